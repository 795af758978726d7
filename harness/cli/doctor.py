"""The command `bench doctor`: facts about a machine that a bug report needs."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import click

from kvbench import __version__
from kvbench.harness.cli.output import FILLED
from kvbench.harness.core.errors import Exit, first_line

_PACKAGES = ("torch", "transformers", "numpy", "datasets", "lm-eval", "pyarrow", "pydantic", "triton", "vl-convert-python")
_HUB_TIMEOUT_S = 4

Line = tuple[str, str]


@click.command()
@click.option("--model", metavar="DIR|HUB_ID", type=FILLED, help="Also look for this model.")
@click.option(
    "--data", metavar="DIR", envvar="BENCH_DATA", type=FILLED, help="Also read from this directory of text (or BENCH_DATA)."
)
@click.option("--quick", is_flag=True, help="Leave out facts that take seconds: speed, the hub, the model families.")
def doctor(model: str | None, data: str | None, quick: bool) -> None:
    """Show the facts that a bug report needs.

    These are versions, device, what can be reached, and which model families work.

    \b
    bench doctor
    bench doctor --model ./my-model --data ./books
    """
    failed = False
    for name, fact in report(model, Path(data).expanduser() if data else None, quick):
        click.echo(f"{name:<16} {fact}")
        failed |= fact.startswith("FAILED")
    if failed:
        sys.exit(Exit.NO)


def report(model: str | None = None, data: Path | None = None, quick: bool = False) -> Iterator[Line]:
    """Yield the name and value of each fact as soon as it is known. A failure becomes the value, and later facts follow.

    Args:
        quick: leave out facts that take seconds: speed, the hub, the model families.
    """
    parts: list[tuple[str, Callable[[], str]]] = [
        ("kv-bench", lambda: f"{__version__}, python {platform.python_version()}, {platform.system()} {platform.machine()}"),
        ("packages", _packages),
        ("device", _device),
        ("memory", _memory),
        ("compiler", _compiler),
    ]
    parts += [] if quick else [("speed", _speed)]
    parts += [("built-in models", _builtins)]
    parts += [("model", lambda: _model(model))] if model else []
    parts += [("data", lambda: _data(data))] if data else []
    parts += [("hub", lambda: _cache() if quick else f"{_hub()}; {_cache()}")]
    parts += [] if quick else [("families", _families)]
    for name, value in parts:
        try:
            yield name, value()
        except Exception as error:  # the report must also work on faulty machines
            yield name, f"FAILED: {type(error).__name__}: {first_line(error)}"


def _packages() -> str:
    versions = []
    for name in _PACKAGES:
        try:
            versions.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            versions.append(f"{name} missing")
    return ", ".join(versions)


def _device() -> str:
    import torch

    from kvbench.harness.core.device import device_name, instructions

    cpu_device = torch.device("cpu")
    cpu = f"{device_name(cpu_device)}, {instructions(cpu_device)}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return f"{cpu}; CUDA: {', '.join(gpus) or 'none'}"


def _memory() -> str:
    import torch

    from kvbench.harness.core.device import free_bytes

    free = f"{free_bytes(torch.device('cpu')) / 2**30:.1f} GiB free"
    for i in range(torch.cuda.device_count()):
        left, total = torch.cuda.mem_get_info(i)
        free += f"; GPU {i} {left / 2**30:.1f} of {total / 2**30:.1f} GiB"
    return free


def _compiler() -> str:
    from kvbench.harness.engine.kernel_interface import why_not_compiled
    from kvbench.policies.h2o import H2O

    return f"can't compile H2O's walk: {reason}" if (reason := why_not_compiled(H2O().bind(8))) else "builds kernels for this CPU"


def _speed() -> str:
    import torch

    from kvbench.harness.core.device import bandwidth, multiply_rate
    from kvbench.harness.models.load import device_of

    device = device_of("auto")
    rates = {name: multiply_rate(device, dtype) for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16))}
    products = ", ".join(f"{rate / 1e12:.2f} TFLOP/s in {name}" for name, rate in rates.items())
    return f"{device.type}: {bandwidth(device) / 1e9:.1f} GB/s, {products}"


def _builtins() -> str:
    from kvbench.harness.models.hub import builtins

    return ", ".join(f"builtin:{name}" for name in builtins()) or "none"


def _model(model: str) -> str:
    from kvbench.harness.models.hub import model_directory

    return f"{model}: found in {model_directory(model, None, False)}"


def _data(data: Path) -> str:
    from kvbench.harness.data import pg19

    _, texts = pg19.books("test", data)
    first = next(iter(texts))
    return f"{data}: begins with {first.title!r}, {len(first.text):,} characters"


def _hub() -> str:
    from urllib.error import URLError
    from urllib.request import Request, urlopen

    from huggingface_hub.constants import ENDPOINT

    try:
        with urlopen(Request(ENDPOINT, method="HEAD"), timeout=_HUB_TIMEOUT_S) as answer:
            return f"answers ({answer.status})"
    except (URLError, OSError, ValueError) as error:
        return f"out of reach ({getattr(error, 'reason', error)})"


def _cache() -> str:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = sorted(f"{r.repo_type} {r.repo_id}" for r in scan_cache_dir().repos)
    except CacheNotFound:
        repos = []
    more = f" and {len(repos) - 6} more" if len(repos) > 6 else ""
    return f"in the local cache: {', '.join(repos[:6]) or 'nothing'}{more}"


def _families() -> str:
    from kvbench.harness.cli.listing import models
    from kvbench.harness.core.packaged import PACKAGED

    rows = [row for row in models() if row["family"] not in PACKAGED]
    others = [f"{row['family']} ({row['state']})" for row in rows if row["state"] != "works"]
    return f"{len(rows) - len(others)} of {len(rows)} work" + (f"; not {', '.join(others)}" if others else "")
