"""What the README and the documentation say is so."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import yaml
from conftest import bench
from markdown_it import MarkdownIt

import kvbench
from kvbench.harness.cli import cli
from kvbench.harness.core import plugins
from kvbench.harness.run import policy_check
from kvbench.harness.suite import cells

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CODE = {re.search(r"class (\w+)\(Policy\)", code)[1]: code for code in re.findall(r"```python\n(.*?)```", README, re.S)}
LINK = re.compile(r'(?:\]\(|(?:src|srcset)=")([^)"\s#]*)(?:#([^)"\s]+))?')


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def test_every_verb_policy_task_and_suite_is_documented():
    suites = [path.stem for path in (ROOT / "suites").glob("*.yaml")]
    assert [v for v in cli.commands if f"`bench {v}" not in page("commands.md")] == []
    assert [p for p in plugins.policy_names() if f"`{p}`" not in page("policies.md")] == []
    assert [t for t in plugins.task_names() if f"`{t}`" not in page("tasks/index.md")] == []
    assert [s for s in suites if f"`{s}`" not in page("suites.md")] == []


@pytest.mark.slow("takes seconds")
def test_no_figure_begins_a_block_of_html():
    """A line that begins with a marker ends its paragraph in CommonMark, and what follows it is shown as it is written."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    tokens = [(path.name, token) for path in pages for token in MarkdownIt().parse(path.read_text(encoding="utf-8"))]
    assert [(name, t.content) for name, t in tokens if t.type == "html_block" and t.content.lstrip().startswith("<!--=")] == []


@pytest.mark.parametrize("path", [ROOT / "README.md", *sorted((ROOT / "docs/findings").glob("*.md"))], ids=lambda path: path.name)
def test_a_rendered_page_has_whole_paragraphs(path):
    """A comment or a table in the wrong place splits a paragraph, so that its second half begins with a small letter."""
    tokens = MarkdownIt().enable("table").parse(path.read_text(encoding="utf-8"))
    paragraphs = [after.content for token, after in itertools.pairwise(tokens) if token.type == "paragraph_open"]
    assert [text for text in paragraphs if text[0].islower()] == []


@pytest.mark.slow("takes seconds")
def test_its_policy_keeps_the_rules(tmp_path):
    file = tmp_path / "policy.py"
    file.write_text(CODE["SmallKeys"])
    assert [f for f in policy_check.check(f"{file}:SmallKeys").findings if not f.ok] == []


@pytest.mark.slow("measures suites")
def test_its_command_measures_its_policy(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("small_keys.py").write_text(CODE["SmallKeys"])
    command = re.search(r"^bench (run smoke (?:.*\\\n)*.*)$", README, re.M)[1].replace("\\\n", "").split()
    code, out, _ = bench(capsys, *command, "--results", "results")
    assert code == 0
    assert all(name in out for name in ("SmallKeys", "sink_window"))


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
    assert len(records) == 3 * (1 + 1 + 2 + 1 + 1 + 2)


def test_the_suites_in_the_documentation_are_suites(tmp_path):
    cells_of = []
    for text in re.findall(r"```yaml\n(suite: .*?)```", page("suites.md"), re.S):
        (tmp_path / "s.yaml").write_text(text)
        cells_of.append(len(cells.load(tmp_path / "s.yaml")[1]))
    assert cells_of == [13, 15]


def test_the_suite_in_the_documentation_is_a_part_of_pg19(tmp_path):
    text = next(c for c in re.findall(r"```yaml\n(.*?)```", page("suites.md"), re.S))
    (tmp_path / "s.yaml").write_text(text)
    assert len(cells.load(tmp_path / "s.yaml")[1]) == 1 + 3 * 4
    shipped = yaml.safe_load((ROOT / "suites/pg19.yaml").read_text())
    assert {k: v for k, v in yaml.safe_load(text).items() if k != "policies"}.items() <= shipped.items()


def test_the_citation_is_of_this_version():
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == kvbench.__version__


def anchors(path: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and mkdocs make them."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.M)
    return {
        re.sub(r"[^\w\- ]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()).replace(" ", "-") for heading in headings
    }


def test_links_between_files_lead_somewhere():
    files = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    if not files:
        pytest.skip("this is no git checkout")
    broken = []
    for file in files:
        text = re.sub(r"^```.*?^```$", "", (ROOT / file).read_text(encoding="utf-8"), flags=re.S | re.M)
        for target, anchor in LINK.findall(text):
            path = (ROOT / file).parent / target if target else ROOT / file
            if re.match("[a-z]+:", target):
                continue
            if not path.exists() or (anchor and path.suffix == ".md" and anchor not in anchors(path)):
                broken.append(f"{file}: {target}#{anchor}")
    assert broken == []


def test_a_policy_of_an_installed_package_is_found_by_its_entry_point(monkeypatch: pytest.MonkeyPatch):
    entry = EntryPoint("theirs", "kvbench.policies.window:Window", "bench.policies")
    monkeypatch.setattr(plugins, "entry_points", lambda group: [entry] if group == "bench.policies" else [])
    assert "theirs" in plugins.policy_names()
    assert plugins.policy_class("theirs").__name__ == "Window"
