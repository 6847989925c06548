"""Optuna: the runner, its searches, ask-and-tell, pruning and recovery."""
