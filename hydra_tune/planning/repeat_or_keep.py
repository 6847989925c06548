"""Decides whether a block repeats its forward in the backward, or keeps its activations.

A repeated forward must make the same values as the first. A forward that counts its calls, changes a list, or draws
from a generator other than torch's may not, and then the model would train on other numbers. So a block keeps its
activations if

    its first run    has changed anything that a second run would find changed, or would change again (`SideEffects`)
    its second run   makes other values than the first (`try_repetition`): it runs at once, with a backward of its own

The reason is a text, in the report as `keeps`. An empty text says that the block repeats. Changes are looked for before
the second run. So a block that adds to a list is not run twice, and the list has grown once.

Some first runs must be undone, because the block is to be run in another way. Whether that is possible depends on what
was changed: buffers, attributes and torch's random numbers can be put back, a list cannot.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from hydra_tune.blocks.ambient_settings import is_activation
from hydra_tune.blocks.block import Block, has_hooks
from hydra_tune.blocks.early_repetition import repeat_early
from hydra_tune.blocks.repeated_call import RepeatedCall
from hydra_tune.blocks.tree import flatten, tensors_in
from hydra_tune.devices.meter import CountingPaused, TrialMeter, measured, storages_of
from hydra_tune.devices.tensor_bytes import same_bits, versions_of
from hydra_tune.planning.fingerprint import HOOKS_OF_MODULES, origin_of
from hydra_tune.planning.reached_weights import Reached, globals_of, stays_as_it_is
from hydra_tune.randomness.python_and_numpy import PythonAndNumpyStates
from hydra_tune.schedule.plan import BlockProfile


class SideEffects:
    """Finds what a block's first run changes beside making its outputs. Made before that run: it notes all that the
    block can reach."""

    def __init__(self, call: RepeatedCall, given: Sequence[Any]) -> None:
        self._call, self._block = call, call.block
        self.given = [x for x in given if isinstance(x, torch.Tensor)]
        self._objects = [x for x in given if not isinstance(x, torch.Tensor)]
        block = self._block
        with CountingPaused():
            others = {
                "an argument": self._objects,
                "its forward": block.own_forward,
                "what is noted on a weight": [p.__dict__ for p in block.parameters],
            }
            self._reached = Reached(block.module, others, globals_of(block.module, block.own_forward))
            self._held = [(p.data, p.data.clone()) for p in block.held]  # some operators write and leave the version
            self._buffers = [b for m in block.modules for b in m._buffers.values() if b is not None]
        self._versions = versions_of(self._buffers)
        self._attributes = [dict(vars(module)) for module in block.modules]
        self._hooks, self._random = self._hooks_now(), PythonAndNumpyStates()

    @property
    def on_buffers(self) -> bool:
        """Whether the block has written into buffers. These are put back around a repetition."""
        return self._call.has_written_buffers or versions_of(self._buffers) != self._versions

    def drew_random_numbers(self) -> bool:
        """Whether Python's or NumPy's generator has moved. The block may have drawn, or another thread."""
        return self._random.have_moved()

    # ---- repeat or keep ----

    def reason_to_keep(self, outputs: Any) -> str:
        """Why the block may not be repeated, as the end of a sentence; "" if it may. It may not if a repetition would
        start from other values than the first run."""
        block = self._block
        with CountingPaused():
            changed = self._reached.changes()
            if changed:
                return f"changes {changed[0]}"
            if any(map(is_activation, block.buffers_themselves())):
                return "changes a buffer into an activation"
            if not all(same_bits(*held) for held in self._held):
                return "changes a weight"
            if gives := self._gives_away(outputs):
                return gives
        if self._call.has_changed_inputs:
            return "changes an input in place"
        if block.module_states.now().is_rebuilt:
            return "makes, or exchanges, a child of a module"
        changing = next((type(x).__name__ for x in self._objects if not stays_as_it_is(x)), None)
        if changing:
            return f"is given an object, a {changing}, that others may change"
        direct = {id(value) for own in self._attributes for value in own.values()}
        if any(number not in direct and is_activation(x) for number, x in self._reached.met.items()):
            return "has an activation in an attribute"
        if self._hooks_now() != self._hooks:
            return "puts a hook or an attribute on an input, or a hook on a module"
        return ""

    def _gives_away(self, outputs: Any) -> str:
        """Why a caller that has the outputs could change what the block depends on; "" if it could not."""
        reached = self._reached.met
        own = [x for x in (*reached.values(), *self._block.held, *self._buffers) if isinstance(x, torch.Tensor)]
        own = [x for x in own if not any(x is given for given in self.given)]
        memory = {s._cdata for x in own for s in storages_of(x)}
        within = Reached(torch.nn.Module(), {"": outputs}).met.items()
        same = any(
            number in reached and not stays_as_it_is(x) for number, x in within if not isinstance(x, torch.Tensor)
        )
        if same or any(s._cdata in memory for t in tensors_in(outputs) for s in storages_of(t)):
            return "returns a buffer, or another tensor, list, dict or object that it keeps"
        if not all(isinstance(x, torch.Tensor) or stays_as_it_is(x) for x in flatten(outputs)[0]):
            return "returns an object"
        return ""

    def _hooks_now(self) -> list[tuple[Any, ...]]:
        """Hooks and attributes that a forward may leave on a tensor that it is given, or on a module of its own."""
        given = [(x._backward_hooks is not None, x.retains_grad, x.requires_grad, *x.__dict__) for x in self.given]
        return given + [tuple(vars(m).get(kind, ())) for m in self._block.modules for kind in HOOKS_OF_MODULES]

    # ---- undoing the first run ----

    def undo(self) -> str:
        """Undo the first run. Returns what cannot be put back; then nothing is undone. Returns "" if all was undone."""
        if self._call.has_changed_inputs:
            return "what it is given"
        if self.drew_random_numbers():
            return "Python's or NumPy's random numbers"
        if self._hooks_now() != self._hooks:
            return "hooks, or attributes of what it is given"
        with CountingPaused():
            if changed := self._reached.changes():
                return changed[0]
        self._call.rewind()
        for module, before in zip(self._block.modules, self._attributes, strict=True):
            vars(module).clear()
            vars(module).update(before)
        with CountingPaused():
            for now, then in [held for held in self._held if not same_bits(*held)]:
                now.copy_(then)
        return ""


def try_repetition(
    call: RepeatedCall, effects: SideEffects, meter: TrialMeter, profile: BlockProfile, outputs: Any
) -> BlockProfile:
    """Run the block's forward once more, as its backward would, and then that backward. Returns the profile with the
    results: the reason to keep, bytes and seconds. This run changes nothing, since the first run has changed nothing.
    """
    block, first, found, drew = call.block, tensors_in(outputs), dict[str, Any](), effects.drew_random_numbers()
    if not drew:  # else the block may have drawn from these generators, and a repetition would draw other numbers
        call.drop()
    states = PythonAndNumpyStates()

    def run(args: Sequence[Any], kwargs: dict[str, Any], asked: Sequence[torch.Tensor]) -> None:
        _lose_activations(block)
        with without_hooks_within(block), measured(meter) as used:
            again = tensors_in(block.forward(args, kwargs))
            same = len(first) == len(again) and all(map(same_bits, first, again))
            found["keeps"] = "" if same else f"{block.name} makes other values when it is repeated"
            held = [p for p in block.held if not has_hooks(p)]
            wanted, inputs = ([x for x in of if x.requires_grad] for of in (again, [*asked, *held]))
            del again
            if wanted and inputs:
                torch.autograd.grad(wanted, inputs, [torch.ones_like(x) for x in wanted], allow_unused=True)
            del wanted
            lent = versions_of(block.buffers_themselves())  # of clones; read now, since the backward may write, too
        found["writes_buffers"] = profile.writes_buffers or any(lent) or call.has_written_buffers
        found["backward_work_bytes"], found["backward_s"] = used.num_bytes, used.seconds

    with torch.autograd.set_detect_anomaly(torch.is_anomaly_enabled(), check_nan=False):
        puts_hooks = repeat_early(call, run)
        found["writes_buffers"] |= puts_hooks  # a hook may write into buffers
    if drew and states.have_moved():
        states.put_back()
        found["keeps"] = f"{block.name} draws from Python's or NumPy's random numbers"
    elif drew:  # not the block: it was another thread
        call.drop()
    return BlockProfile(**{**vars(profile), **found})


def _lose_activations(block: Block) -> None:
    """Overwrite activations in attributes (by NaN): in the backward the attributes may hold other activations, so a
    repetition must not depend on them."""
    for module in block.modules:
        for name, value in [item for item in vars(module).items() if is_activation(item[1])]:
            vars(module)[name] = torch.full_like(value, torch.nan if value.is_floating_point() else 0)


# ---- users' hooks within a block ----


def has_users_hooks_within(block: Block) -> bool:
    return any(len(own) < len(hooks) for _, _, hooks, own in _hooks_within(block))


@contextmanager
def without_hooks_within(block: Block) -> Iterator[None]:
    """Within, modules inside the block have only torch's hooks, which compute weights. Other hooks report a call to
    somebody, as those by which transformers collects outputs. A run that only measures must not be reported."""
    found = list(_hooks_within(block))
    for module, kind, _, own in found:
        vars(module)[kind] = own
    try:
        yield
    finally:
        for module, kind, hooks, _ in found:
            vars(module)[kind] = hooks


def _hooks_within(block: Block) -> Iterator[tuple[torch.nn.Module, str, Any, Any]]:
    """For each module inside the block and each kind of hook that it has: module, kind, all hooks, torch's hooks."""
    for module in block.modules[1:]:
        for kind in HOOKS_OF_MODULES:
            hooks = vars(module).get(kind)
            if hooks:
                own = ((key, hook) for key, hook in hooks.items() if origin_of(hook).startswith("torch."))
                yield module, kind, hooks, OrderedDict(own)
