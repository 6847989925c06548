"""The best value found against the epochs spent: Optuna one trial at a time, Optuna's n_jobs=8, and ours at 8.

Each arm searches `digits` until as many epochs are spent as 64 full trainings have. The best is `study.best_value` by
then, of trials that have finished: what was spent on those under way is lost. All arms have one device, which trains an
epoch at a time, so equal compute is equal wall time.

    sequential                 Optuna's defaults: TPESampler, MedianPruner
    sequential, our sampler    the same, with the sampler of ours
    n_jobs=8                   Optuna's defaults; the threads in turn
    ours                       HydraTrialRunner(concurrency=8), RungPruner, TPESampler with Hyperopt's gamma; the turns
                               as ShardPool(policy="oldest-first") gives them to trials that keep their device busy

TPE takes the best of the finished trials for good, the best tenth of all trials by default. Where most are stopped
early, that is half of those that finish; Hyperopt's sqrt(n) / 4 (Bergstra et al., 2013) is stricter.
What depends on threads is fixed: whose turn it is (`turns`), and the sampler's seed, which Optuna's threads would draw
anew. Hyperparameters are drawn when a trial begins. Our trials train in plain PyTorch within the runner, for `prepare`
gives the same bits: the search is compared, not the training. Mann-Whitney, one-sided: are our values larger? Settings
were chosen with other seeds.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import ceil, inf, sqrt
from typing import Any

import optuna
import scipy
import sklearn
import torch
from scipy.stats import mannwhitneyu

import hydra_tune
from benchmarks.digits import EPOCHS, WORST, Training
from benchmarks.measure import RESULTS, save
from benchmarks.picture import curves
from benchmarks.turns import Turns

BUDGET = 64 * EPOCHS  # epochs
CURVE = tuple(range(EPOCHS, BUDGET + 1, EPOCHS))
TESTED = tuple(BUDGET * quarter // 4 for quarter in (1, 2, 3, 4))
SEED_STRIDE = 100_000


def hyperopt_gamma(num_trials: int) -> int:
    return min(ceil(sqrt(num_trials) / 4), 25)


@dataclass(frozen=True)
class Arm:
    pruner: Callable[[], optuna.pruners.BasePruner]
    gamma: Callable[[int], int] | None = None
    jobs: int = 1
    ours: bool = False


ARMS = {
    "sequential": Arm(optuna.pruners.MedianPruner),
    "sequential, our sampler": Arm(optuna.pruners.MedianPruner, hyperopt_gamma),
    "n_jobs=8": Arm(optuna.pruners.MedianPruner, jobs=8),
    "ours": Arm(lambda: hydra_tune.RungPruner(1, reduction_factor=4), hyperopt_gamma, jobs=8, ours=True),
}


@dataclass(frozen=True)
class Finished:
    """A trial that nobody has stopped, by when so many epochs were spent: its value, and its loss on the test split."""

    spent: int
    value: float
    test: float


@dataclass
class Search:
    """One arm with one seed."""

    arm: Arm
    seed: int
    trials: int = 0
    finished: list[Finished] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._turns = Turns(self.arm.jobs, BUDGET)

    def run(self) -> None:
        sampler = optuna.samplers.TPESampler(seed=self.seed, gamma=self.arm.gamma)
        sampler.reseed_rng = lambda: None  # type: ignore[method-assign]
        study = optuna.create_study(sampler=sampler, pruner=self.arm.pruner())
        if self.arm.ours:
            with hydra_tune.ShardPool(["cpu"], "1MiB", policy="oldest-first") as pool:
                hydra_tune.HydraTrialRunner(pool, self.arm.jobs).optimize(study, self._objective)
        else:
            study.optimize(self._objective, n_jobs=self.arm.jobs)
        self.trials = len(study.trials)

    def _objective(self, trial: optuna.Trial) -> float:
        self._turns.take(trial.number, -inf)
        training, value = Training(trial, SEED_STRIDE * self.seed + trial.number), WORST
        for epoch in range(1, EPOCHS + 1):
            if not self._turns.take(trial.number, trial.number if self.arm.ours else self._turns.spent):
                trial.study.stop()
                raise optuna.TrialPruned
            value = training.epoch()
            self._turns.note_epoch()
            trial.report(value, epoch)
            if trial.should_prune():
                raise optuna.TrialPruned
        self.finished.append(Finished(self._turns.spent, value, training.test()))
        return value

    def best(self, spent: int) -> Finished:
        """When so many epochs were spent."""
        done = [trial for trial in self.finished if trial.spent <= spent]
        return min(done, key=lambda trial: trial.value, default=Finished(spent, WORST, WORST))


def quartiles(values: Sequence[float]) -> dict[str, float]:
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"quartile_low": low, "median": median, "quartile_high": high}


def summary(searches: Sequence[Search]) -> dict[str, Any]:
    best = [[search.best(spent) for search in searches] for spent in CURVE]
    return {
        "trials": statistics.median(search.trials for search in searches),
        "finished": statistics.median(len(search.finished) for search in searches),
        "value": [quartiles([trial.value for trial in each]) for each in best],
        "test": [quartiles([trial.test for trial in each]) for each in best],
    }


def compared(ours: Sequence[Search], other: Sequence[Search]) -> list[dict[str, Any]]:
    """`p_worse`: how probable are values of ours as large as these, were they no larger? `p_better`: as small."""
    rows = []
    for spent in TESTED:
        for what in ("value", "test"):
            a, b = ([getattr(search.best(spent), what) for search in arm] for arm in (ours, other))
            p = {side: float(mannwhitneyu(a, b, alternative=side).pvalue) for side in ("greater", "less")}
            medians = {"ours": quartiles(a), "other": quartiles(b)}
            rows.append({"epochs": spent, "of": what, "p_worse": p["greater"], "p_better": p["less"], **medians})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first-seed", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(1)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    logging.getLogger("hydra_tune").setLevel(logging.WARNING)
    searches: dict[str, list[Search]] = {name: [] for name in ARMS}
    start_s = time.perf_counter()
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        for name, arm in ARMS.items():
            search = Search(arm, seed)
            search.run()
            searches[name].append(search)
        values = "  ".join(f"{name} {searches[name][-1].best(BUDGET).value:.4f}" for name in ARMS)
        print(f"seed {seed}: {values}", flush=True)
    arms = {name: summary(each) for name, each in searches.items()}
    tests = {name: compared(searches["ours"], each) for name, each in searches.items() if name != "ours"}
    for name, rows in tests.items():
        for row in rows:
            print(
                f"{row['of']:<5} at {row['epochs']:>4} epochs: ours {row['ours']['median']:.4f}, "
                f"{name} {row['other']['median']:.4f}, p worse {row['p_worse']:.3f}, p better {row['p_better']:.3f}"
            )
    versions = {"optuna": optuna.__version__, "scikit-learn": sklearn.__version__, "scipy": scipy.__version__}
    result = {"versions": versions, "seconds": time.perf_counter() - start_s, "seeds": options.seeds}
    path = save("search", {**result, "epochs": CURVE, "arms": arms, "ours_beside": tests})
    by_arm = {name: arm["value"] for name, arm in arms.items()}
    picture = curves(CURVE, by_arm, x_title="epochs spent", y_title="best loss, median and quartiles", y_max=0.7)
    (RESULTS / "search.svg").write_text(picture)
    print(path.relative_to(path.parents[2]))


if __name__ == "__main__":
    main()
