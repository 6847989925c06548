"""Tries each device as a pool would use it, and measures how fast it copies and computes, each for a moment.

A block hides its promotion behind computing if it has enough flop for each byte. A spilled step promotes each weight
twice, 2b bytes for b bytes a weight, and computes 8 flop for each weight and token: a forward of 2, and a backward of 6
with the repeated forward. At F flop/s and W bytes/s promotions are hidden from n = bF/4W tokens on.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from hydra_tune.config import format_bytes
from hydra_tune.devices.device import Device
from hydra_tune.devices.nvml import NvmlReading
from hydra_tune.devices.open_devices import open_devices
from hydra_tune.devices.torch_build import TorchBuild
from hydra_tune.doctor.finding import Finding
from hydra_tune.doctor.gpus import find_nvml, link_bytes_per_s
from hydra_tune.errors import ConfigError

COPY_BYTES = 32 << 20
MOST_S = 1.2  # of all measurements together, beside their first runs
SIDES = {"cpu": 1024, "cuda": 4096}  # of the matrices that are multiplied
DTYPES = {"cpu": torch.float32, "cuda": torch.float16}
SLOW = 0.5  # of what a link can carry


@dataclass(frozen=True)
class DeviceRates:
    """Each measured alone, per second. `is_pinned` says whether the host's side could be pinned."""

    h2d_bytes_per_s: float
    d2h_bytes_per_s: float
    flops_per_s: float
    is_pinned: bool = False


def copy_findings(
    devices: str | Sequence[str | torch.device], nvml: NvmlReading, build: TorchBuild, *, measures: bool
) -> list[Finding]:
    """One finding for each device: what it reaches, or why it cannot be used. Without `measures` only the latter."""
    names = _names(devices, build)
    findings = []
    for name in names:
        try:
            (device,) = open_devices([name], COPY_BYTES)
            torch.ones(1, device=device.torch_device).add_(1).item()  # a kernel: has this build any for this device?
            if measures:
                rates = measure(device, MOST_S / (3 * len(names)))
                findings.append(_finding(device, rates, _link_bytes_per_s(device, nvml, build)))
        except (ConfigError, RuntimeError, OSError) as error:
            findings.append(_failed(name, error))
    return findings


def _names(devices: str | Sequence[str | torch.device], build: TorchBuild) -> list[str]:
    """Each once. A device that is named twice is one that two share."""
    if devices == "auto":
        return [f"cuda:{i}" for i in range(len(build.gpus))] or ["cpu"]
    return list(dict.fromkeys([str(devices)] if isinstance(devices, (str, torch.device)) else map(str, devices)))


def measure(device: Device, seconds: float) -> DeviceRates:
    """Copy and compute for about so many seconds each."""
    host, slot = torch.ones(COPY_BYTES, dtype=torch.uint8), device.slot(0, COPY_BYTES)
    kind = device.torch_device.type
    matrix = torch.ones(SIDES[kind], SIDES[kind], dtype=DTYPES[kind], device=device.torch_device)
    device.pin(host)
    try:
        return DeviceRates(
            h2d_bytes_per_s=COPY_BYTES / _run_s(lambda: device.promote([(slot, host)]), device, seconds),
            d2h_bytes_per_s=COPY_BYTES / _run_s(lambda: device.spill([slot], [slot])[1].wait(), device, seconds),
            flops_per_s=2 * SIDES[kind] ** 3 / _run_s(lambda: matrix @ matrix, device, seconds),
            is_pinned=not device.is_virtual and host.is_pinned(),
        )
    finally:
        device.unpin(host)
        device.free_slot(0, COPY_BYTES)


def _run_s(run: Callable[[], object], device: Device, seconds: float) -> float:
    """Seconds of one run, the median of those that fit into `seconds`; the first is not counted."""
    run()
    device.synchronize()
    runs_s: list[float] = []
    while sum(runs_s) < seconds:
        start = time.perf_counter()
        run()
        device.synchronize()
        runs_s.append(time.perf_counter() - start)
    return statistics.median(runs_s)


def _link_bytes_per_s(device: Device, nvml: NvmlReading, build: TorchBuild) -> float | None:
    if device.is_virtual:
        return None
    known = find_nvml(build.gpus[device.torch_device.index or 0], nvml)
    return None if known is None else link_bytes_per_s(known)


def _finding(device: Device, rates: DeviceRates, link: float | None) -> Finding:
    how = "" if device.is_virtual else " (pinned)" if rates.is_pinned else " (not pinned)"
    found = (
        f"{device.name}: host to device {_gigabytes(rates.h2d_bytes_per_s)}, "
        f"device to host {_gigabytes(rates.d2h_bytes_per_s)}{how}"
    )
    figures = {
        "device": device.name,
        "h2d_bytes_per_s": rates.h2d_bytes_per_s,
        "d2h_bytes_per_s": rates.d2h_bytes_per_s,
        "flops_per_s": rates.flops_per_s,
    }
    meaning = _hides(device, rates)
    if not device.is_virtual and not rates.is_pinned:
        to_do = f"Free host memory, raise the container's limit, or ulimit -l: {format_bytes(COPY_BYTES)} were refused."
        return Finding("copies", "note", found, f"Pinning failed, so copies are slow. {meaning}", to_do, figures)
    if link is not None and min(rates.h2d_bytes_per_s, rates.d2h_bytes_per_s) < SLOW * link:
        meaning = f"The link can carry {_gigabytes(link)} each way. {meaning}"
        to_do = "See whether others copy, and whether the process runs on the socket of the GPU (numactl)."
        return Finding("copies", "note", found, meaning, to_do, figures)
    return Finding("copies", "ok", found, meaning, figures=figures)


def _hides(device: Device, rates: DeviceRates) -> str:
    kind = device.torch_device.type
    tokens = DTYPES[kind].itemsize * rates.flops_per_s / (4 * rates.h2d_bytes_per_s)
    intensity = rates.flops_per_s / rates.h2d_bytes_per_s
    return (
        f"A millisecond promotes {rates.h2d_bytes_per_s / 1e9:.1f} MB of weights. Matrix products reach "
        f"{_flops(rates.flops_per_s)} in {str(DTYPES[kind]).partition('.')[2]}. So promotions hide behind computing "
        f"where there are {_two_digits(intensity)} flop for a byte: in training, from about {_two_digits(tokens)} "
        "tokens a batch on."
    )


def _two_digits(amount: float) -> int:
    return max(1, int(float(f"{amount:.2g}")))


def _flops(flops_per_s: float) -> str:
    return f"{flops_per_s / 1e12:.3g} TFLOP/s" if flops_per_s >= 1e12 else f"{flops_per_s / 1e9:.3g} GFLOP/s"


def _gigabytes(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.1f} GB/s"


def _failed(name: str, error: Exception) -> Finding:
    words = " ".join(str(error).split())
    found = f"{name} cannot be used: {words[:300]}{'...' * (len(words) > 300)}"
    to_do = "" if isinstance(error, ConfigError) else "Make it work in plain PyTorch first."
    return Finding("devices", "problem", found, "A pool with this device fails in the same way.", to_do)
