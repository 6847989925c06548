"""Named sweeps for the simulator, each a function that returns its trials.

Sizes, batches and numbers of trials come from papers. Their tables give no flop/s and no epochs: what a docstring calls
assumed does not come from the paper. So makespans of these sweeps compare schedules, and do not predict hours. Copies
cost what the simulator is told of links. Host optimizers cost nothing, unless `cost` says so.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from inspect import signature
from math import ceil
from pathlib import Path
from typing import Any

from hydra_tune.errors import ConfigError
from hydra_tune.simulation.cost import CostModel, transformer_trial
from hydra_tune.simulation.workload import TrialWork, parse

RTX_2080_TI = CostModel(4e12, measured_on="assumed: 30% of the 13.4 Tflop/s that NVIDIA states for fp32")
H100 = CostModel(500e12, measured_on="assumed: 50% of the 989 Tflop/s that NVIDIA states for bf16")
RTX_4090 = CostModel(115e12, measured_on="assumed: 70% of the 165 Tflop/s that NVIDIA states for bf16")
A100 = CostModel(125e12, measured_on="assumed: 40% of the 312 Tflop/s that NVIDIA states for bf16")
WIKITEXT_2_TOKENS = 2_088_628  # words of the training part; a model's own tokens are some 15% more
CIFAR_10_IMAGES = 50_000

# A machine with different devices: memory as their makers state it, speed relative to the first, PCIe gen 5, 4 and 3.
MIXED_DEVICES: list[dict[str, float]] = [
    *[{"memory": 80 * 10**9, "speed": 1.0, "link_bytes_per_s": 50e9}] * 2,
    *[{"memory": 40 * 10**9, "speed": 0.5, "link_bytes_per_s": 25e9}] * 2,
    *[{"memory": 11 * 10**9, "speed": 0.1, "link_bytes_per_s": 12e9}] * 4,
]


def hydra_bert(cost: CostModel = RTX_2080_TI, *, epochs: int = 1, memory: int | str = "11GB") -> list[TrialWork]:
    """Hydra's masked language model on WikiText-2: 12 trials, batch {8, 16, 32} x four learning rates
    (arXiv 2110.08633: 144 layers, width and feed-forward 1024, sequence 128, GPUs of 11 GB).

    Assumed: fp32, BERT's vocabulary of 30522, one epoch, cut by memory.
    """
    model = {"layers": 144, "width": 1024, "feed_forward": 1024, "sequence": 128, "vocabulary": 30522, "heads": 16}
    return [
        transformer_trial(
            cost, **model, batch=batch, steps=_text_steps(128, batch, epochs), memory=memory, name=f"b{batch}-lr{rate}"
        )
        for batch in (8, 16, 32)
        for rate in ("1e-3", "1e-4", "1e-5", "1e-6")
    ]


def hydra_vit(cost: CostModel = RTX_2080_TI, *, epochs: int = 1, memory: int | str = "11GB") -> list[TrialWork]:
    """Hydra's architecture search over vision transformers on CIFAR-10: 12 trials, size {300M .. 2B} x batch
    {128, 256} (arXiv 2110.08633; GPUs of 11 GB).

    Assumed: fp32, patches of 4 x 4 (65 tokens an image), feed-forward 4 x width, one epoch, cut by memory, and
    the depths and widths below, which give each size within 5%.
    """
    sizes = {"300M": (24, 1024), "600M": (32, 1280), "800M": (40, 1280), "1B": (40, 1440), "1.5B": (48, 1600)}
    sizes["2B"] = (48, 1856)
    return [
        transformer_trial(
            cost,
            layers=layers,
            width=width,
            feed_forward=4 * width,
            sequence=65,
            batch=batch,
            vocabulary=10,
            heads=16,
            steps=ceil(CIFAR_10_IMAGES / batch) * epochs,
            memory=memory,
            name=f"{size}-b{batch}",
        )
        for size, (layers, width) in sizes.items()
        for batch in (128, 256)
    ]


def hydra_gpt2_xl(cost: CostModel = RTX_2080_TI, *, epochs: int = 1) -> list[TrialWork]:
    """Hydra's fine-tuning of GPT-2-XL on WikiText-2: 12 trials, batch {16, 8} x six learning rates, 13 shards at
    batch 16 and 8 at batch 8 (arXiv 2110.08633: 48 layers, width 1600, context 512).

    Assumed: fp32, shards that need about the same, one epoch.
    """
    return [
        transformer_trial(
            cost,
            **_GPT2_XL,
            batch=batch,
            steps=_text_steps(512, batch, epochs),
            shards=shards,
            name=f"b{batch}-lr{number}",
        )
        for batch, shards in ((16, 13), (8, 8))
        for number in range(6)
    ]


def saturn_mix(cost: CostModel = A100, *, epochs: int = 1, memory: int | str = "40GB") -> list[TrialWork]:
    """Trials of different sizes, after Saturn's model selection (arXiv 2309.01226): GPT-2-XL and GPT-J on WikiText-2,
    batch {16, 32}; ViT-G, batch {64, 128}; three learning rates each, on A100s of 40 GB. 18 trials.

    Assumed: the combinations of models, batches and rates, bf16, context 512, one epoch of WikiText-2 and of 50,000
    images of 257 tokens. Saturn's choice of parallelism for each trial is not modelled.
    """
    gpt_j = {"layers": 28, "width": 4096, "feed_forward": 16384, "sequence": 512, "vocabulary": 50400, "heads": 16}
    vit_g = {"layers": 48, "width": 1664, "feed_forward": 8192, "sequence": 257, "vocabulary": 1000, "heads": 16}
    shapes: list[tuple[str, dict[str, Any], int, int]] = [
        *[("gpt2-xl", _GPT2_XL, batch, _text_steps(512, batch, epochs)) for batch in (16, 32)],
        *[("gpt-j", gpt_j, batch, _text_steps(512, batch, epochs)) for batch in (16, 32)],
        *[("vit-g", vit_g, batch, ceil(CIFAR_10_IMAGES / batch) * epochs) for batch in (64, 128)],
    ]
    return [
        transformer_trial(
            cost, **shape, batch=batch, steps=steps, memory=memory, weight_bytes=2, name=f"{name}-b{batch}-lr{rate}"
        )
        for name, shape, batch, steps in shapes
        for rate in ("1e-3", "1e-4", "1e-5")
    ]


def lora_sweep(cost: CostModel = RTX_4090, *, steps: int = 200) -> list[TrialWork]:
    """Adapters over one frozen base of 7B: 12 trials, rank {8, 16, 32, 64} x three learning rates. A step is 6Pn flop,
    and sends almost no gradients to the host.

    Assumed: Llama 2's shape (arXiv 2307.09288; 16512 = 1.5 x 11008, for its third feed-forward matrix), bf16,
    batches of 4 x 1024 tokens.
    """
    base = {"layers": 32, "width": 4096, "feed_forward": 16512, "sequence": 1024, "vocabulary": 32000}
    return [
        transformer_trial(
            cost,
            **base,
            batch=4,
            steps=steps,
            weight_bytes=2,
            adapter_rank=rank,
            base=0,
            name=f"r{rank}-lr{number}",
        )
        for rank in (8, 16, 32, 64)
        for number in range(3)
    ]


def lora_70b(cost: CostModel = H100, *, steps: int = 100) -> list[TrialWork]:
    """Adapters over one frozen base of 70B in bf16, which is shared: 16 trials, rank {4, 8, 16, 32} x four learning
    rates.

    Assumed: Llama 2's shape (arXiv 2307.09288; 35840 gives a layer as many weights as its grouped attention and three
    feed-forward matrices have), batches of 1024 tokens, 100 steps.
    """
    base = {"layers": 80, "width": 8192, "feed_forward": 35840, "sequence": 1024, "vocabulary": 32000}
    return [
        transformer_trial(
            cost, **base, batch=1, steps=steps, weight_bytes=2, adapter_rank=rank, base=0, name=f"r{rank}-lr{number}"
        )
        for rank in (4, 8, 16, 32)
        for number in range(4)
    ]


def asha_arrivals(seed: int = 0, *, trials: int = 27, mean_gap_s: float = 20.0) -> list[TrialWork]:
    """Trials that arrive one after another. A pruner ends two in three at each rung: ASHA (Li et al., arXiv 1810.05934)
    with reduction factor 3 and rungs at 9, 27 and 81 of 243 steps.

    Assumed: exponential gaps between arrivals, pruned trials drawn at random, shards as in `random_heterogeneous`.
    """
    rng = random.Random(seed)
    arrival_s = 0.0
    sweep = []
    for number in range(trials):
        stops_after = next((rung for rung in (9, 27, 81) if rng.random() < 2 / 3), None)
        sweep.append(
            TrialWork(243, **_random_shards(rng), name=f"asha{number}", arrival_s=arrival_s, stops_after=stops_after)
        )
        arrival_s += rng.expovariate(1 / mean_gap_s)
    return sweep


def random_heterogeneous(seed: int = 0, trials: int = 16) -> list[TrialWork]:
    """Trials with nothing in common: 1 to 8 shards, 10 to 50 steps, mean forward times of 10 ms to 1 s a shard,
    shards of 50 MB to 500 MB. From no paper. The same seed gives the same sweep on every machine."""
    rng = random.Random(seed)
    return [TrialWork(rng.randint(10, 50), **_random_shards(rng), name=f"random{n}") for n in range(trials)]


def _random_shards(rng: random.Random) -> dict[str, Any]:
    scale_s = 10 ** rng.uniform(-2, 0)
    forward_s = tuple(scale_s * rng.uniform(0.5, 1.5) for _ in range(rng.randint(1, 8)))
    return {
        "forward_s": forward_s,
        "backward_s": tuple(seconds * rng.uniform(2.5, 3.5) for seconds in forward_s),
        "shard_bytes": tuple(rng.randint(50 * 10**6, 500 * 10**6) for _ in forward_s),
    }


def _text_steps(sequence: int, batch: int, epochs: int) -> int:
    return ceil(WIKITEXT_2_TOKENS / (sequence * batch)) * epochs


_GPT2_XL = {"layers": 48, "width": 1600, "feed_forward": 6400, "sequence": 512, "vocabulary": 50257, "heads": 25}

SWEEPS: dict[str, Callable[..., list[TrialWork]]] = {
    "hydra-bert": hydra_bert,
    "hydra-vit": hydra_vit,
    "hydra-gpt2-xl": hydra_gpt2_xl,
    "saturn-mix": saturn_mix,
    "lora-sweep": lora_sweep,
    "lora-70b": lora_70b,
    "asha-arrivals": asha_arrivals,
    "random-heterogeneous": random_heterogeneous,
}


def named_or_from_file(name: str, cost: CostModel | None = None) -> list[TrialWork]:
    """The sweep with this name, or the one in the JSON file with this path.

    Args:
        cost: of the machine that the named sweep runs on; None for the sweep's own.

    Raises:
        ConfigError: there is no such sweep or file; or `cost` is given for a sweep whose seconds do not depend on it.
    """
    if name not in SWEEPS:
        if not Path(name).exists():
            raise ConfigError(f"a workload is a JSON file or one of {', '.join(SWEEPS)}; got {name!r}. Check the path.")
        return parse(name)
    if cost is None:
        return SWEEPS[name]()
    if "cost" not in signature(SWEEPS[name]).parameters:
        raise ConfigError(f"the seconds of {name} are drawn at random, whatever a machine takes. Leave --cost out.")
    return SWEEPS[name](cost=cost)
