"""Carry a model file to a machine that takes only a few MiB at a time: split it here, join it there.

    python tests/gpu/model.py split MODEL.gguf FOLDER [--mib 36]     writes FOLDER/1, FOLDER/2, ...: carry one a call
    python tests/gpu/model.py join FOLDER STORE                      there, after each call: adds the pieces of FOLDER to STORE

Each piece comes with the file's name, its number of pieces and its SHA-256. `join` prints the path of the file once all pieces
have come, and else which are missing; it exits with 1 until then. `make gpu-model` splits the installed SmolLM2.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
from pathlib import Path

NOTE = "model.json"


def split(file: Path, folder: Path, mib: int) -> int:
    """Write the pieces of a file, each into a folder of its own, and return how many there are."""
    shutil.rmtree(folder, ignore_errors=True)
    content = file.read_bytes()
    size = mib << 20
    pieces = [content[start : start + size] for start in range(0, len(content), size)]
    note = json.dumps({"name": file.name, "pieces": len(pieces), "sha256": hashlib.sha256(content).hexdigest()})
    for number, piece in enumerate(pieces, 1):
        target = folder / str(number)
        target.mkdir(parents=True)
        (target / f"{number}.piece").write_bytes(piece)
        (target / NOTE).write_text(note)
    return len(pieces)


def join(folder: Path, store: Path) -> Path:
    """Copy the pieces in a folder to a store, and write the file once the store has all of them.

    Raises:
        ValueError: pieces are missing, or the joined file is not the one that was split.
    """
    store.mkdir(parents=True, exist_ok=True)
    for path in [*folder.rglob("*.piece"), *folder.rglob(NOTE)]:
        shutil.copy(path, store / path.name)
    note = json.loads((store / NOTE).read_text())
    pieces = [store / f"{number}.piece" for number in range(1, note["pieces"] + 1)]
    if missing := [path.stem for path in pieces if not path.exists()]:
        raise ValueError(f"{note['name']}: of {note['pieces']} pieces {', '.join(missing)} are missing")
    content = b"".join(path.read_bytes() for path in pieces)
    if hashlib.sha256(content).hexdigest() != note["sha256"]:
        raise ValueError(f"{note['name']}: the joined pieces have another SHA-256 than the file that was split")
    file = store / str(note["name"])
    file.write_bytes(content)
    return file


def main() -> None:
    """Parse the command line, and split or join."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=("split", "join"))
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--mib", type=int, default=36, help="of a piece")
    options = parser.parse_args()
    if options.verb == "split":
        print(f"{options.target}: {split(options.source, options.target, options.mib)} pieces")
        return
    try:
        print(join(options.source, options.target))
    except (OSError, ValueError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
