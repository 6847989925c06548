"""docs/troubleshooting.md quotes messages word for word: each is still what the source says.

A quote is a block of ```text, with `...` for each value. It is compared with the strings of the source: f-strings,
those for `%` and `.format`, and plain ones. Where a message is put together from several strings, a value of one is
another one.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from hydra_tune.errors import BudgetError

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "troubleshooting.md"
VALUE = "\0"  # in the place of a value
DEEPEST = 3
PREFIX = str(BudgetError(""))


def quotes() -> list[str]:
    tokens = MarkdownIt("commonmark").parse(PAGE.read_text(encoding="utf-8"))
    return [" ".join(token.content.split()) for token in tokens if token.type == "fence" and token.info == "text"]


@dataclass(frozen=True)
class Template:
    """A string of the source, with VALUE for its values."""

    parts: tuple[str, ...]
    pattern: re.Pattern[str]

    @classmethod
    def of(cls, text: str) -> Template:
        parts = text.split(VALUE)
        return cls(tuple(sorted(parts, key=len, reverse=True)), re.compile("(.+?)".join(map(re.escape, parts))))

    def values_in(self, text: str) -> tuple[str, ...] | None:
        match = self.pattern.fullmatch(text) if all(part in text for part in self.parts) else None
        return None if match is None else match.groups()


@cache
def templates() -> list[Template]:
    found = set[str]()
    for folder in ("hydra_tune", "integrations"):
        for path in (ROOT / folder).rglob("*.py"):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            found.update(strings(tree, docstrings(tree)))
    spaced = {core(re.sub(f"{VALUE}+", VALUE, " ".join(text.replace("...", VALUE).split()))) for text in found}
    spaced |= {core(text.removesuffix(VALUE)) for text in spaced}  # advice at the end gives way to other advice
    return [Template.of(text) for text in sorted(spaced) if text.strip(VALUE)]


def docstrings(tree: ast.AST) -> set[ast.AST]:
    statements = (node.value for node in ast.walk(tree) if isinstance(node, ast.Expr))
    return {value for value in statements if isinstance(value, ast.Constant)}


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
    return is_composed(core(quote.removeprefix(PREFIX).replace("...", VALUE)))


@cache
def is_composed(text: str, depth: int = 0) -> bool:
    """Whether it is a string of the source, whose values are values, or such strings themselves."""
    if text in ("", VALUE):
        return depth > 0
    for template in templates():
        values = template.values_in(text)
        if values is None or (values and depth == DEEPEST):
            continue
        if all(is_composed(core(value), depth + 1) for value in values):
            return True
    return False


def core(text: str) -> str:
    """Without the marks around it, and the subject that goes where a reason gets another one."""
    return re.sub(rf"^[^\w{VALUE}]+|[^\w{VALUE}]+$", "", text).removeprefix("it ")


@pytest.mark.parametrize("quote", quotes(), ids=lambda quote: quote.removeprefix(PREFIX)[:50])
def test_each_message_is_in_the_source(quote):
    assert is_said(quote), f"no string of the source says so any more; write anew in {PAGE.name}: {quote}"


@pytest.mark.parametrize("quote", quotes(), ids=lambda quote: quote.removeprefix(PREFIX)[:50])
def test_a_message_that_has_changed_is_found(quote):
    """As if the source had a word more, at several places."""
    text = quote.removeprefix(PREFIX)
    ends = [match.end() for match in re.finditer(r"\b[a-z]{4,}\b", text)]
    assert ends
    for end in ends[:: 1 + len(ends) // 4]:
        assert not is_said(f"{text[:end]} now{text[end:]}")


def test_the_page_has_what_users_meet():
    assert len(quotes()) >= 30
    assert any(quote.startswith(PREFIX) for quote in quotes())
