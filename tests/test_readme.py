"""What the README and the documentation say is so."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import yaml
from conftest import bench

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
    """A script that draws one of the README's pictures."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs/images" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def draw():
    return script("draw")


@pytest.fixture(scope="module")
def zoo():
    return script("zoo")


@pytest.fixture(scope="module")
def recall():
    return script("recall")


def test_every_verb_policy_task_and_suite_is_documented():
    suites = [path.stem for path in (ROOT / "suites").glob("*.yaml")]
    assert [v for v in cli.commands if f"`bench {v}" not in page("commands.md")] == []
    assert [p for p in plugins.policy_names() if f"`{p}`" not in page("policies.md")] == []
    assert [t for t in plugins.task_names() if f"`{t}`" not in page("tasks/index.md")] == []
    assert [s for s in suites if f"`{s}`" not in page("suites.md")] == []


@pytest.mark.parametrize("name", ["draw", "zoo", "recall"])
def test_the_pictures_are_drawn_from_the_records(name, request):
    picture = request.getfixturevalue(name)
    drawings = picture.drawings()
    assert len(drawings) == 2
    for name, svg in drawings.items():
        assert (picture.FOLDER / name).read_text(encoding="utf-8") == svg
        assert f"docs/images/{name}" in README


def test_the_losses_the_readme_names_are_those_of_the_picture(draw):
    rows = [row for budget in draw.question()["budgets"] for row in budget["rows"]]
    lost = {(row["policy"], row["capacity"]): row["loss"]["value"] for row in rows}
    text = " ".join(README.split())
    assert f"(`window`) loses {lost['window', 64]:.0f} %" in text
    assert f"which is StreamingLLM), loses {lost['sink_window', 64]:.0f} %" in text
    assert "A random choice and KeyDiff, a score made for finished prompts, lose more than 1,000 %" in text
    assert min(lost["random", 64], lost["keydiff", 64]) > 1000


def policies_of(rows) -> int:
    """Policies and variants; those that kept the same tokens share a row."""
    return sum(len(row.policy.split(" = ")) for row in rows)


def test_who_beats_random_is_what_the_readme_says(zoo):
    records, text = zoo.measured(), " ".join(README.split())
    step, prompt = (zoo.losses(records, moment) for moment in zoo.MOMENTS)
    count = int(re.search(r"(\d+) policies and variants keep 64 tokens", text)[1])
    assert policies_of(step) == policies_of(prompt) == count  # dense among them, the control not
    assert {zoo.spread(records, moment)[0] for moment in zoo.MOMENTS} == {5}
    assert max(zoo.spread(records, moment)[1] for moment in zoo.MOMENTS) == pytest.approx(0.05, abs=0.005)
    better = [{row.policy: row for row in rows if row.verdict == zoo.BETTER} for rows in (step, prompt)]
    assert [set(x) for x in better] == [{"dense", "rkv"}, {"dense", "rkv", "cake"}]
    assert (
        f"only {-better[0]['dense'].loss:.1f} % ahead at every step and {-better[1]['dense'].loss:.1f} % after a prompt" in text
    )
    assert f"R-KV closes {better[0]['rkv'].closed:.0%} of that gap".replace("%", " %") in text
    assert (
        f"and {better[1]['rkv'].closed:.0%} after the prompt, CAKE {better[1]['cake'].closed:.0%} after".replace("%", " %")
        in text
    )
    near = [row for row in step if row.verdict == zoo.WORSE and row.loss < 1]
    assert f"{policies_of(near)} of the others are surely worse, by up to {max(row.loss for row in near):.1f} %" in text
    assert min(row.loss for row in step if row.loss > 0 and row not in near and row.verdict == zoo.WORSE) > 2
    made_for_prompts = {"keydiff", "cur", "leverage", "knorm"}
    most, least = (re.search(pattern, text)[1] for pattern in (r"lose at most ([\d.]+) % when", r"(\d+) % or more when"))
    assert max(row.loss for row in prompt if row.policy in made_for_prompts) == pytest.approx(float(most), abs=0.05)
    assert min(row.loss for row in step if row.policy in made_for_prompts) == pytest.approx(int(least), abs=0.5)


def test_what_is_still_there_is_what_the_readme_says(recall):
    rows, text = recall.answered(recall.measured()), " ".join(README.split())
    right = {(row["policy"], row["task"], row["question"]): row["right"] for row in rows}
    policies = {row["policy"] for row in rows}
    assert f"Here {len(policies) - 1} policies and variants cut" in text  # dense cuts nothing
    first = f"a random choice of 64 tokens answers {right['random', 'once', 'unseen']:.0f} % (five seeds), SnapKV"
    assert f"{first} {right['snapkv', 'once', 'unseen']:.0f} % if it has not seen the question, and" in text
    assert f"{right['snapkv', 'once', 'seen']:.0f} % if it has." in text
    assert {row["seeds"] for row in rows if row["policy"].startswith("random")} == {5}
    assert {right["dense", task, "seen"] for task in recall.TASKS} == {100.0, 70.0}
    for window in ("window", "sink_window"):
        assert right[window, "recent", "seen"] == 100
        assert max(right[window, task, q] for task in recall.TASKS[1:] for q in recall.QUESTIONS) <= 7
    seen, unseen = (right["snapkv", "once", q] for q in ("seen", "unseen"))
    assert f"SnapKV keeps {seen:.0f} % of what was told `once` if it saw the question, {unseen:.0f} % if it did not" in text
    popular, distracted = (right["h2o (window 32)", task, "unseen"] for task in ("popular", "distracted"))
    assert f"({popular:.0f} % of `popular`) at the cost of its neighbours ({distracted:.0f} % of `distracted`)" in text
    assert f"without knowing that it will be asked ({right['keydiff', 'needle', 'unseen']:.0f} %)" in text
    most = max(right[p, "values", q] for p in policies - {"dense"} for q in recall.QUESTIONS)
    assert f"({most:.0f} % at best; dense itself answers {right['dense', 'values', 'seen']:.0f} %)" in text


@pytest.mark.parametrize("name", ["SmallKeys", "Fading"])
def test_its_policies_keep_the_rules(name, tmp_path):
    file = tmp_path / "policy.py"
    file.write_text(CODE[name])
    assert [f for f in policy_check.run_checks(f"{file}:{name}") if not f.ok] == []


def test_its_examples_are_as_short_as_it_says():
    statistic = re.search(r"class FadingAttention.*?return [^\n]*", CODE["Fading"], re.S)[0]
    assert len(CODE["SmallKeys"].strip().splitlines()) <= 20
    assert len(statistic.splitlines()) <= 10


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


def test_the_examples_of_every_kind_keep_the_rules(written):
    assert len(written) == 4
    for name, settings in written.items():
        assert [f for f in policy_check.run_checks(name, settings, [24]) if not f.ok] == [], name


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
    no_policies = {"dense", "recompute_window", "recompute_sink_window", "random", "replay"}  # of eviction: references, a control
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
