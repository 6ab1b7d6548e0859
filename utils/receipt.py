"""The receipt of a run, receipt.yaml: what its results were made from, and their hashes, for `python -m utils.repeat`.

No path of a machine, no user's name and no key is in it. Written by utils/run.py and export.py.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from importlib import metadata
from itertools import accumulate
from pathlib import Path
from typing import Any

import cv2
import torch
import yaml
from accelerate import Accelerator

from utils.batch import Split
from utils.compare_runs import NOT_HASHED, RECEIPT, differences
from utils.distributed import deepspeed
from utils.distributed.doctor import MACHINE_FLAGS, code_hash
from utils.distributed.launch import describe_device
from utils.errors import Stopped, UserError
from utils.files import ROOT, VERSION, read_yaml
from utils.tracking.run_log import git, git_commit

REPEATED = "repeated.yaml"  # the receipt of the run that a run repeats, and `check`: whether to stop before training
USER_FILES = ("layers", "task_file", "augmentations", "hooks")
# Other settings that change no bytes, or are in the environment too.
OTHER_FLAGS = (
    *("resume", "time_limit", "profile", "threads", "hashes", "save_steps", "save_period", "strict", "allow_licence"),
    *("wandb_id", "log_with", "no_wandb", "bbox_interval", "upload_model", "upload_dataset", "annotations", "review"),
)
HASHED_BYTES = 2**30  # of a split's images, without --hashes; takes one or two seconds
Values = dict[str, Any]


def files_hash(files: Iterable[Path]) -> str:
    """Return the SHA-256 of the SHA-256 of each file's content."""
    return sha256(b"".join(sha256(file.read_bytes()).digest() for file in files)).hexdigest()


def split_inputs(split: Split, hashes: bool = False) -> dict[str, str]:
    """Return what identifies a split wherever it lies; images by content if they are small, or with `hashes`."""
    is_small = all(size <= HASHED_BYTES for size in accumulate(path.stat().st_size for path in split.images))
    content = files_hash(split.images) if hashes or is_small else NOT_HASHED
    return {**split.identity(), "images": content}


def user_files(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the SHA-256 of the user's code that settings name, by flag and name."""
    paths = {flag: Path(settings[flag]) for flag in USER_FILES if settings.get(flag)}
    files = {flag: filter(Path.is_file, (path, *sorted(path.rglob("*.py")))) for flag, path in paths.items()}
    return {f"{flag} {path.name}": files_hash(files[flag]) for flag, path in paths.items()}


def code_inputs(settings: Mapping[str, Any]) -> Values:
    """Return the hashes of the code and of the user's files, and the settings that are inputs, in plain values."""
    parts = {"settings": {key: value for key, value in settings.items() if key not in (*MACHINE_FLAGS, *OTHER_FLAGS)}}
    parts |= {key: parts["settings"].pop(key) for key in ("hyperparameters", "model") if key in settings}
    return {"code": code_hash(ROOT), "your files": user_files(settings), **json.loads(json.dumps(parts))}


def environment(device: torch.device, accelerator: Accelerator | None = None) -> Values:
    """Return what else decides the bytes: versions, hardware, and the precision and processes of a run."""
    run = {"precision": accelerator.mixed_precision, "processes": accelerator.num_processes} if accelerator else {}
    packages = ("accelerate", "torchvision", "numpy", "pillow", *["deepspeed"] * deepspeed.is_requested())
    versions = {"torch": str(torch.__version__), **{name: metadata.version(name) for name in packages}}
    hardware = {"device": describe_device(device), "cpu": torch.backends.cpu.get_cpu_capability()}
    return {"python": platform.python_version(), **versions, "opencv": cv2.__version__, **hardware, **run}


def require_inputs(now: Mapping[str, Any], then: Mapping[str, Any]) -> None:
    """Raise `UserError`, with exit code 2, if inputs differ from those in the receipt of the run that is repeated."""
    if changed := differences(now, {key: then["inputs"].get(key, "none") for key in now}).values():
        raise UserError(f"cannot be repeated here: {'; '.join(changed)}", 2)


@dataclass
class Receipt:
    """What a run begins with, and the hashes of its results by file name, or its metrics."""

    inputs: Values = field(default_factory=dict)  # must be equal for equal bytes
    environment: Values = field(default_factory=dict)  # except for `processes` with --logical-processes too
    results: Values = field(default_factory=dict)
    resumed: list[str] = field(default_factory=list)  # what differed when the run was resumed
    revision: str = ""  # of the code

    def check_repetition(self, folder: Path) -> None:
        """Compare with the run that the run in `folder` repeats, if it does, and print the differences.

        Raises `UserError` if inputs differ, and `Stopped` if no more than that is asked.
        """
        if (folder / REPEATED).is_file():
            then = read_yaml(folder / REPEATED)
            is_free = then["inputs"]["settings"]["logical_processes"] > 0
            for name, line in differences(self.environment, then["environment"]).items():
                needed = "need not be equal" if is_free and name == "processes" else "equal bytes need what was"
                print(f"{line} ({needed})", flush=True)
            require_inputs(self.inputs, then)
            if then["check"]:
                raise Stopped(0)

    def begin(self, folder: Path, settings: Mapping[str, Any], resumed: bool = False) -> dict[str, str]:
        """Add what settings and, if `resumed`, the receipt in `folder` have; return texts by file name."""
        self.revision, self.inputs = git_commit(), {**self.inputs, **code_inputs(settings)}
        if resumed and (folder / RECEIPT).is_file():
            then = read_yaml(folder / RECEIPT)
            self.inputs["initial weights"], self.results = then["inputs"]["initial weights"], then["results"]
            changed = {**differences(self.inputs, then["inputs"]), **differences(self.environment, then["environment"])}
            self.resumed, self.environment = [*then["resumed"], *changed.values()], then["environment"]
        diff = git("diff", "HEAD", "--", "*.py", "models/*.yaml")
        return {RECEIPT: self.text(), **({"code.diff": diff} if diff else {})}

    @property
    def sha256(self) -> str:
        """The hash of the inputs, which weight files name."""
        return sha256(json.dumps(self.inputs, sort_keys=True).encode()).hexdigest()

    def text(self) -> str:
        """Return the content of receipt.yaml."""
        content = {"lockstep": VERSION, "sha256": self.sha256, **vars(self)}
        return yaml.safe_dump(content, default_flow_style=None, sort_keys=False, allow_unicode=True, width=100)
