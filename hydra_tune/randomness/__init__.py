"""Owns what a thread draws random numbers from: a trial's own generators, and records by which draws are repeated."""

from hydra_tune.randomness.draw_record import DrawRecord, drawing_again, noting_draws, rewind, state_kept
from hydra_tune.randomness.kernels import draws, install
from hydra_tune.randomness.trial_state import (
    RandomState,
    current_state,
    has_own_state,
    hold,
    hold_unheld,
    let_go,
    make_current,
)

__all__ = [
    "DrawRecord", "RandomState", "current_state", "drawing_again", "draws", "has_own_state", "hold", "hold_unheld",
    "install", "let_go", "make_current", "noting_draws", "rewind", "state_kept",
]  # fmt: skip
