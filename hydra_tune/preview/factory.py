"""`hydra-tune plan MODULE:FACTORY`: a plan of what a function of the user's builds."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra_tune.errors import ConfigError, HydraTuneError
from hydra_tune.preview.budget_plan import Plan, plan

_EXAMPLE = "such as train:build for a function build in train.py"


def plan_of_factory(where: str, **options: Any) -> Plan:
    """Call the factory at `where`, a text such as ``"train:build"``, and plan what it returns.

    The module is imported with the current folder on the path. The factory takes no arguments and returns model,
    optimizer and batch, or a dict with arguments of `hydra_tune.plan`. `options` are arguments of it, too; those that
    are not None go before the factory's.

    Raises:
        ConfigError: there is no such factory, it fails, or it returns something else.
    """
    factory = _factory_at(where)
    try:
        built = factory()
    except HydraTuneError:
        raise
    except Exception as error:
        raise ConfigError(f"a factory builds a model without arguments, but {where} raised {_told(error)}.") from error
    arguments = _arguments_of(built, where)
    return plan(**arguments | {name: value for name, value in options.items() if value is not None})


def _factory_at(where: str) -> Callable[[], Any]:
    module_name, _, name = where.partition(":")
    if not module_name or not name:
        raise ConfigError(f"a factory is named MODULE:FACTORY, {_EXAMPLE}; got {where!r}.")
    try:
        with _current_folder_on_the_path():
            module = importlib.import_module(module_name)
    except Exception as error:
        raise ConfigError(
            f"{module_name!r} is a Python module that can be imported from here, but importing it raised "
            f"{_told(error)}. Run the command in its folder."
        ) from error
    factory = getattr(module, name, None)
    if not callable(factory):
        raise ConfigError(f"a factory is a function of {module_name}, {_EXAMPLE}; it has no function {name!r}.")
    return factory  # type: ignore[no-any-return]


@contextmanager
def _current_folder_on_the_path() -> Iterator[None]:
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        yield
    finally:
        if here in sys.path:
            sys.path.remove(here)


def _arguments_of(built: Any, where: str) -> dict[str, Any]:
    if isinstance(built, Mapping):
        known = list(inspect.signature(plan).parameters)
        if unknown := [key for key in built if key not in known]:
            raise ConfigError(f"a factory's dict has the keys {', '.join(known)}; {where} gave {unknown[0]!r}.")
        if "model" not in built or not {"batch", "eval_batch"} & built.keys():
            raise ConfigError(
                f"a factory's dict has a model and a batch; {where} gave {', '.join(built) or 'nothing'}."
            )
        return {"batch": None, **built}
    if isinstance(built, tuple) and len(built) == 3:
        return dict(zip(("model", "optimizer", "batch"), built, strict=True))
    raise ConfigError(
        f"a factory returns model, optimizer and batch, or a dict with plan's arguments; {where} returned "
        f"{type(built).__name__}. Write return model, optimizer, batch."
    )


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".rstrip(".")
