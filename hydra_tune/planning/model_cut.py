"""Cuts one trial's model into blocks, and cuts it anew when a pilot finds that it must.

A block is promoted as a whole, so that its forward has all of its weights on the device. A pilot may find a block that
is too large, or that uses a weight in a way that a visit cannot give. Then its children become blocks, or the weight is
held on the device. While the model is cut, a block's `forward` is replaced by ours (`BlockForward`). `unwrap` gives the
module's own back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from hydra_tune.blocks.block import Block
from hydra_tune.blocks.stand_ins import BlockForward
from hydra_tune.errors import FINER, LARGER, SMALLER_STEP, BudgetError, PrepareError, does_not_fit
from hydra_tune.planning import partition
from hydra_tune.planning.adapters import REASON, adapters_to_hold
from hydra_tune.planning.fingerprint import has_users_hook
from hydra_tune.schedule.plan import TOO_LARGE, BlockProfile, Cut, TrialPlan

if TYPE_CHECKING:
    from hydra_tune.trials.trial import Trial


class ModelCut:
    """The blocks of one trial's model, and the choices that decide them.

    `blocks`    in the order of the plan, once there is one
    `choices`   which modules are opened or kept, and which weights are held
    `uses`      how many blocks have a weight, by the weight's id
    """

    def __init__(self, trial: Trial) -> None:
        self._trial = trial
        self.blocks: list[Block] = []
        self.uses: Counter[int] = Counter()
        self.choices = Cut()
        self.is_stale = False  # the model must be cut anew: it has changed, or the choices have
        self._shard_of: dict[str, int] = {}

    def close(self) -> None:
        """Drop references to the model and the trial, so that no reference cycle keeps them alive."""
        self.blocks, self._shard_of = [], {}
        self.__dict__.pop("_trial", None)

    # ---- cutting ----

    def choose(self, choices: Cut) -> None:
        """Note these choices. The model is cut by them before the next plan is made."""
        self.is_stale |= choices != self.choices
        self.choices = choices

    def adopt(self, choices: Cut, profiles: Sequence[BlockProfile] = ()) -> None:
        """Cut the model by these choices now. With `profiles`, blocks are in their order."""
        self.unwrap()
        self.choices, self.is_stale = choices, False
        trial = self._trial
        self.blocks = partition.blocks_of(trial.model, trial.pool.budget_bytes, choices, profiles, self.blocks)
        if adapters := adapters_to_hold(trial, self.blocks):
            self.choices = choices = choices.adding("held", adapters, REASON)
            self.blocks = partition.blocks_of(trial.model, trial.pool.budget_bytes, choices, profiles, self.blocks)
        self.uses = Counter(id(p) for block in self.blocks for p in block.slot_parameters)
        for block in self.blocks:  # from here on, calls of them are visits
            block.is_current, block.riders = True, frozenset()
            block.module.forward = BlockForward(block, trial)
        if trial.planner.pilot is not None:  # a pilot has everything but the blocks on the device
            trial.residency.hold(trial.model, self.blocks, trial.optimizers)

    def unwrap(self) -> None:
        for block in self.blocks:
            ours = block.module.__dict__.get("forward")
            block.is_current, block.module_states.shared = False, None
            if isinstance(ours, BlockForward):  # the user may have put back that of a former block
                ours.give_back()

    def open_block(self, block: Block, reason: str) -> None:
        """In a pilot: from here on the block's children are blocks. If it has none, it stays on the device as a whole.

        Raises:
            BudgetError: the block is too large and has no children.
        """
        opens = partition.has_children(block.module)
        if not opens and reason.startswith(TOO_LARGE):
            raise self.refused_block(block, reason)
        self.adopt(self.choices.adding("opened" if opens else "kept", [block.name], reason))

    def refused_block(self, block: Block, reason: str) -> BudgetError:
        """The error that ends a pilot. `reason` is `TOO_LARGE`, and what the block needs."""
        pilot, meter = self._trial.planner.pilot, self._trial.meter
        weights = pilot is not None and block.weight_bytes > pilot.free_bytes
        helps = LARGER, "a narrower layer or half precision" if weights else SMALLER_STEP, FINER
        needs, beside = reason.removeprefix(f"{TOO_LARGE}: it needs "), self.choices.staying()
        refusal = does_not_fit(f"block {block.name}", needs, meter.room, helps, beside=beside)
        return self._trial.planner.note_refusal(refusal)

    def hold_weight(self, block: Block, weight: nn.Parameter, reason: str) -> Block:
        """In a pilot: hold a weight of this block on the device from here on. Returns the new block of the module."""
        trial = self._trial
        named = (*trial.model.named_parameters(), *trial.model.named_buffers())
        name = next((n for n, p in named if p is weight), "")
        if not name:
            raise PrepareError(
                f"a quantized weight is only read in a forward, but one of {block.name} is not: {reason}. Train over a "
                "base that is not quantized."
            )
        try:
            self.adopt(self.choices.adding("held", [name], reason))
        except torch.OutOfMemoryError as error:
            raise trial.meter.refusal(error) from None
        if trial.casts.has(weight):
            raise PrepareError(
                "a weight that was used as autocast's copy so far is used otherwise in the same autocast context: "
                f"{reason}. It is on the device from here on: repeat the forward."
            )
        return next(each for each in self.blocks if each.module is block.module)

    def keep_where_hooked(self) -> None:
        """Have blocks with a user's hook within keep their activations: the hook would fire again in a repetition."""
        for block in self.blocks:
            if not block.keeps and any(map(has_users_hook, block.modules[1:])):
                block.keeps = "it has a hook within"

    # ---- shards ----

    def pack(self, plan: TrialPlan, trained: Container[int]) -> list[list[Block]]:
        """Put the blocks in the order of this plan. Returns the blocks of each of its shards. `trained` has the ids of
        parameters that are ever trained."""
        names = {block.name: block for block in self.blocks}
        self.blocks = [names[profile.name] for profile in plan.blocks]
        for block, profile in zip(self.blocks, plan.blocks, strict=True):
            block.let_ride(trained if profile.rides and not plan.resident else ())
        self._shard_of = {self.blocks[i].name: n for n, shard in enumerate(plan.shards) for i in shard.blocks}
        return [[self.blocks[i] for i in shard.blocks] for shard in plan.shards]

    def shard_of(self, block: Block) -> int:
        if block.name not in self._shard_of:
            raise PrepareError(
                f"a backward comes before the model is cut anew, but block {block.name}, whose backward was still to "
                "come, is cut otherwise now. Call backward before a forward on other inputs, or raise the pool's "
                "memory=."
            )
        return self._shard_of[block.name]
