"""What a trial's configuration has set in its optimizer, and what stays of that where it goes on with another trial's
weights and optimizer state, as in population based training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Hyperparameters:
    """As an objective gave them to `prepare`: of each parameter group, and the first rates of each schedule."""

    groups: list[dict[str, Any]]
    rates: list[list[Any] | None]  # None for an extra state that is no schedule

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer | None, extra: Sequence[Any]) -> Hyperparameters:
        groups = [] if optimizer is None else optimizer.param_groups
        plain = [{key: _plain(value) for key, value in group.items() if key != "params"} for group in groups]
        return cls(plain, [_rates_of(each) for each in extra])

    def plain(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"groups": self.groups, "rates": self.rates}

    def stay(self, others: dict[str, Any], optimizer: torch.optim.Optimizer | None, extra: Sequence[Any]) -> None:
        """Of those that the other trial was given otherwise, this trial's, in an optimizer and schedules that have the
        other's state. A learning rate that has changed since is changed by the same factor."""
        groups = [] if optimizer is None else optimizer.param_groups
        for group, own, other in zip(groups, self.groups, others["groups"], strict=True):
            for key in (key for key in own if key in other and own[key] != other[key]):
                changed_since = float(group["lr"]) / other["lr"] if key == "lr" and other["lr"] else None
                _set(group, key, own[key] if changed_since is None else own[key] * changed_since)
        for schedule, rates, their_rates in zip(extra, self.rates, others["rates"], strict=True):
            if rates is not None and rates != their_rates:
                schedule.base_lrs = list(rates)
            if rates is not None and hasattr(schedule, "_last_lr"):
                schedule._last_lr = [group["lr"] for group in schedule.optimizer.param_groups]


def _rates_of(schedule: Any) -> list[Any] | None:
    rates = getattr(schedule, "base_lrs", None)
    return list(map(_plain, rates)) if isinstance(rates, (list, tuple)) else None


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def _set(group: dict[str, Any], key: str, value: Any) -> None:
    """In place where it is a tensor, as a capturable optimizer's rate is."""
    if isinstance(group[key], torch.Tensor):
        group[key].fill_(value)
    else:
        group[key] = value
