"""What the README and the documentation say is so."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest
import yaml
from conftest import bench
from markdown_it import MarkdownIt

import kvbench
from kvbench.harness.cli import cli
from kvbench.harness.core import plugins
from kvbench.harness.models.families import FAMILIES
from kvbench.harness.run import policy_check
from kvbench.harness.suite import cells

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CODE = {re.search(r"class (\w+)\(Policy\)", code)[1]: code for code in re.findall(r"```python\n(.*?)```", README, re.S)}
LINK = re.compile(r'(?:\]\(|(?:src|srcset)=")([^)"\s#]+)')


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def script(name: str):
    """A script that draws one of the README's pictures, or writes its figures."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def fixture_of(name):
    """A fixture that gives a script."""

    @pytest.fixture(scope="module")
    def given():
        return script(name)

    return given


draw, zoo, recall, writing = (fixture_of(f"images/{name}") for name in ("draw", "zoo", "recall", "writing"))
figures = fixture_of("figures")


def test_every_verb_policy_task_and_suite_is_documented():
    suites = [path.stem for path in (ROOT / "suites").glob("*.yaml")]
    assert [v for v in cli.commands if f"`bench {v}" not in page("commands.md")] == []
    assert [p for p in plugins.policy_names() if f"`{p}`" not in page("policies.md")] == []
    assert [t for t in plugins.task_names() if f"`{t}`" not in page("tasks/index.md")] == []
    assert [s for s in suites if f"`{s}`" not in page("suites.md")] == []


@pytest.mark.parametrize("name", ["draw", "zoo", "recall", "writing", "backcopy", "equal"])
def test_the_pictures_are_drawn_from_the_records(name):
    picture = script(f"images/{name}")
    drawings = picture.drawings()
    assert len(drawings) == 2
    for name, svg in drawings.items():
        assert (picture.FOLDER / name).read_text(encoding="utf-8") == svg
        assert f"docs/images/{name}" in README or f"(images/{name})" in page("pretraining.md") or "dark" in name


@pytest.mark.slow("takes seconds")
def test_no_figure_begins_a_block_of_html():
    """A line that begins with a marker ends its paragraph in CommonMark, and what follows it is shown as it is written."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    tokens = [(path.name, token) for path in pages for token in MarkdownIt().parse(path.read_text(encoding="utf-8"))]
    assert [(name, t.content) for name, t in tokens if t.type == "html_block" and t.content.lstrip().startswith("<!--=")] == []


def test_figures_in_prose_are_those_of_the_records(figures):
    today, marked = figures.figures(), 0
    for page_ in figures.PAGES:
        text = page_.read_text(encoding="utf-8")
        assert figures.written(text, today) == text, f"python docs/figures.py changes {page_.name}"
        marked += text.count("<!---->")
    assert marked > 25
    with pytest.raises(KeyError):
        figures.written("<!--=recall/of/nobody-->5 %<!---->", today)
    assert figures.written("a <!--=n-->5 %<!----> b", {"n": "6 %"}) == "a <!--=n-->6 %<!----> b"


def test_what_the_readme_concludes_from_losses_is_so(zoo, draw):
    """Its sentences, by what would refute them; their figures are written by docs/figures.py."""
    records = zoo.measured()
    step, prompt = (zoo.losses(records, moment) for moment in zoo.MOMENTS)
    assert {zoo.spread(records, moment)[0] for moment in zoo.MOMENTS} == {5}
    better = [{row.policy for row in rows if row.verdict == zoo.BETTER} for rows in (step, prompt)]
    assert better == [{"dense", "rkv", "headkv"}, {"dense", "cur", "cake", "rkv", "headkv", "duo_attention"}]
    assert {row.policy: row.verdict for row in zoo.losses(records, "prompt", "cache")}["cur"] == zoo.ALIKE
    far = [row.loss for row in step if row.verdict == zoo.WORSE and row.loss >= 1]
    assert min(far) > 2, "those that are a little worse are a group"
    lost = {(r["policy"], r["capacity"]): r["loss"]["value"] for b in draw.question()["budgets"] for r in b["rows"] if r["loss"]}
    assert min(lost["random", 64], lost["keydiff", 64]) > 1000


def test_what_the_readme_concludes_from_answers_is_so(recall):
    records = recall.measured()
    right = {(row["policy"], row["task"], row["question"]): row["right"] for row in recall.answered(records)}
    assert {row["seeds"] for row in recall.answered(records) if row["policy"].startswith("random")} == {5}
    assert {right["dense", task, "seen"] for task in recall.TASKS} == {100.0, 70.0}
    for window in ("window", "sink_window"):
        assert right[window, "recent", "seen"] == 100
        assert max(right[window, task, q] for task in recall.TASKS[1:] for q in recall.QUESTIONS) <= 7
    ahead = []  # of SnapKV, a random choice, in each question about a line
    for task in ("once", "popular", "distracted"):
        asked = [r for r in records if recall.asked(r) == (task, "unseen")]
        chance, snapkv = (
            np.mean([[c == "1" for c in r.metrics.outcomes] for r in asked if recall.name(r, records) == name], 0)
            for name in ("random", "snapkv")
        )
        ahead += list(chance - snapkv)
    assert len(ahead) == 300
    assert np.mean(ahead) > 3 * np.std(ahead, ddof=1) / len(ahead) ** 0.5


def test_what_the_readme_concludes_from_long_answers_is_so(writing):
    """At every step, 192 tokens: SnapKV is ahead of H2O and of the random choice that keeps the prompt; windows fail."""
    solved = {}
    for record in writing.measured("stream"):
        solved.setdefault(record.cell.policy, []).append(np.array(list(record.metrics.outcomes)) == "1")
    assert len(solved["random"]) == 5
    for behind in (np.mean(solved["random"], 0), solved["h2o"][0].astype(float)):
        ahead = solved["snapkv"][0] - behind
        assert ahead.mean() > 3 * ahead.std(ddof=1) / len(ahead) ** 0.5
    assert solved["dense"][0].mean() > solved["snapkv"][0].mean()
    assert {solved[name][0].sum() for name in ("window", "sink_window", "tova", "recompute_window")} == {0}


@pytest.mark.slow("takes seconds")
def test_what_the_readme_concludes_at_equal_bytes_is_so():
    """Unseen questions: dense in 4 bits beats SnapKV, which holds more. Seen ones: SnapKV in 4 bits is as good as in full."""
    items = script("images/equal").measured()
    rows = {(panel, row["name"]): row for panel, item in items.items() for row in item["rows"]}
    smaller, fewer = rows["unseen", "dense as int4"], rows["unseen", "snapkv of 74 tokens"]
    assert smaller["held_bytes"] < fewer["held_bytes"]
    assert smaller["answers"][0]["low"] > fewer["answers"][0]["high"]
    assert rows["seen", "snapkv of 96 tokens as int4"]["held_bytes"] < rows["seen", "snapkv of 74 tokens"]["held_bytes"]
    assert rows["seen", "snapkv of 96 tokens as int4"]["answers"][0]["low"] > 0.9
    window, coded = rows["stream", "sink_window of 74 tokens"], rows["stream", "sink_window of 96 tokens as int4"]
    assert coded["held_bytes"] < window["held_bytes"] / 2
    assert {row["answers"][0]["share"] for row in (window, coded)} == {1}
    two_bits, kept, kivi = (
        rows["prose", f"dense as {name}"]["loss"] for name in ("int2", "int2 sinks 4 recent 8", "kivi2 residual 32")
    )
    assert two_bits["low"] > kept["high"] > kept["low"] > kivi["high"]


@pytest.mark.slow("takes seconds")
@pytest.mark.parametrize("name", ["SmallKeys", "Fading"])
def test_its_policies_keep_the_rules(name, tmp_path):
    file = tmp_path / "policy.py"
    file.write_text(CODE[name])
    assert [f for f in policy_check.check(f"{file}:{name}").findings if not f.ok] == []


def test_its_examples_are_as_short_as_it_says():
    statistic = re.search(r"class FadingAttention.*?return [^\n]*", CODE["Fading"], re.S)[0]
    assert len(CODE["SmallKeys"].strip().splitlines()) <= 20
    assert len(statistic.splitlines()) <= 10


@pytest.mark.slow("measures suites")
def test_its_commands_measure_its_policies(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("small_keys.py").write_text(CODE["SmallKeys"])
    Path("fading.py").write_text(CODE["Fading"])
    command = re.search(r"^bench (run smoke .*)$", README, re.M)[1].split()
    code, out, _ = bench(capsys, *command, "--policy", "fading.py:Fading", "--results", "results")
    assert code == 0
    assert all(name in out for name in ("SmallKeys", "Fading", "sink_window"))


@pytest.fixture
def written(tmp_path, monkeypatch) -> dict[str, list[str]]:
    """The settings in docs/policies.md's commands, by policy. The current directory has the files of its examples."""
    monkeypatch.chdir(tmp_path)
    text = page("policies.md")
    classes = {re.search(r"class (\w+)\((?:Policy|Composed)\)", c)[1]: c for c in re.findall(r"```python\n(.*?)```", text, re.S)}
    found = {}
    for file, name, settings in re.findall(r"^bench policy check (\w+\.py):(\w+)(.*)$", text, re.M):
        Path(file).write_text(classes.pop(name))
        found[f"{file}:{name}"] = re.findall(r"--set (\S+)", settings)
    assert classes == {}, "each example has a command that checks it"
    return found


@pytest.mark.slow("takes seconds")
def test_the_examples_of_every_kind_keep_the_rules(written):
    assert len(written) == 4
    for name, settings in written.items():
        assert [f for f in policy_check.check(name, settings, [24]).findings if not f.ok] == [], name


@pytest.mark.slow("measures suites")
def test_the_examples_of_every_kind_are_measured(written, capsys):
    """By the suite beside them, at every moment of eviction."""
    suite = re.search(r"```yaml\n(.*?)```", page("policies.md"), re.S)[1]
    Path("mine.yaml").write_text(suite)
    shorter = ("--set", "tokens=128", "--set", "prompt=72")
    code, out, _ = bench(capsys, "run", "mine.yaml", *shorter, "--results", "results", "--json")
    assert code == 0
    records = json.loads(out)
    assert all(r["status"] == "ok" for r in records)
    assert {r["cell"]["policy"] for r in records} == {"random", *written}
    assert len(records) == 3 * (1 + 2 + 1 + 1 + 2)


def test_the_suites_in_the_documentation_are_suites(tmp_path):
    cells_of = []
    for text in re.findall(r"```yaml\n(suite: .*?)```", page("suites.md"), re.S):
        (tmp_path / "s.yaml").write_text(text)
        cells_of.append(len(cells.load(tmp_path / "s.yaml")[1]))
    assert cells_of == [13, 15]


def test_the_number_of_policies_is_that_of_the_list():
    references = {"dense", "recompute_window", "recompute_sink_window", "reset"}  # which choose nothing to evict
    no_policies = references | {"random", "replay"}
    count = len(set(plugins.policy_names()) - no_policies)
    assert f"[{count} are shipped]" in README
    assert f"{count} policies:" in page("comparison.md")


def test_the_suite_in_the_documentation_is_a_part_of_pg19(tmp_path):
    text = next(c for c in re.findall(r"```yaml\n(.*?)```", page("suites.md"), re.S))
    (tmp_path / "s.yaml").write_text(text)
    assert len(cells.load(tmp_path / "s.yaml")[1]) == 1 + 3 * 4
    shipped = yaml.safe_load((ROOT / "suites/pg19.yaml").read_text())
    assert {k: v for k, v in yaml.safe_load(text).items() if k != "policies"}.items() <= shipped.items()


def test_the_number_of_families_is_that_of_the_list():
    from test_models import REFUSED

    assert f"{len(FAMILIES) - len(REFUSED)} families passing" in page("models.md")
    assert f"{len(REFUSED)} refused" in page("models.md")


def test_the_citation_is_of_this_version():
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == kvbench.__version__


def test_links_between_files_lead_somewhere():
    files = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    if not files:
        pytest.skip("this is no git checkout")
    broken = [
        f"{file}: {target}"
        for file in files
        for target in LINK.findall(re.sub(r"^```.*?^```$", "", (ROOT / file).read_text(encoding="utf-8"), flags=re.S | re.M))
        if not re.match("[a-z]+:", target) and not ((ROOT / file).parent / target).exists()
    ]
    assert broken == []


def test_a_policy_of_an_installed_package_is_found_by_its_entry_point(monkeypatch: pytest.MonkeyPatch):
    entry = EntryPoint("theirs", "kvbench.policies.window:Window", "bench.policies")
    monkeypatch.setattr(plugins, "entry_points", lambda group: [entry] if group == "bench.policies" else [])
    assert "theirs" in plugins.policy_names()
    assert plugins.policy_class("theirs").__name__ == "Window"
