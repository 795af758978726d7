"""Prints the table of `docs/scale.md`: cells, GPU hours and bytes of the suites, from shapes alone."""

from __future__ import annotations

from kvbench.harness.core import plugins
from kvbench.harness.models.load import DTYPES
from kvbench.harness.models.shape import ModelShape, readable_shape
from kvbench.harness.suite import Cell, load, shipped_suites

MATRIX_RATE = {"bfloat16": 300e12, "float16": 300e12, "float32": 30e12}  # of an H100 in large blocks: 40 to 60 % of its peak
KERNEL_S = 2e-6  # a small kernel in a captured graph
KERNELS_A_TOKEN_AND_LAYER = 35  # of the walk; a closed form or a fused kernel needs far fewer
RECORD_BYTES = 15e3  # the mean of leaderboard/results
TRACE_BYTES_A_TOKEN = 4
TEXT_BYTES_A_TOKEN = 8  # ids, and bytes of text, as 32-bit integers
# Published sizes of models that are not in this repository: parameters, layers, heads, dimension of a head.
PUBLISHED = {
    "EleutherAI/pythia-70m": (70e6, 6, 8, 64),
    "EleutherAI/pythia-160m": (162e6, 12, 12, 64),
    "EleutherAI/pythia-1.4b": (1.41e9, 24, 16, 128),
    "EleutherAI/pythia-12b": (11.8e9, 36, 40, 128),
    "meta-llama/Llama-2-7b-hf": (6.74e9, 32, 32, 128),
    "meta-llama/Llama-2-7b-chat-hf": (6.74e9, 32, 32, 128),
    "togethercomputer/Llama-2-7B-32K-Instruct": (6.74e9, 32, 32, 128),
    "meta-llama/Llama-2-13b-hf": (13.0e9, 40, 40, 128),
    "meta-llama/Llama-3.1-8B-Instruct": (8.03e9, 32, 8, 128),
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": (8.03e9, 32, 8, 128),
}


def shape_of(cell: Cell) -> ModelShape | None:
    """The shape of a cell's model, from its config or as published."""
    if cell.model.id in PUBLISHED:
        parameters, layers, heads, head_dim = PUBLISHED[cell.model.id]
        return ModelShape(heads, heads, head_dim, int(parameters), (None,) * layers, tuple(range(layers)))
    return readable_shape(cell.model.id, cell.model.revision)


def gpu_seconds(cell: Cell, shape: ModelShape) -> float:
    """Seconds of a cell on one H100: products of matrices, and the small kernels of the walk."""
    task = plugins.task_class(cell.task.name)
    tokens, attended = task.total(cell.task), (cell.capacity or task.longest(cell.task)) + 1
    a_token = 2 * shape.parameters + 4 * shape.layers * shape.heads * shape.head_dim * attended
    if not cell.policy.caches:
        return task.windows(cell.task) * attended * a_token / MATRIX_RATE[cell.model.dtype]
    walked = tokens if cell.policy.evicts and cell.evict != "prompt" else 0
    return tokens * a_token / MATRIX_RATE[cell.model.dtype] + walked * shape.layers * KERNELS_A_TOKEN_AND_LAYER * KERNEL_S


def row(name: str, cells: list[Cell]) -> str | None:
    """A suite's line of the table; None if a model's shape is not known."""
    shapes = {cell.model: shape for cell in cells if (shape := shape_of(cell)) is not None}
    if any(cell.model not in shapes for cell in cells):
        return None
    tokens = [plugins.task_class(cell.task.name).total(cell.task) for cell in cells]
    hours = sum(gpu_seconds(cell, shapes[cell.model]) for cell in cells) / 3600
    alone = sum(plugins.task_class(cell.task.name).of_device for cell in cells)
    texts = {(cell.model, cell.task): count for cell, count in zip(cells, tokens, strict=True)}
    weights = sum(shape.parameters * DTYPES[model.dtype].itemsize for model, shape in shapes.items()) / 1e9
    sent = sum(texts.values()) * TEXT_BYTES_A_TOKEN / 1e6
    back = (sum(tokens) * TRACE_BYTES_A_TOKEN + len(cells) * RECORD_BYTES) / 1e6
    figures = f"{sum(tokens) / 1e6:,.1f} | {hours:.2g} | {weights:,.3g} | {sent:,.1f} | {back:,.1f}"
    return f"| `{name}` | {len(cells):,} | {alone or ''} | {figures} |"


def main() -> None:
    """Print the table."""
    print("| suite | cells | alone | million tokens | H100 hours | models, GB a worker | texts, MB | back, MB |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for path in shipped_suites():
        line = row(path.stem, load(path)[1])
        if line is not None:
            print(line)


if __name__ == "__main__":
    main()
