"""Tests of a classifier's augmentation: each transform, mixing, the source of its randomness, and centre crops."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from data.transforms import ERASED_RGB, Augmenter, TransformSettings, centre_crop, torch_seeded_by
from tests.making import noise

SIDE = 32
EVERYTHING = TransformSettings(
    crop_scale=0.3, fliplr=0.5, flipud=0.5, brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1, randaugment=2,
    erasing=0.5, mixup=0.4, cutmix=0.4,
)  # fmt: skip


def plain(*colour: int, side: int = SIDE) -> Tensor:
    """Return a square image of one colour, RGB, or of one grey."""
    return torch.tensor(colour, dtype=torch.uint8).view(-1, 1, 1).expand(3, side, side).contiguous()


def noisy(width: int = SIDE, height: int = SIDE, seed: int = 0) -> Tensor:
    return torch.from_numpy(noise(width, height, seed).transpose(2, 0, 1).copy())


def augmenter(images: Sequence[Tensor], settings: TransformSettings) -> Augmenter:
    """Return an augmenter of images that each have their own class."""
    return Augmenter(settings, lambda number: (images[number], number), len(images), len(images))


def results(count: int, images: Sequence[Tensor], side: int = SIDE, **settings: float) -> list[tuple[Tensor, Tensor]]:
    """Return `count` results for the first image, each with its own generator."""
    augment = augmenter(images, TransformSettings(**settings))
    return [augment(0, side, np.random.default_rng(seed)) for seed in range(count)]


def pixels(count: int, image: Tensor, side: int = SIDE, **settings: float) -> Tensor:
    """Return the images of `results`, (count, 3, side, side)."""
    return torch.stack([changed for changed, _ in results(count, [image], side, **settings)])


# Single transforms


def test_without_strengths_a_square_image_is_unchanged() -> None:
    images = [noisy(seed=seed) for seed in range(3)]
    for changed, shares in results(10, images):
        assert torch.equal(changed, images[0])
        assert (shares.dtype, shares.tolist()) == (torch.float32, [1, 0, 0])


@pytest.mark.parametrize(("width", "height"), [(10, 10), (20, 64), (64, 20), (47, 33), (100, 100), (200, 10)])
def test_images_of_any_size_become_squares(width: int, height: int) -> None:
    for changed, shares in results(3, [noisy(width, height), noisy(height, width)], crop_scale=0.5, mixup=0.5):
        assert (changed.dtype, changed.shape) == (torch.uint8, (3, SIDE, SIDE))
        assert shares.shape == (2,)


def test_crops_have_a_minimum_area_and_a_moderate_aspect() -> None:
    steps = torch.arange(0, 256, 4, dtype=torch.uint8)
    columns, rows = steps.expand(64, 64), steps.view(64, 1).expand(64, 64)
    crops = pixels(60, torch.stack((columns, rows, columns)), side=64, crop_scale=0.25)
    # the extreme values in an enlarged crop are those of its first and last column and row
    lows, highs = crops[:, :2].flatten(2).amin(2), crops[:, :2].flatten(2).amax(2)
    sides = (highs - lows).double() / 4 + 1  # in columns and rows of 64
    areas, aspects = sides.prod(1) / 64**2, sides[:, 0] / sides[:, 1]
    assert areas.min() > 0.25 * (1 - 2 * 0.5 / 32)  # either side is rounded: by half a pixel of about 32
    assert 0.72 < aspects.min() < 0.8
    assert 1.25 < aspects.max() < 1.39
    assert areas.min() < 0.35
    assert areas.max() > 0.8
    assert len({tuple(corner) for corner in lows.tolist()}) > 30


@pytest.mark.parametrize(("setting", "axis"), [("fliplr", 2), ("flipud", 1)])
def test_a_flip_mirrors_the_image(setting: str, axis: int) -> None:
    image = noisy()
    assert (pixels(5, image, **{setting: 1.0}) == image.flip(axis)).all()
    unchanged = [torch.equal(one, image) for one in pixels(100, image, **{setting: 0.5})]
    assert 25 < sum(unchanged) < 75  # 5 standard deviations


def test_a_crop_can_be_flipped() -> None:
    image = torch.cat((plain(20), plain(220)), dim=2)  # dark on the left, bright on the right
    changed = pixels(10, image, crop_scale=0.9, fliplr=1.0)
    assert (changed[..., :4] == 220).all()
    assert (changed[..., -4:] == 20).all()


def test_brightness_scales_all_values() -> None:
    changed = pixels(40, plain(100), brightness=0.5).flatten(1)
    assert (changed.amin(1) == changed.amax(1)).all()
    assert 50 <= changed.min() < 60
    assert 140 < changed.max() <= 150


def test_contrast_scales_the_distance_from_the_mean() -> None:
    image = torch.cat((plain(60)[:, :16], plain(140)[:, :16]), dim=1)
    changed = pixels(40, image, contrast=0.5)
    dark, bright = (changed[:, 0, row, 0].int() for row in (0, -1))
    assert (dark + bright - 200).abs().max() <= 2  # around the mean, 100
    assert 40 <= dark.min() < 45
    assert 75 < dark.max() <= 80


def test_saturation_scales_the_distance_from_grey() -> None:
    changed = pixels(40, plain(150, 100, 50), saturation=0.5)[:, :, 0, 0].double()
    weights = torch.tensor([0.299, 0.587, 0.114], dtype=torch.double)  # of the three colours in grey
    assert (changed @ weights - 109.25).abs().max() < 1.5  # 44.85 + 58.7 + 5.7
    ranges = changed[:, 0] - changed[:, 2]  # 100 in the image
    assert 48 <= ranges.min() < 60
    assert 140 < ranges.max() <= 152


def test_hue_rotates_the_colour_circle() -> None:
    changed = pixels(40, plain(200, 0, 0), hue=0.1)[:, :, 0, 0].int()
    assert (changed[:, 0] - 200).abs().max() <= 1
    assert changed[:, 1:].amin(1).max() <= 1
    assert (changed[:, 1:].amax(0) > 60).all()  # towards yellow and towards magenta
    assert changed[:, 1:].max() <= 121  # 0.1 of the circle is 0.6 of a sixth of it


def test_an_erased_rectangle_has_the_mean_colour() -> None:
    image = noisy()
    image[0] = 7  # not the mean colour
    shapes = set()
    for one in pixels(30, image, erasing=1.0):
        rows, columns = (one != image).any(0).nonzero(as_tuple=True)
        top, bottom, left, right = rows.min(), rows.max() + 1, columns.min(), columns.max() + 1
        expected = image.clone()
        expected[:, top:bottom, left:right] = torch.tensor(ERASED_RGB, dtype=torch.uint8).view(3, 1, 1)
        assert torch.equal(one, expected)
        shapes.add((int(bottom - top), int(right - left)))
    assert len(shapes) > 10
    assert 25 < sum(torch.equal(one, image) for one in pixels(100, image, erasing=0.5)) < 75


def test_randaugment_changes_pixels_by_its_magnitude() -> None:
    image = noisy()
    changed = pixels(20, image, randaugment=2)
    assert (changed.dtype, changed.shape) == (torch.uint8, (20, *image.shape))
    assert sum(not torch.equal(one, image) for one in changed) > 12  # one of its 14 operations is the identity
    assert not torch.equal(changed, pixels(20, image, randaugment=2, randaugment_magnitude=30))


# Mixing


@pytest.mark.parametrize("alpha", [0.2, 1.0])
def test_mixup_blends_pixels_and_classes_of_two_images_in_the_same_shares(alpha: float) -> None:
    greys = torch.tensor([0, 100, 200, 250])
    mixed = 0
    for image, shares in results(40, [plain(int(grey)) for grey in greys], mixup=1.0, mixup_alpha=alpha):
        assert (image.dtype, shares.dtype, shares.shape) == (torch.uint8, torch.float32, (4,))
        assert shares.sum() == pytest.approx(1)
        assert (shares > 0).sum() <= 2
        assert shares[0] > 0 or alpha < 1  # a share may be rounded to 0
        assert image.min() == image.max()
        assert abs(int(image[0, 0, 0]) - float(shares @ greys.float())) <= 0.51
        mixed += bool(0.05 < shares[0] < 0.95)
    assert mixed >= 5


def test_cutmix_pastes_a_rectangle_and_its_class_in_the_share_of_its_area() -> None:
    greys = torch.tensor([0, 100, 200, 250])
    mixed = 0
    for image, shares in results(40, [plain(int(grey)) for grey in greys], cutmix=1.0):
        areas = torch.stack([(image == grey).all(0).float().mean() for grey in greys])
        assert shares.tolist() == pytest.approx(areas.tolist())
        assert shares.sum() == pytest.approx(1)
        assert (shares > 0).sum() <= 2
        if 0 < shares[0] < 1:
            rows, columns = (image[0] != 0).nonzero(as_tuple=True)
            assert (image[0, rows.min() : rows.max() + 1, columns.min() : columns.max() + 1] != 0).all()
            mixed += 1
    assert mixed >= 15


def test_mixup_and_cutmix_each_use_their_own_alpha() -> None:
    images = [plain(8 * k) for k in range(30)]
    mixups = results(30, images, mixup=1.0, mixup_alpha=1e6, cutmix_alpha=0.01)
    firsts = torch.stack([shares[0] for _, shares in mixups])
    assert ((firsts - 0.5).abs() < 0.01).sum() > 25  # but for an image that is its own partner
    assert ((firsts - 0.5).abs() < 0.01).logical_or(firsts > 0.99).all()
    cutmixes = results(30, images, cutmix=1.0, mixup_alpha=0.01, cutmix_alpha=1e6)
    firsts = torch.stack([shares[0] for _, shares in cutmixes])
    # the rectangle has half of the area less the part outside of the image: an eighth if it is centred on a corner
    assert ((firsts > 0.47) & (firsts < 0.9)).sum() > 25


def test_two_mixed_images_of_one_class_belong_to_it_wholly() -> None:
    images = [plain(0), plain(200)]
    augment = Augmenter(TransformSettings(mixup=1.0, mixup_alpha=1.0), lambda k: (images[k], 1), 2, 3)
    mixed = [augment(0, SIDE, np.random.default_rng(seed)) for seed in range(20)]
    assert all(shares.tolist() == pytest.approx([0, 1, 0]) for _, shares in mixed)
    assert len({int(image[0, 0, 0]) for image, _ in mixed}) > 4


@pytest.mark.parametrize("setting", ["mixup", "cutmix"])
def test_partners_are_drawn_from_all_images(setting: str) -> None:
    loaded: list[int] = []

    def load(number: int) -> tuple[Tensor, int]:
        loaded.append(number)
        return plain(0), number

    augment = Augmenter(TransformSettings(**{setting: 1.0}), load, 5, 5)
    for seed in range(60):
        augment(3, SIDE, np.random.default_rng(seed))
    assert loaded[::2] == [3] * 60
    assert set(loaded[1::2]) == {0, 1, 2, 3, 4}
    assert max(map(loaded[1::2].count, range(5))) < 30


def test_a_partner_is_augmented_too() -> None:
    images = [plain(0), torch.cat((plain(100)[:, :, :16], plain(200)[:, :, :16]), dim=2)]
    for image, shares in results(20, images, mixup=1.0, mixup_alpha=1.0, fliplr=1.0):
        assert (image - shares[1] * images[1].flip(2)).abs().max() <= 0.51


def test_the_shares_of_mixup_and_cutmix() -> None:
    mixed = results(200, [plain(8 * k) for k in range(30)], mixup=0.5, cutmix=0.25, cutmix_alpha=1e6)
    # cutmix gives two greys, mixup one grey of two classes; one in 30 images is its own partner
    kinds = [len(image.unique()) + (shares.max() < 1) for image, shares in mixed]
    plains, mixups, cutmixes = (kinds.count(kind) for kind in (1, 2, 3))
    assert plains + mixups + cutmixes == 200
    assert 30 < cutmixes < 70
    assert 60 < mixups < 130


def test_without_mixing_no_partner_is_loaded() -> None:
    images = {0: plain(10)}
    augment = Augmenter(TransformSettings(fliplr=0.5), lambda number: (images[number], 1), 100, 2)
    for seed in range(10):
        assert augment(0, SIDE, np.random.default_rng(seed))[1].tolist() == [0, 1]


# Randomness


def test_the_result_depends_only_on_the_generator_and_global_generators_continue() -> None:
    augment = augmenter([noisy(50, 40, seed) for seed in range(6)], EVERYTHING)
    first = [augment(2, SIDE, np.random.default_rng(seed)) for seed in range(12)]
    torch.manual_seed(123)
    random.seed(123)
    np.random.seed(123)  # noqa: NPY002 - the global generator
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()  # noqa: NPY002
    for seed in reversed(range(12)):  # the order must not matter
        for one, other in zip(augment(2, SIDE, np.random.default_rng(seed)), first[seed], strict=True):
            assert torch.equal(one, other)
    assert len({image.numpy().tobytes() for image, _ in first}) == 12
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.array_equal(np.random.get_state()[1], before[2])  # noqa: NPY002


def test_within_the_block_torch_draws_from_the_generator() -> None:
    with torch_seeded_by(np.random.default_rng(1)):
        first = torch.rand(4)
    torch.rand(3)
    with torch_seeded_by(np.random.default_rng(1)):
        assert torch.equal(torch.rand(4), first)
    with torch_seeded_by(np.random.default_rng(2)):
        assert not torch.equal(torch.rand(4), first)


def test_the_global_generator_is_restored_after_an_error() -> None:
    before = torch.get_rng_state()

    def fail() -> None:
        with torch_seeded_by(np.random.default_rng(1)):
            torch.rand(1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert torch.equal(torch.get_rng_state(), before)


# Centre crops


def test_a_centre_crop_has_seven_eighths_of_the_shorter_side() -> None:
    image = noisy(48, 32)
    # 28 / 0.875 = 32: not resized; 2 rows and 10 columns on either side are cut off
    assert torch.equal(centre_crop(image, 28), image[:, 2:30, 10:38])
    assert torch.equal(centre_crop(image.mT, 28), image[:, 2:30, 10:38].mT)


def test_a_shrunk_centre_crop_is_smooth() -> None:
    def halved(image: Tensor, first: int) -> Tensor:
        """Return 28 columns of the image at half its width, each from four columns with triangular weights."""
        weights = (0.125, 0.375, 0.375, 0.125)
        return sum(weight * image[..., 2 * first - 1 + k :: 2][..., :28] for k, weight in enumerate(weights))

    image = noisy(96, 64)
    expected = halved(halved(image.float(), 10).mT, 2).mT
    crop = centre_crop(image, 28)
    assert (crop.dtype, crop.shape) == (torch.uint8, (3, 28, 28))
    assert (crop - expected).abs().max() <= 1


@pytest.mark.parametrize(("height", "width"), [(10, 10), (10, 300), (300, 10), (27, 28)])
def test_a_small_or_long_image_is_enlarged_for_a_centre_crop(height: int, width: int) -> None:
    image = plain(10, 20, 30, side=300)[:, :height, :width]
    assert torch.equal(centre_crop(image, 28), plain(10, 20, 30, side=28))
