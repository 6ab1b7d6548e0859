"""The licence of weights, and the files that they were made from: both are passed on to every file made from them.

Called by models/weights/reader.py, models/initial_weights.py and train.py. docs/models.md#licences lists known files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from utils.errors import UserError

UNKNOWN = "unknown"
YOURS = "yours"  # the licence of weights that were trained from scratch
# Identifiers from https://spdx.org/licenses, in lower case, by the program that wrote a file.
LICENCE_OF_PROGRAM = {"yolov5": "agpl-3.0", "yolov9": "mit"}
TORCHVISION_LICENCE = "bsd-3-clause"
YOLOV5_RELEASE = re.compile(r"yolov5[nsmlx]6?u?(-seg|-cls)?\.pt")
CHECKSUM_IN_NAME = re.compile(r"-([0-9a-f]{8,})\.pth$")  # torchvision names its files by the SHA-256's first digits
SHOWN_DIGITS = 8  # digits of a SHA-256 that messages show


@dataclass(frozen=True)
class Origin:
    """The licence of weights, and the name and SHA-256 of each file that they were made from, oldest first."""

    licence: str = UNKNOWN
    files: Sequence[Mapping[str, str]] = field(default_factory=list)

    @classmethod
    def recorded(cls, content: Mapping[str, Any]) -> Origin:
        """Return the origin recorded in a weight file, metadata or settings; older ones imply it by their settings."""
        if isinstance(licence := content.get("licence"), str):
            files = content.get("origin")
            known = [each for each in files if isinstance(each, dict)] if isinstance(files, list | tuple) else []
            return cls(licence, [{key: str(each.get(key, "")) for key in ("file", "sha256")} for each in known])
        weights = content.get("settings", content).get("weights")  # value of --weights in the run that trained them
        if weights == "":
            return cls(YOURS)
        is_release = isinstance(weights, str) and YOLOV5_RELEASE.fullmatch(Path(weights).name)
        return cls(LICENCE_OF_PROGRAM["yolov5"] if is_release else UNKNOWN)

    @classmethod
    def of_program(cls, program: str, sha256: str) -> Origin:
        """Return the origin of a file that does not record it.

        Args:
            program: program that wrote the file, see `Weights.source`
            sha256: hexadecimal SHA-256 of the file
        """
        if program == "tensors" and sha256[:SHOWN_DIGITS] in torchvision_checksums():
            return cls(TORCHVISION_LICENCE)
        return cls(LICENCE_OF_PROGRAM.get(program, UNKNOWN))

    def followed_by(self, file: str, sha256: str) -> Origin:
        """Return the origin of weights that are made from `file`, whose own origin this is."""
        return Origin(self.licence, [*self.files, {"file": file, "sha256": sha256}])

    def content(self) -> dict[str, Any]:
        """Return the entries that record the origin in a weight file, metadata and settings."""
        return {"licence": self.licence, "origin": [dict(each) for each in self.files]}

    def __str__(self) -> str:
        if not self.files:
            return self.licence
        first = self.files[0]
        return f"{self.licence} (began as {first['file']}, SHA-256 {first['sha256'][:SHOWN_DIGITS]}...)"

    def require(self, allowed: Sequence[str]) -> None:
        """Raise `UserError` if --allow-licence lists licences, but not this one. Weights from scratch are allowed."""
        if not allowed or self.licence in (YOURS, *map(str.lower, allowed)):
            return
        raise UserError(
            f"the licence of the weights is {self}, which --allow-licence {','.join(allowed)} does not list; give "
            "other weights, or --weights '' to train from scratch"
        )


@cache
def torchvision_checksums() -> frozenset[str]:
    """Return the first digits of the SHA-256 of torchvision's weight files, which are in their names."""
    from torchvision import models

    addresses = (weights.url for name in models.list_models() for weights in models.get_model_weights(name))
    return frozenset(match[1][:SHOWN_DIGITS] for url in addresses if (match := CHECKSUM_IN_NAME.search(url)))
