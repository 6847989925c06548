"""Lets the pages' links lead somewhere on the site, too: those to files beside docs/, which a code host has.

A page links `../benchmarks/results/x.json`, as a reader of the repository needs it. The site gets a copy of each file
that a page names so, under `repository/`, and for a folder a page that lists it. The changelog and the contributor's
guide, which lie beside docs/, become pages. A link that shows the name of a page's file shows its title.

The reference is read from a copy of the source that is arranged as an installed package: a checkout keeps integrations/
beside hydra_tune/.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files, InclusionLevel

DOCS = Path(__file__).parent
ROOT = DOCS.parent
PAGES = ("CHANGELOG.md", "CONTRIBUTING.md")  # of the repository's root
LINK = re.compile(r"\]\((\.\./[^)#\s]+)")
LINKED_FILE = re.compile(r"\[(?:docs/)?([\w/]+\.md)\]\(")  # a link that shows the name of a page's file
TITLE = re.compile(r"^# ([^:\n]+)", re.MULTILINE)


@event_priority(100)  # before mkdocstrings, which leaves out a folder that is not there
def on_config(config: Any) -> Any:
    source = ROOT / "build" / "site-source"
    shutil.rmtree(source, ignore_errors=True)
    only_code = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "hydra_tune", source / "hydra_tune", ignore=only_code)
    shutil.copytree(ROOT / "integrations", source / "hydra_tune" / "integrations", ignore=only_code)
    for path in source.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        path.write_text(text.replace("::\n", ":\n"), encoding="utf-8")  # before code; Markdown has one colon there
    return config


def on_files(files: Files, *, config: Any) -> Files:
    named = {path for page in files.documentation_pages() for path in _outside(page).values()}
    for name in PAGES:
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    for folder in sorted(filter(Path.is_dir, named)):
        inside = sorted(filter(Path.is_file, folder.iterdir()))
        listed = "\n".join(f"- [{each.name}]({each.name})" for each in inside)
        title = f"# {folder.relative_to(ROOT).as_posix()}"
        text, beside = f"{title}\n\n{listed}\n", InclusionLevel.NOT_IN_NAV
        files.append(File.generated(config, f"{_place(folder)}/index.md", content=text, inclusion=beside))
        named |= set(inside)
    for file in sorted(filter(Path.is_file, named)):
        files.append(File.generated(config, _place(file), abs_src_path=str(file)))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    markdown = LINKED_FILE.sub(lambda match: f"[{_title(match[1])}](", markdown)
    if page.file.src_path in PAGES:
        return markdown.replace("](docs/", "](")
    for link, path in _outside(page.file).items():
        there = _place(path) + ("/index.md" if path.is_dir() else "")
        relative = Path(os.path.relpath(there, Path(page.file.src_path).parent)).as_posix()
        markdown = re.sub(rf"\]\({re.escape(link)}(?=[)#])", f"]({relative}", markdown)
    return markdown


def _outside(page: File) -> dict[str, Path]:
    """What a page links to beside docs/, by the link."""
    if page.generated_by is not None:
        return {}
    links = {link: (DOCS / page.src_path).parent / link for link in LINK.findall(page.content_string)}
    paths = {link: Path(os.path.normpath(path)) for link, path in links.items()}
    return {link: path for link, path in paths.items() if not path.is_relative_to(DOCS)}


def _title(name: str) -> str:
    """What a page is called, up to a colon."""
    path = DOCS / name
    found = TITLE.search(path.read_text(encoding="utf-8")) if path.exists() else None
    return name if found is None else found[1]


def _place(path: Path) -> str:
    """On the site."""
    return f"repository/{path.relative_to(ROOT).as_posix()}"
