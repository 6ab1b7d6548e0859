"""Where weights that a flag names are to be found."""

from __future__ import annotations

import json
import os
import re
import subprocess
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from models.tasks.classification.torchvision_models import architecture, default_weights
from utils.background import own_python
from utils.download import download
from utils.errors import UserError
from utils.files import ROOT, cache_folder, one_at_a_time

DEFAULT, WANDB, OPENVINO = "DEFAULT", "wandb:", "_openvino_model"  # the last ends the name of an exported folder
CHECKSUM = re.compile(r"-([0-9a-f]{8,})\.pth$")  # in torchvision's file names: the first digits of the SHA-256
OFFICIAL = re.compile(r"yolov5[nsmlx](6|-cls)?\.pt")
SEGMENTATION = re.compile(r"yolov5[nsmlx]-seg\.pt")
RELEASE = "https://github.com/ultralytics/yolov5/releases/download/v7.0/"
SHA256 = {"yolov5n.pt": "4f180cf23ba0717ada0badd6c685026d73d48f184d00fc159c2641284b2ac0a3"}  # of RELEASE, as known


def find_weights(name: str, yaml: Mapping[str, Any] | None = None, source: str = "the model YAML") -> Path:
    """The weight file of that name, as given or in the repository's folder; else an official YOLOv5 one from the cache,
    downloaded where it is missing. DEFAULT is what torchvision recommends for the architecture of the model's `yaml`;
    wandb:entity/project/name:alias an artifact.

    Raises `UserError`; for an official name it tells the address and where the file may lie.
    """
    if name == DEFAULT:
        if not yaml or "architecture" not in yaml:
            raise UserError(f"--weights {DEFAULT} goes with a --cfg that names an `architecture` of torchvision")
        return torchvision_weights(default_weights(architecture(yaml, source)))
    if name.startswith(WANDB):
        return from_wandb(name.removeprefix(WANDB))
    for candidate in (Path(name), ROOT / name):
        if os.path.isfile(candidate) or (candidate.name.endswith(OPENVINO) and os.path.isdir(candidate)):
            return candidate
    file = Path(name).name
    if OFFICIAL.fullmatch(file):
        return official_weights(name, file)
    if SEGMENTATION.fullmatch(file):
        raise UserError(f"weights {name} are for segmentation, which is no task here; take {file.replace('-seg', '')}")
    raise UserError(f"weights {name} are not a file; check the path, or start from scratch with --weights ''")


def official_weights(name: str, file: str) -> Path:
    """YOLOv5's release file for `--weights name`, in the cache. LOCKSTEP_RELEASES: the address of a mirror's folder.

    Raises `UserError`.
    """
    folder = (os.environ.get("LOCKSTEP_RELEASES") or RELEASE).rstrip("/")
    cached = cache_folder() / "weights" / file
    return download(
        f"{folder}/{file}",
        cached,
        sha256=SHA256.get(file, ""),
        usable=is_whole,
        advice=f"fetch it by other means and put it at {Path(name).absolute()} or {cached}, or start from scratch with "
        "--weights '' --cfg and a model YAML",
    )


def torchvision_weights(address: str) -> Path:
    """A weight file of torchvision's, where torch itself keeps it. Raises `UserError`."""
    file = Path(address).name
    known = CHECKSUM.search(file)
    return download(address, Path(torch.hub.get_dir()) / "checkpoints" / file, sha256=known[1] if known else "")


def is_whole(path: Path) -> bool:
    """Is it a zip archive, as torch writes, that agrees with its own checksums?"""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.testzip() is None
    except (zipfile.BadZipFile, OSError, EOFError, RuntimeError, NotImplementedError, zlib.error):
        return False


def from_wandb(name: str) -> Path:
    """The weight file in a W&B artifact, entity/project/name:alias, kept in the cache; the first process of a machine
    fetches it.

    Raises `UserError`.
    """
    folder = cache_folder() / "wandb" / re.sub(r"[^\w.-]", "-", name)
    with one_at_a_time(folder.with_suffix(".lock")):
        told = subprocess.run(
            [*own_python("utils.tracking.wandb_process", "fetch"), name, str(folder)],
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
