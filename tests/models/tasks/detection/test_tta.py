"""Augmented copies of a batch."""

from __future__ import annotations

import torch

from models.tasks.detection.tta import AUGMENTATIONS, PADDING_GREY, Augmentation


def test_scaled_images_are_padded_to_whole_strides() -> None:
    images = torch.rand(2, 3, 48, 64)
    scaled, scale = Augmentation(0.5, False).apply(images, 32)
    assert scaled.shape == (2, 3, 32, 32)
    assert scale == (0.5, 0.5)
    assert (scaled[..., 24:, :] == PADDING_GREY).all()
    torch.testing.assert_close(scaled[..., :24, :].mean(), images.mean(), atol=0.02, rtol=0)


def test_mirrored_images() -> None:
    images = torch.rand(1, 3, 8, 8)
    mirrored, scale = Augmentation(1.0, True).apply(images, 8)
    assert torch.equal(mirrored, images.flip(3))
    assert scale == (1, 1)


def test_the_first_augmentation_changes_nothing() -> None:
    images = torch.rand(1, 3, 8, 8)
    assert AUGMENTATIONS[0].apply(images, 8)[0] is images
