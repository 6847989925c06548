"""A sweep as plain data: how many seconds and bytes each shard of each trial takes. One `TrialWork` for each trial.

It is written in Python or in a JSON file:

    [{"steps": 100, "forward_s": [0.1, 0.1], "backward_s": [0.3, 0.3], "shard_bytes": [500, 500]}, ...]

A step of a trial with K shards is 2K tasks, F0 .. F(K-1), B(K-1) .. B0, one after another (arXiv 2110.08633,
section 4).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from difflib import get_close_matches
from numbers import Integral, Real
from os import PathLike
from pathlib import Path
from typing import Any

from hydra_tune.errors import ConfigError
from hydra_tune.schedule.plan import Direction

_SECONDS_PER_SHARD = ("forward_s", "backward_s")
_BYTES_PER_SHARD = ("shard_bytes", "work_bytes", "gradient_bytes")
_SECONDS = ("optimizer_s", "loop_s", "arrival_s")
_BYTES = ("boundary_bytes", "held_bytes", "step_bytes")


@dataclass(frozen=True)
class TrialWork:
    """One trial. Each tuple has one entry for each shard. Seconds are those of a device of speed 1.

    `steps`           mini-batches of the whole trial
    `forward_s`       seconds of a forward task
    `backward_s`      seconds of a backward task, with its repeated forward
    `shard_bytes`     weights that are promoted for a task; 0 if they are held on the device
    `work_bytes`      scratch of a task beyond the weights; none by default
    `boundary_bytes`  the tensor that one shard passes to the next
    `gradient_bytes`  sent to the host after a backward task; by default as many as the weights
    `optimizer_s`     seconds of the host's optimizer after each step; trials' optimizers step one at a time, since they
                      share the host's memory
    `loop_s`          seconds of the trial's own loop after that (data, loss, logging), beside those of other trials
    `arrival_s`       when the trial is started
    `held_bytes`      on the device for the trial's life
    `step_bytes`      on the device from a step's first task to its last
    `stops_after`     steps after which a pruner ends the trial
    `shared_weights`  for each shard the number of its weights if they are frozen and other trials have the same, else
                      None; by default none are shared
    """

    steps: int
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    shard_bytes: tuple[int, ...]
    name: str = ""
    work_bytes: tuple[int, ...] = ()
    boundary_bytes: int = 0
    gradient_bytes: tuple[int, ...] | None = None
    optimizer_s: float = 0.0
    loop_s: float = 0.0
    arrival_s: float = 0.0
    held_bytes: int = 0
    step_bytes: int = 0
    stops_after: int | None = None
    shared_weights: tuple[int | None, ...] = ()

    def __post_init__(self) -> None:
        _check(self)

    @property
    def num_shards(self) -> int:
        return len(self.forward_s)

    @property
    def steps_run(self) -> int:
        return self.steps if self.stops_after is None else self.stops_after

    @property
    def step_s(self) -> float:
        """Device seconds of a step: all its tasks, one after another."""
        return sum(self.forward_s) + sum(self.backward_s)

    @property
    def total_s(self) -> float:
        """Device seconds of all the steps that run. The host's optimizer is not among them."""
        return self.steps_run * self.step_s

    @property
    def shard_work_bytes(self) -> tuple[int, ...]:
        return self.work_bytes or (0,) * self.num_shards

    @property
    def shard_gradient_bytes(self) -> tuple[int, ...]:
        return self.shard_bytes if self.gradient_bytes is None else self.gradient_bytes

    def tasks(self) -> Iterator[tuple[Direction, int]]:
        """The tasks of one step in order, each a direction and a shard."""
        for shard in range(self.num_shards):
            yield Direction.FORWARD, shard
        for shard in reversed(range(self.num_shards)):
            yield Direction.BACKWARD, shard

    def task_s(self, direction: Direction, shard: int) -> float:
        return (self.forward_s if direction is Direction.FORWARD else self.backward_s)[shard]


_KEYS = [field.name for field in fields(TrialWork)]
_REQUIRED = [field.name for field in fields(TrialWork) if field.default is MISSING]
_TUPLES = {*_SECONDS_PER_SHARD, *_BYTES_PER_SHARD, "shared_weights"}


def parse(workload: str | PathLike[str] | Sequence[TrialWork | Mapping[str, Any]]) -> list[TrialWork]:
    """The trials of a sweep, from a list of `TrialWork`s or of dicts with its keys, or from a JSON file with that list.

    Raises:
        ConfigError: names the trial, the key, and what is wrong.
    """
    if isinstance(workload, (str, PathLike)):
        workload = _read(Path(workload))
    if not isinstance(workload, (list, tuple)) or not workload:
        raise ConfigError(
            f"a workload is a list of at least one trial, got {_short(workload)}. "
            'Write [{"steps": 100, "forward_s": [...], "backward_s": [...], "shard_bytes": [...]}], one dict a trial.'
        )
    trials = []
    for number, entry in enumerate(workload):
        try:
            trials.append(entry if isinstance(entry, TrialWork) else _trial(entry))
        except ConfigError as error:
            raise ConfigError(f"trial {number} of the workload: {error}") from None
    sizes: dict[int, int] = {}
    for number, trial in enumerate(trials):
        for weights, size in zip(trial.shared_weights, trial.shard_bytes):  # noqa: B905 (may be empty)
            if weights is not None and sizes.setdefault(weights, size) != size:
                raise ConfigError(
                    f"weights of one number have one size, but weights {weights} have {size} bytes in trial {number} "
                    f"of the workload, and {sizes[weights]} before. Give them another number."
                )
    return trials


def save(trials: Sequence[TrialWork], path: str | PathLike[str]) -> Path:
    """Write a JSON file that `parse` reads, without the values that are defaults; returns its path."""
    defaults = {field.name: field.default for field in fields(TrialWork)}
    entries = [{k: v for k, v in asdict(trial).items() if v != defaults[k]} for trial in trials]
    path = Path(path)
    path.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
    return path


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"a workload is a list of trials or a JSON file with one; {path} cannot be read: {error.strerror}. "
            "Check the path."
        ) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}. Write a list of trials, one object each.") from None


def _trial(entry: Any) -> TrialWork:
    if not isinstance(entry, Mapping):
        raise ConfigError(f"a trial is a dict, got {_short(entry)}. Write its keys: {', '.join(_REQUIRED)}.")
    for key in entry:
        if key not in _KEYS:
            similar = get_close_matches(str(key), _KEYS, 1)
            advice = f"Did you mean {similar[0]}?" if similar else f"The keys are {', '.join(_KEYS)}."
            raise ConfigError(f"it has a key that means nothing, {key!r}. {advice}")
    missing = [key for key in _REQUIRED if key not in entry]
    if missing:
        raise ConfigError(f"it needs {', '.join(_REQUIRED)}, but has no {', '.join(missing)}. Add it.")
    arguments = {key: _as_tuple(value) if key in _TUPLES else value for key, value in entry.items()}
    return TrialWork(**arguments)


def _as_tuple(value: Any) -> Any:
    """A list or an array as a tuple; anything else as it is, to be refused later."""
    plain = value.tolist() if hasattr(value, "tolist") else value
    return tuple(plain) if isinstance(plain, list) else plain


def _check(trial: TrialWork) -> None:
    if not isinstance(trial.name, str):
        raise _refuse("name", "text", trial.name, "Write a string, or leave it out.")
    if not _is_count(trial.steps) or trial.steps < 1:
        raise _refuse("steps", "a whole number of at least 1", trial.steps, "Write how many mini-batches it trains.")
    stop = trial.stops_after
    if stop is not None and (not _is_count(stop) or not 1 <= stop <= trial.steps):
        rule = f"a whole number from 1 to steps, here {trial.steps}, or None"
        raise _refuse("stops_after", rule, stop, "Leave it out if the trial is not pruned.")
    for key in _SECONDS_PER_SHARD:
        given = getattr(trial, key)
        if not given or not _is_tuple_of(given, lambda value: _is_finite(value) and value > 0):
            raise _refuse(key, "positive seconds, one a shard", given, "Write a list such as [0.1, 0.2].")
    given_bytes = [key for key in _BYTES_PER_SHARD if key != "gradient_bytes" or trial.gradient_bytes is not None]
    for key in given_bytes:
        given = getattr(trial, key)
        if not _is_tuple_of(given, lambda value: _is_count(value) and value >= 0):
            raise _refuse(key, "whole bytes of at least 0, one a shard", given, "Write a list such as [4096, 4096].")
    if not _is_tuple_of(trial.shared_weights, lambda value: value is None or _is_count(value)):
        raise _refuse("shared_weights", "numbers or None, one a shard", trial.shared_weights, "Write such as [0, 1].")
    for key in (*_SECONDS_PER_SHARD, *given_bytes, "shared_weights"):
        given = getattr(trial, key)
        if len(given) != trial.num_shards and (given or key not in ("work_bytes", "shared_weights")):
            rule = f"one entry a shard, as forward_s, which has {trial.num_shards}"
            raise _refuse(key, rule, given, f"It has {len(given)}: give each list one entry for each shard.")
    for key in _SECONDS:
        if not _is_finite(getattr(trial, key)) or getattr(trial, key) < 0:
            raise _refuse(key, "finite seconds of at least 0", getattr(trial, key), "Write a number such as 0.5.")
    for key in _BYTES:
        if not _is_count(getattr(trial, key)) or getattr(trial, key) < 0:
            raise _refuse(key, "whole bytes of at least 0", getattr(trial, key), "Write an int such as 4096.")


def _is_tuple_of(value: object, is_valid: Any) -> bool:
    return isinstance(value, tuple) and all(map(is_valid, value))


def _is_count(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value).bit_length() <= 62


def _is_finite(value: object) -> bool:
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    try:
        return abs(float(value)) < 1e18
    except OverflowError:
        return False


def _refuse(key: str, rule: str, value: object, advice: str) -> ConfigError:
    return ConfigError(f"{key} is {rule}, got {_short(value)}. {advice}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
