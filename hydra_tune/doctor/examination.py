"""Examines the machine: asks NVML, torch, the system and the installed packages, and tries each device."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from hydra_tune.devices.nvml import read_nvml
from hydra_tune.devices.torch_build import read_torch
from hydra_tune.doctor.copies import copy_findings
from hydra_tune.doctor.finding import Finding
from hydra_tune.doctor.gpus import gpu_findings
from hydra_tune.doctor.host import host_findings, read_host
from hydra_tune.doctor.versions import version_findings


def examine(devices: str | Sequence[str | torch.device] = "auto", *, measures: bool = True) -> list[Finding]:
    """Everything that decides whether and how fast hydra_tune works here. Takes some seconds with `measures`.

    Without a GPU, a driver or NVML it says so. `exit_status` in `finding.py` says whether something will not work,
    `table` in `table.py` draws the findings.

    Args:
        devices: as in `ShardPool`; each is opened, and one kernel is run there.
        measures: whether copies and matrix products are timed, one device after another.
    """
    nvml, host = read_nvml(), read_host()  # before torch takes memory of a device for itself
    build = read_torch()
    tried = copy_findings(devices, nvml, build, measures=measures)
    return [
        *gpu_findings(nvml, build, os.environ),
        *(finding for finding in tried if finding.area == "devices"),
        *host_findings(host, sum(gpu.total_bytes for gpu in build.gpus)),
        *(finding for finding in tried if finding.area == "copies"),
        *version_findings(),
    ]
