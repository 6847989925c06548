"""What a Lightning Trainer over a pool refuses, as it is made or before its module is prepared.

The pool decides where weights are, in one process. An argument that places or splits the module, or changes what its
weights are, would work against it. So it is refused by name, with what to write instead.
"""

from __future__ import annotations

from typing import Any

from hydra_tune.blocks.root import trial_of
from hydra_tune.errors import ConfigError, PrepareError
from hydra_tune.integrations.lightning_trainer.packages import is_a
from hydra_tune.pool.shard_pool import ShardPool

_PRECISIONS = {"HalfPrecision", "DoublePrecision", "BitsandbytesPrecision", "TransformerEnginePrecision"}


def refuse_trainer(trainer: Any, pool: ShardPool) -> None:
    """Raises:
    ConfigError: an argument says where the module is to be, how it is split, or what its weights are made.
    """
    strategy, precision = trainer.strategy, type(trainer.precision_plugin)
    is_single = is_a("SingleDeviceStrategy", strategy)
    wanted, there = strategy.root_device.type, pool.devices[0].torch_device.type
    if not is_single or trainer.num_devices > 1:
        raise ConfigError(
            f"the pool decides where a module and its parts are, in one process, but the Trainer has "
            f"{type(strategy).__name__} and {trainer.num_devices} device(s). Write Trainer(devices=1), and give the "
            "pool the devices: ShardPool(devices=...)."
        )
    if wanted != there:
        advice = "cpu" if there == "cpu" else "gpu"
        raise ConfigError(
            f"a Trainer and its pool use one kind of device, but the pool has {there} and the Trainer {wanted}. Write "
            f'Trainer(accelerator="{advice}", devices=1), or give the pool other devices=.'
        )
    if named := _PRECISIONS.intersection(kind.__name__ for kind in precision.__mro__):
        raise ConfigError(
            "a module's weights are plain tensors of the dtype that they have, and the default dtype is the whole "
            f'process\'s, but the Trainer has {named.pop()} (precision="{trainer.precision}"). Write '
            'precision="bf16-mixed"; or convert the module and its batches, and leave precision out.'
        )


def refuse_module(module: Any) -> None:
    if getattr(module, "_compiler_ctx", None) is not None:
        raise PrepareError(
            f"a prepared module runs operator by operator, but this {type(module).__name__} was given to "
            "torch.compile. Give the Trainer the plain module."
        )
    if trial_of(module) is not None:
        raise PrepareError(
            f"a Trainer with HydraLightningCallback prepares its module, but this {type(module).__name__} is prepared "
            "already. Leave hydra_tune.prepare out, or call hydra_tune.release(module) first."
        )
