"""Owns where a thread's random numbers come from: generators of each trial, and records that let draws be repeated."""

from hydra_tune.randomness.draw_record import DrawRecord, drawing_again
from hydra_tune.randomness.random_state import RandomState, drawing_from, hold

__all__ = ["DrawRecord", "RandomState", "drawing_again", "drawing_from", "hold"]
