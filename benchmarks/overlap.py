"""Double buffering: step time of a spilled model whose copies are slowed until they take as long as its computing.

A stack of equal layers, one a shard, on a virtual device with room for a few. Each promotion takes as long as one
task of the same direction computes, as it was measured in the same round, and a device makes one at a time. Without
double buffering a step takes the sum of both. With it, it should take the larger of the two, which are equal: the goal
is 1.10 of that.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

import torch
from torch import nn

import hydra_tune
from benchmarks.measure import interleaved, save
from hydra_tune.devices.device import Device

LAYERS, WIDTH, BATCH = 24, 2048, 256
LAYER_BYTES = WIDTH * (WIDTH + 1) * 4
SHARDS_WITH_ROOM = 3
GOAL = 1.10


class SlowLink:
    """Between the host and one device: each promotion takes `seconds`, its own copy included."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.busy_s = 0.0
        self._one = threading.Lock()

    def promote(self, copy: Callable[[], None]) -> None:
        with self._one:
            start = time.perf_counter()
            copy()
            time.sleep(max(0.0, start + self.seconds - time.perf_counter()))
            self.busy_s += time.perf_counter() - start


class Training:
    """One model on a device of its own; seconds of its last forward and backward."""

    def __init__(self, budget: int, *, double_buffering: bool) -> None:
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)]
        self.link = SlowLink()
        self.x = torch.randn(BATCH, WIDTH)
        least = 1 if double_buffering else None
        with mock.patch.object(Device, "least_ahead_bytes", least):
            self.pool = hydra_tune.ShardPool(["cpu"], budget)
        _links[id(self.pool.events.devices[0])] = self.link
        self.model = hydra_tune.prepare(nn.Sequential(*layers), pool=self.pool)
        self.forward_s = self.backward_s = 0.0
        self.step(0.0, 0.0)

    def step(self, forward_copy_s: float, backward_copy_s: float) -> None:
        self.link.busy_s, self.link.seconds = 0.0, forward_copy_s
        start = time.perf_counter()
        loss = self.model(self.x).sum()
        self.forward_s = time.perf_counter() - start
        self.link.seconds = backward_copy_s
        loss.backward()
        self.backward_s = time.perf_counter() - start - self.forward_s

    def close(self) -> None:
        hydra_tune.release(self.model)

    @property
    def shards(self) -> Sequence[dict[str, object]]:
        shards: Sequence[dict[str, object]] = self.pool.report()["trials"][0]["shards"]
        return shards


def budget_with_room() -> int:
    """Bytes for a few layers and the largest work, beside what a step holds."""
    training = Training(2 * LAYERS * LAYER_BYTES, double_buffering=False)
    (plan,) = training.pool.plans.values()
    training.close()
    return plan.held_bytes + plan.step_bytes + SHARDS_WITH_ROOM * LAYER_BYTES + max(b.work_bytes for b in plan.blocks)


_links: dict[int, SlowLink] = {}


@contextmanager
def slowed() -> Iterator[None]:
    promote = Device.promote

    def slow(device: Device, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        _links[id(device)].promote(lambda: promote(device, copies))

    with mock.patch.object(Device, "promote", slow):
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    copies: list[float] = []
    with slowed():
        budget = budget_with_room()
        plain, sums, overlapped = (Training(budget, double_buffering=ahead) for ahead in (False, False, True))
        assert len(plain.shards) == LAYERS, plain.shards

        def delays() -> tuple[float, float]:
            return plain.forward_s / LAYERS, plain.backward_s / LAYERS

        def run_overlapped() -> None:
            overlapped.step(*delays())
            copies.append(overlapped.link.busy_s)

        seconds = interleaved(
            {
                "computing": lambda: plain.step(0.0, 0.0),
                "one after another": lambda: sums.step(*delays()),
                "double buffering": run_overlapped,
            },
            rounds=options.rounds,
            warm_up=2,
        )
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    medians["copying"] = statistics.median(copies[2:])
    larger = max(medians["computing"], medians["copying"])
    figures = {
        "double buffering over the larger": medians["double buffering"] / larger,
        "one after another over the larger": medians["one after another"] / larger,
        "one after another over the sum": medians["one after another"] / (medians["computing"] + medians["copying"]),
    }
    sizes = {"layers": LAYERS, "width": WIDTH, "batch": BATCH}
    path = save("overlap_cpu", {"goal": GOAL, **sizes, "median_seconds": medians, **figures})
    for name, value in medians.items():
        print(f"{name:18} {value * 1e3:8.1f} ms")
    for name, value in figures.items():
        print(f"{name:34} {value:.3f}")
    print(path.relative_to(path.parents[2]))


if __name__ == "__main__":
    main()
