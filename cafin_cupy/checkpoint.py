"""Checkpoints of the training program: a file that always holds a finished epoch, however the program ends."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from .errors import refuse

KEYS = {"settings", "epochs", "seconds", "generator", "parts"}


def save(path: Path, content: dict[str, Any]) -> None:
    """Write tensors, numbers and containers to a file, which until the end is the old one, and then the new one."""
    new = path.with_name(f"{path.name}.new")
    with open(new, "wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())  # else a crash of the machine may leave the new name without its content
    os.replace(new, path)


def load(path: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What `save` has written for an unfinished run with these settings; its tensors on the CPU.

    Raises:
        CafinError: the file is truncated or foreign, or its run had other settings or is over.
    """
    mend = f"delete {path}, or name another file"
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # what torch and pickle raise for a file that is not theirs has no common kind
        refuse("train", "checkpoint", "be a whole checkpoint", f"{type(error).__name__} from reading it", mend)
    if not isinstance(content, Mapping) or set(content) != KEYS or not isinstance(content["settings"], Mapping):
        refuse("train", "checkpoint", "be one that this program has written", "another file", mend)
    for name, value in settings.items():
        if content["settings"].get(name) != value:
            refuse("train", "checkpoint", f"be of a run with {name} {value}", content["settings"].get(name), mend)
    if len(content["epochs"]) >= settings["epochs"]:
        refuse("train", "checkpoint", "be of an unfinished run", f"one that is over after {settings['epochs']}", mend)
    return dict(content)
