"""Owns what a thread draws random numbers from: a trial's own generators, and records by which draws are repeated."""

from hydra_tune.randomness.draw_record import DrawRecord, drawing_again, noting_draws, rewind, state_kept
from hydra_tune.randomness.trial_state import RandomState, hold, hold_unheld, let_go, make_current, own_devices

__all__ = [
    "DrawRecord", "RandomState", "drawing_again", "hold", "hold_unheld", "let_go", "make_current", "noting_draws",
    "own_devices", "rewind", "state_kept",
]  # fmt: skip
