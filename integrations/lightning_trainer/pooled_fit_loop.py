"""A Trainer's fit loop, which writes a checkpoint at an epoch's end where the search wants one."""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger("hydra_tune")


class PooledFitLoop:
    """Comes before a fit loop's own class."""

    trainer: Any
    epoch_loop: Any

    def on_advance_end(self) -> None:
        """An epoch has ended, with all callbacks and schedules. Lightning goes on exactly from here alone: in the
        middle of an epoch it would begin a new order of the data."""
        super().on_advance_end()  # type: ignore[misc]
        checkpoints, step = self.trainer.pool_state.checkpoints, self.epoch_loop.batch_progress.total.ready
        if checkpoints is not None and checkpoints.is_due(step):
            path = checkpoints.folder / f"training-{checkpoints.number}-step-{step}.ckpt"
            try:
                self.trainer.save_checkpoint(path)
                checkpoints.note(path, step, was_due=True)
            except OSError as error:  # a full disk
                logger.warning("no checkpoint could be written to %s (%s); the training goes on", path, error)
