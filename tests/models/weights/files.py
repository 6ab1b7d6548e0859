"""Write weight files in all formats of torch and pickle."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


class Call:
    """An object whose pickle is a call."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


def save_zip(value: Any, path: Path) -> None:
    torch.save(value, path)


def save_legacy(value: Any, path: Path) -> None:
    torch.save(value, path, _use_new_zipfile_serialization=False)


def save_pickle(value: Any, path: Path) -> None:
    path.write_bytes(pickle.dumps(value, protocol=4))


def save_old_pickle(value: Any, path: Path) -> None:
    path.write_bytes(pickle.dumps(value, protocol=0))


def save_bytes(data: bytes, path: Path) -> None:
    """Write the bytes of a pickle as a zip file of torch."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", data)
        archive.writestr("archive/version", "3\n")


def text(value: str) -> bytes:
    """Return the opcode that pushes a string (protocol 2)."""
    return b"X" + len(value).to_bytes(4, "little") + value.encode()
