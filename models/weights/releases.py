"""Find the weight file that --weights names; YOLOv5's releases, torchvision's weights and W&B artifacts are downloaded.

Called by models/starting_point.py and models/ensemble.py.
"""

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

from models.tasks import TASKS
from utils.background import own_python
from utils.download import download
from utils.errors import UserError
from utils.files import ROOT, cache_folder, one_at_a_time

TORCHVISION_DEFAULT = "DEFAULT"  # the weights that torchvision recommends for an architecture
WANDB_PREFIX = "wandb:"
OPENVINO_SUFFIX = "_openvino_model"  # of an exported folder
CHECKSUM_IN_NAME = re.compile(r"-([0-9a-f]{8,})\.pth$")  # in torchvision's file names: the first digits of the SHA-256
OTHER_TASK = re.compile(r"(yolov5[nsmlx])-\w+\.pt")  # the release files of tasks that are not in `TASKS`
RELEASE_ADDRESS = "https://github.com/ultralytics/yolov5/releases/download/v7.0/"
RELEASE_SHA256 = {"yolov5n.pt": "4f180cf23ba0717ada0badd6c685026d73d48f184d00fc159c2641284b2ac0a3"}  # of its files


def find_weights(name: str, yaml: Mapping[str, Any] | None = None, source: str = "the model YAML") -> Path:
    """Return the weight file of that name: as given, or in the repository's folder, else an official YOLOv5 file from
    the cache, downloaded if it is not there yet.

    DEFAULT means torchvision's recommendation for the architecture of the model's `yaml`, which errors call `source`;
    wandb:entity/project/name:alias means an artifact. Raises `UserError`; for an official name it gives the address and
    the path that the file can be put at.
    """
    if name == TORCHVISION_DEFAULT:
        return torchvision_weights(yaml or {}, source)
    if name.startswith(WANDB_PREFIX):
        return artifact_weights(name.removeprefix(WANDB_PREFIX))
    for candidate in (Path(name), ROOT / name):
        if os.path.isfile(candidate) or (candidate.name.endswith(OPENVINO_SUFFIX) and os.path.isdir(candidate)):
            return candidate
    file = Path(name).name
    if any(re.fullmatch(entry.load().official_weights, file) for entry in TASKS.values()):
        return official_weights(name, file)
    if other := OTHER_TASK.fullmatch(file):
        raise UserError(f"weights {name} are for none of the tasks here, {', '.join(TASKS)}; take {other[1]}.pt")
    raise UserError(f"weights {name} are not a file; check the path, or start from scratch with --weights ''")


def official_weights(name: str, file: str) -> Path:
    """Return YOLOv5's release file for `--weights name`, in the cache. Raises `UserError`.

    The environment variable LOCKSTEP_RELEASES gives the address of a mirror's folder.
    """
    folder = (os.environ.get("LOCKSTEP_RELEASES") or RELEASE_ADDRESS).rstrip("/")
    cached = cache_folder() / "weights" / file
    return download(
        f"{folder}/{file}",
        cached,
        sha256=RELEASE_SHA256.get(file, ""),
        usable=is_whole,
        advice=f"fetch it by other means and put it at {Path(name).absolute()} or {cached}, or start from scratch with "
        "--weights '' --cfg and a model YAML",
    )


def torchvision_weights(yaml: Mapping[str, Any], source: str) -> Path:
    """Return the recommended weights for a YAML's `architecture`, in torch's own cache. Raises `UserError`."""
    from models.tasks.classification import torchvision_models

    if "architecture" not in yaml:
        raise UserError(
            f"--weights {TORCHVISION_DEFAULT} goes with a --cfg that names an `architecture` of torchvision"
        )
    address = torchvision_models.default_weights(torchvision_models.architecture(yaml, source))
    file = Path(address).name
    digits = CHECKSUM_IN_NAME.search(file)
    return download(address, Path(torch.hub.get_dir()) / "checkpoints" / file, sha256=digits[1] if digits else "")


def is_whole(path: Path) -> bool:
    """Return whether a file is a zip archive, as torch writes, that agrees with its own checksums."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.testzip() is None
    except (zipfile.BadZipFile, OSError, EOFError, RuntimeError, NotImplementedError, zlib.error):
        return False


def artifact_weights(name: str) -> Path:
    """Return the weight file of a W&B artifact, entity/project/name:alias, in the cache. Raises `UserError`.

    The first process of a machine fetches it; the others wait.
    """
    folder = cache_folder() / "wandb" / re.sub(r"[^\w.-]", "-", name)
    with one_at_a_time(folder.with_suffix(".lock")):
        output = subprocess.run(
            [*own_python("utils.tracking.wandb_process", "fetch"), name, str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        ).stdout
    answer = json.loads(output) if output else {"error": "wandb is not installed, or has failed"}
    if "error" in answer:
        raise UserError(
            f"--weights {WANDB_PREFIX}{name} cannot be fetched ({answer['error']}); check the key and the name "
            "(entity/project/name:alias), or download the file and name it"
        )
    files = [Path(file) for file in answer["files"] if file.endswith(".pt")]
    chosen = [file for file in files if file.name == "best.pt"] or files
    if len(chosen) != 1:
        raise UserError(
            f"--weights {WANDB_PREFIX}{name} holds {len(chosen)} .pt files, and must hold one, or a best.pt"
        )
    return chosen[0]
