"""KV Bench: what an LLM loses, and gains, when part of its KV cache is thrown away."""

__version__ = "0.1.0"
