"""Check what somebody's KV cache does: `bench audit`, and `kvbench.audit` in notebooks and tests."""
