"""The first promise over the whole zoo: every architecture, trained four ways under three budgets.

A cell of the table is one such training beside plain PyTorch's: losses, the last gradients, final weights,
buffers, optimizer state and random state. `pytest -m proof tests/test_exactness.py` runs all cells and writes
docs/exactness.md; with `-k "albert and adamw"` it runs some of them and writes nothing.
"""

import logging
import math
import random
import warnings
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from pathlib import Path

import numpy
import pytest
import torch

import hydra_tune
from comparison import with_and_without_checks
from hydra_tune.blocks.root import use_no_cache
from hydra_tune.config import checks_enabled
from zoo import ZOO

STEPS = 3
BUDGETS = ("resident", "half", "least")
TABLE = Path(__file__).parent.parent / "docs" / "exactness.md"


@dataclass(frozen=True)
class Training:
    optimizer: Callable
    accumulation: int = 1
    clip: float | None = None
    cosine: bool = False
    bf16: bool = False


TRAININGS = {
    "adamw": Training(partial(torch.optim.AdamW, lr=1e-3), accumulation=2, clip=1.0, cosine=True),
    "sgd": Training(partial(torch.optim.SGD, lr=1e-3, momentum=0.9, weight_decay=0.01)),
    "adafactor": Training(partial(torch.optim.Adafactor, lr=1e-2)),
    "bf16": Training(partial(torch.optim.AdamW, lr=1e-3), bf16=True),
}

REFUSED = "refused"


# (architecture, training, budget) -> (the largest relative difference allowed, or REFUSED; why)
EXPECTED_DIFFERENCES: dict[tuple[str, str, str], tuple[float | str, str]] = {}


# (architecture, training) -> why plain PyTorch itself can't train it on every CPU
NOT_EVERYWHERE = {("lstm", "bf16"): "oneDNN has no bfloat16 LSTM for a CPU without AVX-512"}


# ---- one training ------------------------------------------------------------------------------------


def kept(tensor):
    """A copy that no operator makes, so that no virtual device counts it: a script on a GPU would keep it in host
    memory."""
    if tensor is None:
        return None
    tensor = tensor.detach()
    memory = tensor.untyped_storage().clone()
    return torch.empty(0, dtype=tensor.dtype).set_(memory, tensor.storage_offset(), tensor.size(), tensor.stride())


def train(name, training, *, pool=None):
    """All that `STEPS` of a training leave behind, by what it is: tensors, or None where there is none."""
    torch.manual_seed(0), random.seed(0), numpy.random.seed(0)
    architecture = ZOO[name]
    model = architecture.build()
    optimizer = training.optimizer(model.parameters())
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS) if training.cosine else None
    if pool is not None:
        model, optimizer = hydra_tune.prepare(model, optimizer, pool=pool)
    else:
        use_no_cache(model)  # as `prepare` does: a cache lays out keys and values anew, and some CPUs round otherwise
    found = {}
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(training.accumulation):
            with torch.autocast("cpu", torch.bfloat16) if training.bf16 else nullcontext():
                loss = architecture.loss(model, architecture.batch())
            (loss / training.accumulation).backward()
            found[f"loss {step}.{part}"] = kept(loss)
        if training.clip is not None:
            found[f"norm {step}"] = kept(torch.nn.utils.clip_grad_norm_(model.parameters(), training.clip))
        for n, p in model.named_parameters():
            found[f"gradient of {n}"] = kept(p.grad)
        optimizer.step()
        if schedule is not None:
            schedule.step()
    if pool is not None:
        hydra_tune.release(model)
    names = {p: n for n, p in model.named_parameters()}
    found |= {f"weight {n}": p.detach().clone() for p, n in names.items()}
    found |= {f"buffer {n}": b.clone() for n, b in model.named_buffers()}
    states = {f"{key} of {names[p]}": v for p, state in optimizer.state.items() for key, v in state.items()}
    found |= {what: v.clone() if isinstance(v, torch.Tensor) else v for what, v in states.items()}
    found["random state"] = torch.get_rng_state()
    return found


@lru_cache(maxsize=1)
def plain(name, training_name):
    found = train(name, TRAININGS[training_name])
    assert all(torch.isfinite(v).all() for v in found.values() if torch.is_tensor(v)), "nan equals nothing"
    return found


def weight_bytes(name):
    return sum(p.numel() * p.element_size() for p in ZOO[name].build().parameters())


@lru_cache(maxsize=1)
def budget_bytes(name, training_name):
    """Of each budget. `half` of the weights, or `least` where that is more; `least` is what the largest block
    needs beside what its trial and step hold, and not a byte more, where the first step has room in that, too."""
    weights = weight_bytes(name)
    for share in (1, 1.5, 2.25, 3.4, 5, 0.6):
        plan = plan_of(name, training_name, int(weights * share))
        if plan is None or plan.resident:
            continue
        largest = max(b.weight_bytes + max(b.forward_work_bytes, b.backward_work_bytes) for b in plan.blocks)
        least = plan.held_bytes + plan.step_bytes + largest
        if plan_of(name, training_name, least) is not None:
            return {"resident": 40 * weights, "half": max(weights // 2, least), "least": least}
    raise hydra_tune.BudgetError("no budget from 0.6 to 5 times the weights has a spilled plan")


def plan_of(name, training_name, budget):
    """The plan under this budget, made of first steps; None if there is none."""
    torch.manual_seed(0)
    architecture, training = ZOO[name], TRAININGS[training_name]
    with hydra_tune.ShardPool(["cpu"], budget) as pool:
        model = architecture.build()
        model, optimizer = hydra_tune.prepare(model, training.optimizer(model.parameters()), pool=pool)
        try:
            while not pool.plans:  # a block that does not fit beside its step is opened for the next one
                for _ in range(training.accumulation):
                    with torch.autocast("cpu", torch.bfloat16) if training.bf16 else nullcontext():
                        loss = architecture.loss(model, architecture.batch())
                    (loss / training.accumulation).backward()
                optimizer.step()
        except (hydra_tune.BudgetError, torch.OutOfMemoryError):
            return None
        *_, plan = pool.plans.values()
    return plan


# ---- one cell ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """`result` is bitwise, difference, refused, error, or none where there is no plain training to compare with;
    `text` says more of the last four."""

    result: str
    text: str = ""
    difference: float = 0.0
    announced: bool = False  # the library has warned of a difference
    budget: float = math.nan  # as a fraction of the weights
    shards: int = 0


def largest_difference(left, right):
    """(relative difference, what differs), the largest there is; None if every bit is the same.

    Relative to the largest value of its kind: the gradient of a key's bias is noise around zero.
    """
    scales = {}
    for what, a in left.items():
        if torch.is_tensor(a) and a.numel():
            kind = what.split()[0]
            scales[kind] = max(scales.get(kind, 0.0), a.double().abs().max().item())
    sizes = {
        what: difference(left.get(what), right.get(what)) / (scales.get(what.split()[0]) or 1.0)
        for what in left | right
    }
    size, what = max((size, what) for what, size in sizes.items())
    return (size, what) if size else None


def difference(a, b):
    """The largest there is, 0.0 if every bit is the same, inf if one is not what the other is."""
    if not torch.is_tensor(a) or not torch.is_tensor(b):
        return 0.0 if a is b or (type(a) is type(b) and a == b) else math.inf
    if a.shape != b.shape or a.dtype != b.dtype:
        return math.inf
    if torch.equal(a, b):
        return 0.0
    size = (a.double() - b.double()).abs().max().item()
    return math.inf if math.isnan(size) else size


@cache
def cell(name, training_name, budget, checked=False):
    assert checks_enabled() == checked
    # a forward that converts a module of its own, as that of Switch does, finds weights that are no leaves
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
    try:
        expected, share = plain(name, training_name), math.nan
    except RuntimeError as error:
        return Cell("none", f"{type(error).__name__}: {error}")
    try:
        num_bytes = 40 * weight_bytes(name) if budget == "resident" else budget_bytes(name, training_name)[budget]
        share = num_bytes / weight_bytes(name)
        with hydra_tune.ShardPool(["cpu"], num_bytes) as pool, warnings_logged() as messages:
            found = train(name, TRAININGS[training_name], pool=pool)
            (trial,) = pool.report()["trials"]
        worst = largest_difference(expected, found)
        assert trial["resident"] == (budget == "resident"), "trained where it was to be"
    except (hydra_tune.PrepareError, hydra_tune.BudgetError, torch.OutOfMemoryError) as error:
        return Cell("refused", str(error), budget=share)
    except Exception as error:
        return Cell("error", f"{type(error).__name__}: {error}", budget=share)
    figures = {"budget": share, "shards": len(trial["shards"])}
    if worst is None:
        return Cell("bitwise", **figures)
    return Cell(
        "difference", f"{worst[0]:.0e} at {worst[1]}", worst[0], any("last bit" in m for m in messages), **figures
    )


@contextmanager
def warnings_logged():
    """What the library logs as warnings meanwhile."""
    messages, handler = [], logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger("hydra_tune")
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)


def complaint(name, training_name, budget, checked=False):
    """What is wrong with a cell; None if it is as promised, or as far from it as is known."""
    known = EXPECTED_DIFFERENCES.get((name, training_name, budget))
    found = cell(name, training_name, budget, checked)
    if found.result == "none":
        right = (name, training_name) in NOT_EVERYWHERE
    elif known is None or known[0] == REFUSED:
        right = found.result == ("bitwise" if known is None else "refused")
    else:
        within = found.result == "difference" and found.difference <= known[0] and found.announced
        right = found.result == "bitwise" or within
    return None if right else f"{name}, {training_name}, {budget}: {found.result} {found.text}"


# ---- the tests ---------------------------------------------------------------------------------------


def cases(keys):
    return [pytest.param(*key, id="-".join(key)) for key in keys]


KINDS = {kind: [n for n, a in ZOO.items() if a.kind == kind] for kind in {a.kind for a in ZOO.values()}}
OFTEN = {n for kind, names in KINDS.items() for n in names[::10]}


@with_and_without_checks
@pytest.mark.parametrize(
    ("name", "training"),
    cases((n, list(TRAININGS)[i % len(TRAININGS)]) for i, n in enumerate(ZOO) if n in OFTEN),
)
def test_architecture_trains_as_in_plain_pytorch(name, training, checked):
    assert complaint(name, training, "half", checked) is None


def test_the_table_has_a_row_for_every_architecture():
    if not TABLE.exists():
        pytest.skip("not written yet")
    rows = [line.split("|")[1].strip() for line in TABLE.read_text().splitlines() if line.startswith("| ")]
    assert rows[1:] == list(ZOO), "write it anew: pytest -m proof tests/test_exactness.py"


# ---- the proof ---------------------------------------------------------------------------------------

RESULTS: dict[tuple[str, str, str], Cell] = {}
SIGNS = {"bitwise": "=", "difference": "~", "refused": "x", "error": "!", "none": "-"}
HEAD = """# Every architecture of the zoo beside plain PyTorch

Written by `pytest -m proof tests/test_exactness.py`, which trains each architecture of `tests/zoo.py` for {steps}
steps in four ways: AdamW with clipped norms, two accumulated batches a step and a cosine schedule; SGD with momentum
and weight decay; Adafactor; AdamW under bfloat16 autocast. Each is trained under three budgets: resident; half of the
weights, or what "least" is where that is more; and least, what the largest block needs beside what is always held,
and not a byte more, if a first step has room in that, too. Losses, the last gradients, final weights, buffers,
optimizer state and random state are compared, with `use_cache` off on both sides.

`=` every bit is that of plain PyTorch, `~` some differ, `x` refused with a message, `!` failed, `-` plain PyTorch
itself can't on this CPU.
A training has three signs: resident, half, least. "Least" is in percent of the weights; "shards" is their number there.
Differences are the largest of all, relative to the largest value of its kind (of all gradients, of all weights).

{bitwise} of {all} architectures are equal bit for bit in every cell.

| architecture | kind | parameters | shards | least | {trainings} | where not bitwise |
|---|---|---|---|---|{rules}---|
"""
TAIL = "\ntorch {torch}, transformers {transformers}, threads: {threads}, a CPU with {cpu}.\n"


def all_cells(name):
    return [(name, t, b) for t in TRAININGS for b in BUDGETS]


def row(name):
    found = {key: RESULTS[key] for key in all_cells(name)}
    signs = ["".join(SIGNS[found[name, t, b].result] for b in BUDGETS) for t in TRAININGS]
    least = [c for (_, _, b), c in found.items() if b == "least" and not math.isnan(c.budget)]
    percents = sorted({round(100 * c.budget) for c in least}) or ["-"]
    figures = [
        f"{sum(p.numel() for p in ZOO[name].build().parameters()):,}",
        str(max((c.shards for c in least), default=0) or "-"),
        f"{percents[0]}" if percents[0] == percents[-1] else f"{percents[0]} to {percents[-1]}",
    ]
    return "| " + " | ".join([name, ZOO[name].kind, *figures, *signs, why(found)]) + " |"


def why(found):
    """Of each result other than bitwise the worst, with its reason."""
    parts = []
    for result in ("difference", "refused", "error", "none"):
        keys = [key for key, c in found.items() if c.result == result]
        if keys:
            worst = max(keys, key=lambda key: found[key].difference)
            _, reason = EXPECTED_DIFFERENCES.get(worst, (None, NOT_EVERYWHERE.get(worst[:2], "unexpected")))
            parts.append(f"{result}: {found[worst].text.split('. ')[0][:160]} ({reason})")
    return "; ".join(parts).replace("|", "/").replace("\n", " ")


def cell_cases():
    """Each cell as users run it; and with checks, too, where there is not a byte to spare."""
    for name, training, budget in (key for n in ZOO for key in all_cells(n)):
        case = (name, training, budget)
        yield pytest.param(*case, False, id="-".join(case))
        if budget == "least":
            yield pytest.param(*case, True, id="-".join([*case, "checked"]), marks=pytest.mark.checks)


@pytest.mark.proof
@pytest.mark.parametrize(("name", "training", "budget", "checked"), list(cell_cases()))
def test_cell(name, training, budget, checked):
    if not checked:
        RESULTS[name, training, budget] = cell(name, training, budget)
    assert complaint(name, training, budget, checked) is None


@pytest.mark.parametrize("budget", ["half", "least"])
def test_an_activation_is_not_taken_for_the_cast_of_a_weight(budget):
    """Where a call took another branch than was measured, it was run again without casts, but with their places."""
    assert complaint("switch", "bf16", budget) is None


@pytest.mark.proof
def test_table():
    import transformers

    cells = [key for name in ZOO for key in all_cells(name)]
    assert [key for key in cells if key not in RESULTS] == [], "cells that say nothing"
    bitwise = [n for n in ZOO if all(RESULTS[key].result == "bitwise" for key in all_cells(n))]
    head = HEAD.format(
        steps=STEPS,
        bitwise=len(bitwise),
        all=len(ZOO),
        trainings=" | ".join(TRAININGS),
        rules="---|" * len(TRAININGS),
    )
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    cpu = torch.backends.cpu.get_cpu_capability()
    tail = TAIL.format(**versions, threads=torch.get_num_threads(), cpu=cpu)
    TABLE.write_text(head + "".join(row(n) + "\n" for n in ZOO) + tail)
    assert [c for c in (complaint(*key) for key in cells) if c is not None] == []
    assert set(EXPECTED_DIFFERENCES) <= set(cells), "of architectures that there are"
    assert len(bitwise) >= 95
