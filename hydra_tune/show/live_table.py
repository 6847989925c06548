"""Draws a snapshot of a pool for people: a rich renderable for terminals and notebooks, and one plain line elsewhere.

digits   12 of 64 done, 4 run, 3 pruned   best 0.213 (trial 7)   8 min left
cuda:0   ━━━━━━━━━╸━━━  14.2 of 20.0 GiB   busy 94%   computes trial 12, promotes trial 14
 trial      state      step        ms/step  value   device    host      share  left
 trial 12   spilled    140/2000    210      0.31    1.2 GiB   7.7 GiB   48%    7 min
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from hydra_tune.config import format_bytes
from hydra_tune.show.snapshot import DeviceSnapshot, PoolSnapshot, SearchSnapshot, TrialSnapshot

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.text import Text

MOST_ROWS = 20
_GAP = 2  # between columns
_STYLES = {
    "resident": "green",
    "spilled": "cyan",
    "measuring": "yellow",
    "paused": "magenta",
    "complete": "dim",
    "pruned": "dim",
    "did not fit": "dim red",
    "failed": "red",
}


class LiveTable:
    """The search, if there is one, a line for each device, and a row for each of `most_rows` trials, among them that of
    the `chosen` name, which stands out. A renderable of rich: it leaves out the last columns where a terminal is too
    narrow for them, also if it has become so since."""

    def __init__(self, snapshot: PoolSnapshot, *, chosen: str = "", most_rows: int = MOST_ROWS) -> None:
        self._snapshot = snapshot
        self._chosen = chosen
        self._most_rows = most_rows

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        yield _drawn(self._snapshot, options.max_width, self._chosen, self._most_rows)


def _drawn(snapshot: PoolSnapshot, columns: int, chosen: str, most_rows: int) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = []
    if snapshot.search is not None:
        parts.append(Text(_search_line(snapshot, snapshot.search, columns), "bold", no_wrap=True, overflow="ellipsis"))
    parts += [_device_line(device, snapshot.elapsed_s, columns) for device in snapshot.devices]
    rows = _rows(snapshot, most_rows)
    place = next((n for n, trial in enumerate(rows) if trial.name == chosen), 0)
    first = max(0, place - most_rows + 1)
    if rows:
        parts.append(_table(rows[first : first + most_rows], chosen, columns))
    ended = 0 if snapshot.search is None else snapshot.search.done
    if (more := len(live_trials(snapshot)) + ended - min(len(rows), most_rows)) > 0:
        parts.append(Text(f" and {more} more", "dim"))
    return Group(*parts)


def plain_line(snapshot: PoolSnapshot) -> str:
    """The same in one line of plain text, for logs."""
    devices = ", ".join(
        f"{d.name} busy {_percent(d.busy_s, snapshot.elapsed_s)}, {_amount(d.used_bytes, d.budget_bytes)}"
        for d in snapshot.devices
    )
    steps = ", ".join(
        f"{t.name} {t.state}"
        + (f" ({format_seconds(t.waits_s)})" if t.waits_s and t.state.startswith("waits") else "")
        + (f" at step {_steps(t)}" if _steps(t) else "")
        for t in live_trials(snapshot)[:MOST_ROWS]
    )
    search = "" if snapshot.search is None else _search_line(snapshot, snapshot.search) + "; "
    return f"{search}{devices}" + (f"; {steps}" if steps else "")


def live_trials(snapshot: PoolSnapshot) -> list[TrialSnapshot]:
    """In the order in which they are shown."""
    live = [trial for trial in snapshot.trials if not trial.has_ended]
    return sorted(live, key=lambda trial: (len(trial.name), trial.name))  # trial 2 before trial 10


def _rows(snapshot: PoolSnapshot, most: int) -> list[TrialSnapshot]:
    """Live trials, and as many of the last ended ones as there is room for."""
    live = live_trials(snapshot)
    ended = [] if snapshot.search is None else list(snapshot.search.ended)
    room = max(0, most - len(live))
    return [*live, *(ended[-room:] if room else [])]


def _search_line(snapshot: PoolSnapshot, search: SearchSnapshot, columns: int | None = None) -> str:
    """Without the search's name, where a terminal is too narrow for it."""
    from rich.cells import cell_len

    done = f"{search.done}" if search.n_trials is None else f"{search.done} of {search.n_trials}"
    told = [f"{done} done", f"{search.running} running"]
    told += [f"{number} {word}" for word, number in (("pruned", search.pruned), ("failed", search.failed)) if number]
    if search.did_not_fit:
        told.append(f"{search.did_not_fit} did not fit")
    parts = [", ".join(told)]
    if search.best is not None:
        parts.append(f"best {search.best:.4g} (trial {search.best_trial})")
    if search.running and (left_s := search.left_s(snapshot.trials)) is not None:
        parts.append(f"{format_seconds(left_s)} left")
    line = "   ".join([search.name, *parts])
    return line if columns is None or cell_len(line) <= columns else "   ".join(parts)


def _device_line(device: DeviceSnapshot, elapsed_s: float, columns: int) -> Text:
    from rich.text import Text

    width = 20 if columns >= 100 else 8
    full = min(width, round(width * device.used_bytes / device.budget_bytes))
    line = Text.assemble(
        (f"{device.name:8} ", "bold"),
        ("━" * full, "cyan"),
        ("━" * (width - full), "bright_black"),
        f"  {_amount(device.used_bytes, device.budget_bytes)}   busy {_percent(device.busy_s, elapsed_s)}",
        no_wrap=True,
        overflow="ellipsis",
    )
    does = [f"{verb} {name}" for verb, name in (("computes", device.computes), ("promotes", device.promotes)) if name]
    return line.append(f"   {', '.join(does)}" if does else "   idle", "" if does else "dim")


def _table(trials: list[TrialSnapshot], chosen: str, columns: int) -> RenderableType:
    from rich import box
    from rich.cells import cell_len
    from rich.table import Table
    from rich.text import Text

    rows = [_cells(trial) for trial in trials]
    widths = {name: max(len(name), *(cell_len(row[name]) for row in rows)) for name in rows[0]}
    names = list(widths)
    while len(names) > 2 and sum(widths[name] + _GAP for name in names) - _GAP > columns:
        names.pop()
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False, header_style="dim")
    table.add_column("trial", no_wrap=True)
    table.add_column("state", no_wrap=True, max_width=max(1, columns - widths["trial"] - _GAP))
    for name in names[2:]:
        table.add_column(name, justify="right", no_wrap=True)
    for trial, row in zip(trials, rows, strict=True):
        first = Text(row["trial"], "reverse" if trial.name == chosen else "")
        table.add_row(first, *(row[name] for name in names[1:]), style=_STYLES.get(trial.state, "yellow"))
    return table


def _cells(t: TrialSnapshot) -> dict[str, str]:
    """By column. The last ones are left out first."""
    return {
        "trial": t.name,
        "state": t.state,
        "step": _steps(t),
        "ms/step": "" if t.step_s is None else f"{1e3 * t.step_s:.3g}" if t.step_s < 1 else f"{1e3 * t.step_s:.0f}",
        "value": "" if t.value is None else f"{t.value:.4g}",
        "device": format_bytes(t.device_bytes) if t.device_bytes else "",
        "host": format_bytes(t.host_bytes) if t.host_bytes else "",
        "share": f"{t.device_share:.0%}" if t.device_share else "",
        "left": "" if t.left_s is None or t.has_ended else format_seconds(t.left_s),
    }


def _steps(trial: TrialSnapshot) -> str:
    if trial.total_steps is None:
        return str(trial.steps) if trial.steps else ""
    return f"{trial.steps}/{trial.total_steps}"


def _amount(used_bytes: int, budget_bytes: int) -> str:
    return f"{format_bytes(used_bytes)} of {format_bytes(budget_bytes)}"


def _percent(part_s: float, whole_s: float) -> str:
    return f"{part_s / whole_s:.0%}" if whole_s else "0%"


def format_seconds(seconds: float) -> str:
    """``75`` -> ``"75 s"``, ``600`` -> ``"10 min"``, ``9000`` -> ``"2 h 30 min"``."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
