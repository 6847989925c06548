"""Owns what a thread draws random numbers from: a trial's own generators, and records by which draws are repeated."""

from hydra_tune.randomness.draw_record import DrawRecord, drawing_again
from hydra_tune.randomness.trial_state import RandomState, drawing_from, hold

__all__ = ["DrawRecord", "RandomState", "drawing_again", "drawing_from", "hold"]
