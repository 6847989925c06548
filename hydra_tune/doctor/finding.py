"""One finding about a machine, and what all findings together say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Area = Literal["devices", "host memory", "processor", "copies", "versions"]
Level = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class Finding:
    """`level` is "problem" if something will not work, "note" if it works but slower or with less than there could be.

    `found`     what is here, with units
    `meaning`   what it means for hydra_tune
    `to_do`     the next step; empty if there is none
    `figures`   the same in numbers, for programs
    """

    area: Area
    level: Level
    found: str
    meaning: str
    to_do: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """As plain data, for JSON."""
        return asdict(self)


def exit_status(findings: Sequence[Finding]) -> int:
    """1 if something will not work, else 0."""
    return int(any(finding.level == "problem" for finding in findings))


def summary(findings: Sequence[Finding]) -> str:
    """One line: whether hydra_tune works here."""
    problems, notes = (sum(f.level == level for f in findings) for level in ("problem", "note"))
    counted = [f"{n} {word}{'s' * (n > 1)}" for n, word in ((problems, "problem"), (notes, "note")) if n]
    if problems:
        return f"{' and '.join(counted)}: something will not work here."
    return "hydra_tune works here" + (f", with {counted[0]}." if counted else ".")
