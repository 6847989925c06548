"""What a trial's configuration has set in its optimizer and its schedules.

In population based training a trial goes on with another trial's weights and optimizer state. The other's
hyperparameters come with that state, and would undo what the search has changed. So those that the two configurations
give differently are set to this trial's again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler


@dataclass(frozen=True)
class Hyperparameters:
    """As an objective gave them to `prepare`: of each parameter group, and of each schedule."""

    groups: list[dict[str, Any]]
    schedules: list[dict[str, Any] | None]  # None for an extra state that is no schedule

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer | None, extra: Sequence[Any]) -> Hyperparameters:
        groups = [] if optimizer is None else optimizer.param_groups
        plain = [{key: _plain(value) for key, value in group.items() if key != "params"} for group in groups]
        return cls(plain, [_settings_of(each) if isinstance(each, LRScheduler) else None for each in extra])

    def plain(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"groups": self.groups, "schedules": self.schedules}

    def stay(self, others: dict[str, Any], optimizer: torch.optim.Optimizer | None, extra: Sequence[Any]) -> None:
        """Of those that were given otherwise where the state comes from, this trial's, in an optimizer and schedules
        that have that state. A learning rate that has changed since is changed by the same factor."""
        groups = [] if optimizer is None else optimizer.param_groups
        for group, own, other in zip(groups, self.groups, others["groups"], strict=True):
            _set_rate(group, own, other)
            for key in own:
                if key != "lr" and key in other and own[key] != other[key]:
                    _set(group, key, own[key])
        for schedule, settings, their_settings in zip(extra, self.schedules, others["schedules"], strict=True):
            if settings is not None:
                _set_schedule(schedule, settings, their_settings)


def _set_rate(group: dict[str, Any], own: dict[str, Any], other: dict[str, Any]) -> None:
    """A schedule that begins with a rate of 0 has left what was given in `initial_lr`."""
    first = next((key for key in ("lr", "initial_lr") if own.get(key) and other.get(key)), None)
    if first is None:
        if own["lr"] != other["lr"]:
            _set(group, "lr", own["lr"])
    elif own[first] != other[first]:
        _set(group, "lr", own[first] * (float(group["lr"]) / other[first]))


def _settings_of(schedule: Any) -> dict[str, Any]:
    """Numbers, and lists of them, by name; and those of the schedules within it."""
    own = {name: _plain(value) for name, value in vars(schedule).items() if name != "_last_lr"}
    return {
        "own": {name: value for name, value in own.items() if _is_plain(value)},
        "within": [_settings_of(each) for each in _within(schedule)],
    }


def _set_schedule(schedule: Any, settings: dict[str, Any], others: dict[str, Any]) -> None:
    for name, value in settings["own"].items():
        if name in others["own"] and others["own"][name] != value:
            setattr(schedule, name, list(value) if isinstance(value, list) else value)
    for each, own, other in zip(_within(schedule), settings["within"], others["within"], strict=True):
        _set_schedule(each, own, other)
    if hasattr(schedule, "_last_lr"):
        schedule._last_lr = [group["lr"] for group in schedule.optimizer.param_groups]


def _within(schedule: Any) -> Sequence[Any]:
    """A `SequentialLR` and a `ChainedScheduler` have some."""
    found: Sequence[Any] = getattr(schedule, "_schedulers", ())
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def _is_plain(value: Any) -> bool:
    return all(map(_is_plain, value)) if isinstance(value, list) else isinstance(value, (bool, int, float, str))


def _set(group: dict[str, Any], key: str, value: Any) -> None:
    """In place where it is a tensor, as a capturable optimizer's rate is."""
    if isinstance(group[key], torch.Tensor):
        group[key].fill_(value)
    else:
        group[key] = tuple(value) if isinstance(value, list) else value  # as Adam's betas are
