"""One autocast context of a thread, as a trial's forwards in it see it: a weight is cast once, for all of them.

    with torch.autocast("cuda"):         w ---> cast ---> loss_a     the gradients of both are added in the lower
        loss = a(model) + b(model)                 `----> loss_b     precision, and cast back together

PyTorch forgets the casts where the outermost context is left. Until then it does not see that a weight has changed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

import torch

from hydra_tune.casts import Clearings, context_number
from hydra_tune.errors import PrepareError
from hydra_tune.graph import Cast, autocasts_copy
from hydra_tune.host_buffer import version_of
from hydra_tune.process_state import remembers_casts

_Key: TypeAlias = tuple[int, torch.dtype, int]  # a weight, what it is cast to, and the number of a context within
_Noted: TypeAlias = tuple[dict[int, int], dict[_Key, torch.Tensor], dict[_Key, int], int]


class AutocastContext:
    """The one that this thread is in, or none."""

    def __init__(self) -> None:
        self._number = context_number() if remembers_casts() else None
        self._versions: dict[int, int] = {}  # of weights, by their ids, when they were cast
        self._casts: dict[_Key, torch.Tensor] = {}
        self._made_by: dict[_Key, int] = {}  # numbers of calls
        self._num_forwards = 0
        self._clearings = Clearings()

    @property
    def goes_on(self) -> bool:
        return self._number is not None and remembers_casts() and self._number == context_number()

    @property
    def is_shared(self) -> bool:
        """By several forwards."""
        return self._num_forwards > 1

    @property
    def is_parted(self) -> bool:
        """Other threads have cleared casts of earlier forwards, which this one would have used."""
        return self.is_shared and self.goes_on and self._clearings.by_others

    def noted(self) -> _Noted:
        """What forwards have done so far."""
        return dict(self._versions), dict(self._casts), dict(self._made_by), self._num_forwards

    def take_back(self, before: _Noted) -> None:
        """All that a forward has done since, which will be started anew."""
        self._versions, self._casts, self._made_by, self._num_forwards = before

    def end_forward(self) -> None:
        """One that has not left it, though it may have cleared its casts."""
        if self._number is not None and remembers_casts():
            self._number = context_number()

    def begin_forward(self, weights: Iterable[torch.Tensor], name: str) -> None:
        """One that casts these.

        Raises:
            PrepareError: another one in this context has cast them, and they have changed since.
        """
        self._num_forwards += 1
        if any(self._versions.setdefault(id(weight), version_of(weight)) != version_of(weight) for weight in weights):
            raise PrepareError(
                f"within one autocast context weights stay as they are, but those of {name} were changed, by an "
                "optimizer perhaps, between two forwards in it: PyTorch would go on with the casts of their old "
                "values, which are not kept here. Leave torch.autocast before the optimizer's step, or give it "
                "cache_enabled=False."
            )

    def made_by(self, weight: torch.Tensor, dtype: torch.dtype, call: int) -> int:
        """Which call has made the cast that this one uses: the first one, in a context. Later ones have higher
        numbers."""
        return self._made_by.setdefault((id(weight), dtype, context_number()), call)

    def cast_of(self, weight: torch.Tensor, dtype: torch.dtype, *, is_own: bool) -> torch.Tensor:
        """What stands for it in the outer graph, where a forward casts it for several uses. It is kept when the graph
        is gone: autograd runs its node after newer ones. If operators outside of blocks are given autocast's own copy,
        that is it."""
        copy = autocasts_copy(weight) if is_own else None
        if copy is not None and copy.dtype == dtype:
            return copy
        key = id(weight), dtype, context_number()
        if key not in self._casts:
            with torch.enable_grad():
                self._casts[key] = Cast.apply(weight, dtype)  # type: ignore[no-untyped-call]
        return self._casts[key]
