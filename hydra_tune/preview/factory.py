"""`hydra-tune plan MODULE:FACTORY`: a plan of what a function of the user's builds."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import sysconfig
import traceback
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
        ConfigError: there is no such factory, it fails, what it returns does, or it returns something else.
    """
    factory = _factory_at(where)
    with _users_errors(f"a factory builds a model without arguments, but {where}", factory):
        built = factory()
    arguments = _arguments_of(built, where) | {name: value for name, value in options.items() if value is not None}
    with _users_errors(f"a plan makes some steps with what a factory returns, but those of {where}", factory):
        return plan(**arguments)


def _factory_at(where: str) -> Callable[[], Any]:
    module_name, _, name = where.partition(":")
    if not module_name or not name:
        raise ConfigError(f"a factory is named MODULE:FACTORY, {_EXAMPLE}; got {where!r}.")
    rule = f"MODULE is a Python module that can be imported from this folder, but {module_name!r}"
    with _users_errors(rule), _current_folder_on_the_path():
        module = importlib.import_module(module_name)
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


@contextmanager
def _users_errors(rule: str, factory: Callable[[], Any] | None = None) -> Iterator[None]:
    """Errors of the user's code, within, become a `ConfigError` of one sentence, with the line that has raised."""
    try:
        yield
    except HydraTuneError:
        raise
    except (Exception, SystemExit) as error:  # a script may read its command line where it is imported
        code = getattr(factory, "__code__", None)
        places = _places_in_users_code(error) or ([(code.co_filename, code.co_firstlineno)] if code else [])
        place = f" ({os.path.relpath(places[-1][0])}:{places[-1][1]})" if places else ""
        told = f"{type(error).__name__}: {error}".rstrip(".: ")
        raise ConfigError(f"{rule} raised {told}{place}.") from error


def _places_in_users_code(error: BaseException) -> list[tuple[str, int]]:
    """File and line of each call on the way to the error that is in no library and not in this package."""
    libraries = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")]
    others = ("<", str(Path(__file__).parent.parent), *libraries)
    frames = traceback.extract_tb(error.__traceback__)
    return [(frame.filename, frame.lineno or 0) for frame in frames if not frame.filename.startswith(others)]
