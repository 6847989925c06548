"""Hugging Face's Trainer over a pool, those derived from it, and its hyperparameter search.

Imports `transformers` and `frameworks`; `optuna_runner` and `ray_tune` late, for a search by either.
"""
