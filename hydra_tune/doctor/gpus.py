"""Findings about GPUs: the driver beside torch's build, and each GPU's memory, link and division (MIG)."""

from __future__ import annotations

from collections.abc import Mapping

from hydra_tune.config import format_bytes
from hydra_tune.devices.nvml import NvmlGpu, NvmlReading
from hydra_tune.devices.open_devices import CUDA_MARGIN_BYTES
from hydra_tune.devices.torch_build import TorchBuild, TorchGpu
from hydra_tune.doctor.finding import Finding

WIDTH = 16  # lanes of PCIe that a card has which is made for computing
LANE_BYTES_PER_S = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}  # by PCIe's generation
_BUSY = 10  # a tenth of the memory is more than what a driver and a desktop take


def gpu_findings(nvml: NvmlReading, build: TorchBuild, environment: Mapping[str, str]) -> list[Finding]:
    """What there is to say before any GPU is used. Devices are in torch's order; their UUIDs tell which is which."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if not build.gpus:
        listed = [f for i, gpu in enumerate(nvml.gpus) for f in _gpu(f"GPU {i} (by NVML)", gpu, None)]
        return [_without_gpus(nvml, build, visible), *listed]
    findings = [_driver(nvml, build)]
    seen = [find_nvml(gpu, nvml) for gpu in build.gpus]
    for index, (gpu, known) in enumerate(zip(build.gpus, seen, strict=True)):
        findings += _gpu(f"cuda:{index}", known, gpu) if known else [_unknown(f"cuda:{index}", gpu)]
    hidden = [gpu for gpu in nvml.gpus if gpu not in seen]
    return findings + ([_hidden(hidden, len(nvml.gpus), visible)] if hidden and any(seen) else [])


def find_nvml(gpu: TorchGpu, nvml: NvmlReading) -> NvmlGpu | None:
    """What NVML says of torch's GPU; for an instance of a divided GPU, of the whole card."""
    for known in nvml.gpus:
        uuids = [known.uuid, *(instance.uuid for instance in known.instances)]
        if gpu.uuid and any(uuid and uuid.partition("-")[2] == gpu.uuid for uuid in uuids):
            return known
    return None


def link_bytes_per_s(gpu: NvmlGpu) -> float | None:
    """What the link of a card carries each way, by PCIe's figures; None if they are not known."""
    lane = LANE_BYTES_PER_S.get(gpu.most_link_generation or 0)
    return None if lane is None or not gpu.link_width else lane * gpu.link_width


# ---- torch finds no GPU ----

_VIRTUAL = "Trials run on a virtual device: a part of host memory, with a budget. All works, at the CPU's speed."


def _without_gpus(nvml: NvmlReading, build: TorchBuild, visible: str | None) -> Finding:
    if nvml.gpus:
        return _unused(nvml, build, visible)
    if nvml.cause == "other":
        return Finding(
            "devices",
            "problem",
            f"NVIDIA's driver does not answer: {nvml.error}",
            "No GPU can be used. " + _VIRTUAL,
            "Restart the machine if the driver was updated, or else the container. nvidia-smi should work first.",
        )
    if nvml.cause == "package":
        return Finding("devices", "note", f"no GPU ({build.name}), and nvidia-ml-py is missing", _VIRTUAL, _PACKAGE)
    why = nvml.error or "the driver is here, but no GPU"
    to_do = "" if nvml.error and not build.cuda else "If there is a GPU: install its driver; in Docker, --gpus all."
    return Finding("devices", "note", f"no GPU ({why}); {build.name}", _VIRTUAL, to_do)


_PACKAGE = 'pip install "nvidia-ml-py>=12"'


def _unused(nvml: NvmlReading, build: TorchBuild, visible: str | None) -> Finding:
    """The driver has GPUs, and torch has none."""
    names = ", ".join(gpu.name or "a GPU" for gpu in nvml.gpus)
    found = f"{names}, {_driver_name(nvml)}; but {build.name}, finds none"
    if build.cuda is None and build.rocm is None:
        return _problem(found, "This torch cannot use a GPU. " + _VIRTUAL, _install_cuda_build(nvml))
    if visible is not None and (not visible.strip() or visible.strip().startswith("-1")):
        words = f"CUDA_VISIBLE_DEVICES={visible!r} hides all of {len(nvml.gpus)} GPUs"
        return Finding("devices", "note", words, _VIRTUAL, "Unset CUDA_VISIBLE_DEVICES to use them.")
    if build.cuda and nvml.cuda and nvml.cuda[0] < int(build.cuda.partition(".")[0]):
        return _problem(
            found,
            f"The driver runs CUDA up to {nvml.cuda[0]}.{nvml.cuda[1]}: it is too old for this torch.",
            f"Update the driver, or fit torch to it. {_install_cuda_build(nvml)}",
        )
    if all(gpu.has_mig and not gpu.instances for gpu in nvml.gpus):
        return _problem(found, "MIG is on, but no instance is made.", f"{_MAKE_INSTANCE}, or turn MIG off.")
    said = f" torch says: {build.words}" if build.words else ""
    hint = "" if visible is None else f" CUDA_VISIBLE_DEVICES is {visible!r}: check that it names one of them."
    to_do = f"Make python -c 'import torch; torch.zeros(1).cuda()' work.{hint}"
    return _problem(found, f"No GPU can be used.{said}", to_do)


_MAKE_INSTANCE = "Make an instance (nvidia-smi mig -cgi PROFILE -C)"


def _problem(found: str, meaning: str, to_do: str) -> Finding:
    return Finding("devices", "problem", found, meaning, to_do)


def _install_cuda_build(nvml: NvmlReading) -> str:
    """One that the driver can run: within one major version of CUDA, older drivers run newer builds."""
    if nvml.cuda is not None and nvml.cuda < (12, 0):
        return "The builds of torch that hydra_tune needs are for CUDA 12 and newer: update the driver first."
    index = "cu130" if nvml.cuda is not None and nvml.cuda >= (13, 0) else "cu126"
    line = f"pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/{index}"
    return f"Install a CUDA build: {line} (pytorch.org has the line for other versions)"


def _driver_name(nvml: NvmlReading) -> str:
    cuda = "" if nvml.cuda is None else f" (for CUDA up to {nvml.cuda[0]}.{nvml.cuda[1]})"
    return f"driver {nvml.driver or 'of unknown version'}{cuda}"


# ---- torch finds some ----


def _driver(nvml: NvmlReading, build: TorchBuild) -> Finding:
    if nvml.error and not build.rocm:
        found = f"{build.name}; {'nvidia-ml-py is missing' if nvml.cause == 'package' else f'NVML: {nvml.error}'}"
        meaning = "Links, MIG and other processes on the GPUs are not known. hydra_tune works without NVML."
        return Finding("devices", "note", found, meaning, _PACKAGE if nvml.cause == "package" else "")
    if build.rocm:
        return Finding("devices", "note", build.name, "hydra_tune is tested with CUDA and on the CPU, not with ROCm.")
    return Finding("devices", "ok", f"{_driver_name(nvml)}; {build.name}", "The driver runs this build.")


def _unknown(name: str, gpu: TorchGpu) -> Finding:
    """A GPU that torch has and NVML does not tell of."""
    total = {"total_bytes": gpu.total_bytes}
    meaning = "A pool takes what is free when it is made, less 512 MiB."
    return Finding("devices", "ok", f"{name}: {gpu.name}, {format_bytes(gpu.total_bytes)}", meaning, figures=total)


def _hidden(hidden: list[NvmlGpu], total: int, visible: str | None) -> Finding:
    why = "by torch" if visible is None else f"by CUDA_VISIBLE_DEVICES={visible!r}"
    found = f"{len(hidden)} of {total} GPUs not used {why}: {', '.join(gpu.name or 'a GPU' for gpu in hidden)}"
    return Finding("devices", "note", found, 'devices="auto" is every GPU that torch finds.')


def _gpu(name: str, known: NvmlGpu, gpu: TorchGpu | None) -> list[Finding]:
    findings = [_memory(name, known, gpu)]
    if known.has_mig:
        findings.append(_mig(name, known))
    if (link := _link(name, known)) is not None:
        findings.append(link)
    if known.unread:
        found = f"{name}: NVML does not tell {_reasons(known.unread)}"
        findings.append(Finding("devices", "note", found, "hydra_tune works without. Some checks are left out."))
    return findings


def _reasons(unread: Mapping[str, str]) -> str:
    """Names by reason: "PCIe width, memory (Not Supported)"."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in unread.items():
        by_reason.setdefault(reason, []).append(name)
    return "; ".join(f"{', '.join(names)} ({reason})" for reason, names in by_reason.items())


def _memory(name: str, known: NvmlGpu, gpu: TorchGpu | None) -> Finding:
    """By NVML; of an instance, if torch's GPU is one."""
    free_bytes, total_bytes = known.free_bytes, known.total_bytes
    for instance in known.instances:
        if gpu is not None and instance.uuid.partition("-")[2] == gpu.uuid:
            free_bytes, total_bytes = instance.free_bytes, instance.total_bytes
    label = f"{name}: {known.name or 'a GPU'}"
    if free_bytes is None or total_bytes is None:
        total = "memory unknown" if gpu is None else format_bytes(gpu.total_bytes)
        return Finding("devices", "ok", f"{label}, {total}", "A pool takes what is free when it is made, less 512 MiB.")
    found = f"{label}, {format_bytes(free_bytes)} of {format_bytes(total_bytes)} free"
    figures = {"free_bytes": free_bytes, "total_bytes": total_bytes}
    budget_bytes = free_bytes - CUDA_MARGIN_BYTES
    if gpu is None:
        return Finding("devices", "ok", found, "Not used: torch finds no GPU.", figures=figures)
    if budget_bytes <= 0:
        return Finding(
            "devices",
            "problem",
            found + _others(known),
            "A pool leaves 512 MiB for CUDA itself, so nothing is left for trials.",
            f"End what uses {name}, or leave it out: devices=[...] without {name!r}.",
            figures,
        )
    taken = f'memory="auto" is {format_bytes(budget_bytes)} now.'
    if total_bytes - free_bytes <= total_bytes // _BUSY:
        return Finding("devices", "ok", found, taken, figures=figures)
    meaning = f"{format_bytes(total_bytes - free_bytes)} are in use. {taken} If others take more, trials may fail."
    to_do = "End what uses it, or set memory= to what will be left."
    return Finding("devices", "note", found + _others(known), meaning, to_do, figures)


def _others(known: NvmlGpu) -> str:
    told = [
        f"process {pid}" + ("" if used is None else f" ({format_bytes(used)})") for pid, used in known.others[:4]
    ] + ["more"] * (len(known.others) > 4)
    return f"; used by {', '.join(told)}" if told else "; used by processes that are not seen from here"


def _mig(name: str, known: NvmlGpu) -> Finding:
    n = len(known.instances)
    found = f"{name}: MIG is on, {n} instance{'s' * (n != 1)}"
    meaning = (
        "An instance is a device of its own. CUDA shows a process one of them in most drivers, so a pool has one. "
        "All of them share the card's link: copies are slower while others copy."
    )
    to_do = "To use the others: one process for each, with CUDA_VISIBLE_DEVICES=MIG-... (nvidia-smi -L has the names)."
    return Finding("devices", "note", found, meaning, to_do if n > 1 else "" if n else f"{_MAKE_INSTANCE}.")


def _link(name: str, known: NvmlGpu) -> Finding | None:
    generation, width, rate = known.most_link_generation, known.link_width, link_bytes_per_s(known)
    if generation is None or not width:
        return None
    found, to_do = f"{name}: PCIe generation {generation} x{width}", ""
    if width < (most := known.most_link_width or WIDTH) or most < WIDTH:
        found += f" of x{max(most, WIDTH)}"
        to_do = "Use a slot with all lanes; a second card may halve them. Some cards have x8 by design."
    elif (card := known.card_generation or generation) > generation:
        found += f", of a card for generation {card}"
        to_do = "Use a slot of that generation, or set it in the BIOS."
    if known.link_generation is not None and known.link_generation < generation:
        found += f" (now {known.link_generation}: an idle card slows its link)"
    meaning = "Spilled weights and gradients go over it" + (
        f", at most {rate / 1e9:.1f} GB/s each way." if rate else "."
    )
    figures = {"link_generation": generation, "link_width": width, "link_bytes_per_s": rate}
    return Finding("devices", "note" if to_do else "ok", found, meaning, to_do, figures)
