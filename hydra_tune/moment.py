"""What a block's forward met, which its repetition in backward must meet again."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

import torch

from hydra_tune.block import Block
from hydra_tune.errors import HydraTuneError
from hydra_tune.host_buffer import digest, same_values, version_of, versions_of
from hydra_tune.randomness.trial_state import generator_states, has_own_state, set_generator_states
from hydra_tune.surroundings import Surroundings


class FoundBuffer:
    """A buffer's state that some forward found, for as long as that may be repeated."""

    __slots__ = ("__weakref__", "host", "value", "version")

    def __init__(self, host: torch.Tensor) -> None:
        self.host = host
        self.version = version_of(host)
        self.value: torch.Tensor | None = None  # if a call has written another one since


FoundBuffers: TypeAlias = "WeakValueDictionary[tuple[int, int], FoundBuffer]"  # by id and version


class Moment:
    """One forward's. Notes are made where they cost least: before it, in its visit, or after it."""

    __slots__ = (
        "_block", "_buffers", "_draws_apart", "_made_like", "_rewritten", "_versions", "_written",
        "arguments", "attributes", "digests", "random_states", "surroundings", "trains",
    )  # fmt: skip

    def __init__(self, block: Block) -> None:
        self._block = block
        self.arguments: Sequence[Any] = ()  # the leaves as they are given to the repeated forward
        self.surroundings: Surroundings | None = None
        self.random_states: Sequence[torch.Tensor] = ()  # none of a forward that has drawn nothing
        self._draws_apart = False  # from those that other threads draw from, too
        self._buffers: Sequence[FoundBuffer] = ()
        self._written: Sequence[tuple[int, torch.Tensor]] = ()  # by itself: values from before, by site
        self.trains: Sequence[bool] = ()  # which of the block's parameters
        self.attributes: Sequence[dict[str, Any]] = ()  # on these
        self._versions: Sequence[int] = ()  # of the block's parameters
        self._rewritten: Sequence[torch.Tensor] = ()  # values of weights that are written without raising a version
        self._made_like: Sequence[tuple[torch.Size, torch.dtype]] = ()
        self.digests: Sequence[float | None] | None = None  # of what it made

    # ---- random numbers ----

    def note_thread(self) -> None:
        """A runner's trial has a thread that draws from a state of its own anyway."""
        self._draws_apart = self._block.draws and not has_own_state()

    def drawing(self, how: Callable[[], AbstractContextManager[None]]) -> AbstractContextManager[None]:
        return how() if self._draws_apart else nullcontext()

    def note_random_states(self, generators: Sequence[torch.Generator]) -> None:
        self.random_states = generator_states(generators)

    def note_drawn(self, generators: Sequence[torch.Generator]) -> None:
        """After a forward. One that has drawn, or beside which another thread has, repeats apart; one that has not
        leaves the generators alone."""
        if self._draws_apart or has_own_state():
            return
        if all(map(torch.equal, self.random_states, generator_states(generators))):
            self.random_states = ()
        else:
            self._draws_apart = True

    def rewind(self, generators: Sequence[torch.Generator]) -> None:
        """After a forward that had no room."""
        if self.random_states and not self._draws_apart:
            set_generator_states(generators, self.random_states)

    # ---- buffers ----

    def note_buffers(self, found: FoundBuffers) -> None:
        """`found` knows those that other forwards have found, too."""
        self._buffers = [found.setdefault((id(b), version_of(b)), FoundBuffer(b)) for b in self._block.buffers()]

    def note_written(self, before: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Values of the buffers that the forward has written, by site."""
        self._written = before

    def buffers(self) -> tuple[list[tuple[int, torch.Tensor]], list[tuple[int, torch.Tensor]]]:
        """The values that buffers had then, of those that have others now, by site: written since, and replaced by
        another tensor.

        Raises:
            RuntimeError: something else has changed a buffer.
        """
        if not self._buffers:
            return [], []
        then, replaced = dict(self._written), set[int]()
        for i, (now, found) in enumerate(zip(self._block.buffers(), self._buffers, strict=True)):
            is_unchanged = found.host._version == found.version
            if now is not found.host:
                replaced.add(i)
            if i in then or (now is found.host and is_unchanged):
                continue
            if is_unchanged:
                then[i] = found.host
            else:
                if found.value is None:
                    raise RuntimeError(
                        f"a block's buffers stay as they are from its forward to its backward, but buffer "
                        f"{self._block.buffer_sites[i][1]!r} of block {self._block.name} was changed in between, "
                        "outside of the block. Change it in the block's forward, or after backward."
                    )
                then[i] = found.value
        values = list(then.items())
        return [v for v in values if v[0] not in replaced], [v for v in values if v[0] in replaced]

    # ---- weights ----

    def note_weights(self) -> None:
        self._versions = versions_of(self._block.parameters)
        if self._block.rewritten:
            self._rewritten = [p.detach().clone() for p in self._block.slot_parameters]

    def refuse_changed_weights(self) -> None:
        """
        Raises:
            RuntimeError: one was written since.
        """
        if self._versions != versions_of(self._block.parameters) or not all(
            map(same_values, self._rewritten, self._block.slot_parameters)
        ):
            raise RuntimeError(
                f"a weight of block {self._block.name} was changed in place between forward and backward. "
                "Call backward before optimizer.step(), or repeat the forward; and write weights in a forward before "
                "they are used there."
            )

    # ---- outputs ----

    def note_outputs(self, made: Sequence[torch.Tensor], *, values: bool = False) -> None:
        """Of which the repetition is to have the `values`, too."""
        self._made_like = [(x.shape, x.dtype) for x in made]
        self.digests = [digest(x.detach()) for x in made] if values else None

    def explain(self, error: Exception) -> None:
        """That the repetition has raised, where the forward had not."""
        add_note = getattr(error, "add_note", None)  # Python 3.10 has none
        if add_note is not None and not isinstance(error, (HydraTuneError, torch.OutOfMemoryError)):
            add_note(
                f"Block {self._block.name} raised this where its forward is repeated, in backward, and not at first: "
                "it may depend on something that has changed since, as a global, or an object, list or dict that the "
                "model changes for each layer. Give it what it depends on as an argument."
            )

    def refuse_other_outputs(self, made: Sequence[torch.Tensor]) -> None:
        """
        Raises:
            RuntimeError: the repetition has `made` others.
        """
        again = [(x.shape, x.dtype) for x in made]
        if again != self._made_like:
            raise RuntimeError(
                f"a block's forward may be repeated, but block {self._block.name} made {_spelt(self._made_like)} at "
                f"first and {_spelt(again)} then: it depends on something that has changed since, or on random "
                "numbers other than torch's. Give it what it depends on as an argument, or draw from torch's."
            )

    def refuse_other_values(self, made: Sequence[torch.Tensor]) -> None:
        """
        Raises:
            RuntimeError: the repetition has `made` others.
        """
        assert self.digests is not None
        if not all(map(_are_alike, self.digests, (digest(x.detach()) for x in made))):
            raise RuntimeError(
                f"a block's forward may be repeated, but block {self._block.name} made other values at first: it "
                "depends on something that has changed since, as a global, or an object, list or dict among its "
                "attributes that the model changes for each layer, or on weights that a hook has written through "
                ".data. Give it what it depends on as an argument, or set a number or tensor as an attribute of the "
                "module itself."
            )


def _are_alike(a: float | None, b: float | None) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=1e-3) or (math.isnan(a) and math.isnan(b))
    return a == b


def _spelt(made: Sequence[tuple[torch.Size, torch.dtype]]) -> str:
    return ", ".join(f"{dtype} of shape {tuple(shape)}" for shape, dtype in made) or "no tensor"
