"""What a `HydraExecutor` is given is looked at where it is written, not in a trial."""

import pytest

pytest.importorskip("ray")

import hydra_tune
from hydra_tune import ConfigError, HydraExecutor


@pytest.mark.parametrize(
    "options",
    [
        *({"devices": value} for value in ([], 5, [0], None)),
        *({"memory": value} for value in ([], None, 1.5e9, True, [None])),
    ],
    ids=str,
)
def test_devices_and_memory_are_one_or_several(options):
    (key,) = options
    with pytest.raises(ConfigError, match=f"{key} is one for all devices, or a list with at least one"):
        HydraExecutor(**options)


@pytest.mark.parametrize("options", [{"devices": ["gpu"]}, {"devices": "cpu:x"}, {"policy": "first-come"}], ids=str)
def test_unknown_devices_and_policies_are_named(options):
    (value,) = options.values()
    with pytest.raises(ConfigError, match=f"got '{value if isinstance(value, str) else value[0]}'"):
        HydraExecutor(**options)


@pytest.mark.parametrize("again", [hydra_tune.trainable, hydra_tune.tune.with_resources])
def test_an_executor_is_given_once(again):
    def train(config):
        """Nothing."""

    proxy = hydra_tune.trainable(train, HydraExecutor())
    with pytest.raises(ConfigError, match="train was given its HydraExecutor before"):
        again(proxy, HydraExecutor())


@pytest.mark.parametrize(
    ("devices", "concurrency", "cpus", "gpus", "places"),
    [
        (["cpu"], None, 1, 0, 2),  # two fill each other's gaps
        (["cpu"], None, 4, 0, 4),  # one a CPU
        (["cpu"], None, 64, 0, 8),  # at most eight a device
        (["cpu"] * 4, None, 2, 0, 4),  # at least one a device
        ("auto", None, 64, 4, 32),
        ("cuda:0", None, 64, 4, 8),
        (["cpu"], 3, 1, 0, 3),
    ],
)
def test_as_many_trials_live_on_a_node_as_its_cpus_and_devices_are_good_for(devices, concurrency, cpus, gpus, places):
    spec = HydraExecutor(devices=devices, concurrency=concurrency).spec
    assert spec.places({"CPU": cpus, "GPU": gpus}) == places


@pytest.mark.parametrize(
    "give", [hydra_tune.tune.run, lambda *args, **kw: hydra_tune.tune.Experiment("e", *args, **kw)]
)
def test_an_executor_is_not_what_a_trial_owns(give):
    """It failed in each trial's process, with advice that was followed already."""
    with pytest.raises(ConfigError, match=r"given as resources=, got it as resources_per_trial="):
        give(lambda config: None, resources_per_trial=HydraExecutor())
