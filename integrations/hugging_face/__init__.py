"""Hugging Face's Trainer and those made from it, and its hyperparameter search."""
