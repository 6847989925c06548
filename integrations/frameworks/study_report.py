"""A pool's report with what an Optuna study knows: values, parameters, and Optuna's own plots."""

from __future__ import annotations

import logging
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra_tune.errors import ConfigError
from hydra_tune.integrations.frameworks.trial_attributes import LACK
from hydra_tune.pool.shard_pool import ShardPool

if TYPE_CHECKING:
    import optuna
    from plotly.graph_objects import Figure

logger = logging.getLogger("hydra_tune")
_PLOTS = {
    "Optimization history": "plot_optimization_history",
    "Intermediate values": "plot_intermediate_values",
    "Parameter importances": "plot_param_importances",
    "Parallel coordinates": "plot_parallel_coordinate",
    "Slices": "plot_slice",
    "Pareto front": "plot_pareto_front",
}


def plot_timeline(pool: ShardPool) -> Figure:
    """`ShardPool.plot_timeline`: who had the devices when, as a plotly figure."""
    return pool.plot_timeline()


def save_report(pool: ShardPool, path: str | os.PathLike[str], study: optuna.Study | None = None) -> Path:
    """Write `ShardPool.save_report`, with the study's values, parameters and plots (these need plotly). Returns the
    path.

    Raises:
        ConfigError: the name does not end in .html, there is no such folder, or the arguments are in another order.
    """
    is_study = study is None or hasattr(study, "get_trials")
    if not (isinstance(pool, ShardPool) and isinstance(path, (str, os.PathLike)) and is_study):
        given = ", ".join(type(each).__name__ for each in (pool, path, study))
        raise ConfigError(
            f'save_report takes a pool, a path and a study, but got {given}. Write save_report(pool, "x.html", study).'
        )
    if study is None:
        return pool.save_report(path)
    return pool.save_report(path, results=_results(study), figures=_figures(study), title=study.study_name)


def _results(study: optuna.Study) -> dict[str, dict[str, Any]]:
    """By the name that a trial has in its pool."""
    found: dict[str, dict[str, Any]] = {}
    for trial in study.get_trials(deepcopy=False):
        values = trial.values or [None] * len(study.directions)
        names = ["value"] if len(values) == 1 else [f"value {i}" for i in range(len(values))]
        state = "did not fit" if LACK in trial.user_attrs else trial.state.name.lower()
        params = {name: "None" if value is None else value for name, value in trial.params.items()}
        known = {"state": state, **dict(zip(names, values, strict=True)), **params}
        found[f"trial {trial.number}"] = known
    return found


def _figures(study: optuna.Study) -> list[tuple[str, str]]:
    """Optuna's plots as JSON, but those that say nothing of this study: each raises then."""
    from optuna import visualization

    if not visualization.is_available():
        logger.info("the report has none of Optuna's plots: they need plotly, pip install plotly")
        return []
    found = []
    for title, name in _PLOTS.items():
        several = len(study.directions) > 1
        if several != (name == "plot_pareto_front"):
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                figure = getattr(visualization, name)(study)
        except Exception as error:
            logger.debug("no %s in the report: %s", title, error)
            continue
        if len(figure.data):
            found.append((title, figure.to_json()))
    return found
