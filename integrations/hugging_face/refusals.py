"""What a trainer over a pool refuses, as it is made or before its model is prepared.

The pool decides where weights are. An argument, or a way of loading, that places, splits or packs them would work
against it, and the numbers or the budget would be wrong. So it is refused by name, with what to write instead.
"""

from __future__ import annotations

from typing import Any

import torch

from hydra_tune.errors import ConfigError, PrepareError
from hydra_tune.pool.shard_pool import ShardPool


def refuse_arguments(args: Any) -> None:
    """Raises:
    ConfigError: an argument says where the model is to be, or how it is split.
    """
    ways = {
        "deepspeed": bool(args.deepspeed),
        "fsdp": bool(args.fsdp),
        "torch_compile": args.torch_compile,
        "fp16_full_eval": args.fp16_full_eval,
        "bf16_full_eval": args.bf16_full_eval,
        "place_model_on_device": "place_model_on_device" in vars(args) and args.place_model_on_device,
        "several processes": args.parallel_mode.value == "distributed",
    }
    if found := [name for name, is_set in ways.items() if is_set]:
        raise ConfigError(
            f"the pool decides where a model and its parts are, and runs it as it is written, but TrainingArguments "
            f"has {', '.join(found)}. Leave that out, or leave HydraTrainerCallback out."
        )


def refuse_device(wanted: torch.device, pool: ShardPool) -> None:
    """Raises:
    ConfigError: the trainer computes on another kind of device than the pool.
    """
    there = pool.devices[0].torch_device.type
    if wanted.type != there:
        raise ConfigError(
            f"a trainer and its pool use one kind of device, but the pool has {there} and the trainer {wanted.type}. "
            f"Write TrainingArguments(use_cpu={there == 'cpu'}), or give the pool other devices=."
        )


def refuse_model(model: Any) -> None:
    """Raises:
    PrepareError: its weights are packed, or were put on devices when it was loaded.
    """
    if getattr(model, "is_quantized", False) or getattr(model, "quantization_method", None) is not None:
        raise PrepareError(
            f"a block's weights are plain tensors, which the pool copies and drops, but this {type(model).__name__} is "
            "quantized. Load it without quantization_config, in bfloat16 (dtype=torch.bfloat16): adapters train on a "
            "base that the pool spills."
        )
    if getattr(model, "hf_device_map", None):
        raise PrepareError(
            f"the pool decides where a model is, but this {type(model).__name__} was loaded with a device_map. Load it "
            "without device_map, to host memory."
        )
