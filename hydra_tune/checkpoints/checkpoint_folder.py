"""The checkpoints of one trial, in a folder; each is there whole or not at all, and nothing is executed on reading one.

When one is written, `resumption.py` decides; what is in it, `contents.py`.

000-000000120/tensors.safetensors   of the first model that the trial prepared, after 120 mini-batches
              state.json            what is not a tensor, and the digest of both
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hydra_tune.checkpoints.plain_state import decode, encode
from hydra_tune.process.fork import gate

logger = logging.getLogger("hydra_tune")
KEPT = 2  # should the newest prove torn
_UNFINISHED = ".unfinished"
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, order=True)
class Position:
    """After so many mini-batches with the trial's model of that number, from 0."""

    model: int
    step: int

    def __str__(self) -> str:
        return f"{self.model:03d}-{self.step:09d}"


class CheckpointFolder:
    """Where one trial's checkpoints are; written by one process at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, position: Position, state: Any) -> None:
        """Write one and let go of all but the newest few. Those before are untouched should it fail.

        Raises:
            Exception: of the disk, or of safetensors.
            ConfigError: the state holds what no checkpoint can.
        """
        self.stage(position, state)
        self.publish(position)

    def stage(self, position: Position, state: Any) -> None:
        """Write one that is not there before it is published."""
        unfinished = self.path / (str(position) + _UNFINISHED)
        self.discard()
        try:
            unfinished.mkdir(parents=True)
            _write(unfinished, state)
        except BaseException:
            self.discard()
            raise

    def publish(self, position: Position) -> None:
        with gate.stepped_out():  # the disk keeps no other trial from forking its loader's workers
            place = self.path / str(position)
            shutil.rmtree(place, ignore_errors=True)
            place.with_name(place.name + _UNFINISHED).rename(place)
            _synchronise(self.path)
            for _, old in self._positions()[KEPT:]:
                shutil.rmtree(old, ignore_errors=True)

    def discard(self) -> None:
        """What was not published."""
        for unfinished in self.path.glob("*" + _UNFINISHED):
            shutil.rmtree(unfinished, ignore_errors=True)

    def newest(self) -> tuple[Position, Any] | None:
        """The newest that is sound, if there is one; says which ones are not."""
        positions = self._positions()
        for i, (position, place) in enumerate(positions):
            try:
                return position, _read(place)
            except Exception as error:  # torn in any way
                then = "the one before it is taken" if i + 1 < len(positions) else "there is none before it"
                logger.warning("the checkpoint %s is not sound (%s); %s", place, error, then)
        return None

    @property
    def last_position(self) -> str:
        """The newest one's name, sound or not."""
        return max((str(position) for position, _ in self._positions()), default="none")

    def _positions(self) -> list[tuple[Position, Path]]:
        """The newest first."""
        return sorted(self._found(), reverse=True)

    def _found(self) -> Iterator[tuple[Position, Path]]:
        for place in self.path.iterdir() if self.path.is_dir() else ():
            model, _, step = place.name.partition("-")
            if model.isdecimal() and step.isdecimal():
                yield Position(int(model), int(step)), place


def _write(place: Path, state: Any) -> None:
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(encode(state, tensors, "state"))
    with gate.stepped_out():  # as above; no operator runs from here on
        from safetensors.torch import save_file

        save_file(tensors, place / "tensors.safetensors")
        digest = _digest(place / "tensors.safetensors", text)
        (place / "state.json").write_text(json.dumps({"version": 1, "blake2b": digest, "state": text}))
        for path in (place / "tensors.safetensors", place / "state.json", place):
            _synchronise(path)


def _read(place: Path) -> Any:
    from safetensors.torch import load_file

    content = json.loads((place / "state.json").read_text())
    if content["version"] != 1:
        raise ValueError(f"written by a later version: {content['version']}")
    if _digest(place / "tensors.safetensors", content["state"]) != content["blake2b"]:
        raise ValueError("its content is not what was written")
    return decode(json.loads(content["state"]), load_file(place / "tensors.safetensors"))


def _digest(path: Path, text: str) -> str:
    digest = hashlib.blake2b(text.encode())
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _synchronise(path: Path) -> None:
    """With the disk."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
