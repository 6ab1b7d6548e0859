"""Slices of options."""

from __future__ import annotations

from dataclasses import dataclass

from utils.config.hyperparameters import Hyperparameters
from utils.config.select import select


@dataclass(frozen=True)
class Part:
    lr0: float = 5.0
    momentum: float = 5.0
    colour: str = "red"


def test_select_takes_the_fields_of_the_same_names() -> None:
    whole = Hyperparameters(lr0=0.3)
    assert select(Part, whole) == Part(lr0=0.3, momentum=whole.momentum, colour="red")
    assert select(Part, whole, colour="blue").colour == "blue"
