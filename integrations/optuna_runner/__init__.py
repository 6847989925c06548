"""Optuna's studies over a pool: the runner, its searches, ask-and-tell, pruning. Imports Optuna and `frameworks`."""
