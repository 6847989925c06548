"""One call of a block: its forward, and the repetition in backward."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import accumulate
from typing import Any, Protocol, TypeVar

import torch

from hydra_tune import reentrant
from hydra_tune.arguments import Arguments, Outputs, refuse_hidden_outputs, taken_out
from hydra_tune.block import Block, are_trained, attributes_of
from hydra_tune.call_weights import CallWeights, note_casts
from hydra_tune.copies import Copies
from hydra_tune.errors import PrepareError, UncuttableError
from hydra_tune.forward_pass import ForwardPass
from hydra_tune.gradient_sums import GradientSums, WeightSum
from hydra_tune.graph import (
    Unsaved,
    alias_of,
    borrowed_by,
    detached,
    has_saved_hooks,
    is_checkpointed,
    is_repetition,
    leaf_of,
    nodes_of,
    saved_as_it_is,
    uncached,
)
from hydra_tune.host_buffer import version_of, versions_of
from hydra_tune.late_gradients import Gate
from hydra_tune.local_backward import LocalBackward
from hydra_tune.marks import next_hook, refuse_late_marks
from hydra_tune.moment import Moment
from hydra_tune.randomness.block_draws import drawing_again, drawing_apart, drawing_for_nothing
from hydra_tune.randomness.trial_state import generator_states, set_generator_states
from hydra_tune.residency import Residency
from hydra_tune.seen_call import SeenCall
from hydra_tune.shard import Direction
from hydra_tune.spill import ChangedBuffer
from hydra_tune.surroundings import Surroundings, refuse_modes
from hydra_tune.tree import map_in_place, map_tensors, tensors_in
from hydra_tune.turn import Turn
from hydra_tune.visit import Visit

ResultT = TypeVar("ResultT")
_numbers = itertools.count()


class Executor(Protocol):
    """What a call needs of the trial it runs for."""

    residency: Residency
    marked: dict[int, BlockCall]
    sums: GradientSums
    copies: Copies
    turn: Turn

    @property
    def has_model(self) -> bool: ...

    def pass_of(self, block: Block) -> ForwardPass: ...

    @property
    def in_forward(self) -> bool: ...

    @property
    def in_backward(self) -> bool: ...

    @property
    def is_alone(self) -> bool: ...

    def run_block(self, block: Block, args: Sequence[Any], kwargs: dict[str, Any]) -> Any: ...

    def visit(
        self, block: Block, direction: Direction, *, evaluates: bool = False
    ) -> AbstractContextManager[Visit]: ...

    def probe(self, call: BlockCall) -> bool: ...

    def with_room(self, block: Block, run: Callable[[], ResultT], rewound: Callable[[], bool]) -> ResultT: ...

    def measuring(self, call: BlockCall) -> AbstractContextManager[None]: ...

    def finds(self, block: Block, error: PrepareError) -> bool: ...

    def end_forward(self, error: Exception) -> None: ...

    def note_backward(self, call: BlockCall) -> None: ...

    def end(self) -> None: ...

    def enter_backward(self, forward_pass: ForwardPass, grads: Sequence[torch.Tensor | None]) -> None: ...


class BlockCall:
    """One call of a block, and what its backward must restore.

    `tensors`, each once, are its sources, and have as many edges in the outer graph as `num_edges` says; then come
    its `weights`. Outputs are the tensors that the block made; one that it was given is handed on as it is.
    """

    # what a backward must restore, or compare with
    num_edges: Sequence[int] = ()
    always_apart: Sequence[bool] | None = None  # gradients of each tensor's uses; of all, where nobody knows
    used_by_others: Sequence[bool] | None = None  # each tensor, in this step; all, where nobody knows
    nondifferentiable: Sequence[int] = ()
    weights: CallWeights | None = None  # of a call with gradients
    _outputs: Outputs | None = None
    made: Sequence[torch.Tensor] = ()  # by a call without gradients
    _sharing: Sequence[tuple[torch.Tensor, int]] = ()  # outputs that share memory, each with its version
    _gate: Gate | None = None
    _is_marked = False
    is_checkpointed = False  # by a checkpoint around the block, which makes what its node saves anew
    _counts_uses = False  # of its tensors, for no pilot has seen them given so

    # what a pilot finds
    seen: SeenCall | None = None
    shares_memory = False

    def __init__(self, block: Block, trial: Executor, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self.block = block
        self.trial = trial
        self.forward_pass = trial.pass_of(block)
        self.forward_pass.may_repeat |= not torch.is_grad_enabled() or has_saved_hooks()
        self.arguments = Arguments(block.name, args, kwargs)
        self.tensors = self.arguments.tensors
        self._moment = Moment(block)

    # ---- what it is given and what it makes ----

    def refuse_changed_inputs(self, tensors: Sequence[torch.Tensor], versions: Sequence[int]) -> None:
        if list(versions) != versions_of(tensors):
            raise self._changed_input()

    def _changed_input(self) -> UncuttableError:
        return UncuttableError(
            f"a block leaves its inputs as they are, but {self.block.name} changed one in place. "
            "Make its first operator out of place (inplace=False), or give it a copy."
        )

    def outputs_of(self, made: Sequence[torch.Tensor]) -> Any:
        assert self._outputs is not None
        if self.block.shares_memory:
            dense = [x for x in made if x.layout is torch.strided]
            owners = Counter(x.untyped_storage()._cdata for x in dense)
            self._sharing = [(x.detach(), version_of(x)) for x in dense if owners[x.untyped_storage()._cdata] > 1]
        self._watch([*self.tensors, *made])
        outputs = self._outputs.filled(self.tensors, made)
        self.tensors = self.arguments.tensors = ()  # the graph keeps them where a backward will come
        self._outputs = None
        return outputs

    # ---- forward ----

    def start_graph(self) -> None:
        """A backward may come: count the edges, and give autocast's copies their places in the outer graph."""
        if self.seen is None:
            refuse_modes(self.block.name, self.block.modules)
        self._moment.arguments = self.arguments.kept()
        given = self.block.edges.of_tensors(self.arguments.places)
        if given is not None:
            self.always_apart = given.apart
        self._counts_uses = given is None and self.seen is None
        self.num_edges = [1] * len(self.tensors) if given is None else given.num_edges
        within_backward = self.trial.in_backward and not is_repetition()  # whose graph no gradient goes through
        self.weights = CallWeights(self.block, self.forward_pass, within_backward=within_backward)
        self.forward_pass.may_join |= self.may_join

    def edges_in(self) -> list[torch.Tensor]:
        """Every source as many times as it has edges."""
        assert self.weights is not None
        self._gate, late = self.forward_pass.gates.pop(self.block, (None, {}))
        sources = [*self.tensors, *self.weights.sources(late, self.trial.sums)]
        num_edges = [*self.num_edges, *self.weights.num_edges]
        if num_edges.count(1) == len(num_edges):
            return sources
        return [source for source, count in zip(sources, num_edges, strict=True) for _ in range(count)]

    def forward_unsaved(self, arguments: tuple[Sequence[Any], dict[str, Any]]) -> Any:
        try:
            with Unsaved():
                return self.block.forward(*arguments)
        except RuntimeError as error:  # in the local graph inputs are leaves
            if "leaf Variable that requires grad" in str(error):
                raise self._changed_input() from error
            raise

    def run_forward(self) -> tuple[torch.Tensor, ...]:
        """The block on its promoted weights, keeping no graph; notes what `run_backward` must restore."""
        self._moment.note_thread()
        return self.trial.with_room(self.block, self._run_forward, self._rewound)

    def _rewound(self) -> bool:
        """After a forward that had no room: it has changed nothing else, or its block would not be one."""
        self._moment.rewind(self.trial.residency.device.generators())
        return True

    def _run_forward(self) -> tuple[torch.Tensor, ...]:
        block, moment = self.block, self._moment
        moment.note_buffers(self.trial.residency.found_buffers)
        moment.surroundings = Surroundings(block.module_states)
        with self.trial.visit(block, Direction.FORWARD) as visit, moment.drawing(drawing_apart), visit.drawing():
            moment.note_random_states(self.trial.residency.device.generators())
            weight_versions, first_hook = versions_of(visit.leaves), next_hook()
            moment.trains, moment.attributes = are_trained(visit.leaves), attributes_of(visit.leaves)
            given = visit.brought(detached(self.tensors))
            if self._counts_uses:  # as they are given for the repetition
                given = list(map(uncached, given))
            versions = versions_of(given)
            arguments = self.arguments.filled(given)
            outputs = self._computed(visit, self.forward_unsaved, arguments)
            block.refuse_changed_weights(visit.leaves, weight_versions)
            block.refuse_changed_flags(visit.leaves, moment.trains)
            refuse_late_marks(block, visit.leaves, first_hook, repeats=True)
            if self.arguments.may_change:
                self.arguments.refuse_changed_containers(given, arguments)
            made, self._outputs = taken_out(outputs, given)
            del outputs, arguments
            if not all(are_trained(made)):
                self.nondifferentiable = [i for i, x in enumerate(made) if not x.requires_grad]
            if self._counts_uses:
                self.num_edges = _num_uses(made, given)
            assert self.weights is not None
            self.weights.count_uses(made, [*given, *visit.leaves], len(given))
            if self.seen is None and (block.reentrant or any(map(_has_hooks, block.parameters))):
                self._cut_unused_edges(made, visit.leaves)
            plain = visit.taken_home([self._kept(visit, alias_of(x)) for x in made])
            changed = visit.changed_buffers()
            self.refuse_changed_inputs(given, versions)
            del made, given
        moment.note_drawn(self.trial.residency.device.generators())
        with self.trial.residency.meter.paused() if block.rewritten else nullcontext():
            moment.note_weights()
        if block.is_checked:
            moment.note_outputs(plain)
        else:
            with self.trial.residency.meter.paused():
                moment.note_outputs(plain, values=True)
        self._write_back(visit, changed)
        return tuple(plain)

    def run_without_graph(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The block as it is called: no backward follows, so it may change what it is given."""
        note_casts(self.block, self.forward_pass)
        self._moment.note_random_states(self.trial.residency.device.generators())
        versions = versions_of(self.tensors)

        def rewound() -> bool:
            return not self.arguments.may_change and versions == versions_of(self.tensors) and self._rewound()

        return self.trial.with_room(self.block, lambda: self._run_without_graph(args, kwargs), rewound)

    def _run_without_graph(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        self._moment.note_buffers(self.trial.residency.found_buffers)
        here = self.trial.visit(self.block, Direction.FORWARD, evaluates=True)
        with here as visit, self.trial.measuring(self):
            weight_versions, first_hook = versions_of(visit.leaves), next_hook()
            outputs = self._computed(visit, self.block.forward, args, kwargs)
            self.block.refuse_changed_weights(visit.leaves, weight_versions)
            refuse_late_marks(self.block, visit.leaves, first_hook, repeats=False)
            self.block.refuse_gradients(visit.leaves[: len(self.block.own_parameters)])  # beside borrowed ones
            refuse_hidden_outputs(self.block.name, outputs, visit.copy.has)
            self.made = made = tensors_in(outputs)
            if any(x.grad_fn is not None for x in made):
                raise UncuttableError(
                    f"a block whose weights and inputs require no gradients makes no graph, but {self.block.name} "
                    "does. Detach what it returns, or let one of them require a gradient."
                )
            if any(map(visit.copy.has, made)):
                outputs = map_tensors(partial(self._kept, visit), outputs)
            if self.arguments.may_change:
                map_in_place(partial(self._kept, visit), [*args, *kwargs.values()])
            changed = visit.changed_buffers()
        self._write_back(visit, changed)
        self._watch([*self.tensors, *made])
        return outputs

    def _kept(self, visit: Visit, tensor: torch.Tensor) -> torch.Tensor:
        """Beyond the visit: a copy, if the slot has it."""
        if not visit.copy.has(tensor):
            return tensor
        with torch.inference_mode(False):
            copy = tensor.clone()
        self.trial.copies.watch(self.block.name, copy)
        return copy

    def _computed(self, visit: Visit, forward: Callable[..., Any], *arguments: Any) -> Any:
        """What the forward gives; the buffers that a failing one has changed so far stay changed, unless it is to run
        again for lack of room."""
        try:
            return forward(*arguments)
        except torch.OutOfMemoryError:
            raise
        except BaseException:
            self._write_back(visit, visit.changed_buffers())
            raise

    def found_buffers(self) -> list[tuple[int, int]]:
        """Which they are, and their versions."""
        return [(id(buffer), version_of(buffer)) for buffer in self.block.buffers()]

    def _write_back(self, visit: Visit, changed: Sequence[ChangedBuffer], *, in_backward: bool = False) -> None:
        """Buffers that the block has changed, as `Visit.changed_buffers` tells them, to their host masters."""
        if not changed:
            return
        before = [(b.site, b.host if b.is_assigned else b.host.clone()) for b in changed]
        for (_, value), b in zip(before, changed, strict=True):
            found = self.trial.residency.found_buffers.get((id(b.host), version_of(b.host)))
            if found is not None:  # by a call in a graph that lives
                found.value = value
        if not in_backward:
            self._moment.note_written(before)
        visit.write_back(changed)

    def _watch(self, known: Sequence[torch.Tensor]) -> None:
        """What shares memory and is changed in place later, plain PyTorch would change in both."""
        if self.shares_memory and self.trial.residency.meter.journal is not None:
            self.trial.residency.meter.journal.watch(self.block.name, known)

    def _cut_unused_edges(self, made: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor]) -> None:
        """A weight that this call does not use has no edge: its hooks would fire, without a gradient. Nor one that only
        reentrant checkpoints use: plain PyTorch waits for no such use."""
        assert self.weights is not None
        used = {id(leaf_of(node)) for node in nodes_of(made)}
        self.weights.cut_unused({i for i, leaf in enumerate(leaves) if id(leaf) not in used})

    # ---- backward ----

    def marks(self) -> list[torch.Tensor]:
        """What the node saves beside the tensors, where hooks see it, perhaps a checkpoint's around the block: this
        calls the block again, and hands out the mark of that call."""
        if not has_saved_hooks():
            return []
        number, self._is_marked, self.is_checkpointed = next(_numbers), True, is_checkpointed()
        if self.trial.in_backward:
            self.trial.marked[number] = self
        with self.trial.residency.meter.paused():
            return [torch.tensor([number], device="cpu")]

    def unmarked(self, saved: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The tensors. The last call that they are of will be repeated: in plain PyTorch too, a checkpoint's backward
        sees the buffers, and the random numbers, of its second forward."""
        if not self._is_marked:
            return saved
        *tensors, mark = saved
        last = self.trial.marked.pop(int(mark), self)
        self._moment = last._moment
        return tensors

    def run_backward(
        self,
        tensors: Sequence[torch.Tensor],
        needed: Sequence[bool],
        grad_outputs: Sequence[torch.Tensor | None],
    ) -> list[torch.Tensor | None]:
        """Gradients for each edge: of `tensors` on the device, of parameters on the host.

        `needed` says which edges want one; `grad_outputs` has one entry for each output that the block made.
        """
        if any(version_of(output) != version for output, version in self._sharing):
            raise RuntimeError(
                f"a block's outputs that share memory stay as they are until its backward, but one of block "
                f"{self.block.name} was changed in place after the model's forward, which the others' gradients would "
                "miss. Change a copy (.clone())."
            )
        weights, sums = self.weights, self.trial.sums
        assert weights is not None
        run = partial(self._run_backward, weights, tensors, needed, grad_outputs)
        try:
            grads, before, at_once = self.trial.with_room(self.block, run, lambda: True)
        except RuntimeError as error:
            if self.block.reentrant or not reentrant.is_refused(error):
                raise
            self.block.reentrant = True  # which no earlier call has shown
            grads, before, at_once = self.trial.with_room(self.block, run, lambda: True)
        self.block.is_checked = True
        self._add_at_once(at_once)
        num_edges = [*self.num_edges, *weights.num_edges]
        of_casts = [row[0] for row in grads[len(num_edges) :]]
        with self.trial.residency.meter.paused() if before else nullcontext():
            weights.hand_on(before, grads[len(self.num_edges) :], of_casts, sums)
        return [g for source in grads[: len(num_edges)] for g in source]

    def _add_at_once(self, gradients: Sequence[tuple[torch.Tensor, torch.Tensor | None]]) -> None:
        """To weights that still want some, as plain PyTorch does while reentrant checkpoints run."""
        for weight, gradient in gradients:
            if weight.requires_grad and gradient is not None:
                with self.trial.residency.meter.paused() if id(weight) in self.block.in_slot else nullcontext():
                    reentrant.add_to_grad(weight, gradient)

    @property
    def may_join(self) -> bool:
        """Whether the gradients of some tensor's uses are one, if nobody else uses it in this step."""
        return self.always_apart is not None and any(
            n > 1 and not apart for n, apart in zip(self.num_edges, self.always_apart, strict=False)
        )

    def _is_apart(self, tensor: int) -> bool:
        """Whether the gradients of its uses are not added here, for others use it, or may do so."""
        if self.always_apart is None or self.used_by_others is None:
            return True
        return self.always_apart[tensor] or self.used_by_others[tensor]

    def note_users(self, edges: Sequence[Any], users: Mapping[Any, int]) -> None:
        """Once its forward has ended, or a later one: `edges` of its node, and how many lead to each place."""
        num_edges = self.num_edges[: len(self.always_apart or ())]
        before = self.used_by_others or [False] * len(num_edges)
        starts = accumulate(num_edges, initial=0)
        self.used_by_others = [
            was or users[edges[start]] > n for was, start, n in zip(before, starts, num_edges, strict=False)
        ]

    def _run_backward(
        self,
        weights: CallWeights,
        tensors: Sequence[torch.Tensor],
        needed: Sequence[bool],
        grad_outputs: Sequence[torch.Tensor | None],
    ) -> tuple[list[list[torch.Tensor | None]], dict[int, WeightSum], list[tuple[torch.Tensor, torch.Tensor | None]]]:
        """Gradients for each source's edges; then the sums of shared weights before this call, and behind the sources
        what the uses of their casts here give; and weights, each with what it gets at once."""
        moment, parameters = self._moment, self.block.parameters
        sums = weights.sums_before(self.trial.sums)
        moment.refuse_changed_weights()
        assert moment.surroundings is not None
        num_edges = [*self.num_edges, *weights.num_edges]
        wanted = [n > 0 and needed[end - 1] for n, end in zip(num_edges, accumulate(num_edges), strict=True)]
        written, replaced = moment.buffers()
        generators = self.trial.residency.device.generators() if moment.random_states else []
        with self.trial.visit(self.block, Direction.BACKWARD) as visit:
            visit.train(moment.trains)
            visit.mark(moment.attributes)
            now = visit.copy.swap_buffers(self.block, written)
            visit.lend_buffers(replaced)
            with moment.drawing(drawing_again):
                drawn = generator_states(generators)
                try:
                    set_generator_states(generators, moment.random_states)
                    given = [alias_of(t).requires_grad_(n) for t, n in zip(tensors, wanted, strict=False)]
                    inputs = list(map(uncached, visit.brought(given)))
                    first_node = torch._C._autograd._get_sequence_nr()
                    restored = moment.surroundings.restored(self.block.name, alone=self.trial.is_alone)
                    with torch.enable_grad(), saved_as_it_is(), restored, visit.drawing():
                        made, _ = taken_out(self._repeated(self.arguments.filled(inputs, moment.arguments)), inputs)
                finally:
                    set_generator_states(generators, drawn)
                    visit.copy.swap_buffers(self.block, now)
                    visit.set_buffers()
            moment.refuse_other_outputs(made)
            if moment.digests is not None:
                with self.trial.residency.meter.paused():
                    moment.refuse_other_values(made)
            if moment.surroundings.have_gradients:  # not when the pilot saw it, or it would not be a block
                borrowed_by(self.block.name, made, (*inputs, *visit.leaves), first_node)
            # in the visit they were told not to
            remembers = self.block.reentrant and moment.surroundings.remember_casts
            remembering = reentrant.casts_remembered(made) if remembers else nullcontext()
            found = self.found_buffers()
            try:
                # what a checkpoint within draws it undoes, and noise does not
                with moment.drawing(drawing_for_nothing), visit.drawing(), remembering:
                    brought = visit.brought(grad_outputs)
                    grads, within = self._local_backward(weights, inputs, made, wanted, brought, visit, sums)
            except torch.OutOfMemoryError:  # it may run again, as if it had not
                if self.block.draws:
                    set_generator_states(generators, drawn)
                raise
            except BaseException:
                self._write_back(visit, visit.changed_buffers(), in_backward=True)
                raise
            if (
                now or replaced or found != self.found_buffers()
            ):  # by a hook, a Function, or a checkpoint within the block
                self._write_back(visit, visit.changed_buffers(), in_backward=True)
            num_tensors, num_rows, at_once = len(tensors), len(grads), [i for i, _ in within]
            grads += [[gradient] for _, gradient in within]
            del within  # on the device
            masters = [*parameters, *(parameters[i] for i in (*weights.casts, *sums, *at_once))]
            residency = self.trial.residency
            gate = None if sums or at_once or visit.is_away else self._gate  # late ones have room at home only
            spilled = residency.spill_gradients(visit.device, self.block, masters, grads[num_tensors:], gate)
            grads[:num_tensors] = map(visit.taken_home, grads[:num_tensors])
            grads[num_tensors:] = spilled  # the step's reservation does not cover the others, the visit's does
        return (
            grads[:num_rows],
            sums,
            [(parameters[i], row[0]) for i, row in zip(at_once, grads[num_rows:], strict=True)],
        )

    def _repeated(self, arguments: tuple[Sequence[Any], dict[str, Any]]) -> Any:
        try:
            return self.block.forward(*arguments)
        except Exception as error:
            self._moment.explain(error)
            raise

    def _local_backward(
        self,
        weights: CallWeights,
        inputs: Sequence[torch.Tensor],
        made: list[torch.Tensor],
        wanted: Sequence[bool],
        grad_outputs: Sequence[torch.Tensor | None],
        visit: Visit,
        sums: Mapping[int, WeightSum],
    ) -> tuple[list[list[torch.Tensor | None]], list[tuple[int, torch.Tensor]]]:
        """As `LocalBackward.run`, and its `within`, by the numbers of weights; uses up what was `made`."""
        leaves, first = [*inputs, *visit.leaves], len(inputs)
        recast = {first + i: cast.dtype for i, cast in weights.casts.items()}
        backward = LocalBackward(
            leaves,
            first,
            [(w or i in recast) and x.requires_grad for i, (w, x) in enumerate(zip(wanted, leaves, strict=False))],
            [*self.num_edges, *weights.num_edges],
            [*map(self._is_apart, range(first)), *[True] * len(visit.leaves)],
            recast,
            {first + i: dtype for i, dtype in weights.castable.items()},
            {first + i for i in weights.cast_elsewhere},
            {first + i: total for i, total in sums.items()},
            self.block.reentrant,
        )
        residency = self.trial.residency
        rows = backward.run(made, grad_outputs, lambda gradient: residency.received(visit.device, [gradient])[0])
        return rows, [(i - first, gradient) for i, gradient in backward.within]


def _has_hooks(parameter: torch.Tensor) -> bool:
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def _num_uses(made: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> list[int]:
    """Of each given tensor in the graph behind what was made; 1 for one that has none there."""
    nodes = list(nodes_of(made))  # kept: a node's Python object must stay the same one
    uses = Counter(id(leaf_of(child)) for node in nodes for child, _ in node.next_functions if child is not None)
    return [uses[id(tensor)] or 1 for tensor in given]
