"""Studies beside the benchmark: reference models and how they are trained. `harness` and `policies` import nothing of it."""

if __name__ != "kvbench.lab":
    raise ImportError("lab is kvbench.lab")
