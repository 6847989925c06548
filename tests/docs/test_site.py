"""The site: each page has a place in it, each public name a place in the reference, and nothing needs a network.

`make docs` builds it, where any warning is an error; with its packages here, a test does, too.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hydra_tune

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"
NOT_BUILT = not all(map(importlib.util.find_spec, ("mkdocs", "material", "mkdocstrings_handlers")))


def test_each_page_is_in_the_navigation():
    config = (ROOT / "mkdocs.yml").read_text()
    named = re.findall(r"(?:- |: )(\S+\.md)$", config.partition("\nnav:")[2], re.MULTILINE)
    pages = [path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")]
    assert sorted(named) == sorted([*pages, "CHANGELOG.md", "CONTRIBUTING.md"])  # these from the repository's root


def test_each_public_name_is_in_the_reference_once():
    pages = [path.read_text() for path in (DOCS / "reference").glob("*.md")]
    named = [name for page in pages for name in re.findall(r"^::: hydra_tune\.(\w+)$", page, re.MULTILINE)]
    assert sorted(named) == sorted(hydra_tune.__all__)


def test_pictures_need_no_network():
    """A terminal's picture, as rich writes it, has its font from there."""
    for picture in (DOCS / "assets").glob("*.svg"):
        assert not re.findall(r"(?:url\(|href=)\W*https?:.*", picture.read_text()), picture.name


@pytest.mark.skipif(NOT_BUILT, reason="`make docs` installs what builds the site")
def test_the_site_is_built_without_a_warning_and_needs_no_network(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    for page in tmp_path.rglob("*.html"):
        text = page.read_text()
        fetched = re.findall(r"<(?:script|img|iframe)[^>]*\ssrc=\"?(https?:[^\s\">]+)", text)
        fetched += re.findall(r"<link[^>]*\shref=\"?(https?:[^\s\">]+)", text)
        assert not fetched, page.name
    assert "AdamW" in (tmp_path / "search" / "search_index.js").read_text()
    reference = (tmp_path / "reference" / "training.html").read_text()
    assert 'id="hydra_tune.prepare"' in reference and "extra_state" in reference
