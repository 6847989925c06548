"""A search with a real network that trains in milliseconds: scikit-learn's digits, 1797 images of 8 x 8 pixels.

Seven hyperparameters of a perceptron with one hidden layer under SGD, over ranges wide enough for most of them to be
wrong. 497 images train, 650 give the value, the cross-entropy after each epoch, and 650 are held out. What a
configuration comes to depends on it and on its trial's seed alone.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import optuna
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

EPOCHS = 30  # of a trial that is not stopped
WORST = 10.0  # a loss that has no number, or a larger one


class Split(NamedTuple):
    x_BP: torch.Tensor
    y_B: torch.Tensor


@cache
def splits() -> tuple[Split, Split, Split]:
    """To train, to compare and to test."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    x, y = torch.tensor(digits.data, dtype=torch.float32)[order] / 16, torch.tensor(digits.target)[order]
    sizes = [len(y) - 1300, 650, 650]
    train, value, test = map(Split, x.split(sizes), y.split(sizes))
    return train, value, test


class Training:
    """Of one trial's network."""

    def __init__(self, trial: optuna.Trial, seed: int) -> None:
        lr = trial.suggest_float("lr", 1e-4, 1.0, log=True)
        momentum = trial.suggest_float("momentum", 0.0, 0.99)
        weight_decay = trial.suggest_float("weight_decay", 1e-6, 1e-1, log=True)
        dropout = trial.suggest_float("dropout", 0.0, 0.7)
        width = trial.suggest_int("width", 8, 128, log=True)
        smoothing = trial.suggest_float("label_smoothing", 0.0, 0.3)
        self._batch = trial.suggest_categorical("batch", [32, 64, 128])
        self._smoothing = smoothing
        self._seed = seed
        self._epoch = 0
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Dropout(dropout), nn.Linear(width, 10))
        self._model = model
        self._optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum, weight_decay=weight_decay)

    def epoch(self) -> float:
        """One more; the value after it."""
        train, value, _ = splits()
        self._epoch += 1
        torch.manual_seed(1000 * self._seed + self._epoch)  # plain threads share one generator
        self._model.train()
        for batch in torch.randperm(len(train.y_B)).split(self._batch):
            logits = self._model(train.x_BP[batch])
            F.cross_entropy(logits, train.y_B[batch], label_smoothing=self._smoothing).backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
        return self._loss(value)

    def test(self) -> float:
        return self._loss(splits()[2])

    @torch.no_grad()
    def _loss(self, split: Split) -> float:
        self._model.eval()
        loss = F.cross_entropy(self._model(split.x_BP), split.y_B).item()
        return min(loss, WORST) if loss == loss else WORST
