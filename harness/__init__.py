"""KV Bench: what an LLM loses, and gains, when part of its KV cache is thrown away."""

if __name__ != "kvbench.harness":
    raise ImportError("harness is kvbench.harness")
