"""Studies whose pages are in docs/. `python -m kvbench.lab.studies.NAME` runs one; it reads and writes files of the checkout."""

from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"  # resolved, as a checkout has a link to this folder
RESULTS = DOCS.parent / "leaderboard" / "records"
