"""Where weights that a flag names are to be found."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
from collections.abc import Mapping
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import torch
from tqdm import tqdm

from models.classifiers import architecture, default_weights
from utils.background import own_python
from utils.errors import UserError
from utils.files import ROOT, cache_folder, one_at_a_time, replacing
from utils.place import speaks

DEFAULT, WANDB = "DEFAULT", "wandb:"
PATIENCE = 20.0  # seconds that a server may be silent
CHECKSUM = re.compile(r"-([0-9a-f]{8,})\.pth$")  # in torchvision's file names: the first digits of the SHA-256
OFFICIAL = re.compile(r"yolov5[nsmlx]6?\.pt")
RELEASE = "https://github.com/ultralytics/yolov5/releases/download/v7.0/"


def find_weights(name: str, yaml: Mapping[str, Any] | None = None, source: str = "the model YAML") -> Path:
    """The weight file of that name, as given or in the repository's folder; DEFAULT is what torchvision recommends for
    the architecture of the model's `yaml`, downloaded where it is missing; wandb:entity/project/name:alias an artifact.

    Raises `UserError`; for an official YOLOv5 name it tells the address.
    """
    if name == DEFAULT:
        if not yaml or "architecture" not in yaml:
            raise UserError(f"--weights {DEFAULT} goes with a --cfg that names an `architecture` of torchvision")
        address = default_weights(architecture(yaml, source))
        return download(address, Path(torch.hub.get_dir()) / "checkpoints" / Path(address).name)
    if name.startswith(WANDB):
        return from_wandb(name.removeprefix(WANDB))
    for candidate in (Path(name), ROOT / name):
        if os.path.isfile(candidate):
            return candidate
    if OFFICIAL.fullmatch(Path(name).name):
        raise UserError(
            f"weights {name} are not here; download {RELEASE}{Path(name).name} and put it at {Path(name).absolute()}, "
            "or start from scratch with --weights '' --cfg and a model YAML"
        )
    raise UserError(f"weights {name} are not a file; check the path, or start from scratch with --weights ''")


def from_wandb(name: str) -> Path:
    """The weight file in a W&B artifact, entity/project/name:alias, kept in the cache; the first process of a machine
    fetches it.

    Raises `UserError`.
    """
    folder = cache_folder() / "wandb" / re.sub(r"[^\w.-]", "-", name)
    with one_at_a_time(folder.with_suffix(".lock")):
        told = subprocess.run(
            [*own_python("utils.wandb_process", "fetch"), name, str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        ).stdout
    answer = json.loads(told) if told else {"error": "wandb is not installed, or has failed"}
    if "error" in answer:
        raise UserError(
            f"--weights {WANDB}{name} cannot be had ({answer['error']}); check the key and the name "
            "(entity/project/name:alias), or download the file and name it"
        )
    files = [Path(file) for file in answer["files"] if file.endswith(".pt")]
    chosen = [file for file in files if file.name == "best.pt"] or files
    if len(chosen) != 1:
        raise UserError(f"--weights {WANDB}{name} holds {len(chosen)} .pt files, and must hold one, or a best.pt")
    return chosen[0]


def download(address: str, path: Path) -> Path:
    """The file at `address`, kept at `path`; of the processes of a machine one fetches it, and the others wait.

    Raises `UserError` with the address and the place where it belongs.
    """
    with one_at_a_time(path.with_suffix(".lock")):
        if not path.is_file():
            try:
                _fetch(address, path)
            except (OSError, ValueError, HTTPException) as error:  # URLError and all that sockets raise are OSErrors
                reason = getattr(error, "reason", error)
                raise UserError(
                    f"{address} cannot be downloaded ({reason}); fetch it by other means and put it at {path}"
                ) from None
    return path


def _fetch(address: str, path: Path) -> None:
    """Raises OSError, HTTPException, or ValueError where the content is not what the name says."""
    hidden = None if speaks() else True  # None: tqdm asks whether it writes to a terminal
    digest, done = hashlib.sha256(), 0
    with (
        urlopen(address, timeout=PATIENCE) as answer,
        replacing(path) as file,
        tqdm(
            total=int(answer.headers.get("Content-Length") or 0) or None,
            desc=path.name,
            unit="B",
            unit_scale=True,
            disable=hidden,
            leave=False,
        ) as bar,
    ):
        while part := answer.read(2**20):
            file.write(part)
            digest.update(part)
            done += len(part)
            bar.update(len(part))
        if bar.total is not None and done != bar.total:
            raise ValueError(f"the connection ended after {done} of {bar.total} bytes")
        wanted = CHECKSUM.search(path.name)
        if wanted and not digest.hexdigest().startswith(wanted[1]):
            raise ValueError("its checksum is another than its name says")
