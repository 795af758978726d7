"""Where a model's files come from, with a fake hub, and the cache of weight digests."""

from __future__ import annotations

import json
import os

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from kvbench.harness.core.errors import UserError
from kvbench.harness.models.hub import model_directory, weights_digest

COMMIT = "0123456789abcdef" * 2 + "01234567"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub with one model that records requests. `cached`: the content of the local cache."""

    class Hub:
        directory = tmp_path / "snapshot"
        cached = False
        asked: list[dict] = []

        def download(self, model, *, local_files_only=False, **what):
            self.asked.append({"model": model, "local": local_files_only, **what})
            if model != "owner/name":
                raise OSError("404 Client Error\nwith more lines")
            if local_files_only and not self.cached:
                raise LocalEntryNotFoundError("not cached")
            return str(self.directory)

    made = Hub()
    made.directory.mkdir()
    (made.directory / "config.json").write_text("{}")
    (made.directory / "model.safetensors").write_bytes(b"weights")
    made.asked = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", made.download)
    return made


@pytest.mark.parametrize("revision", [None, "main"])
def test_a_model_of_the_hub_is_downloaded(hub, revision):
    """A branch moves, so the hub is asked, but only for files that we read."""
    assert model_directory("owner/name", revision, False) == hub.directory
    (asked,) = hub.asked
    assert (asked["local"], asked["revision"]) == (False, revision)
    assert "*.safetensors" in asked["allow_patterns"]
    assert "pytorch_model*.bin" not in asked["allow_patterns"]


@pytest.mark.parametrize(("cached", "locally"), [(True, [True]), (False, [True, False])])
def test_a_commit_that_is_there_is_not_asked_for(hub, cached, locally):
    hub.cached = cached
    assert model_directory("owner/name", COMMIT, False) == hub.directory
    assert [asked["local"] for asked in hub.asked] == locally


@pytest.fixture
def remembered(tmp_path, monkeypatch):
    """The file of cached digests."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/kv-bench/digests.json"


def test_a_digest_is_remembered(hub, remembered):
    first = weights_digest(hub.directory)
    known = json.loads(remembered.read_text())
    assert len(known) == 2
    assert weights_digest(hub.directory) == first
    remembered.write_text(json.dumps(dict.fromkeys(known, "0" * 64)))
    assert weights_digest(hub.directory) != first, "a file that did not change is not read again"


@pytest.mark.parametrize("change", ["other size", "same size", "same size and time"])
def test_a_remembered_digest_of_weights_that_changed_is_not_used(hub, remembered, change):
    weights = hub.directory / "model.safetensors"
    first = weights_digest(hub.directory)
    time, changed = weights.stat().st_mtime_ns, weights.stat().st_ctime_ns
    weights.write_bytes(b"other weights" if change == "other size" else b"WEIGHTS")
    os.utime(weights, ns=(time, time + (change == "same size")))
    while weights.stat().st_ctime_ns == changed:  # the clock of a file system ticks every few milliseconds
        os.utime(weights, ns=(time, time + (change == "same size")))
    second = weights_digest(hub.directory)
    assert second != first
    weights.write_bytes(b"weights")
    os.utime(weights, ns=(time, time))
    assert weights_digest(hub.directory) == first


def test_the_generation_config_is_part_of_the_digest(hub, remembered):
    config = hub.directory / "generation_config.json"
    digests = [weights_digest(hub.directory)]
    for end in (1, 2):
        config.write_text(json.dumps({"eos_token_id": end}))
        digests.append(weights_digest(hub.directory))
    assert len(set(digests)) == 3


@pytest.mark.parametrize("text", ["", "{", "[]", '"x"', '{"a": 1}'])
def test_a_damaged_file_of_digests_is_made_anew(hub, remembered, text):
    first = weights_digest(hub.directory)
    remembered.write_text(text)
    assert weights_digest(hub.directory) == first
    assert len([name for name in json.loads(remembered.read_text()) if str(hub.directory) in name]) == 2


def test_a_commit_of_which_only_the_tokenizer_is_there_is_downloaded(hub):
    hub.cached = True
    (hub.directory / "model.safetensors").unlink()
    with pytest.raises(UserError, match="no safetensors weights$"):
        model_directory("owner/name", COMMIT, False)
    assert [asked["local"] for asked in hub.asked] == [True, False]


def test_pickled_weights_are_downloaded_where_they_are_allowed(hub):
    (hub.directory / "model.safetensors").rename(hub.directory / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"pickled weights are read only with model\.pickle: true"):
        model_directory("owner/name", None, False)
    assert model_directory("owner/name", None, True) == hub.directory
    assert "pytorch_model*.bin" in hub.asked[-1]["allow_patterns"]


def test_what_the_hub_refuses_is_told_in_one_line(hub):
    with pytest.raises(UserError) as error:
        model_directory("owner/nothing", None, False)
    assert str(error.value) == "owner/nothing: can't be downloaded (OSError: 404 Client Error)"
