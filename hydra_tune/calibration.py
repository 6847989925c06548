"""Measures a machine for the simulator: the rates that its devices reach while all of them work, as in a sweep."""

from __future__ import annotations

import platform
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hydra_tune.devices.device import Device
from hydra_tune.devices.open_devices import open_devices
from hydra_tune.pool.shard_pool import ShardPool
from hydra_tune.simulation.cost import ADAMW_BYTES_PER_WEIGHT, CostModel
from hydra_tune.trials.preparation import prepare, release

COPY_BYTES = 32 << 20
NUM_TRAINED = 1 << 22  # weights that the host's optimizer steps
BATCH, SEQUENCE = 8, 128
WIDTHS = {"cpu": 512, "cuda": 2048}  # of the layer that is trained
TINY_BLOCKS, TINY_BUDGET = 64, 80_000  # of the model whose tasks compute almost nothing; the budget is in bytes
_LEAST_S = 0.2  # that each repeat of a measurement takes at least


def calibrate(devices: str | Sequence[str | torch.device] = "auto", *, repeats: int = 5) -> CostModel:
    """Measure the rates of this machine, for `CostModel.save` and ``hydra-tune simulate --cost``. Takes some seconds.

    All devices are measured at the same time: those that share cores or links are as slow as in a sweep. A rate is the
    median of `repeats` on each device, and then the median of the devices.

        compute          a transformer layer in fp32: a forward, then a forward and backward
        host memory      a step of AdamW
        a task's own     a spilled model with blocks so small that they compute almost nothing, less the time that the
        time             same model takes in plain PyTorch

    The number of threads is the process's (`torch.set_num_threads`), as in a pool.

    Args:
        devices: as in `ShardPool`.

    Raises:
        ConfigError: a device is unknown.
    """
    opened = open_devices(devices, "auto")
    rates = _measure_together(opened, repeats)
    names = ", ".join(device.name for device in opened)
    return CostModel(
        flops_per_s=rates["flops_per_s"],
        h2d_bytes_per_s=rates["h2d_bytes_per_s"],
        d2h_bytes_per_s=rates["d2h_bytes_per_s"],
        host_bytes_per_s=ADAMW_BYTES_PER_WEIGHT * NUM_TRAINED / _median_s(_optimizer_step(), repeats),
        task_s=_task_overhead_s(opened[0], repeats),
        measured_on=f"{names}; torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.platform()}",
    )


def _measure_together(devices: Sequence[Device], repeats: int) -> dict[str, float]:
    """Each rate, by its name in `CostModel`: the median of the devices. Each device has a thread, and a barrier lets
    all of them measure the same rate at the same time."""
    rates_of: list[dict[str, float]] = [{} for _ in devices]
    barrier, num_threads = threading.Barrier(len(devices)), torch.get_num_threads()
    errors: list[BaseException] = []

    def measure(device: Device, rates: dict[str, float]) -> None:
        try:
            torch.set_num_threads(num_threads)
            with _work_by_rate(device) as work:
                for rate, (amount, run) in work.items():
                    barrier.wait()
                    rates[rate] = amount / _median_s(run, repeats, device)
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=measure, args=pair) for pair in zip(devices, rates_of, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return {rate: statistics.median(rates[rate] for rates in rates_of) for rate in rates_of[0]}


@contextmanager
def _work_by_rate(device: Device) -> Iterator[dict[str, tuple[float, Callable[[], Any]]]]:
    """For each rate: an amount of flop or bytes, and a function that does this amount of work."""
    torch_device = device.torch_device
    width = WIDTHS[torch_device.type]
    layer = nn.TransformerEncoderLayer(
        width, width // 64, 4 * width, dropout=0.0, batch_first=True, device=torch_device
    )
    x = torch.randn(BATCH, SEQUENCE, width, device=torch_device, requires_grad=True)
    flops = 8 * (4 + 8) * width**2 * BATCH * SEQUENCE  # P = 12 width^2: forward 2Pn, backward with a repetition 6Pn

    def train() -> None:
        with torch.no_grad():
            layer(x)
        layer(x).sum().backward()

    host, slot = torch.ones(COPY_BYTES, dtype=torch.uint8), device.slot(0, COPY_BYTES)
    device.pin(host)
    try:
        yield {
            "flops_per_s": (flops, train),
            "h2d_bytes_per_s": (COPY_BYTES, lambda: device.promote([(slot, host)])),
            "d2h_bytes_per_s": (COPY_BYTES, lambda: device.spill([slot], [slot])[1].wait()),
        }
    finally:
        device.unpin(host)
        device.free_slot(0, COPY_BYTES)


def _optimizer_step() -> Callable[[], Any]:
    weight = nn.Parameter(torch.randn(NUM_TRAINED))
    weight.grad = torch.randn(NUM_TRAINED)
    return torch.optim.AdamW([weight]).step


def _task_overhead_s(device: Device, repeats: int) -> float:
    """Seconds of a task beside its arithmetic, from a spilled trial whose blocks compute almost nothing."""
    x = torch.randn(8, 8, device=device.torch_device)
    plain, model = _tiny_model().to(device.torch_device), _tiny_model()

    def median_s(model: nn.Module) -> float:
        return _median_s(lambda: model(x).sum().backward(), repeats, device)

    budget_bytes = TINY_BUDGET
    # The first run measures what one block needs. With that as its budget, the second makes each block a shard.
    for _ in range(2):
        with ShardPool([device.torch_device], budget_bytes) as pool:
            prepare(model, pool=pool)
            model(x).sum().backward()
            (plan,) = pool.plans.values()
            budget_bytes = plan.held_bytes + plan.step_bytes + max(b.weight_bytes + b.work_bytes for b in plan.blocks)
            seconds = median_s(model)
            release(model)
    num_tasks = 2 * len(plan.shards)
    return max(0.0, seconds - median_s(plain)) / num_tasks


def _tiny_model() -> nn.Module:
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(TINY_BLOCKS)))


def _median_s(run: Callable[[], Any], repeats: int, device: Device | None = None) -> float:
    """Seconds of one run: the median of `repeats`, each of which runs as often as `_LEAST_S` allows."""
    run()
    seconds = []
    for _ in range(repeats):
        count, start = 0, time.perf_counter()
        while time.perf_counter() - start < _LEAST_S:
            run()
            if device is not None:
                device.synchronize()
            count += 1
        seconds.append((time.perf_counter() - start) / count)
    return statistics.median(seconds)
