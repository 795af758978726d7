"""Lets the site show Markdown as GitHub does: pages from outside docs/, links between files, light and dark pictures."""

from __future__ import annotations

import json
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PAGES = {  # a file of the repository: its place on the site
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "leaderboard/README.md": "leaderboard/README.md",
    "leaderboard/paper.md": "leaderboard/paper.md",
    "leaderboard/index.html": "leaderboard/page.html",  # this and the next are not tracked: `bench leaderboard` makes them
    "leaderboard/feed.json": "leaderboard/feed.json",
}
_PLACES = {place: file for file, place in PAGES.items()}
_LINK = re.compile(r'(?P<before>\]\(|(?:src|srcset)=")(?P<target>[^)"\s#]+)(?P<anchor>#[^)"\s]*)?')
_PICTURE = re.compile(r'<picture>\s*<source[^>]*srcset="([^"]+)">\s*<img alt="([^"]*)" src="([^"]+)"[^>]*>\s*</picture>')


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """List the pages of a folder that the navigation names, such as `decisions/`, in the order of their names."""
    _list_folders(config.nav or [])
    return config


def _list_folders(entries: list[Any]) -> None:
    """Replace folders by their pages, at every level of the navigation."""
    for entry in entries:
        for title, target in dict(entry).items() if isinstance(entry, dict) else ():
            if isinstance(target, list):
                _list_folders(target)
            elif target.endswith("/"):
                entry[title] = [f"{target}{page.name}" for page in sorted((ROOT / "docs" / target).glob("*.md"))]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from outside docs/, and the leaderboard's charts."""
    charts = (f"leaderboard/charts/{path.name}" for path in (ROOT / "leaderboard/charts").glob("*.svg"))
    for file, place in [*PAGES.items(), *((chart, chart) for chart in charts)]:
        if not (ROOT / file).exists():
            continue
        if place.endswith(".html"):
            text = (ROOT / file).read_text(encoding="utf-8")
            text = text.replace('href="README.md"', 'href="./"').replace('href="paper.md"', 'href="paper/"')
            files.append(File.generated(config, place, content=text))
        else:
            files.append(File.generated(config, place, abs_src_path=str(ROOT / file)))
    for script in sorted((ROOT / "leaderboard/page").glob("*.js")):  # the data of suites that the page loads
        files.append(File.generated(config, f"leaderboard/page/{script.name}", abs_src_path=str(script)))
    feed = ROOT / "leaderboard/feed.json"
    if feed.exists():
        shown = json.dumps(badge(json.loads(feed.read_text(encoding="utf-8"))))
        files.append(File.generated(config, "leaderboard/badge.json", content=shown))
    return files


def badge(feed: dict[str, Any]) -> dict[str, Any]:
    """The README's badge, as shields.io reads it: the best policy of the feed's default question, and what it loses."""
    question = next(q for q in feed["questions"] if q["id"] == feed["default"])
    budget = question["budgets"][len(question["budgets"]) // 2]
    best = budget["rows"][0]
    unit = "%" if question["measure"] == "perplexity" else "points"
    lost = f" loses {best['loss']['value']:.1f} {unit}" if best["loss"] else ""
    return {"schemaVersion": 1, "label": f"at {budget['capacity']} tokens", "message": f"{best['name']}{lost}", "color": "0757b8"}


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Make links between the repository's files links between the site's pages."""
    place = page.file.src_uri
    folder = posixpath.dirname(_PLACES.get(place, f"docs/{place}"))
    if place.startswith("leaderboard/"):
        page.meta["search"] = {"exclude": True}  # thousands of table rows would be all that a search finds
    if place == "leaderboard/README.md" and (ROOT / "leaderboard/index.html").exists():
        for made in ("index.html", "feed.json"):
            markdown = markdown.replace(f"`{made}`", f"[`{made}`]({made})", 1)
    here = posixpath.dirname(place)
    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.S | re.M)  # code stays as it is
    parts[::2] = [_LINK.sub(lambda match: _on_site(match, folder, here, config), part) for part in parts[::2]]
    text = _PICTURE.sub(r"![\2](\3#only-light)![\2](\1#only-dark)", "".join(parts))
    return text.replace("<details>", "<details markdown>")


def _on_site(match: re.Match[str], folder: str, here: str, config: MkDocsConfig) -> str:
    target, anchor = match["target"], match["anchor"] or ""
    if re.match(r"[a-z]+:|/", target):
        return match[0]
    file = posixpath.normpath(posixpath.join(folder, target))
    place = PAGES.get(file) or (file if file.startswith("leaderboard/charts/") else None)
    if place is None and file.startswith("docs/") and (ROOT / file).is_file() and not file.endswith(".py"):
        place = file.removeprefix("docs/")
    if place is None:
        kind = "tree" if (ROOT / file).is_dir() else "blob"
        return f"{match['before']}{config.repo_url}/{kind}/main/{file}{anchor}"
    return f"{match['before']}{posixpath.relpath(place, here or '.')}{anchor}"
