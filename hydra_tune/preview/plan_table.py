"""Draws a plan as text of 80 columns: a name and a value a row, long values over several lines."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from hydra_tune.config import format_bytes

if TYPE_CHECKING:
    from hydra_tune.preview.budget_plan import Placement, Plan
    from hydra_tune.preview.step_time import StepTime

WIDTH = 80
_MOST_NAMES = 6
Row = tuple[str, str]  # with an empty value: a heading


def rows_of(plan: Plan) -> list[Row]:
    rows = [("budgets of a device", "")]
    rows.append(("least", _up(plan.least_bytes)))
    rows.append(("comfortable", _up(plan.comfortable_bytes)))
    rows.append(("resident from", _up(plan.resident_bytes)))
    if plan.at_budget is not None:
        rows += _placement_rows(plan.at_budget)
    if plan.time is not None:
        rows += _time_rows(plan.time)
    host = plan.host
    rows += [("on the host", ""), ("a trial", format_bytes(host.trial_bytes))]
    if host.shared_bytes:
        rows.append(("shared by all trials", format_bytes(host.shared_bytes)))
    rows.append(("trials that fit", f"{host.trials} in {format_bytes(host.host_memory_bytes)}"))
    if plan.refused:
        rows += [("refused", ""), *(("", text) for text in plan.refused)]
    return [*rows, ("notes", ""), ("measured by", plan.how), *(("", note) for note in plan.notes)]


def _placement_rows(at: Placement) -> list[Row]:
    rows = [(f"in {format_bytes(at.budget_bytes)}", "")]
    rows.append(("the trial is", "resident" if at.resident else f"spilled, {at.shards} shards"))
    held = ", ".join(f"{format_bytes(size)} {kind}" for kind, size in at.held.items())
    rows.append(("held for its life", f"{format_bytes(at.held_bytes)}: {held}" if held else "nothing"))
    rows.append(("a step", f"{format_bytes(at.step_bytes)}, and {format_bytes(at.task_bytes)} for a task"))
    rows.append(
        ("device peak", f"{format_bytes(at.reserved_bytes)} reserved, {format_bytes(at.peak_bytes)} by tensors")
    )
    if not at.resident:
        rows.append(("blocks that repeat", _named(at.repeated)))
        rows.append(("blocks that keep", _named(at.kept)))
        rows += [("", reason) for reason in dict.fromkeys(at.kept.values())][:_MOST_NAMES]
    down, up = at.step.to_device_bytes, at.step.gradient_bytes
    rows.append(("over the link a step", f"{format_bytes(down)} to the device, {format_bytes(up)} back"))
    if at.evaluation.to_device_bytes:
        rows.append(("an evaluation", f"{format_bytes(at.evaluation.to_device_bytes)} to the device"))
    return rows


def _time_rows(time: StepTime) -> list[Row]:
    hides = f"from {time.hides_at} {time.unit} a step on" if time.hides_at else "nothing to hide"
    return [
        ("seconds of a step", ""),
        ("alone", f"{time.alone_s:.3g} s"),
        ("one of several", f"{time.together_s:.3g} s"),
        (
            "of that",
            f"{time.compute_s:.3g} s computing, {time.copies_s:.3g} s copies, {time.optimizer_s:.3g} s optimizer",
        ),
        ("transfers hide", f"{hides}; this batch has {time.amount}"),
        ("rates of", time.source),
    ]


def text_of(rows: Sequence[Row], *, title: str) -> str:
    indent = 2 + max(len(name) for name, value in rows if value) + 2
    lines = [title]
    for name, value in rows:
        if not value:
            lines += ["", name]
            continue
        wrapped = textwrap.wrap(value, WIDTH - indent) or [""]
        lines.append(f"{'  ' + name:{indent}}{wrapped[0]}")
        lines += [" " * indent + line for line in wrapped[1:]]
    return "\n".join(lines)


def _up(num_bytes: int | None) -> str:
    return "not known" if num_bytes is None else format_bytes(num_bytes, up=True)


def _named(names: Iterable[str]) -> str:
    every = list(names)
    if not every:
        return "none"
    more = f" and {len(every) - _MOST_NAMES} more" if len(every) > _MOST_NAMES else ""
    return f"{len(every)}: {', '.join(every[:_MOST_NAMES])}{more}"
