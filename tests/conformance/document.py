"""docs/conformance.md: the figures of `run.py`, and why tests fail where several trials run at a time."""

from __future__ import annotations

import os
import platform
from collections import defaultdict
from importlib.metadata import PackageNotFoundError, version
from textwrap import fill
from typing import Any

BESIDE = ("torch", "numpy", "SQLAlchemy", "cmaes", "fakeredis", "grpcio", "pandas", "scikit-learn", "scipy", "pytest")
BESIDE += ("redis", "lupa")  # without which tests of storages fail in both ways
UNKNOWN = "no reason known"
ONLY_HERE = "at the first report the runner tries the pruner out on another study, but the test allows no other trial"
ONLY_RAISED = (
    "each thread has its own database in memory, without a study: with several jobs Optuna loses the error, and the "
    "test passes though no trial ran; the runner raises it"
)
EXPECTED = (ONLY_HERE, ONLY_RAISED)  # to fail through the runner alone
WHY = {  # by the end of a test's name
    "trials that run together do not know each other's results: some points are drawn twice, or too many are drawn": (
        "test_hyperband_pruner_and_brute_force_sampler",
        "test_hyperband_pruner_and_grid_sampler",
        "test_brute_force.py::test_study_optimize_with_single_search_space",
        "test_brute_force.py::test_study_optimize_with_single_search_space_user_added",
        "test_brute_force.py::test_study_optimize_with_pruned_trials",
        "test_brute_force.py::test_study_optimize_with_failed_trials",
        "test_brute_force.py::test_study_optimize_with_nan",
        "test_brute_force.py::test_objective_with_nan",
        "test_grid.py::test_enqueued_trial",
        "test_grid.py::test_nan",
        "test_grid.py::test_retried_trial",
        "test_grid.py::test_study_optimize_with_exceeding_number_of_trials",
        "test_grid.py::test_study_optimize_with_fail",
        "test_grid.py::test_study_optimize_with_pruning",
    ),
    "expects that all earlier trials have finished": (
        "test_successive_halving_pruner_with_auto_min_resource",
        "test_init_cmaes_opts",
        "test_init_cmaes_opts_lr_adapt",
        "test_internal_optimizer_with_margin",
        "test_warm_starting_cmaes",
        "test_warm_starting_cmaes_maximize",
        "test_restore_optimizer_from_substrings",
        "test_sample_relative_n_startup_trials",
        "test_get_solution_trials",
        "test_population_size",
        "test_child_generation_strategy_generation_key",
        "test_find_sample_id_partial_fix",
        "test_warn_independent_sampling",
        "test_study.py::test_after_trial",
        "test_study.py::test_after_trial_pruning",
        "test_optimize_with_progbar",
    ),
    "a database may give one waiting trial to two threads; then the runner asks for another": (
        "test_enqueue_trial_properly_sets_param_values",
    ),
    "expects a certain order of draws, or the sampler's seed: with several jobs Optuna draws a new seed": (
        "test_qmc_sampler_suggest_int_balanced",
        "test_sample_relative_seeding",
        "test_samplers.py::test_reproducible",
    ),
    "expects that no more trials have begun than its own number of jobs begins before the end": (
        "test_gp.py::test_constraints_func_nan",
        "test_optimize_with_catch",
        "test_optimize_parallel_timeout",
        "test_stop_in_callback",
        "test_stop_in_objective",
        "test_stop_n_jobs",
        "test_stop_with_MaxTrialsCallback",
        "test_terminator_callback_terminator",
    ),
    "with several jobs Optuna loses errors of the last trials; the runner raises them": (
        "test_brute_force.py::test_study_optimize_with_infinite_search_space",
        "test_brute_force.py::test_study_optimize_with_dynamic_range_search_space",
        "test_nsgaii.py::test_constraints_func_nan",
        "test_nsgaiii.py::test_constraints_func_nan",
        "test_out_of_the_range_categorical",
        "test_enqueued_insufficient_trial",
        "test_optimize_with_catch_invalid_type",
        "test_after_trial_failing",
        "test_after_trial_failing_in_after_trial",
    ),
    "a thread that has asked for a trial does not see what other threads add afterwards": (
        "test_infer_relative_search_space",
    ),
    "with several jobs Optuna shows no progress towards a timeout": (
        "test_optimize_with_progbar_timeout",
        "test_optimize_with_progbar_timeout_formats",
    ),
    ONLY_RAISED: ("test_optimize_trivial_rdb_resume_study",),
    ONLY_HERE: ("test_hyperband_no_call_of_filter_study_in_should_prune",),
}
PROSE = """\
# Optuna's own tests through the runner

A runner that takes the place of `study.optimize` may break what users rely on without anybody noticing. Optuna has
tests for that. So they run twice: in Optuna's own loop, and with
`HydraTrialRunner(pool, concurrency).optimize(study, ...)` in place of `study.optimize(...)`, with as many jobs.
`python -m tests.conformance.run` does this and wrote this page; its docstring says how.

- Only tests that call `optimize` are counted. Those that make a study only to draw it, to compute the importance of its
  parameters or to keep files are left out.
- A test that asks for more `n_jobs` gets as many, in both.
- Four trials at a time begin with a pause of 10 ms, in both: many of these objectives end before another begins.
- Where a test passes in one way and fails in the other, both are run at least five times more. A test that has failed
  once counts as failed.

These tests notice neither a heartbeat that stops nor a database session that a thread leaves open: `test_storages.py`
does. Errors of the last trials that neither way raises are those of a sampler's `after_trial`.
"""
HEADER = """\
| Optuna | trials at a time | call `optimize` | pass: stock | runner | fail: both | only stock | only the runner |
|---|---|---|---|---|---|---|---|
"""
WRAP: dict[str, Any] = {"subsequent_indent": "  ", "break_long_words": False, "break_on_hyphens": False}


def as_markdown(figures: list[dict[str, Any]]) -> str:
    parts = [PROSE, environment() + "\n", HEADER + "".join(map(row, figures))]
    for figure in figures:
        if figure["stock"] or figure["hydra"]:
            parts.append(f"## What fails with Optuna {figure['optuna']}, {figure['concurrency']} at a time\n")
            parts.append(reasons(figure))
    return "\n".join(parts)


def environment() -> str:
    beside = ", ".join(map(_with_version, BESIDE))
    system = f"{platform.system()} on {os.cpu_count()} cores, Python {platform.python_version()}"
    return fill(f"{system}, {beside}.", 120, break_on_hyphens=False)


def _with_version(name: str) -> str:
    try:
        return f"{name} {version(name)}"
    except PackageNotFoundError:
        return f"no {name}"


def row(figure: dict[str, Any]) -> str:
    stock, runner = set(figure["stock"]), set(figure["hydra"])
    total = figure["tests"]
    counts = (total, total - len(stock), total - len(runner), len(stock & runner), len(stock - runner))
    counted = " | ".join(f"{n:,}" for n in (*counts, len(runner - stock)))
    return f"| {figure['optuna']} | {figure['concurrency']} | {counted} |\n"


def why(test: str) -> str:
    name = test.split("[")[0]
    return next((why for why, names in WHY.items() if name.endswith(names)), UNKNOWN)


def reasons(figure: dict[str, Any]) -> str:
    """For each reason the tests, with how many of their cases fail in stock Optuna and through the runner."""
    cases: dict[str, dict[str, int]] = defaultdict(lambda: {"stock": 0, "hydra": 0})
    for way in ("stock", "hydra"):
        for test in figure[way]:
            cases[test.split("[")[0]][way] += 1
    listed: dict[str, list[str]] = defaultdict(list)
    for test, failed in sorted(cases.items()):
        name = test.removeprefix("tests/").replace("_tests/", "/")
        listed[why(test)].append(f"`{name}` {failed['stock']}, {failed['hydra']}")
    lines = [fill(f"- {reason}: {'; '.join(tests)}.", 120, **WRAP) for reason, tests in listed.items()]
    return (
        "By what a test takes for granted, and how many of its cases fail, in Optuna alone and through the runner:\n\n"
        + "\n".join([*lines, ""])
    )
