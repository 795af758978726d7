"""Read what a compiled kernel asks of a GPU and the instructions of its loops, by the tools that come with Triton."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Resources:
    """What a thread of a kernel takes."""

    registers: int
    spilled: int  # bytes of the stack; only spilt registers lie there


@dataclass(frozen=True)
class Loop:
    """A loop that lies in no other one."""

    instructions: int  # for each warp and iteration, if all branches are run
    barriers: int
    shuffles: int
    nested: bool  # has a loop inside, whose iterations are unknown
    copied: int = 0  # bytes that a warp copies to shared memory in an iteration, while other instructions run


def resources(told: str) -> Resources:
    """What `cuobjdump -res-usage` tells of the one kernel in a file."""
    registers, stack, local = (int(re.findall(rf"\b{name}:(\d+)", told)[0]) for name in ("REG", "STACK", "LOCAL"))
    return Resources(registers, stack + local)


def instructions(sass: str) -> list[tuple[int, str]]:
    """(address, instruction) of a disassembled kernel, without the no-ops that fill it up behind its last branch."""
    found = [(int(a, 16), x) for a, x in re.findall(r"^\s+/\*([0-9a-f]{4,6})\*/\s+(.*?)\s*;", sass, re.MULTILINE)]
    while found and found[-1][1] == "NOP":
        found.pop()
    return found


def loops(code: list[tuple[int, str]]) -> list[Loop]:
    """The outer loops: what lies between a jump back and where it leads."""
    spans = set()
    for address, text in code:
        jump = re.search(r"\bBRA\b.*\b0x([0-9a-f]+)$", text)
        if jump and int(jump[1], 16) < address:
            spans.add((int(jump[1], 16), address))
    inner = {a for a in spans for b in spans if a != b and b[0] <= a[0] and a[1] <= b[1]}
    outer = []
    for span in sorted(spans - inner):
        texts = [text for address, text in code if span[0] <= address <= span[1]]
        names, nested = [_name(x) for x in texts], any(span[0] <= x[0] and x[1] <= span[1] for x in inner)
        outer.append(Loop(len(names), names.count("BAR"), names.count("SHFL"), nested, sum(map(_copied, texts))))
    return outer


def _copied(text: str) -> int:
    """Bytes that 32 threads copy by an instruction, if it is an asynchronous copy."""
    bits = re.search(r"\.(64|128)\b", text.split("[")[0])
    return 32 * (int(bits[1]) if bits else 32) // 8 if _name(text) == "LDGSTS" else 0


def _name(text: str) -> str:
    """An instruction's name, without its predicate and variant."""
    return re.sub(r"^@!?\w+\s+", "", text).split()[0].partition(".")[0]


def dumped(tools: Path, cubin: bytes, option: str) -> str:
    """What `cuobjdump` tells of a compiled kernel, with `-res-usage` or `-sass`."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([str(tools / "cuobjdump"), option, file.name], capture_output=True, text=True, check=True).stdout
