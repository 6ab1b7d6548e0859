"""The loss of a run's first batches: one that jumps is noticed, on all processes' losses together."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from utils.training.rising_loss import RisingLoss

FINE = [0.3, 0.33, 0.27, 0.17, 0.32, 0.18] + [0.2] * 94
JUMP = [0.37, 0.33, 1.91, 0.5, 0.29, 0.39] + [0.3] * 94


def total(parts: Sequence[Tensor]) -> Tensor:
    """Add the parts of two logical processes, and of another process that has the same."""
    return 2 * torch.stack(list(parts)).sum(0)


def messages(losses: Sequence[float], enabled: bool = True) -> list[str]:
    """Give the watch batches of two terms, shared by two logical processes of this process."""
    watch = RisingLoss(total, enabled)
    shares = torch.tensor([[0.1, 0.15], [0.2, 0.05]])  # adds up to a half
    return [text for loss in losses if (text := watch.add_batch(loss * shares))]


def test_a_healthy_start() -> None:
    """A falling loss with the noise of small batches, and one that never falls."""
    assert messages(FINE) == []
    assert messages([0.25] * 120) == []


@pytest.mark.parametrize(("before", "count"), [(0, 20), (20, 50), (60, 100)])
def test_a_jump_is_said_once(before: int, count: int) -> None:
    """At the next check, even if the loss has fallen since."""
    (text,) = messages([0.35] * before + JUMP)
    assert text == f"from 0.35 to 0.913 within the first {count} batches"


def test_what_is_not_looked_at() -> None:
    """Later batches, and those of a run that is resumed."""
    assert messages([0.3] * 100 + [3.0] * 100) == []
    assert messages(JUMP, enabled=False) == []
