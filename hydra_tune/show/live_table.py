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


def live_table(snapshot: PoolSnapshot, chosen: str = "") -> RenderableType:
    """The search, if there is one, a line for each device, and a row for each of the first `MOST_ROWS` trials; that of
    the `chosen` name stands out."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = []
    if snapshot.search is not None:
        parts.append(Text(_search_line(snapshot.search), "bold", no_wrap=True, overflow="ellipsis"))
    parts += [_device_line(device, snapshot.elapsed_s) for device in snapshot.devices]
    rows = _rows(snapshot)
    if rows:
        parts.append(_TrialTable(rows[:MOST_ROWS], chosen))
    if (more := len(rows) - MOST_ROWS) > 0:
        parts.append(Text(f" and {more} more", "dim"))
    return Group(*parts)


def plain_line(snapshot: PoolSnapshot) -> str:
    """The same in one line of plain text, for logs."""
    devices = ", ".join(
        f"{d.name} busy {_percent(d.busy_s, snapshot.elapsed_s)}, {_amount(d.used_bytes, d.budget_bytes)}"
        for d in snapshot.devices
    )
    steps = ", ".join(
        f"{t.name} {t.state}" + (f" at step {_steps(t)}" if _steps(t) else "") for t in _live(snapshot)[:MOST_ROWS]
    )
    search = "" if snapshot.search is None else _search_line(snapshot.search) + "; "
    return f"{search}{devices}" + (f"; {steps}" if steps else "")


def _live(snapshot: PoolSnapshot) -> list[TrialSnapshot]:
    live = [trial for trial in snapshot.trials if not trial.has_ended]
    return sorted(live, key=lambda trial: (len(trial.name), trial.name))  # trial 2 before trial 10


def _rows(snapshot: PoolSnapshot) -> list[TrialSnapshot]:
    """Live trials, and as many of the last ended ones as there is room for."""
    live = _live(snapshot)
    ended = [] if snapshot.search is None else list(snapshot.search.ended)
    room = max(0, MOST_ROWS - len(live))
    return [*live, *(ended[-room:] if room else [])]


def _search_line(search: SearchSnapshot) -> str:
    done = f"{search.done}" if search.n_trials is None else f"{search.done} of {search.n_trials}"
    told = [f"{done} done", f"{search.running} running"]
    told += [f"{number} {word}" for word, number in (("pruned", search.pruned), ("failed", search.failed)) if number]
    if search.did_not_fit:
        told.append(f"{search.did_not_fit} did not fit")
    parts = [search.name, ", ".join(told)]
    if search.best is not None:
        parts.append(f"best {search.best:.4g} (trial {search.best_trial})")
    if search.left_s is not None and search.running:
        parts.append(f"{format_seconds(search.left_s)} left")
    return "   ".join(parts)


def _device_line(device: DeviceSnapshot, elapsed_s: float) -> Text:
    from rich.text import Text

    width = 20
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


class _TrialTable:
    """With as many columns as the terminal has room for, so that no name is cut."""

    def __init__(self, trials: list[TrialSnapshot], chosen: str) -> None:
        self._trials = trials
        self._chosen = chosen
        self._cells = [_cells(trial) for trial in trials]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        from rich import box
        from rich.table import Table

        names, room = self._columns(options.max_width), options.max_width - self._width("trial") - _GAP
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False, header_style="dim")
        table.add_column("trial", no_wrap=True)
        table.add_column("state", no_wrap=True, max_width=max(1, room))
        for name in names[2:]:
            table.add_column(name, justify="right", no_wrap=True)
        for trial, cells in zip(self._trials, self._cells, strict=True):
            style = _STYLES.get(trial.state, "yellow") + (" reverse" if trial.name == self._chosen else "")
            table.add_row(*(cells[name] for name in names), style=style)
        yield table

    def _columns(self, room: int) -> list[str]:
        """The first ones, as many as fit; trials and states in any case."""
        names = list(self._cells[0])
        while len(names) > 2 and sum(self._width(name) + _GAP for name in names) - _GAP > room:
            names.pop()
        return names

    def _width(self, column: str) -> int:
        from rich.cells import cell_len

        return max(cell_len(column), *(cell_len(cells[column]) for cells in self._cells))


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
