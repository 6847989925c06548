"""A folder of its own for each trial of a search, wherever a Trainer, its callbacks or its loggers write."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def own_folder(path: Any, folder: str) -> str:
    """`folder` in `path`, unless `path` is in it already."""
    path = os.fspath(path)
    return path if folder in Path(path).parts else f"{path.rstrip('/')}/{folder}"  # it may be an address


def give_own_folders(trainer: Any, folder: str) -> None:
    """To those that the user has given a folder, which trials share."""
    for callback in trainer.checkpoint_callbacks:
        if getattr(callback, "dirpath", None) is not None:
            callback.dirpath = own_folder(callback.dirpath, folder)
    for logger in trainer.loggers:
        for name in ("_root_dir", "_save_dir"):  # of CSV files, or of TensorBoard
            if isinstance(vars(logger).get(name), (str, os.PathLike)):
                setattr(logger, name, own_folder(getattr(logger, name), folder))
