"""State as JSON beside tensors, and back: what `state_dict` gives, held without executing anything on reading.

{"step": 3, "exp_avg": tensor}   ->   {"step": 3, "exp_avg": {"$tensor": "optimizer.exp_avg"}}
(1, 2), {0: "a"}, float16        ->   {"$tuple": [1, 2]}, {"$dict": [[0, "a"]]}, {"$dtype": "float16"}
"""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import torch

from hydra_tune.errors import ConfigError

_AS_THEY_ARE: tuple[torch.dtype, ...] = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool)
_AS_THEY_ARE += (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)  # any others as their bytes


def encode(state: Any, tensors: dict[str, torch.Tensor], name: str) -> Any:
    """What JSON can hold of `state`; its tensors go to `tensors`, contiguous, on the host, each once.

    Raises:
        ConfigError: `state`, called `name`, holds something else than plain values and tensors.
    """
    return _Encoder(tensors).encode(state, name)


class _Encoder:
    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self._names: dict[tuple[Any, ...], str] = {}
        self._storages: set[int] = set()

    def encode(self, value: Any, name: str) -> Any:
        if value is None or type(value) in (bool, int, float, str):
            return value
        if isinstance(value, torch.Tensor):
            return self._encode_tensor(value.detach(), name)
        if type(value) in _KINDS:
            tag, parts = _KINDS[type(value)]
            return {tag: self._encode_all(parts(value), name)}
        if type(value) is list:
            return self._encode_all(value, name)
        if type(value) is dict:
            plain = all(type(key) is str and not key.startswith("$") for key in value)
            if plain:
                return {key: self.encode(item, f"{name}.{key}") for key, item in value.items()}
            return {"$dict": self._encode_all(map(list, value.items()), name)}
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)) and value.dtype.kind in "biufc":
            array = numpy.array(value)
            return {"$numpy": [self._encode_tensor(torch.from_numpy(array), name), isinstance(value, numpy.generic)]}
        raise ConfigError(
            f"a checkpoint holds plain values and tensors, but {name} is a {type(value).__name__}. Leave it out of the "
            "state_dict, or turn it into numbers, strings, lists, dicts or tensors there."
        )

    def _encode_all(self, values: Any, name: str) -> list[Any]:
        return [self.encode(value, f"{name}.{i}") for i, value in enumerate(values)]

    def _encode_tensor(self, tensor: torch.Tensor, name: str) -> dict[str, Any]:
        if tensor.layout is not torch.strided or tensor.is_quantized:
            raise ConfigError(f"a checkpoint holds dense tensors, but {name} is {tensor.layout}. Make it dense there.")
        same = (tensor.device, tensor.data_ptr() or id(tensor), tensor.shape, tensor.stride(), tensor.dtype)
        name = self._names.setdefault(same, name)
        code: dict[str, Any] = {"$tensor": name}
        if name not in self._tensors:
            host = tensor.cpu().contiguous()
            storage = host.untyped_storage().data_ptr()
            if storage in self._storages:  # safetensors refuses parts of one memory
                host = host.clone()
            self._storages.add(storage)
            odd = tensor.dtype not in _AS_THEY_ARE
            self._tensors[name] = host.reshape(-1).view(torch.uint8) if odd else host
        if tensor.dtype not in _AS_THEY_ARE:
            code |= {"dtype": _name_of(tensor.dtype), "shape": list(tensor.shape)}
        if not tensor.is_contiguous():
            code["stride"] = list(tensor.stride())
        return code


def decode(code: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """What `encode` was given; each tensor with memory of its own."""
    if isinstance(code, list):
        return [decode(item, tensors) for item in code]
    if not isinstance(code, dict):
        return code
    tag = next(iter(code), "")
    if not tag.startswith("$"):
        return {key: decode(item, tensors) for key, item in code.items()}
    if tag == "$tensor":
        return _decode_tensor(code, tensors[code["$tensor"]])
    items = decode(code[tag], tensors)
    if tag == "$numpy":
        array = items[0].numpy()
        return array[()] if items[1] else array
    return _MADE_OF[tag](items)


def _decode_tensor(code: dict[str, Any], stored: torch.Tensor) -> torch.Tensor:
    if "dtype" in code:
        stored = stored.view(getattr(torch, code["dtype"])).reshape(code["shape"])
    if "stride" not in code:
        return stored.clone()
    return torch.empty_strided(stored.shape, code["stride"], dtype=stored.dtype, device="cpu").copy_(stored)


def _in_order(values: Iterable[Any]) -> list[Any]:
    """One that values of different types have, too."""
    return sorted(values, key=lambda value: (type(value).__name__, repr(value)))


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_KINDS: dict[type, tuple[str, Callable[[Any], Any]]] = {
    tuple: ("$tuple", list),
    torch.Size: ("$tuple", list),
    set: ("$set", _in_order),
    frozenset: ("$frozenset", _in_order),
    Counter: ("$counter", lambda value: map(list, value.items())),
    OrderedDict: ("$ordered", lambda value: map(list, value.items())),
    complex: ("$complex", lambda value: [value.real, value.imag]),
    bytes: ("$bytes", list),
    torch.dtype: ("$dtype", lambda value: [_name_of(value)]),
    torch.device: ("$device", lambda value: [str(value)]),
}
_MADE_OF: dict[str, Callable[[list[Any]], Any]] = {
    "$dict": dict,
    "$tuple": tuple,
    "$set": set,
    "$frozenset": frozenset,
    "$counter": lambda items: Counter(dict(items)),
    "$ordered": OrderedDict,
    "$complex": lambda items: complex(*items),
    "$bytes": bytes,
    "$dtype": lambda items: getattr(torch, items[0]),
    "$device": lambda items: torch.device(items[0]),
}
