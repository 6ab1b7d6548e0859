"""Find the file that --weights names; download releases of YOLOv5 and YOLOv9, torchvision's weights, and files from W&B
and the Hugging Face Hub.

Called by models/initial_weights.py and models/ensemble.py.
"""

from __future__ import annotations

import os
import re
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from models.tasks import TASKS
from models.weights.licence import CHECKSUM_IN_NAME
from utils.download import HUB_PREFIX, download, fetch_from_hub
from utils.errors import UserError
from utils.files import cache_folder, looked_for, one_at_a_time

TORCHVISION_DEFAULT = "DEFAULT"  # the weights that torchvision recommends for an architecture
WANDB_PREFIX = "wandb:"
OPENVINO_SUFFIX = "_openvino_model"  # suffix of an exported folder
RELEASE_ADDRESS = "https://github.com/ultralytics/yolov5/releases/download/v7.0/"
RELEASE_LICENCE = "AGPL-3.0, published by Ultralytics"
YOLOV9_FILE = re.compile(r"v9-[tsmc]\.pt")
YOLOV9_ADDRESS = "https://github.com/MultimediaTechLab/YOLO/releases/download/v1.0-alpha/"
YOLOV9_LICENCE = "MIT, published by MultimediaTechLab"
RELEASE_SHA256 = {"yolov5n.pt": "4f180cf23ba0717ada0badd6c685026d73d48f184d00fc159c2641284b2ac0a3"}  # by release file


def find_weights(
    name: str, yaml: Mapping[str, Any] | None = None, source: str = "the model YAML", training: bool = True
) -> Path:
    """Return the path of a weight file, downloaded into the cache if necessary. Raises `UserError`.

    Args:
        name: path of a file; a run folder, for its best.pt, else last.pt; the name of a release file of YOLOv5 or
            YOLOv9; DEFAULT for torchvision's recommendation for the architecture in `yaml`;
            wandb:entity/project/name:alias for an artifact; or hf:owner/name for a repository of the Hugging Face Hub
        yaml: model YAML that --cfg names, if any
        source: name of the model YAML in errors
        training: whether train.py asks: only it knows DEFAULT and can start without weights
    """
    if name == TORCHVISION_DEFAULT and training:
        return torchvision_weights(yaml or {}, source)
    if name.startswith(WANDB_PREFIX):
        return artifact_weights(name.removeprefix(WANDB_PREFIX))
    if name.startswith(HUB_PREFIX):
        return fetch_from_hub(name.removeprefix(HUB_PREFIX))
    path, file = Path(name), Path(name).name
    if os.path.isfile(path) or (file.endswith(OPENVINO_SUFFIX) and os.path.isdir(path)):
        return path
    if os.path.isdir(path):
        return weights_of_run(path)
    if any(re.fullmatch(entry.load().official_weights, file) for entry in TASKS.values()):
        return official_weights(name, file, ", or start from scratch with --weights '' and --cfg" * training)
    alternative = ", or start from scratch with --weights ''" * training
    raise UserError(f"weights {name} are not a file; check the path{alternative}{looked_for(path)}")


def weights_of_run(folder: Path) -> Path:
    """Return best.pt of a run folder, or last.pt if there is none. Raises `UserError` if there is neither."""
    files = [folder / "weights" / name for name in ("best.pt", "last.pt")]
    for file in files:
        if file.is_file():
            return file
    tried = looked_for(*files)
    raise UserError(f"--weights {folder} is a folder without weights; give a weight file or the folder of a run{tried}")


def official_weights(name: str, file: str, alternative: str) -> Path:
    """Download a release file of YOLOv5 or YOLOv9 into the cache and return its path. Raises `UserError`.

    The environment variable LOCKSTEP_RELEASES may name the URL of a mirror.

    Args:
        name: value of --weights, for the error
        file: name of the release file
        alternative: end of the error's advice, such as another flag to use
    """
    is_yolov9 = YOLOV9_FILE.fullmatch(file)
    address = YOLOV9_ADDRESS if is_yolov9 else RELEASE_ADDRESS
    folder = (os.environ.get("LOCKSTEP_RELEASES") or address).rstrip("/")
    cached = cache_folder() / "weights" / file
    return download(
        f"{folder}/{file}",
        cached,
        sha256=RELEASE_SHA256.get(file, ""),
        usable=is_whole,
        advice=f"download it yourself to {Path(name).absolute()} or {cached}{alternative}",
        licence=YOLOV9_LICENCE if is_yolov9 else RELEASE_LICENCE,
    )


def torchvision_weights(yaml: Mapping[str, Any], source: str) -> Path:
    """Return the recommended weights for a YAML's `architecture`, downloaded into torch's cache if necessary.

    Raises `UserError`.

    Args:
        source: name of the model YAML in errors
    """
    from models.tasks import classify

    if "architecture" not in yaml:
        raise UserError(f"--weights {TORCHVISION_DEFAULT} needs a --cfg that names an `architecture` of torchvision")
    address = classify.default_weights(classify.architecture(yaml, source))
    file = Path(address).name
    digits = CHECKSUM_IN_NAME.search(file)
    cached = Path(torch.hub.get_dir()) / "checkpoints" / file
    return download(address, cached, sha256=digits[1] if digits else "")


def is_whole(path: Path) -> bool:
    """Return whether a file is a zip archive, the format that torch writes, with valid checksums."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.testzip() is None
    except (zipfile.BadZipFile, OSError, EOFError, RuntimeError, NotImplementedError, zlib.error):
        return False


def artifact_weights(name: str) -> Path:
    """Download a W&B artifact, entity/project/name:alias, into the cache and return the path of its weight file.

    Raises `UserError`. The first process of a machine downloads it; the others wait.
    """
    from utils.tracking.wandb import download_artifact

    folder = cache_folder() / "wandb" / re.sub(r"[^\w.-]", "-", name)
    with one_at_a_time(folder.with_suffix(".lock")):
        try:
            files = download_artifact(name, folder)
        except UserError as error:
            raise UserError(
                f"--weights {WANDB_PREFIX}{name} cannot be downloaded ({error}); check the key and the name "
                "(entity/project/name:alias), or download the file and give its path"
            ) from None
    files = [file for file in files if file.suffix == ".pt"]
    chosen = [file for file in files if file.name == "best.pt"] or files
    if len(chosen) != 1:
        raise UserError(
            f"--weights {WANDB_PREFIX}{name} holds {len(chosen)} .pt files; choose one with one .pt file or a best.pt"
        )
    return chosen[0]
