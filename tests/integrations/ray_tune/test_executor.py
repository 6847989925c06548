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
