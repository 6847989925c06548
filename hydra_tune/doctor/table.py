"""Draws findings for people, in a terminal of 80 columns or more. Where the output is no terminal it is plain text.

devices
  ok       cuda:0: NVIDIA H200, 139.1 GiB of 139.8 GiB free
           memory="auto" is 138.6 GiB now.
  note     cuda:0: PCIe generation 5 x8 of x16
           At most 31.5 GB/s each way. Spilled weights and gradients go over it.
           To do: Use a slot with all lanes, without a riser ...
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING

from hydra_tune.doctor.finding import Finding, exit_status, summary

if TYPE_CHECKING:
    from rich.console import RenderableType

_STYLES = {"ok": "green", "note": "yellow", "problem": "bold red"}


def table(findings: Sequence[Finding]) -> RenderableType:
    """For `rich.console.Console().print`. The last line says whether hydra_tune works here."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = []
    for area, group in groupby(findings, key=attrgetter("area")):
        parts += [Text(area, "bold"), _area(list(group))]
    parts += [Text(), Text(summary(findings), "bold red" if exit_status(findings) else "bold green")]
    return Group(*parts)


def _area(findings: Sequence[Finding]) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2), pad_edge=True)
    grid.add_column(no_wrap=True, min_width=9)
    grid.add_column(overflow="fold")
    for finding in findings:
        words = Text.assemble(finding.found, "\n", (finding.meaning, "dim"))
        if finding.to_do:
            words.append(f"\nTo do: {finding.to_do}", "bold")
        grid.add_row(Text(finding.level, _STYLES[finding.level]), words)
    return grid
