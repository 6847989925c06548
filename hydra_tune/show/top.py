"""`hydra-tune top`: shows the pools of a running process, and takes keys to pause, resume, stop and clone trials.

up, down    choose a trial        p  pause      s  stop, and tell it as pruned      q  leave
                                  r  resume     c  clone, if the search has a checkpoint_dir
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from hydra_tune.errors import ConfigError
from hydra_tune.show.control_socket import COMMANDS, ask, processes
from hydra_tune.show.live_table import LiveTable, live_trials
from hydra_tune.show.snapshot import PoolSnapshot

if TYPE_CHECKING:
    from rich.console import RenderableType

FRAME_S = 0.5
_KEYS = {command[0]: command for command in COMMANDS}
_ARROWS = {"\x1b[A": "up", "k": "up", "\x1b[B": "down", "j": "down"}
_HELP = "up, down: choose a trial   p pause   r resume   s stop   c clone   q quit"


def process_to_show(pid: int | None) -> int:
    """The given one, or the only one that there is.

    Raises:
        ConfigError: there is none, or there are several.
    """
    found = processes()
    if pid is not None:
        if pid not in found:
            raise ConfigError(f"process {pid} has no pool that can be shown; there are {found or 'none'}.")
        return pid
    if not found:
        raise ConfigError("no process of this user has a pool with trials. Start a search first.")
    if len(found) > 1:
        raise ConfigError(f"several processes have pools: {found}. Say which, as in: hydra-tune top {found[0]}.")
    return found[0]


def look(pid: int) -> list[PoolSnapshot]:
    """The pools of a process, searches first."""
    return [PoolSnapshot.from_dict(pool) for pool in ask(pid, {"do": "look"})["pools"]]


def command(pid: int, command: str, trial: str) -> str:
    """Have the process carry out a command for a trial, given by its number or name, in the pool that has it. Returns
    what was done."""
    name = f"trial {trial}" if trial.isdigit() else trial
    pools = look(pid)
    number = next((i for i, pool in enumerate(pools) if any(t.name == name for t in pool.trials)), None)
    if number is None:
        live = [t.name for pool in pools for t in pool.trials]
        raise ConfigError(f"a trial is commanded while it lives, but {name!r} is not among {live}.")
    return str(ask(pid, {"do": command, "pool": number, "trial": name})["done"])


def show(pid: int) -> None:
    """Show the process until it has ended or the user leaves."""
    from rich.live import Live

    said, chosen = _HELP, 0
    with _keys() as next_key, Live(screen=True, auto_refresh=False) as live:
        while True:
            try:
                pools = look(pid)
            except ConfigError:
                break
            trials = [t for pool in pools for t in live_trials(pool)]
            chosen = max(0, min(chosen, len(trials) - 1))
            name = trials[chosen].name if trials else ""
            live.update(_drawn(pid, pools, name, said, live.console.height), refresh=True)
            key = next_key(FRAME_S)
            if key == "q":
                return
            chosen += {"up": -1, "down": 1}.get(key, 0)
            if key in _KEYS and trials:
                try:
                    said = command(pid, _KEYS[key], trials[chosen].name)
                except ConfigError as error:
                    said = str(error)
    print(f"process {pid} has ended")


def _drawn(pid: int, pools: list[PoolSnapshot], chosen: str, said: str, lines: int) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [Text(f"process {pid}", "dim")]
    of_tables = (lines - 2) // max(1, len(pools))
    for pool in pools:
        most_rows = max(1, of_tables - len(pool.devices) - 5)  # less those for the search, the header and what follows
        parts += [LiveTable(pool, chosen=chosen, most_rows=most_rows), Text("")]
    return Group(*parts, Text(said, "dim", no_wrap=True, overflow="ellipsis"))


class _NextKey:
    """Called with seconds: the next key within them, "" if none was pressed."""

    def __init__(self) -> None:
        self._pressed: list[str] = []

    def __call__(self, seconds: float) -> str:
        if self._pressed:
            return self._pressed.pop(0)
        if not sys.stdin.isatty():
            time.sleep(seconds)
            return ""
        if not select.select([sys.stdin], [], [], seconds)[0]:
            return ""
        pressed = os.read(sys.stdin.fileno(), 64).decode(errors="ignore")
        self._pressed = [_ARROWS.get(key, key) for key in re.findall(r"\x1b\[.|[^\x1b]", pressed)]
        return self._pressed.pop(0) if self._pressed else ""


@contextlib.contextmanager
def _keys() -> Iterator[_NextKey]:
    """Keys come one by one, and are not shown."""
    if not sys.stdin.isatty():
        yield _NextKey()
        return
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield _NextKey()
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
