"""Autograd's graphs: their nodes, who uses a tensor, what each single use gives to its gradient, what they keep.

Floating-point sums depend on their order. Plain PyTorch adds a tensor's gradient use by use, the latest use
first; where a block and something outside of it use the same tensor, the block must hand out its uses one by
one, or the last bit may differ: (a + b) + c is not a + (b + c).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from hydra_tune.errors import PrepareError, UncuttableError
from hydra_tune.gradient_sums import WeightSum

BLOCK = "BlockFunctionBackward"  # a block's call; its `call` is None once it was used up
GATE = "_GateFunctionBackward"  # for late gradients, before a block's call
CAST = "ToCopyBackward0"  # what autocast makes of a float32 weight
# torch.autograd.grad looks at each gradient's shape before, and its own way to the engine copies a context
_backward = torch.autograd.Variable._execution_engine.run_backward
top_saved_tensors_hooks = getattr(  # torch 2.6 has no way to ask
    torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: None
)


def nodes_of(outputs: Iterable[torch.Tensor]) -> Iterator[Any]:
    """Every node of the graph behind `outputs`."""
    return nodes_from(t.grad_fn for t in outputs if t.grad_fn is not None)


def nodes_from(nodes: Iterable[Any]) -> Iterator[Any]:
    """These and every node behind them."""
    stack = list(nodes)
    seen = set(stack)
    while stack:
        node = stack.pop()
        yield node
        for child, _ in node.next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                stack.append(child)


def users_of(nodes: Iterable[Any], outputs: Iterable[torch.Tensor]) -> Counter[Any]:
    """How many edges lead to each place in a graph: from these nodes, and from who is given the outputs."""
    users = Counter[Any]((t.grad_fn, t.output_nr) for t in outputs if t.grad_fn is not None)
    users.update(child for node in nodes for child in node.next_functions if child[0] is not None)
    return users


def note_users(outputs: Sequence[torch.Tensor]) -> None:
    """Tell each call of a block in the graph behind a forward's outputs which of its tensors others use, too."""
    nodes = list(nodes_of(outputs))
    users = users_of(nodes, outputs)
    for node in nodes:
        call = getattr(node, "call", None) if node.name() == BLOCK else None
        if call is not None and call.may_join:
            call.note_users(node.next_functions, users)


def leaf_of(node: Any) -> torch.Tensor | None:
    """The leaf for which this node accumulates; None for other nodes."""
    leaf: torch.Tensor | None = getattr(node, "variable", None)
    return leaf


def forget_interrupted_backward() -> None:
    """After an exception in a backward PyTorch may keep the rest of its graph until the thread's next backward."""
    with torch.enable_grad():
        torch.ones((), requires_grad=True).backward()


class Uses:
    """The uses of some leaves in the graph behind `outputs`, apart where autocast first casts the leaf.

    After a backward `direct[i]` and `cast[i]` are the gradients of leaf `i` by each use of itself and of its
    cast, in the order in which they were made, where `record` was called before. `cast_once` are the leaves of
    which autocast keeps one copy: weights, each with that copy's dtype. Where it is None, `cast_to[i]` tells it.
    """

    def __init__(
        self,
        outputs: Sequence[torch.Tensor],
        leaves: Sequence[torch.Tensor],
        *,
        cast_once: Mapping[int, torch.dtype | None],
    ) -> None:
        nodes = list(nodes_of(outputs))  # kept: a node's Python object must stay the same one
        index = {id(leaf): i for i, leaf in enumerate(leaves)}
        cast_of: dict[Any, int] = {}
        self.cast_to: dict[int, torch.dtype] = {}
        self._first_cast: dict[int, int] = {}  # its place among the nodes, by leaf
        self._edges: list[tuple[Any, int, int, bool]] = []  # node, position of the edge, leaf, by a cast
        for node in nodes:
            for position, (child, _) in enumerate(node.next_functions):
                i = index.get(id(leaf_of(child)))
                if i is None:
                    continue
                if i in cast_once and self._is_once(node, i, cast_once[i]):
                    cast_of[node], number = i, node._sequence_nr()
                    self._first_cast[i] = min(number, self._first_cast.get(i, number))
                else:
                    self._edges.append((node, position, i, False))
        if cast_of:
            for node in nodes:
                for position, (child, _) in enumerate(node.next_functions):
                    if child in cast_of:
                        self._edges.append((node, position, cast_of[child], True))
        self.direct: list[list[torch.Tensor]] = [[] for _ in leaves]
        self.cast: list[list[torch.Tensor]] = [[] for _ in leaves]

    def _is_once(self, node: Any, leaf: int, wanted: torch.dtype | None) -> bool:
        """Whether the node is a cast to that dtype, or else to the first that autocast knows."""
        if node.name() != CAST:
            return False
        made = node._input_metadata[0].dtype
        if wanted is None and made in (torch.bfloat16, torch.float16):
            wanted = self.cast_to.setdefault(leaf, made)
        return bool(made is wanted)

    def count(self, leaf: int, *, cast: bool) -> int:
        return sum(i == leaf and by_cast == cast for _, _, i, by_cast in self._edges)

    def record(self, wanted: Iterable[int]) -> None:
        """Note the gradients of these leaves in the backward that follows."""
        chosen = set(wanted)
        self._hook(
            (node, position, (self.cast if by_cast else self.direct)[i].append)
            for node, position, i, by_cast in self._edges
            if i in chosen
        )

    def add_to(self, sums: Mapping[int, WeightSum], made: Container[int]) -> None:
        """Add the gradients of these leaves in the backward that follows, those of casts that are `made` here where
        autograd would."""

        def adding(node: Any, i: int, *, by_cast: bool) -> Callable[[torch.Tensor], None]:
            joins = not by_cast and i in made and node._sequence_nr() < self._first_cast[i]
            return partial(sums[i].add, by_cast=by_cast, joins=joins)

        self._hook(
            (node, position, adding(node, i, by_cast=by_cast))
            for node, position, i, by_cast in self._edges
            if i in sums
        )

    def _hook(self, edges: Iterable[tuple[Any, int, Callable[[torch.Tensor], None]]]) -> None:
        """Hand on the gradient of each edge, a node's at that position."""
        sinks: dict[Any, list[tuple[int, Callable[[torch.Tensor], None]]]] = {}
        for node, position, sink in edges:
            sinks.setdefault(node, []).append((position, sink))
        for node, places in sinks.items():
            node.register_hook(_noting(places))


def _noting(places: Sequence[tuple[int, Callable[[torch.Tensor], None]]]) -> Callable[[Any, Any], None]:
    def note(grad_inputs: Sequence[torch.Tensor | None], _: Any) -> None:
        for position, sink in places:
            gradient = grad_inputs[position]
            if gradient is not None:
                sink(gradient)

    return note


def gradients_of(
    outputs: Sequence[torch.Tensor],
    grad_outputs: Sequence[torch.Tensor],
    leaves: Sequence[torch.Tensor],
    needed: Sequence[bool],
) -> list[torch.Tensor | None]:
    """The gradient of each leaf, with the strides that its operators gave it: what accumulates into a leaf's
    `.grad` is laid out anew, and the operators to come would add in another order."""
    wanted = tuple([leaf for leaf, n in zip(leaves, needed, strict=True) if n])
    ends = tuple(outputs), tuple(grad_outputs)
    found = iter(_backward(*ends, False, False, wanted, True, accumulate_grad=False) if wanted else ())
    return [next(found) if n else None for n in needed]


def borrowed_by(
    name: str, outputs: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor], first_node: int
) -> list[nn.Parameter]:
    """Weights that the forward of the block with this name reaches, but not through its own modules and arguments.

    `first_node` is autograd's sequence number when the block's forward began.

    Raises:
        UncuttableError: it reaches an activation so.
    """
    known = {id(leaf) for leaf in leaves}
    found: dict[int, nn.Parameter] = {}
    for node in nodes_of(outputs):
        leaf = leaf_of(node)
        if leaf is None and node._sequence_nr() < first_node:
            raise UncuttableError(
                f"a block reaches activations through its arguments, but {name} uses one that another module has "
                "made, or a hook. Pass it as an argument; for torch.nn.utils.weight_norm and spectral_norm take those "
                "of torch.nn.utils.parametrizations."
            )
        if leaf is not None and id(leaf) not in known:
            if not isinstance(leaf, nn.Parameter):
                raise UncuttableError(
                    f"a block reaches tensors through its own modules and arguments, but {name} uses one of "
                    f"shape {tuple(leaf.shape)} beside them that requires a gradient. Pass it as an argument."
                )
            found[id(leaf)] = leaf
    return list(found.values())


# ---- what a forward keeps for its backward ------------------------------------------------------------


class Unsaved:
    """A context manager, once. Run by the operators that training uses, but keep nothing for a backward.

    Some operators compute otherwise, in the last bit, where no gradient is asked for (oneDNN's LSTM).
    """

    __slots__ = ("_grad",)

    def __enter__(self) -> None:
        self._grad = torch.is_grad_enabled()
        torch._C._set_grad_enabled(True)
        _FORGETTING.__enter__()

    def __exit__(self, *error: object) -> None:
        _FORGETTING.__exit__(*error)
        torch._C._set_grad_enabled(self._grad)


def keep_again() -> None:
    """After an interruption within `Unsaved`."""
    while (hooks := top_saved_tensors_hooks(True)) is not None and hooks[0] is _forget:
        torch._C._autograd._pop_saved_tensors_default_hooks()


def saved(keep: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.detach) -> AbstractContextManager[None]:
    """Whatever hooks surround it, a forward inside keeps what its backward needs.

    Detached: a node that kept its own output with its history would keep itself.
    """
    hooks: AbstractContextManager[None] = torch.autograd.graph.saved_tensors_hooks(keep, _as_it_is)
    return hooks


def saved_as_it_is() -> AbstractContextManager[None]:
    """As `saved`, but free of cost where no hooks are around."""
    return saved() if has_saved_hooks() else nullcontext()


def has_saved_hooks() -> bool:
    """Whether hooks see what is saved here, as they may in torch 2.6, which does not tell."""
    return (
        not hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks") or top_saved_tensors_hooks(True) is not None
    )


def is_checkpointed() -> bool:
    """Whether PyTorch's checkpoint will repeat what runs here, up to the last tensor that is saved. Torch 2.6 does not
    tell."""
    hooks = top_saved_tensors_hooks(True)
    return hooks is not None and getattr(hooks[0], "__module__", None) == "torch.utils.checkpoint"


def is_repetition() -> bool:
    """Whether PyTorch's checkpoint repeats what runs here, for the tensors that it saves. Torch 2.6 does not tell."""
    hooks = top_saved_tensors_hooks(True)
    return hooks is not None and getattr(hooks[0], "__qualname__", "").startswith("_recomputation_hook.")


class ForgottenError(PrepareError):
    """A backward came to what a block's forward did not keep."""


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _forget(_: Any) -> None:
    return None


def _forgotten(_: Any) -> torch.Tensor:
    raise ForgottenError(
        "what a block computes reaches the loss through its outputs, but a backward came to a tensor that was kept "
        "beside them (by a hook, an attribute, a list, a cache or a function that it returns), where the first batch "
        "did not show it. Return the tensor, or keep it from the first batch on."
    )


_FORGETTING = torch.autograd.graph.saved_tensors_hooks(_forget, _forgotten)


def detached(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Leaves of a graph of their own, which require a gradient where the given ones do."""
    return [alias_of(t).requires_grad_(t.requires_grad) for t in tensors]


def uncached(leaf: torch.Tensor) -> torch.Tensor:
    """The same leaf, but as a view, of which autocast remembers no cast: an activation, for which it stands, has one
    for each use."""
    if not leaf.requires_grad or leaf.dtype is not torch.float32 or leaf.layout is not torch.strided:
        return leaf
    with torch.no_grad():
        view = leaf[...]  # strides as they are, of sizes of 1, too: they choose kernels
    view.__dict__.update(leaf.__dict__)
    return view.requires_grad_()


def alias_of(tensor: torch.Tensor) -> torch.Tensor:
    """Without its graph, but with the attributes that the user has put on it."""
    alias = tensor.detach()
    if tensor.__dict__:
        alias.__dict__.update(tensor.__dict__)
    return alias


_SAVES: dict[int, tuple[Callable[..., torch.Tensor], str]] = {  # by a weight's dimensions
    1: (torch.matmul, "_saved_vec"),
    2: (torch.matmul, "_saved_mat2"),
    3: (torch.conv1d, "_saved_weight"),
    4: (torch.conv2d, "_saved_weight"),
    5: (torch.conv3d, "_saved_weight"),
}


class Cast(torch.autograd.Function):
    """Stands for autocast's copy of a weight in a trial's outer graph: empty, but with a gradient.

    Plain PyTorch casts a weight once a context and adds the gradients of all its uses in the lower precision
    before they are cast back. Blocks cast their device copies, each visit anew, and hand their gradients here.
    """

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        ctx.dtype = weight.dtype
        return torch.zeros((), dtype=dtype, device=weight.device).expand(weight.shape)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient.to(ctx.dtype), None


def autocasts_copy(weight: torch.Tensor) -> torch.Tensor | None:
    """The one that PyTorch keeps, or makes here, for all operators in the autocast context around: what an operator on
    an empty batch has saved of it for its backward. None of a weight that can't be had so."""
    if weight.dim() not in _SAVES or torch.is_inference_mode_enabled():
        return None
    operator, name = _SAVES[weight.dim()]
    sizes = weight.shape[:1] if weight.dim() < 3 else weight.shape[1:]
    with torch.enable_grad(), saved_as_it_is():
        batch = weight.new_zeros(0, *sizes).requires_grad_() * 1  # no leaf, which would be kept, too
        copy: torch.Tensor = getattr(operator(batch, weight).grad_fn, name)
    is_copy = copy.grad_fn is not None and copy.grad_fn.name() == CAST
    return copy if is_copy else None
