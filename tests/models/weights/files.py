"""Ways to write a weight file, for the tests of its readers."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch


def save_zip(value: Any, path: Path) -> None:
    torch.save(value, path)


def save_legacy(value: Any, path: Path) -> None:
    torch.save(value, path, _use_new_zipfile_serialization=False)


def save_pickle(value: Any, path: Path) -> None:
    path.write_bytes(pickle.dumps(value, protocol=4))


def save_old_pickle(value: Any, path: Path) -> None:
    path.write_bytes(pickle.dumps(value, protocol=0))


def save_bytes(data: bytes, path: Path) -> None:
    """A torch file in zip format around the bytes of a pickle."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", data)
        archive.writestr("archive/version", "3\n")


def text(value: str) -> bytes:
    """The opcode that pushes a string (protocol 2)."""
    return b"X" + len(value).to_bytes(4, "little") + value.encode()
