"""What every task asks of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from torch import Tensor

Info = TypeVar("Info", covariant=True)


class Batch(Protocol[Info]):
    """images: uint8 (b, 3, h, w) RGB; targets: float32, what is to be found in them; infos: b of them."""

    @property
    def images(self) -> Tensor: ...
    @property
    def targets(self) -> Tensor: ...
    @property
    def infos(self) -> Sequence[Info]: ...
