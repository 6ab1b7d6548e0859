"""Recognise weights of the MIT implementation of YOLOv9, MultimediaTechLab/YOLO. Called by models/weights/reader.py.

Its files hold tensors only, named by layer and path; Lightning's checkpoints of its training have them under a prefix.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from models.weights.content import Weights
from utils.files import ROOT, read_yaml

# Before the names in a Lightning checkpoint: of the EMA, which its validations use, and of the network.
PREFIXES = ("ema.model.", "model.model.", "")
CONSTANTS = "anc2vec"  # part of the names of the numbers 0 to 15, which a head here does not store
NAME = re.compile(r"\d+\.")
CLASSES = re.compile(r"(\d+)\.heads\.0\.class_conv\.2\.weight")
# Sizes by the channels of the first convolution, and whether layer 2 is an ELAN, whose conv2 is a single convolution.
SIZES = {(16, True): "t", (32, True): "s", (32, False): "m", (64, False): "c"}
COCO_CLASSES = 80


def yolov9_weights(state: Mapping[str, Tensor]) -> Weights | None:
    """Return the weights in a state dict with names of that implementation, without its constants; None for others.

    Their model is the shipped one with these layers, if there is one, and the classes are COCO's if there are 80.
    """
    for prefix in PREFIXES:
        names = [name for name in state if name.startswith(prefix) and NAME.match(name.removeprefix(prefix))]
        tensors = {name.removeprefix(prefix): state[name] for name in names if CONSTANTS not in name}
        heads = sorted((int(match[1]), name) for name in tensors if (match := CLASSES.fullmatch(name)))
        if heads and (prefix or len(names) == len(state)):
            nc = len(tensors[heads[0][1]])  # of the main head, before the auxiliary one
            coco = read_yaml(ROOT / "data" / "coco.yaml")["names"] if nc == COCO_CLASSES else {}
            renamed = {f"model.{name}": tensor for name, tensor in tensors.items()}
            return Weights(renamed, _model(tensors, nc), dict(coco), "detect", {}, "yolov9")
    return None


def _model(tensors: Mapping[str, Tensor], nc: int) -> dict[str, Any] | None:
    """Return the YAML of the shipped model with these layers; None if there is none.

    The channels of its class branches are written out, so that a model for other classes has as many.
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
