"""Makes libraries safe where trials run beside each other; installed once a process."""

from __future__ import annotations

from functools import cache

from hydra_tune.integrations.frameworks import accelerate_states, model_loading, process_settings


@cache
def install() -> None:
    """What libraries keep for the whole process is each trial's own from here on, or warned of by name."""
    accelerate_states.install()
    model_loading.install()
    process_settings.install()
