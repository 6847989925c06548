"""What runs somebody's tests through the runner: counts who calls `optimize`, and notes what a test comes to."""

import pytest

from tests.conformance.run import outcomes

SOMEBODYS = """
import threading
import optuna

def test_passes():
    threads, together = set(), threading.Barrier(TOGETHER)
    def objective(trial):
        threads.add(threading.current_thread().name)
        together.wait(30)
        optuna.create_study().optimize(lambda _: 0.0, n_trials=1)
        return 1.0
    optuna.create_study().optimize(objective, n_trials=TOGETHER, n_jobs=2)
    assert len(threads) == TOGETHER

def test_fails():
    assert optuna.create_study().optimize(lambda _: 0.0, n_trials=1), "it is None"

def test_calls_nothing():
    pass
"""


@pytest.mark.proof
@pytest.mark.parametrize("way", ["stock", "hydra"])
@pytest.mark.parametrize("at", [1, 3])
def test_who_calls_optimize_is_counted_and_as_many_run_at_a_time(way, at, tmp_path):
    (tmp_path / "tests").mkdir()
    together = max(at, 2)
    (tmp_path / "tests" / "test_somebodys.py").write_text(SOMEBODYS.replace("TOGETHER", str(together)))
    lines = outcomes(tmp_path, way, at)
    assert [(line["outcome"], line["calls"]) for line in lines] == [
        ("passed", 1 + together),
        ("failed", 1),
        ("passed", 0),
    ]
    assert [line["message"].split("\n")[0] for line in lines] == ["", "AssertionError: it is None", ""]
