"""Count the kernels of a decode step, for each layer, without a GPU: in eager code, without RoPE, and compiled.

    python tests/counts_step.py [--all]

Eager kernels are the operations on the `meta` device that are no views. Compiled kernels are the launches in the code that
inductor generates for an H100, which it is told is there. Our attention counts as two: `attend` and `join`. With --all, every
family is compiled, which takes minutes.
"""

from __future__ import annotations

import argparse
import re
import warnings
from collections import Counter
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from unittest import mock

import torch
import transformers
from counts_flex import BytesMoved
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from kvbench.harness.engine.attention import NAME, RotaryFunctions
from kvbench.harness.engine.model import Model, UnsupportedModelError, adopt
from kvbench.harness.kernels import fused
from kvbench.harness.models.families import FAMILIES, tiny_model

LLAMA_8B = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
LLAMA_7B = {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32, "num_key_value_heads": 32}
ATTENTION = 2  # kernels: attend and join
VIEWS = {
    "_unsafe_view", "alias", "as_strided", "detach", "empty", "expand", "new_empty", "permute", "reshape", "select", "slice",
    "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unsqueeze", "view",
}  # fmt: skip
H100 = SimpleNamespace(
    name="NVIDIA H100", major=9, minor=0, multi_processor_count=132, total_memory=80 * 2**30, warp_size=32, uuid="",
    max_threads_per_multi_processor=2048, max_threads_per_block=1024, regs_per_multiprocessor=65536, L2_cache_size=50 * 2**20,
    shared_memory_per_block=48 * 2**10, shared_memory_per_block_optin=227 * 2**10, shared_memory_per_multiprocessor=228 * 2**10,
    gcnArchName="",
)  # fmt: skip
LAUNCH = re.compile(r"^\s+(?:\w+ = )?(?:(triton_\w+)\.run|(extern_kernels\.\w+)|torch\.ops\.([\w.]+))\(", re.MULTILINE)


class Operations(TorchDispatchMode):
    """Counts operations that launch a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().split("::")[1].split(".")[0]
        self.count[name] += name not in VIEWS
        return func(*args, **(kwargs or {}))


class Unanswered:
    """In place of attention."""

    def attend(self, layer, query, keys, values, terms):
        return query.new_empty(*query.shape[:-1], values.shape[-1])


def model_of(family: str, layers: int, **overrides) -> Model:
    """A model with bfloat16 weights on `meta`. Its rotary functions are skipped if those of the family's tiny model are."""
    types = FAMILIES[family].get("layer_types")
    deeper = {} if types is None else {"layer_types": types * (layers // 2)}
    if FAMILIES[family].get("no_rope_layers"):
        deeper["no_rope_layers"] = FAMILIES[family]["no_rope_layers"] * (layers // 2)
    adopted = adopt(tiny_model(family).bfloat16())
    with torch.device("meta"):
        hf = tiny_model(family, num_hidden_layers=layers, **deeper, **overrides).bfloat16()
    hf.requires_grad_(False)
    hf.set_attn_implementation(NAME)
    return Model(hf, idle_rotary=adopted.idle_rotary)


def eager_kernels(model: Model) -> int:
    """Kernels of a step as the model's own code launches them, without attention."""
    tokens = torch.zeros(1, 1, dtype=torch.int64, device="meta")
    with torch.inference_mode(), Operations() as operations:
        model(tokens, Unanswered())
    return operations.count.total()


def compiled_kernels(model: Model, streams: int = 1) -> Counter[str]:
    """The launches of a compiled step, by name; attention as `attend` and `join`."""
    sources: list[str] = []

    def backend(graph, inputs):
        sources.append(code_for_h100(make_fx(graph)(*inputs), inputs))
        return graph

    with model.idle_rotary.skipped(), model.idle_rotary.compiling(), torch.no_grad():
        fused._compiled(backend)(model.hf, torch.zeros(streams, 1, dtype=torch.int64, device="meta"))
    torch._dynamo.reset()
    (source,) = sources
    calls = source[source.index("def call(") :]
    count = Counter(next(name for name in match.groups() if name) for match in LAUNCH.finditer(calls))
    count["attend"] = count["join"] = count.pop("kv_bench.attend.default")
    return count


def code_for_h100(graph, inputs) -> str:
    """What inductor generates for a graph whose inputs are on `meta`."""
    for node in graph.graph.nodes:
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": torch.device("cuda", 0)}
    graph.recompile()
    fake, sources = FakeTensorMode(allow_non_fake_inputs=True), []
    with fake:
        on_cuda = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda") for x in inputs]
    with pretended_h100(sources), tracing(TracingContext(fake)):
        from torch._inductor.compile_fx import compile_fx

        compile_fx(graph, on_cuda)
    return sources[0]


@contextmanager
def pretended_h100(sources: list[str]):
    """Let inductor generate code for a GPU that is not there. The code is put into `sources` and neither compiled nor run."""
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor import config
    from torch._inductor.graph import GraphLowering

    def never_run(inputs):  # PyTorch 2.11 asserts that it can be called
        raise AssertionError

    def keep_source(lowering):
        sources.append(lowering.codegen()[0].value)
        return SimpleNamespace(call=never_run)

    values = {
        "torch.cuda.is_available": True, "torch.cuda.device_count": 1, "torch.cuda.current_device": 0,
        "torch.cuda.get_device_properties": H100, "torch.cuda.get_device_capability": (9, 0), "torch.cuda._lazy_init": None,
        "torch.cuda._exchange_device": 0, "torch.cuda._maybe_exchange_device": 0, "torch.cuda.synchronize": None,
        "torch.cuda.get_rng_state": torch.zeros(16, dtype=torch.uint8), "torch.cuda.set_rng_state": None,
        "torch._inductor.scheduler.has_triton": True, "torch.utils._triton.triton_hash_with_backend": "",
        "torch._inductor.fx_passes.misc_patterns._misc_patterns_init": None,  # traces patterns on the device
        "torch._inductor.fx_passes.fuse_attention._sfdp_init": None,
        "torch._inductor.fx_passes.pad_mm._pad_mm_init": None,
    }  # fmt: skip
    methods = {"get_device_properties": H100, "get_compute_capability": 90, "is_available": True, "is_triton_capable": True}
    with ExitStack() as stack, warnings.catch_warnings(action="ignore"):
        for name, value in values.items():
            stack.enter_context(mock.patch(name, lambda *_, value=value: value))
        for name, value in methods.items():
            stack.enter_context(mock.patch.object(CudaInterface, name, staticmethod(lambda *_, value=value: value)))
        stack.enter_context(mock.patch.object(CudaInterface.Worker, "get_device_properties", staticmethod(lambda *_: H100)))
        stack.enter_context(mock.patch.object(GraphLowering, "compile_to_module", keep_source))
        stack.enter_context(config.patch(compile_threads=1, force_disable_caches=True))
        yield


def per_layer(family: str, **overrides) -> dict[str, float]:
    """Kernels a layer of a step, with attention: those that two more layers add, by half."""
    models = [model_of(family, layers, **overrides) for layers in (2, 4)]
    shallow, deep = ([eager_kernels(Model(m.hf)), eager_kernels(m)] for m in models)
    eager, skipped = ((b - a) / 2 + ATTENTION for a, b in zip(shallow, deep, strict=True))
    return {"eager": eager, "without RoPE": skipped}


def compiled_per_layer(family: str, **overrides) -> Counter[str]:
    """Kernels that two more layers add to a compiled step, by name."""
    shallow, deep = (compiled_kernels(model_of(family, layers, **overrides)) for layers in (2, 4))
    return deep - shallow


def bytes_of_a_layer(tokens: int, rope: bool, **overrides) -> int:
    """Bytes that a layer of Llama's own code moves for a block beside products and attention; with RoPE, or without."""
    totals = []
    for layers in (2, 4):
        model = model_of("llama", layers, **overrides)
        with torch.inference_mode(), BytesMoved() as moved:
            (Model(model.hf) if rope else model)(torch.zeros(1, tokens, dtype=torch.int64, device="meta"), Unanswered())
        totals.append(moved.total)
    return (totals[1] - totals[0]) // 2


def main() -> None:
    """Print all counts."""
    transformers.utils.logging.set_verbosity_error()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="compile every family")
    compile_all = parser.parse_args().all
    print("kernels a layer of a decode step, attention (2) included")
    print(f"{'family':<18}{'eager':>8}{'without RoPE':>14}{'compiled':>10}")
    for family in ["llama", *(f for f in FAMILIES if f != "llama")]:
        overrides = LLAMA_8B if family == "llama" else {}
        try:
            counts = per_layer(family, **overrides)
        except UnsupportedModelError:
            continue
        print(f"{family:<18}{counts['eager']:>8g}{counts['without RoPE']:>14g}", end="", flush=True)
        if compile_all or family == "llama":
            try:
                print(f"{compiled_per_layer(family, **overrides).total() / 2:>10g}", end="")
            except Exception as error:  # a family that can't be compiled; go on with the others
                print(f"  {type(error).__name__}: {' '.join(str(error).split())[:200]}", end="")
        print("" if RotaryFunctions() != model_of(family, 2).idle_rotary else "   computes RoPE", flush=True)


if __name__ == "__main__":
    main()
