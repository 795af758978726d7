"""An error says which line of the user's code it comes from."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

from kvbench.harness.core import plugins
from kvbench.harness.core.errors import UserError, location_of


def module_of(folder: Path, text: str) -> ModuleType:
    """Import a user's file."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "mine.py"
    file.write_text(text)
    spec = importlib.util.spec_from_file_location("mine", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("def go(x):\n    return 1 / 0\n", "mine.py:2, in go"),
        ("def go(x):\n    y = x + 1\n    return y.view(7)\n", "mine.py:3, in go"),
        ("import torch\n\ndef go(x):\n    return torch.nn.functional.softmax(x, 9)\n", "mine.py:4, in go"),
        ("import statistics\n\ndef go(x):\n    return statistics.mean([])\n", "mine.py:4, in go"),
        ("def inner():\n    return {}['a']\n\ndef go(x):\n    return inner()\n", "mine.py:2, in inner"),
    ],
)
@pytest.mark.parametrize("folder", ["home", "site-packages"])
def test_it_is_the_innermost_line_of_the_users_own_code(tmp_path, text, place, folder):
    """This holds for errors that a library raises, and for installed plug-ins, too."""
    module = module_of(tmp_path / folder, text)
    with pytest.raises(Exception) as caught:  # noqa: PT011 - of any kind
        torch.vmap(module.go)(torch.ones(2, 3))  # torch calls the user's function
    with pytest.raises(Exception) as direct:  # noqa: PT011 - likewise
        module.go(torch.ones(2, 3))
    if folder == "site-packages":  # the test itself is not a library, either
        caught.value.__traceback__ = caught.tb.tb_next
        direct.value.__traceback__ = direct.tb.tb_next
    assert location_of(caught.value) == place
    assert location_of(direct.value) == place


def test_what_our_code_raises_on_its_own_is_told_by_its_innermost_line():
    with pytest.raises(UserError) as caught:
        plugins.task_class("no such task")
    caught.value.__traceback__ = caught.tb.tb_next  # without the test's own frame
    assert location_of(caught.value).startswith("plugins.py:")
    assert location_of(caught.value).endswith(", in _find")
