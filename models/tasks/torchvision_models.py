"""torchvision's classifiers, built from a model YAML with `architecture:`.

Called by `ClassificationTask.build_model`, and for --weights DEFAULT. torchvision is imported inside functions: the
import takes more than a second, and a detector does not need it.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from itertools import chain
from typing import Any, cast

import torch
from torch import nn
from torch.func import functional_call

from models.tasks.contract import Model
from utils.errors import UserError, first_line, nearest

CLASSIFIER_KEYS = ("task", "architecture", "nc", "args")
# These architectures have auxiliary heads for training, which would need a loss, so they are left out. Their pretrained
# weights expect another normalisation of the images, which `transform_input` does.
AUXILIARY_ARGUMENTS = {name: {"aux_logits": False, "init_weights": True} for name in ("googlenet", "inception_v3")}


def architectures() -> list[str]:
    """Return the names of torchvision's classification models."""
    from torchvision import models as torchvision_models

    names: list[str] = torchvision_models.list_models(module=torchvision_models)
    return names


def architecture(yaml: Mapping[str, Any], source: str) -> str:
    """Return the `architecture` of a YAML. Raises `UserError` if torchvision does not have such a classifier.

    Args:
        source: name of the YAML in errors
    """
    name, known = yaml.get("architecture"), architectures()
    if not isinstance(name, str) or name not in known:
        hint = nearest(str(name), known) or ", such as resnet34"
        raise UserError(f"{source}: `architecture` is {name!r}; give a classification model of torchvision{hint}")
    return name


def default_weights(name: str) -> str:
    """Return the URL of the weights that torchvision recommends for an architecture."""
    from torchvision.models import get_model_weights

    url: str = get_model_weights(name).DEFAULT.url
    return url


def build_classifier(yaml: Mapping[str, Any], nc: int, imgsz: int, source: str = "the model YAML") -> Model:
    """Build the network that a YAML names, for `nc` classes and images of `imgsz` pixels.

    It maps (b, 3, h, w) to logits (b, nc). State-dict keys are torchvision's. The YAML's `args` are arguments of
    torchvision's function, such as `dropout: 0.3`. Raises `UserError` if the network cannot be built or does not accept
    such images.

    Args:
        source: name of the YAML in errors
    """
    from torchvision.models import get_model

    name = architecture(yaml, source)
    for key in yaml:
        if key not in CLASSIFIER_KEYS:
            known_keys = ", ".join(CLASSIFIER_KEYS)
            raise UserError(
                f"{source}: unknown key '{key}'{nearest(str(key), CLASSIFIER_KEYS)}; known are {known_keys}"
            )
    args = yaml.get("args") or {}
    if not isinstance(args, dict) or "weights" in args or "num_classes" in args:
        raise UserError(f"{source}: `args` is {args!r}; write lines such as `dropout: 0.3` (weights are for --weights)")
    args = {"transform_input": True, **args} if name in AUXILIARY_ARGUMENTS else args
    try:
        model: nn.Module = get_model(name, weights=None, num_classes=nc, **AUXILIARY_ARGUMENTS.get(name, {}), **args)
    except Exception as error:  # a user's arguments can fail anywhere
        raise UserError(f"{source}: {name} cannot be built with the arguments {args} ({first_line(error)})") from error
    known = inspect.signature(type(model).__init__).parameters
    if unknown := [key for key in args if key not in known]:  # some builders ignore unknown arguments
        raise UserError(
            f"{source}: `args` has '{unknown[0]}', which {name} does not accept{nearest(str(unknown[0]), known)}"
        )
    _check_image_size(model, imgsz, source, name)
    built = cast(Model, model)  # torchvision's class; the attributes make it a `Model`
    built.yaml = {**copy.deepcopy(dict(yaml)), "task": "classify", "nc": nc}
    built.names, built.stride, built.imgsz = {number: str(number) for number in range(nc)}, 1, imgsz
    return built


def _check_image_size(model: nn.Module, imgsz: int, source: str, name: str) -> None:
    """Run the model on the meta device. Raises `UserError` if it does not accept images of this size."""
    state = {key: tensor.to("meta") for key, tensor in chain(model.named_parameters(), model.named_buffers())}
    try:
        with torch.no_grad():
            functional_call(model, state, torch.zeros(2, 3, imgsz, imgsz, device="meta"))
    except Exception as error:
        raise UserError(
            f"{source}: {name} does not work with --imgsz {imgsz} ({first_line(error)}); most are made for 224"
        ) from error
