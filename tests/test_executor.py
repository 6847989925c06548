"""What a `HydraExecutor` is given is looked at where it is written, not in a trial."""

import pytest

pytest.importorskip("ray")

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
