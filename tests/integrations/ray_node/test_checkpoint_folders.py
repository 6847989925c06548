"""Two live trials that write their checkpoints to one folder: whose the files are, nobody can tell."""

import os
from types import SimpleNamespace

import pytest

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
pytest.importorskip("ray")

from ray.tune import Checkpoint

from hydra_tune.integrations.ray_node.tune_session import TrialSession


class Attempt:
    """Notes the path of each checkpoint that it is to report."""

    def __init__(self, name):
        self.order = SimpleNamespace(trial_id=name, trial_name=f"train_{name}", tune_context={})
        self.is_alive = True
        self.paths = []

    def report(self, metrics, checkpoint):
        self.paths.append(checkpoint.path)


def test_a_folder_of_another_live_trial_is_refused_by_name(tmp_path, monkeypatch):
    """Its checkpoints held the other's weights, in silence."""
    monkeypatch.chdir(tmp_path)
    a, b = Attempt("a"), Attempt("b")
    for _ in range(2):
        TrialSession(a).report({}, Checkpoint.from_directory("my_model"))
    assert a.paths == [str(tmp_path / "my_model")] * 2
    with pytest.raises(RuntimeError, match=r"that at .*my_model was reported by train_a, too"):
        TrialSession(b).report({}, Checkpoint.from_directory(tmp_path / "my_model"))
    TrialSession(b).report({}, Checkpoint.from_directory("other"))
    a.is_alive = False
    TrialSession(b).report({}, Checkpoint.from_directory("my_model"))
    assert b.paths == [str(tmp_path / name) for name in ("other", "my_model")]
