"""States of trials that their pool keeps, for those that report no checkpoints of their own.

Schedulers of Tune's pause trials, or have one go on from another's weights. That needs a checkpoint, but a function
that calls `hydra_tune.resume_step` need not write any. Its pool can: it keeps the last state of each trial in host
memory while there is room, and gives Tune the same as a checkpoint.
"""

from __future__ import annotations

import json
import uuid
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from hydra_tune.checkpoints.checkpoint_folder import CheckpointFolder, Position
from hydra_tune.checkpoints.plain_state import decode, encode
from hydra_tune.devices.meter import CountingPaused
from hydra_tune.devices.tensor_bytes import tensor_bytes
from hydra_tune.errors import ResumeError
from hydra_tune.trials.context import Context

_MARK = "hydra_tune.json"  # tells a checkpoint of ours from one of the function's own


class KeptState:
    """Of one trial: copies of its tensors, which take host memory beside the trial's own, and all else as text."""

    def __init__(self, trial_id: str, position: Position, state: Any) -> None:
        self.name = uuid.uuid4().hex
        self.trial_id = trial_id
        self._position = position
        tensors: dict[str, Any] = {}
        self._text = json.dumps(encode(state, tensors, "state"))
        self._tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        self.num_bytes = len(self._text) + sum(map(tensor_bytes, self._tensors.values()))

    @classmethod
    def of(cls, context: Context, trial_id: str) -> KeptState:
        """In the trial's thread, where it reports.

        Raises:
            ResumeError: nobody could go on from it.
        """
        live = [trial for trial in context.trials if not trial.ended]
        if not live or context.resumption is None:
            raise ResumeError("it has no prepared model now")
        (trial,) = live
        trial.boundary()
        with CountingPaused():
            position, state = context.resumption.now(trial.model, trial.optimizer)
            return cls(trial_id, position, state)

    def newest(self) -> tuple[Position, Any]:
        """Copies: the one that goes on from them will change them."""
        return self._position, decode(json.loads(self._text), self._tensors)

    def write(self, directory: str) -> None:
        CheckpointFolder(Path(directory)).write(self._position, decode(json.loads(self._text), self._tensors))
        Path(directory, _MARK).write_text(json.dumps({"name": self.name, "trial_id": self.trial_id}))


def _mark_of(checkpoint: Any) -> dict[str, str] | None:
    path = f"{checkpoint.path}/{_MARK}"
    if not checkpoint.filesystem.get_file_info(path).is_file:
        return None
    with checkpoint.filesystem.open_input_stream(path) as file:
        said: dict[str, str] = json.loads(file.read())
    return said


class KeptStates:
    """The last one of each of a pool's trials, live or paused. Where they take more than `room_bytes()`, the oldest are
    dropped: these trials go on from a checkpoint. Thread-safe."""

    def __init__(self, room_bytes: Callable[[], float]) -> None:
        self._room_bytes = room_bytes
        self._of: OrderedDict[str, KeptState] = OrderedDict()  # by trial, the last one last
        self._lock = Lock()
        self.continued = {"in_memory": 0, "from_checkpoint": 0}  # attempts that have gone on from either

    def keep(self, state: KeptState) -> None:
        with self._lock:
            self._of[state.trial_id] = state
            self._of.move_to_end(state.trial_id)
            room_bytes = self._room_bytes()
            while self._of and sum(each.num_bytes for each in self._of.values()) > room_bytes:
                self._of.popitem(last=False)

    def forget(self, trial_id: str) -> None:
        """It has ended, or its state is out of date."""
        with self._lock:
            self._of.pop(trial_id, None)

    def named(self, name: str) -> KeptState | None:
        with self._lock:
            return next((each for each in self._of.values() if each.name == name), None)

    def found_in(self, checkpoint: Any) -> Found | None:
        """What a `ray.tune.Checkpoint` says to go on from, if it is one of ours.

        Raises:
            ResumeError: it is, but it is not sound.
        """
        said = _mark_of(checkpoint)
        if said is None:
            return None
        held = self.named(said["name"])
        if held is not None:
            newest: tuple[Position, Any] | None = held.newest()
        else:
            with checkpoint.as_directory() as directory:  # from wherever it is stored
                newest = CheckpointFolder(Path(directory)).newest()
        if newest is None:
            raise ResumeError(f"a trial goes on from its checkpoint, but that at {checkpoint.path} is not sound.")
        where = "in_memory" if held is not None else "from_checkpoint"
        with self._lock:
            self.continued[where] += 1
        return Found(*newest)


@dataclass(frozen=True)
class Found:
    """What to go on from."""

    position: Position
    state: Any

    def newest(self) -> tuple[Position, Any]:
        return self.position, self.state
