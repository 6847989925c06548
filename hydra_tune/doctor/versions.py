"""Findings about versions: of Python, of hydra_tune and of the libraries that it works with.

The least versions are those that hydra_tune's own package requires, read from its metadata. No library is imported.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib import metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

import hydra_tune
from hydra_tune.doctor.finding import Finding, Level

LIBRARIES = ("torch", "optuna", "ray", "transformers", "accelerate", "lightning", "peft")
PACKAGE = "hydra-tune"


def version_findings() -> list[Finding]:
    """One of all versions, then one of each that is too old."""
    versions = {name: version for name in LIBRARIES if (version := installed(name)) is not None}
    if installed(PACKAGE) is None:
        meaning = "Which versions hydra_tune needs is read from its installed package, so these are not checked."
        return [_all(versions, "note", meaning, "pip install -e . in the checkout")]
    required = least_versions()
    old = [_too_old(required[name], versions[name]) for name in versions if is_too_old(required, name, versions[name])]
    if old:
        return [_all(versions, "ok", "All but those below are as new as hydra_tune needs."), *old]
    return [_all(versions, "ok", "All are as new as hydra_tune needs.")]


def installed(name: str) -> str | None:
    """The version of this distribution, if it is here."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def least_versions() -> dict[str, Requirement]:
    """What hydra_tune requires of each library, its extras included."""
    required: dict[str, Requirement] = {}
    for requirement in map(Requirement, metadata.requires(PACKAGE) or ()):
        name = canonicalize_name(requirement.name)
        if name in required:
            requirement.specifier &= required[name].specifier
        required[name] = requirement
    return required


def is_too_old(required: Mapping[str, Requirement], name: str, version: str) -> bool:
    """Whether the version is none of those that are required. A build before a release, as in NVIDIA's containers,
    counts as the release."""
    if name not in required:
        return False
    try:
        release = Version(version).base_version
    except InvalidVersion:  # somebody's own build
        return False
    return not required[name].specifier.contains(release)


def _all(versions: Mapping[str, str], level: Level, meaning: str, to_do: str = "") -> Finding:
    python, own = platform.python_version(), hydra_tune.__version__
    found = f"Python {python}, hydra_tune {own}, " + ", ".join(f"{name} {v}" for name, v in versions.items())
    absent = [name for name in LIBRARIES if name not in versions]
    if absent:
        found += f"; not installed: {', '.join(absent)}"
    return Finding("versions", level, found, meaning, to_do, {"python": python, "hydra_tune": own, **versions})


def _too_old(requirement: Requirement, version: str) -> Finding:
    extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
    needed = f"{requirement.name}{extras}{requirement.specifier}"
    found = f"{requirement.name} {version}, but hydra_tune needs {requirement.name}{requirement.specifier}"
    meaning = f"hydra_tune is not tested with this version, and may fail with {requirement.name}."
    return Finding("versions", "problem", found, meaning, f'pip install "{needed}"')
