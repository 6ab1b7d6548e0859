"""Classifiers that torchvision builds, from a model YAML with `architecture:`.

torchvision is imported where it is used: it takes more than a second, which a detector need not wait for.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from utils.errors import UserError, nearest

KEYS = ("task", "architecture", "nc", "args")
# Two have a second and third head, for training alone, that would need a loss of their own; and their weights are of
# images normalised in another way, which `transform_input` brings about.
PLAIN = {name: {"aux_logits": False, "init_weights": True} for name in ("googlenet", "inception_v3")}


def architectures() -> list[str]:
    """The names of torchvision's classification models."""
    from torchvision import models as zoo

    return zoo.list_models(module=zoo)


def architecture(yaml: Mapping[str, Any], source: str) -> str:
    """The name that a YAML of `source` gives. Raises `UserError` where torchvision has no such classifier."""
    name, known = yaml.get("architecture"), architectures()
    if name not in known:
        hint = nearest(str(name), known) or ", such as resnet34"
        raise UserError(f"{source}: `architecture` is {name!r}; give a classification model of torchvision{hint}")
    return name


def default_weights(name: str) -> str:
    """The address of the weights that torchvision recommends for an architecture."""
    from torchvision.models import get_model_weights

    return get_model_weights(name).DEFAULT.url


def build_classifier(yaml: Mapping[str, Any], nc: int, imgsz: int, source: str = "the model YAML") -> nn.Module:
    """The network that a YAML of `source` names, for `nc` classes and images of `imgsz` pixels.

    It turns (b, 3, h, w) into logits (b, nc). State-dict keys are torchvision's. `args` of the YAML are arguments of
    its function, such as `dropout: 0.3`. Its attribute `yaml` builds it again. Raises `UserError` where it cannot be
    built or does not take such images.
    """
    from torchvision.models import get_model

    name = architecture(yaml, source)
    for key in yaml:
        if key not in KEYS:
            raise UserError(f"{source}: unknown key '{key}'{nearest(str(key), KEYS)}; known are {', '.join(KEYS)}")
    args = yaml.get("args") or {}
    if not isinstance(args, dict) or "weights" in args or "num_classes" in args:
        raise UserError(f"{source}: `args` is {args!r}; write lines such as `dropout: 0.3` (weights are for --weights)")
    args = {"transform_input": True, **args} if name in PLAIN else args
    try:
        model = get_model(name, weights=None, num_classes=nc, **PLAIN.get(name, {}), **args)
    except Exception as error:  # a user's arguments can fail anywhere
        raise UserError(f"{source}: {name} cannot be built with the arguments {args} ({_line(error)})") from error
    known = inspect.signature(type(model).__init__).parameters
    if unknown := [key for key in args if key not in known]:  # some builders swallow what they do not know
        raise UserError(
            f"{source}: `args` has '{unknown[0]}', which {name} does not know{nearest(str(unknown[0]), known)}"
        )
    _try(model, imgsz, source, name)
    model.yaml = {**copy.deepcopy(dict(yaml)), "task": "classify", "nc": nc}
    return model


def _try(model: nn.Module, imgsz: int, source: str, name: str) -> None:
    """Send images through, without memory and arithmetic. Raises `UserError` where their size does not suit."""
    state = {key: tensor.to("meta") for key, tensor in chain(model.named_parameters(), model.named_buffers())}
    try:
        with torch.no_grad():
            functional_call(model, state, torch.zeros(2, 3, imgsz, imgsz, device="meta"))
    except Exception as error:
        raise UserError(
            f"{source}: {name} does not work with --imgsz {imgsz} ({_line(error)}); most are made for 224"
        ) from error


def _line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).split("\n")[0][:160]
