"""Submissions as pull requests: a good one is accepted; a forged or incomplete one is refused, for its own reason."""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import yaml
from conftest import Done, bench_in
from factories import record

from kvbench.harness.core.errors import UserError
from kvbench.harness.records import RecordStore, Submitted, fingerprint, read, read_submitted, standing
from kvbench.harness.report.agreement import disagreements
from kvbench.harness.report.feed import feed
from kvbench.harness.report.review import Review, markdown
from kvbench.harness.report.task import task_of
from kvbench.harness.run import submission
from kvbench.harness.run.request import RunRequest
from kvbench.harness.run.submission import MAX_TRACE_BYTES, drawn, local_paths

ROOT = Path(__file__).parents[1]
SUITE = """suite: tiny
version: 1
model: {id: "builtin:sink_1"}
task:
  - {name: perplexity, data: prose, tokens: 512}
  - {name: streameval, lines: 20, distance: 2}
capacity: 32
policies: [dense, window%s]
"""
ADDED = ", {name: sink_window, sinks: 2}, h2o"
RESULTS = Path("leaderboard/results/tiny/builtin_sink_1")


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> Path:
    """A folder of records of the whole suite."""
    folder = tmp_path_factory.mktemp("measured")
    (folder / "tiny.yaml").write_text(SUITE % ADDED)
    request = RunRequest(str(folder / "tiny.yaml"), threads=1)
    request.measure(folder / "results", request.cells(), progress=False)
    return folder / "results"


@pytest.fixture
def checkout(measured, tmp_path) -> Path:
    """A clone of a project in which dense and window stand; a branch has added two policies to the suite's file."""
    folder = tmp_path / "checkout"
    (folder / "suites").mkdir(parents=True)
    (folder / "suites" / "tiny.yaml").write_text(SUITE % "")
    shutil.copytree(measured / "tiny/builtin_sink_1", folder / RESULTS)
    for path in (folder / RESULTS).iterdir():
        if not path.name.startswith(("dense", "window")) or path.name.endswith(".nll.npy"):
            path.unlink()
    (folder / ".gitignore").write_text("*.nll.npy\n")
    git(folder, "init", "-q")
    commit(folder)
    (folder / "suites" / "tiny.yaml").write_text(SUITE % ADDED)
    return folder


@pytest.fixture
def submitted(checkout, measured) -> Path:
    """The clone with the good submission in its last commit."""
    done = bench_in("submit", measured, cwd=checkout)
    assert done.returncode == 0, done.stdout
    for command in re.findall("^git (add .*)$", done.stderr, re.M):
        git(checkout, *command.split())
    commit(checkout)
    return checkout


def git(folder: Path, *arguments: str) -> str:
    who = ["-c", "user.name=A", "-c", "user.email=a@example.org"]
    done = subprocess.run(["git", *who, *arguments], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout


def commit(folder: Path) -> None:
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "a change")


def reviewed(folder: Path, *options: object) -> Done:
    """The review that the workflow on the pull request makes."""
    return bench_in("review", "--base", "HEAD^1", *options, cwd=folder)


def path_of(folder: Path, policy: str, task: str = "perplexity") -> Path:
    paths = [p for p in folder.rglob(f"{policy}-*.json") if json.loads(p.read_text())["cell"]["task"]["name"] == task]
    return paths[0]


def rewrite(path: Path, change) -> None:
    """Change a record's file, and list it as it is now, as a careful forger would."""
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value, indent=1))
    lines = path.with_name("submitted.jsonl")
    if lines.exists():
        entries = [json.loads(line) for line in lines.read_text().splitlines()]
        for entry in entries:
            entry["sha256"] = fingerprint(read(path)) if entry["record"] == path.stem else entry["sha256"]
        lines.write_text("".join(json.dumps(entry) + "\n" for entry in entries))


@pytest.mark.slow("takes seconds")
def test_a_good_submission_is_accepted_and_its_repeated_cells_agree(submitted):
    assert len(git(submitted, "ls-files", "*.nll.npy").split()) == 2, "traces that git ignores travel, too"
    done = reviewed(submitted, "--sample", 2)
    assert done.returncode == 0, done.stdout
    assert "4 records of tiny v1 on builtin:sink\\_1" in done.stdout
    assert "Measured again: 2 of 4 cells" in done.stdout
    assert "all agree" in done.stdout
    assert git(submitted, "rev-parse", "HEAD").strip() in done.stdout, "the seed is the commit's hash"
    assert re.search(r"window.* at 32 -&#62; h2o.* at 32 \| nll \|", done.stdout), "paired with what stands"
    assert "against the 1 at its capacity" in done.stdout


@pytest.mark.slow("measures suites")
def test_a_forged_aggregate_is_refused_and_nothing_is_measured(submitted):
    path = path_of(submitted, "h2o")
    rewrite(path, lambda value: value["metrics"].update(nll=value["metrics"]["nll"] - 0.1))
    done = reviewed(submitted)
    assert done.returncode == 1
    assert re.search(rf"^- {path.stem.replace('_', '.*')}: nll is ", done.stdout, re.M)
    assert "No cell was measured again." in done.stdout
    assert "[1/1]" not in done.stderr


def forge(path: Path, factor: float = 0.97) -> None:
    """Scale every NLL of a record, consistently in trace, figures and hashes."""
    made = read(path)
    trace = path.with_name(made.trace.file)
    np.save(trace, np.load(trace) * np.float32(factor))
    figures = dict(task_of(made).from_trace(made, trace))
    bits = figures["nll"] * figures["tokens"] / math.log(2) / made.metrics.as_json()["bytes"]

    def change(value):
        value["metrics"] |= figures | {"bits_per_byte": bits}
        value["trace"]["sha256"] = hashlib.sha256(trace.read_bytes()).hexdigest()

    rewrite(path, change)


@pytest.mark.slow("takes seconds")
def test_a_forged_trace_passes_verification_and_its_repeated_cell_differs(submitted):
    path = path_of(submitted, "h2o")
    forge(path)
    assert bench_in("records", "verify", path.parent, cwd=submitted).stderr.startswith("6 records are correct, 0 are not")
    files = [(p, read(p)) for p in path.parent.glob("*.json") if p.name.startswith(("sink_window", "h2o"))]
    seed = next(seed for seed in map(str, range(100)) if drawn(files, seed)[0][0] == path)
    done = reviewed(submitted, "--sample", 1, "--seed", seed)
    assert done.returncode == 1
    (row,) = [line for line in done.stdout.splitlines() if "**differs**" in line]
    assert "h2o" in row
    assert "was submitted" in row
    assert "**1 of them differs**" in done.stdout


@pytest.mark.parametrize("factor", [0.97, 1.03])
def test_elsewhere_a_mean_may_differ_by_rounding_and_no_more(factor, measured, tmp_path):
    """A gain is forged as easily as a loss onto a rival's row."""
    honest = path_of(measured, "h2o")
    shutil.copytree(honest.parent, tmp_path / "forged")
    path = tmp_path / "forged" / honest.name
    folders = (path.parent, honest.parent)
    rewrite(path, lambda value: value["facts"].update(device="another device"))
    assert disagreements(read(path), read(honest), folders) == []
    forge(path, factor)
    said, tokens = disagreements(read(path), read(honest), folders)
    assert said.startswith("nll ")
    assert tokens.startswith("exactness: the largest difference of a token is ")


def incomplete(folder):
    path_of(folder, "h2o").unlink()


def without_trace(folder):
    next(folder.rglob("h2o-*.nll.npy")).unlink()


def edited(**parts):
    def change(folder):
        rewrite(path_of(folder, "h2o"), lambda value: [value[part].update(change) for part, change in parts.items()])

    return change


def of_another_cell(**changes):
    def change(folder):
        from kvbench.harness.records import digest

        def edit(value):
            value["cell"] |= changes
            value["cell_id"] = digest(value["cell"])

        rewrite(path_of(folder, "h2o"), edit)

    return change


def huge(folder):
    path = path_of(folder, "h2o")
    trace = path.with_name(read(path).trace.file)
    with trace.open("ab") as file:
        file.truncate(MAX_TRACE_BYTES + 2**20)


def link_to_a_secret(part):
    """A trace, or a keep map that the record names, is a link to a file of somebody's. Copied, it would be published."""

    def change(folder):
        path, secret = path_of(folder, "h2o"), folder.parent / "secret"
        secret.write_text("mine")
        if part == "keep map":
            (folder / path.parent.relative_to(folder) / "leak.kept.npz").symlink_to(secret)
            named = {"file": "leak.kept.npz", "sha256": hashlib.sha256(b"mine").hexdigest(), "steps": ""}
            rewrite(path, lambda value: value["facts"].update(keep_map=named))
        else:
            trace = path.with_name(read(path).trace.file)
            trace.replace(folder.parent / "moved")
            trace.symlink_to(folder.parent / "moved")

    return change


def other_keep_map(folder):
    path = path_of(folder, "h2o")
    path.with_name("a.kept.npz").write_text("not what was measured")
    named = {"file": "a.kept.npz", "sha256": "0" * 64, "steps": ""}
    rewrite(path, lambda value: value["facts"].update(keep_map=named))


REFUSED = {
    "a keep map is a link": (link_to_a_secret("keep map"), "its keep map leak.kept.npz is not a regular file"),
    "a trace is a link": (link_to_a_secret("trace"), ".nll.npy is not a regular file"),
    "another keep map": (other_keep_map, "its keep map a.kept.npz has changed since it was measured: its sha256 differs"),
    "a cell lacks": (incomplete, "tiny, version 1, on builtin:sink_1: 1 of 8 cells have no record: h2o 32"),
    "a trace lacks": (without_trace, "is missing (git ignores some"),
    "a home path": (edited(facts={"platform": "Linux, /home/ann/kv"}), "facts.platform names a local path: /home/ann/kv"),
    "no device": (edited(facts={"device": ""}), "it does not say where it comes from: facts.device is missing"),
    "other source": (edited(facts={"policy_sha256": "0" * 64}), "the source of h2o has changed since: measure it again"),
    "--set": (of_another_cell(capacity=33), "tiny, version 1, has no such cell: add its policy to the suite's file"),
    "old suite": (of_another_cell(suite_version=0), "tiny, version 0: the suite has version 1 now: measure it again"),
    "no suite": (of_another_cell(suite="mine"), "mine: no such suite comes with the project: add suites/mine.yaml"),
    "local model": (of_another_cell(model={"id": "mine", "dtype": "float32"}), "its model mine is a local directory"),
    "not a record": (lambda folder: (folder / "x.json").write_text("{"), "x.json: not readable as JSON"),
    "too large": (huge, "5.0 MiB; a trace may have 4 MiB"),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_is_wrong_is_one_clear_line_and_nothing_is_laid_down(reason, checkout, measured, tmp_path):
    shutil.copytree(measured, tmp_path / "mine")
    break_it, says = REFUSED[reason]
    break_it(tmp_path / "mine")
    done = bench_in("submit", tmp_path / "mine", cwd=checkout)
    assert done.returncode == 1
    assert len([line for line in done.stdout.splitlines() if says in line]) == 1, done.stdout
    assert done.stderr.endswith(" nothing laid down\n")
    assert "?? leaderboard" not in git(checkout, "status", "--porcelain")


@pytest.mark.slow("measures suites")
def test_cells_that_stand_are_left_and_replaced_only_by_newer_ones(submitted, measured, tmp_path):
    done = bench_in("submit", measured, cwd=submitted)
    assert (done.returncode, "its 8 cells all stand" in done.stderr) == (2, True)
    shutil.copytree(measured, tmp_path / "mine")
    path = path_of(tmp_path / "mine", "h2o")
    for finished, code in (("2001-01-01T00:00:00+00:00", 2), ("2101-01-01T00:00:00+00:00", 0)):
        rewrite(path, lambda value, finished=finished: value.update(finished=finished))
        done = bench_in("submit", tmp_path / "mine", "--replace", cwd=submitted)
        assert done.returncode == code, done.stderr
        assert code == 0 or "but the record that stands is newer" in done.stderr
    assert read(path_of(submitted, "h2o")).finished.startswith("2101")
    assert bench_in("submit", tmp_path / "nowhere", cwd=submitted).returncode == 2


@pytest.mark.slow("measures suites")
def test_what_a_pull_request_may_not_do_to_the_folder(submitted):
    """Remove a row, mark its own rows as repeated, hide that a row was submitted, or put a record where another belongs."""
    folder = submitted / RESULTS
    lines = folder / "submitted.jsonl"
    was = lines.read_text()

    def says(text: str) -> None:
        done = reviewed(submitted)
        assert done.returncode == 1
        assert text in done.stdout.replace("\\", ""), done.stdout

    lines.write_text(was.replace('"repeated":null', '"repeated":"yesterday"', 1))
    says("only CI marks that")
    lines.write_text("".join(line + "\n" for line in was.splitlines()[1:]))
    says("is not listed in submitted.jsonl as it is now: lay it down with bench submit")
    lines.write_text(was)
    moved = path_of(submitted, "window").rename(folder / "window.json")
    says("belongs at tiny/builtin_sink_1/window-c32-")
    moved.unlink()
    says(": stood before and is missing")


@pytest.mark.slow("all published records")
def test_a_mark_is_of_one_record_and_an_edit_voids_it(submitted):
    assert reviewed(submitted, "--sample", 1, "--write").returncode == 0
    records, entries = RecordStore(submitted / RESULTS).read_all()[0], read_submitted(submitted / RESULTS)
    (repeated,) = [r for r in records if standing(r, entries) == "repeated by CI"]
    assert {r.cell.policy for r in records if standing(r, entries) == "as submitted"} == {"sink_window", "h2o"}
    assert {r.cell.policy for r in records if standing(r, entries) == "ours"} == {"dense", "window"}
    standings = {facts["standing"] for facts in feed(records, entries)["provenance"]}
    assert standings == {"ours", "as submitted", "repeated by CI"}
    path = next((submitted / RESULTS).glob(f"{repeated.stem}.json"))
    value = json.loads(path.read_text())
    value["facts"]["seconds"] += 1
    path.write_text(json.dumps(value))
    assert standing(read(path), entries) == "as submitted"
    (submitted / RESULTS / "submitted.jsonl").write_text("{}\n")
    assert "submitted.jsonl:1: not a submitted record" in bench_in("leaderboard", "--results", RESULTS, cwd=submitted).stderr


def test_a_record_that_nobody_listed_is_ours():
    made = record()
    assert standing(made, {}) == "ours"
    entry = Submitted(record=made.stem, sha256=fingerprint(made), repeated="today")
    assert standing(made, {made.stem: entry}) == "repeated by CI"
    assert standing(made, {made.stem: entry.model_copy(update={"repeated": None})}) == "as submitted"


def test_a_review_of_nothing_claims_nothing():
    assert markdown(Review([], [], [])) == "### Submission: no records\n\nNo record is new or changed.\n"


def test_the_draw_depends_on_the_seed_alone():
    files = [(Path("x"), record(capacity=n)) for n in range(1, 30)]
    first = drawn(files, "a")
    assert drawn(files[::-1], "a") == first
    assert drawn(files, "b")[:4] != first[:4]


@pytest.mark.slow("measures suites")
def test_a_cell_that_can_not_be_measured_here_is_not_counted_as_repeated(submitted, monkeypatch):
    def unavailable(*arguments, **options):
        raise UserError("the text is out of reach")

    monkeypatch.setattr(submission.RunRequest, "measure", unavailable)
    done = reviewed(submitted, "--write")
    assert done.returncode == 0
    assert "Measured again: 0 of 4 cells" in done.stdout
    assert "not measured: the text is out of reach" in done.stdout
    assert "0 records marked" in done.stderr


def test_a_cell_that_is_compared_with_another_is_repeated_after_it(tmp_path):
    text = SUITE.replace("perplexity, data: prose, tokens: 512", "divergence, data: prose, tokens: 64") % ""
    (tmp_path / "tiny.yaml").write_text(text.replace("  - {name: streameval, lines: 20, distance: 2}\n", ""))
    request = RunRequest(str(tmp_path / "tiny.yaml"), threads=1)
    request.measure(tmp_path / "results", request.cells(), progress=False)
    files = [(path, read(path)) for path in (tmp_path / "results").rglob("window-*.json")]
    (repeat,) = submission._repeats(files, 1, None)
    assert (repeat.again.cell_id, repeat.differs) == (files[0][1].cell_id, [])


@pytest.mark.parametrize(
    ("text", "path"),
    [("/home/ann/x.pt", "/home/ann/x.pt"), ("saved in ~/x", "~/x"), ("C:\\Users\\ann", "C:\\Users\\ann"),
     ("{file: /srv/x}", "/srv/x}"), ("key=/data/b", "/data/b"), ("tables/a.pt", None), ("https://a.b/c/d", None),
     ("either/or", None)],
)  # fmt: skip
def test_a_local_path_is_one_from_the_root_or_from_home(text, path):
    assert list(local_paths({"a": [text]})) == ([("a.0", path)] if path else [])


@pytest.mark.slow("all published records")
def test_no_published_record_names_a_local_path():
    for published in RecordStore(ROOT / "leaderboard/results").read_all()[0]:
        assert list(local_paths(published.as_json())) == [], published.stem


def test_the_workflow_on_a_pull_request_may_only_read_and_runs_no_foreign_text():
    text = (ROOT / ".github/workflows/submission.yml").read_text()
    workflow = yaml.safe_load(text)
    assert workflow["permissions"] == {"contents": "read"}
    assert "pull_request_target" not in text
    assert not any("secrets" in expression for expression in re.findall(r"\$\{\{.*?\}\}", text))
    jobs = workflow["jobs"]
    assert "permissions" not in jobs["review"], "only the job on main may write"
    assert jobs["mark"]["if"] == "github.event_name == 'push'"
    for job in jobs.values():
        assert not any("${{" in step.get("run", "") for step in job["steps"]), "a title or branch name could inject commands"
        commands = " ".join(step.get("run", "") for step in job["steps"])
        assert "bench review --base" in commands
