"""Recognise weights of the MIT implementation of YOLOv9, MultimediaTechLab/YOLO. Called by models/weights/reader.py.

Its files hold tensors only, named by layer and path; its Lightning checkpoints put a prefix before these names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from models.weights.content import Weights
from utils.files import ROOT, read_yaml

# Prefixes of names: the EMA's and the network's in a Lightning checkpoint (validation uses the EMA), none elsewhere.
PREFIXES = ("ema.model.", "model.model.", "")
CONSTANTS = "anc2vec"  # part of the names of constants, the bins 0 to 15, which a `DetectDFL` head does not store
NAME = re.compile(r"\d+\.")
CLASSES = re.compile(r"(\d+)\.heads\.0\.class_conv\.2\.weight")
# Sizes by the channels of the first convolution, and by whether layer 2 is an ELAN, whose conv2 is one convolution.
SIZES = {(16, True): "t", (32, True): "s", (32, False): "m", (64, False): "c"}
COCO_CLASSES = 80


def yolov9_weights(state: Mapping[str, Tensor]) -> Weights | None:
    """Return the weights in a state dict of that implementation, without its constants; None for any other state dict.

    The model is the shipped one with the same layers, if there is one; 80 classes are taken to be COCO's.
    """
    for prefix in PREFIXES:
        names = [name for name in state if name.startswith(prefix) and NAME.match(name.removeprefix(prefix))]
        tensors = {name.removeprefix(prefix): state[name] for name in names if CONSTANTS not in name}
        heads = sorted((int(match[1]), name) for name in tensors if (match := CLASSES.fullmatch(name)))
        if heads and (prefix or len(names) == len(state)):
            nc = len(tensors[heads[0][1]])  # the first head is the main head
            coco = read_yaml(ROOT / "data" / "coco.yaml")["names"] if nc == COCO_CLASSES else {}
            renamed = {f"model.{name}": tensor for name, tensor in tensors.items()}
            return Weights(renamed, _model(tensors, nc), dict(coco), "detect", {}, "yolov9")
    return None


def _model(tensors: Mapping[str, Tensor], nc: int) -> dict[str, Any] | None:
    """Return the YAML of the shipped model with the same layers; None if there is none.

    The YAML names the channels of the class branches, so that they stay the same in a model for other classes.
    """
    first = tensors.get("0.conv.weight")
    size = SIZES.get((len(first), "2.conv2.conv.weight" in tensors)) if first is not None else None
    if size is None:
        return None
    yaml = read_yaml(ROOT / "models" / f"yolov9{size}.yaml")
    last = len(yaml["backbone"]) - 1
    for rows in (yaml["head"], yaml["auxiliary"]):
        last += len(rows)
        first = tensors.get(f"{last}.heads.0.class_conv.0.conv.weight")
        if first is not None:
            *others, args = rows[-1]
            rows[-1] = [*others, [*args, len(first)]]
    return {"task": "detect", **yaml, "nc": nc}
