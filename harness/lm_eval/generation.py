"""Settings for generating answers in lm-eval's tasks, checked before any text is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from kvbench.harness.suite import Settings, validated

_Tokens = Annotated[int | None, Field(ge=1)]


class _GenerationSettings(BaseModel):
    """Known settings. Other settings are accepted here, and refused when answers are generated if they are not supported."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    until: Annotated[list[str] | None, BeforeValidator(lambda x: [x] if isinstance(x, str) else x)] = None
    max_gen_toks: _Tokens = None
    max_new_tokens: _Tokens = None
    max_tokens: _Tokens = None
    max_completion_tokens: _Tokens = None
    do_sample: bool | None = None
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0)


def checked(settings: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Return the settings that have a value, converted to their types.

    Args:
        settings: `generation_kwargs` of a task, or `--gen_kwargs`.
        place: origin of the settings, for messages.

    Raises:
        UserError: a setting is invalid. The message names the first mistake.
    """
    return validated(_GenerationSettings, settings, Settings(place), ()).model_dump(exclude_none=True)
