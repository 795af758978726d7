"""`model.generate(..., custom_generate=FOLDER_OR_REPOSITORY, trust_remote_code=True, policy="h2o", capacity=1024)`."""

from typing import Any

import kvbench


def generate(model: Any, policy: Any = "sink_window", capacity: int | None = 1024, **kwargs: Any) -> Any:
    """`generate` of the model under a policy. cache_options: other arguments of `kvbench.Cache`, by name."""
    options = kwargs.pop("cache_options", None) or {}
    kwargs["past_key_values"] = kvbench.Cache(model, policy, capacity, **options)
    return type(model).generate(model, **kwargs)
