"""`trainable`: what Tune starts for each trial of a function or class that trains in its node's pool.

Tune gives each trial a process of its own, but trials that share devices have to share a process. So Tune's process is
a thin proxy, without torch. Tune's decisions reach the trial through it, and the trial's results reach Tune through it,
over a local socket (`pool_connection.py`; its other end is `ray_node/proxy_connections.py`). Tune persists checkpoints
itself.
"""

from __future__ import annotations

import inspect
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ray.train.constants import RAY_CHDIR_TO_TRIAL_DIR
from ray.tune import Trainable, get_checkpoint, get_context
from ray.tune import report as tune_report
from ray.tune.result import TRIAL_INFO
from ray.tune.trainable.function_trainable import wrap_function

from hydra_tune.errors import ConfigError
from hydra_tune.integrations.ray_node.messages import Ended
from hydra_tune.integrations.ray_node.pool_spec import PoolSpec
from hydra_tune.integrations.ray_tune.executor import HydraExecutor, spec_of
from hydra_tune.integrations.ray_tune.payload import Payload
from hydra_tune.integrations.ray_tune.pool_connection import PoolConnection, PoolLostError
from hydra_tune.integrations.ray_tune.run_pools import keep_pools


def trainable(train: Callable[..., Any] | type, executor: HydraExecutor | None = None) -> type:
    """A trainable for stock `ray.tune`, whose trials run in the pool of their node: `train`, a function of a config or
    a `ray.tune.Trainable` class.

    Raises:
        ConfigError: neither a function nor a trainable, or it has resources of its own.
    """
    spec = spec_of(executor or HydraExecutor())
    if hasattr(train, "its_pools"):
        raise ConfigError(
            f"a trial has one pool, but {train.__name__} was given its HydraExecutor before. Give it once."
        )
    if getattr(train, "_resources", None) is not None:
        raise ConfigError("a trial of a pool has no resources of its own. Leave tune.with_resources out.")
    if inspect.isclass(train):
        if not issubclass(train, Trainable):
            raise ConfigError(f"what Tune runs is a function or a ray.tune.Trainable, got the class {train.__name__}.")
        return _class_proxy(train, spec)
    if isinstance(train, str):
        raise ConfigError(
            f"what trains in a pool is given itself, for Tune may have made something else of what is registered as a "
            f"name; got {train!r}. Give the function, or the class."
        )
    if hasattr(train, "training_loop") or hasattr(train, "train_loop_per_worker"):
        raise ConfigError(
            f"a {type(train).__name__} of Ray Train starts processes of its own, past the pool. Give a function of a "
            "config that trains with hydra_tune.prepare; it may start a trainer itself, for what is not a pool's."
        )
    if not callable(train):
        raise ConfigError(f"what Tune runs is a function or a ray.tune.Trainable, got {train!r}.")
    try:
        inspect.signature(train).bind({})
    except TypeError as error:
        raise ConfigError(f"a training function takes its config, but {train!r} does not: {error}.") from None
    return _function_proxy(train, spec)


# ---- what Tune starts for a trial ----


def _resource_request(spec: PoolSpec) -> Any:
    def default_resource_request(cls: type, config: dict[str, Any]) -> HydraExecutor:
        """In the driver, before a trial starts."""
        keep_pools(spec)
        return HydraExecutor.slot(spec)

    return classmethod(default_resource_request)


def _has_working_directory() -> bool:
    """Of its own, as the driver's environment says, which Tune hands on to its trials."""
    return bool(int(os.environ.get(RAY_CHDIR_TO_TRIAL_DIR, "1")))


def _refuse_other_resources(proxy: Trainable) -> None:
    resources = proxy.trial_resources
    if resources is not None and not isinstance(resources, HydraExecutor):
        raise ConfigError(
            "a trial of a pool has a slot for its proxy, and its node's devices are the pool's, but something has "
            f"given it {resources.required_resources} instead, as ResourceChangingScheduler does. Leave that out."
        )


def _function_proxy(train: Callable[..., Any], spec: PoolSpec) -> type:
    payload = Payload(train)
    connections: list[PoolConnection] = []  # of the trial's process, one

    def proxy(config: dict[str, Any]) -> Any:
        (connection,) = connections
        context = get_context()
        tune_context = {
            "trial_id": context.get_trial_id(),
            "trial_name": context.get_trial_name(),
            "trial_resources": context.get_trial_resources(),
            "trial_dir": context.get_trial_dir(),
            "experiment_name": context.get_experiment_name(),
            "storage": context.get_storage(),
            "has_working_directory": _has_working_directory(),
            "loaded_checkpoint": get_checkpoint(),
        }
        connection.begin(payload.pickled(), config, tune_context)
        try:
            for message in connection.messages(get_checkpoint):
                if isinstance(message, Ended):
                    return message.output
                tune_report(message.metrics, checkpoint=message.checkpoint)
        finally:  # Tune ends this thread where it reports
            connection.stop("Tune has stopped the trial")
        raise PoolLostError("the trial was stopped in its pool, though Tune has not asked for it.")

    name = getattr(train, "__name__", type(train).__name__)
    stock: Any = wrap_function(proxy, name=name)

    class FunctionProxy(stock):  # type: ignore[misc]
        its_pools = spec
        default_resource_request = _resource_request(spec)

        def setup(self, config: dict[str, Any]) -> None:
            _refuse_other_resources(self)
            connections[:] = [PoolConnection(spec)]
            super().setup(config)

        def save_checkpoint(self, checkpoint_dir: str = "") -> Any:
            """What the function has reported last; if that was no checkpoint, what its pool can write of it."""
            result = super().save_checkpoint(checkpoint_dir)
            if result is None or result.checkpoint is not None:
                return result
            with tempfile.TemporaryDirectory() as directory:
                if not connections[0].save(directory):
                    return result
                return self._report_class_trainable_checkpoint(directory, directory)

        def cleanup(self) -> None:
            connections[0].stop("Tune has stopped the trial")
            super().cleanup()

    FunctionProxy.__name__ = FunctionProxy.__qualname__ = name
    return FunctionProxy


def _class_proxy(train: type[Trainable], spec: PoolSpec) -> type:
    payload = Payload(train)

    resets_itself = train.reset_config is not Trainable.reset_config

    class ClassProxy(Trainable):
        """Passes every method that Tune calls on to a trainable in the pool, which has the same storage.

        The trainable is made there with the first call, because Tune starts actors that it never calls. Tune may give
        this actor to another trial (`reset_config`). A trainable without `reset_config` is then made anew; so is one
        that no longer exists, because its former trial has begun in another actor."""

        its_pools = spec
        default_resource_request = _resource_request(spec)

        def setup(self, config: dict[str, Any]) -> None:
            _refuse_other_resources(self)
            self._connection = PoolConnection(spec)
            self._new_config: dict[str, Any] | None = config  # of one that is to be made

        def _call(self, method: str, *arguments: Any, **options: Any) -> Any:
            if self._new_config is not None:
                self._make(self._new_config)
                self._new_config = None
            return self._connection.call(method, *arguments, **options)

        def _make(self, config: dict[str, Any]) -> None:
            info = self._trial_info
            tune_context = {
                "trial_id": self.trial_id,
                "trial_name": self.trial_name,
                "trial_resources": self.trial_resources,
                "trial_dir": self.logdir,
                "experiment_name": getattr(info, "experiment_name", None),
                "storage": self._storage,
                "has_working_directory": _has_working_directory(),
            }
            self._connection.begin(payload.pickled(), self._with_info(config), tune_context)
            self._connection.await_value()

        def _with_info(self, config: dict[str, Any]) -> dict[str, Any]:
            return config if self._trial_info is None else {**config, TRIAL_INFO: self._trial_info}

        def train(self) -> dict[str, Any]:
            result: dict[str, Any] = self._call("train")
            return result

        def save(self, checkpoint_dir: str | None = None) -> Any:
            return self._call("save", checkpoint_dir)

        def restore(self, checkpoint_path: Any) -> None:
            self._call("restore", checkpoint_path)

        def export_model(self, export_formats: Any, export_dir: str | None = None) -> Any:
            return self._call("export_model", export_formats, export_dir)

        def reset_config(self, new_config: dict[str, Any]) -> bool:
            if resets_itself:
                with suppress(PoolLostError):
                    return bool(self._call("reset", self._with_info(new_config), storage=self._storage))
            self._new_config = new_config
            return True

        def cleanup(self) -> None:
            self._connection.stop("Tune has stopped the trial")

    ClassProxy.__name__ = ClassProxy.__qualname__ = train.__name__
    return ClassProxy
