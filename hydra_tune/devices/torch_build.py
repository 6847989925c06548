"""What PyTorch itself says of its build and of the GPUs that it finds, as plain data."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TorchGpu:
    """A GPU by its place in torch's order. `uuid` has no prefix; NVML's begins with "GPU-" or "MIG-"."""

    name: str
    uuid: str
    total_bytes: int


@dataclass(frozen=True)
class TorchBuild:
    """`cuda` is the version that torch is built for: None in a build for the CPU or for ROCm. `words` are what torch
    says when it finds no GPU that it can use, such as that the driver is too old."""

    version: str
    cuda: str | None
    rocm: str | None
    gpus: tuple[TorchGpu, ...] = ()
    words: str = ""

    @property
    def name(self) -> str:
        built_for = f"CUDA {self.cuda}" if self.cuda else f"ROCm {self.rocm}" if self.rocm else "the CPU only"
        return f"torch {self.version}, built for {built_for}"


def read_torch() -> TorchBuild:
    """Ask torch for its GPUs, without a CUDA context. Its warnings become `words`, and so does an error."""
    gpus: tuple[TorchGpu, ...] = ()
    said: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            if torch.cuda.is_available():
                gpus = tuple(_gpu(index) for index in range(torch.cuda.device_count()))
        except (RuntimeError, AssertionError) as error:
            said.append(str(error))
    said += [str(warning.message) for warning in caught]
    words = " ".join(" ".join(said).split())
    return TorchBuild(str(torch.__version__), torch.version.cuda, torch.version.hip, gpus, words)


def _gpu(index: int) -> TorchGpu:
    found = torch.cuda.get_device_properties(index)
    return TorchGpu(str(found.name), str(getattr(found, "uuid", "")), int(found.total_memory))
