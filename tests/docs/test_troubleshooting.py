"""docs/troubleshooting.md quotes messages word for word: each is still what the source says.

A quote is a block of ```text, with `...` for each value. It is compared with the strings of the source that have values:
f-strings, and those for `%` and `.format`. Where a message is put together from several strings, its value may be text
that the source has elsewhere.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from hydra_tune.errors import BudgetError

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "troubleshooting.md"
VALUE = "\0"  # in the place of a value
LEAST_WORDS = 5  # and spaces, of a piece of text that is looked for anywhere in the source
PREFIX = str(BudgetError(""))


def quotes() -> list[str]:
    tokens = MarkdownIt("commonmark").parse(PAGE.read_text(encoding="utf-8"))
    return [" ".join(token.content.split()) for token in tokens if token.type == "fence" and token.info == "text"]


@cache
def templates() -> dict[str, re.Pattern[str]]:
    """Each string of the source that is no docstring, with VALUE for its values; and what matches it."""
    found = set[str]()
    for folder in ("hydra_tune", "integrations"):
        for path in (ROOT / folder).rglob("*.py"):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            found.update(strings(tree, docstrings(tree)))
    spaced = {" ".join(re.sub(f"{VALUE}+", VALUE, text).split()) for text in found}
    return {text: re.compile("(.+?)".join(map(re.escape, text.split(VALUE)))) for text in spaced if text.strip(VALUE)}


def docstrings(tree: ast.AST) -> set[ast.AST]:
    return {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)}


def strings(node: ast.AST, left_out: set[ast.AST]) -> Iterator[str]:
    if node in left_out:
        return
    if isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp) and (text := text_of(node)) is not None:
        yield text
    for child in ast.iter_child_nodes(node):
        if not isinstance(node, ast.JoinedStr) or isinstance(child, ast.FormattedValue):
            yield from strings(child, left_out)


def text_of(node: ast.AST) -> str | None:
    """None if it is no text."""
    match node:
        case ast.Constant(value=str(text)):
            return re.sub(r"%[sd]|\{\}", VALUE, text)
        case ast.JoinedStr(values=parts):
            return "".join(part.value if isinstance(part, ast.Constant) else VALUE for part in parts)
        case ast.BinOp(op=ast.Add(), left=left, right=right):
            texts = [text_of(left), text_of(right)]
            return None if texts == [None, None] else "".join(VALUE if text is None else text for text in texts)
    return None


def is_said(quote: str) -> bool:
    """Whether the source says so."""
    given = quote.removeprefix(PREFIX).replace("...", VALUE)
    for text, pattern in templates().items():
        if all(part in given for part in text.split(VALUE)) and (match := pattern.fullmatch(given)):
            pieces = [piece.strip() for value in match.groups() for piece in value.split(VALUE)]
            if all(map(is_somewhere, pieces)):
                return True
    return False


def is_somewhere(piece: str) -> bool:
    """Whether a piece without values is put together from texts of the source."""
    words = re.findall(r"\w+|\W", piece)
    while words:
        taken = next((n for n in range(len(words), 0, -1) if "".join(words[:n]) in everything()), 0)
        if taken < min(LEAST_WORDS, len(words)) and words[0].isalnum():
            return False
        words = words[max(1, taken) :]
    return True


@cache
def everything() -> str:
    return VALUE.join(templates())


@pytest.mark.parametrize("quote", quotes(), ids=lambda quote: quote.removeprefix(PREFIX)[:50])
def test_each_message_is_in_the_source(quote):
    assert is_said(quote), f"no string of the source says so any more; write anew in {PAGE.name}: {quote}"


@pytest.mark.parametrize("quote", quotes(), ids=lambda quote: quote.removeprefix(PREFIX)[:50])
def test_a_message_that_has_changed_is_found(quote):
    """As if a long word had another one in its place in the source, for some of its words."""
    places = [match.span() for match in re.finditer(r"\b[a-z]{5,}\b", quote.removeprefix(PREFIX))]
    assert places
    for start, end in places[:: 1 + len(places) // 4]:
        text = quote.removeprefix(PREFIX)
        assert not is_said(f"{text[:start]}otherwise-said{text[end:]}")


def test_the_page_has_what_users_meet():
    assert len(quotes()) >= 30
    assert any(quote.startswith(PREFIX) for quote in quotes())
