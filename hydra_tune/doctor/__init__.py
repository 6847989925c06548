"""Examines a machine for `hydra_tune`: what works here, what is slow, what will not work, and what to do."""
