"""Parts of a model by name, for --freeze and `lr_factor`: backbone, head, and patterns of layers or parameters."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import NamedTuple

from torch import nn

from utils.errors import UserError, nearest, shown


class Layers(NamedTuple):
    """The numbered layers of a model: the children of `model.model`, or of a model without that attribute."""

    parent: nn.Module
    names: list[str]  # prefixes of the parameters' names, such as `model.0`
    modules: list[nn.Module]
    main: int  # number of layers up to and with the head; an auxiliary branch follows it


def layers_of(model: nn.Module) -> Layers:
    """Return the numbered layers of a model."""
    children = dict(model.named_children())
    parent, prefix = (children["model"], "model.") if "model" in children else (model, "")
    names, modules = [prefix + name for name, _ in parent.named_children()], list(parent.children())
    head = getattr(model, "head", None)
    main = next((number for number, layer in enumerate(modules, 1) if layer is head), len(modules))
    return Layers(parent, names, modules, main)


def parameters_of(model: nn.Module, word: str, flag: str) -> set[str]:
    """Return the names of the parameters that a word of a flag selects. Raises `UserError` if it selects none.

    Args:
        word: `backbone` (the rows of that list in the model YAML; without one the module of that name, or all but the
            last layer), `head` (the rest), the number of a layer, or a pattern such as `model.2`, `*.bn` or `*.bias`,
            which selects the parameters whose names it matches and all parameters of the modules whose names it matches
        flag: name of the flag in errors
    """
    parameters = {name for name, _ in model.named_parameters()}
    layers = layers_of(model)
    if word in ("backbone", "head"):
        backbone = _backbone(model, parameters, layers)
        chosen = backbone if word == "backbone" else parameters - backbone
    else:
        pattern = layers.names[int(word)] if word.isdecimal() and int(word) < len(layers.names) else word
        modules = tuple(f"{name}." for name, _ in model.named_modules() if name and fnmatchcase(name, pattern))
        chosen = {name for name in parameters if fnmatchcase(name, pattern) or name.startswith(modules)}
    if not chosen:
        known = sorted({name.rpartition(".")[0] for name in parameters} | parameters)
        some = [name for name, _ in model.named_parameters()][:1]
        raise UserError(
            f"{flag} {shown(word)} matches no layer or parameter of the model{nearest(word, known)}; give "
            f"backbone, head, the number of a layer, or a name or pattern such as {', '.join([*some, '*.bias'])}"
        )
    return chosen


def _backbone(model: nn.Module, parameters: set[str], layers: Layers) -> set[str]:
    rows = getattr(model, "yaml", {}).get("backbone")
    named = sorted((name for name, _ in model.named_modules() if name.split(".")[-1] == "backbone"), key=len)
    if isinstance(rows, list):
        prefixes = layers.names[: len(rows)]
    elif named:
        prefixes = named[:1]
    else:
        head = f"{layers.names[layers.main - 1]}."
        return {name for name in parameters if not name.startswith(head)}
    return {name for name in parameters if name.startswith(tuple(f"{prefix}." for prefix in prefixes))}


def rate_factors(model: nn.Module, parts: Mapping[str, float]) -> dict[str, float]:
    """Return the learning-rate factors of parameters by name, from the factors of parts.

    A parameter in several parts has the last part's factor; a parameter in none is not in the result. Raises
    `UserError` if a part matches no parameter.
    """
    return {name: factor for word, factor in parts.items() for name in parameters_of(model, word, "lr_factor:")}
