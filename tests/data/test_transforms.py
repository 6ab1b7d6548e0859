"""A classifier's augmentation: each piece alone, what is mixed with what, and whose random numbers it takes."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from data.transforms import ERASED_RGB, Augmenter, TransformSettings, centre_crop, torch_seeded_by

SIDE = 32
EVERYTHING = TransformSettings(
    crop_scale=0.3, fliplr=0.5, flipud=0.5, brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1, randaugment=2,
    erasing=0.5, mixup=0.4, cutmix=0.4,
)  # fmt: skip


def plain(*colour: int, side: int = SIDE) -> Tensor:
    """A square of one colour, RGB, or of one grey."""
    return torch.tensor(colour, dtype=torch.uint8).view(-1, 1, 1).expand(3, side, side).contiguous()


def noise(height: int, width: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, (3, height, width), np.uint8))


def augmenter(images: Sequence[Tensor], settings: TransformSettings) -> Augmenter:
    """Each image is of a class of its own."""
    return Augmenter(settings, lambda number: (images[number], number), len(images), len(images))


def results(count: int, images: Sequence[Tensor], side: int = SIDE, **settings: float) -> list[tuple[Tensor, Tensor]]:
    """So many results for the first image, each with a generator of its own."""
    augment = augmenter(images, TransformSettings(**settings))
    return [augment(0, side, np.random.default_rng(seed)) for seed in range(count)]


def pixels(count: int, image: Tensor, **settings: float) -> list[Tensor]:
    return [found for found, _ in results(count, [image], **settings)]


# single pieces


def test_a_square_image_is_left_as_it_is_where_nothing_is_asked_for() -> None:
    images = [noise(SIDE, SIDE, seed) for seed in range(3)]
    for found, shares in results(10, images):
        assert torch.equal(found, images[0])
        assert (shares.dtype, shares.tolist()) == (torch.float32, [1, 0, 0])


@pytest.mark.parametrize(("height", "width"), [(10, 10), (64, 20), (20, 64), (33, 47), (100, 100), (10, 200)])
def test_images_of_any_size_become_squares(height: int, width: int) -> None:
    for found, shares in results(3, [noise(height, width), noise(width, height)], crop_scale=0.5, mixup=0.5):
        assert (found.dtype, found.shape) == (torch.uint8, (3, SIDE, SIDE))
        assert shares.shape == (2,)


def test_a_crop_takes_at_least_its_share_of_the_area_and_has_a_moderate_aspect() -> None:
    steps = torch.arange(0, 256, 4, dtype=torch.uint8)
    columns, rows = steps.expand(64, 64), steps.view(64, 1).expand(64, 64)
    found = pixels(60, torch.stack((columns, rows, columns)), side=64, crop_scale=0.25)
    # of an enlarged part the outermost values are those of its first and last column and row
    lows, highs = (torch.stack([f(image[:2].flatten(1), dim=1) for image in found]) for f in (torch.amin, torch.amax))
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
    image = noise(SIDE, SIDE)
    assert all(torch.equal(found, image.flip(axis)) for found in pixels(5, image, **{setting: 1.0}))
    half = [torch.equal(found, image) for found in pixels(100, image, **{setting: 0.5})]
    assert 25 < sum(half) < 75  # 5 standard deviations


def test_a_flip_comes_with_a_crop() -> None:
    image = torch.cat((plain(20), plain(220)), dim=2)  # dark on the left, bright on the right
    for found in pixels(10, image, crop_scale=0.9, fliplr=1.0):
        assert (found[:, :, :4] == 220).all()
        assert (found[:, :, -4:] == 20).all()


def test_brightness_scales_all_values() -> None:
    found = torch.stack(pixels(40, plain(100), brightness=0.5)).flatten(1)
    assert (found.amin(1) == found.amax(1)).all()
    assert 50 <= found.min() < 60
    assert 140 < found.max() <= 150


def test_contrast_scales_the_distance_from_the_mean() -> None:
    image = torch.cat((plain(60)[:, :16], plain(140)[:, :16]), dim=1)
    found = torch.stack(pixels(40, image, contrast=0.5))
    dark, bright = (found[:, 0, row, 0].int() for row in (0, -1))
    assert (dark + bright - 200).abs().max() <= 2  # around the mean, 100
    assert 40 <= dark.min() < 45
    assert 75 < dark.max() <= 80


def test_saturation_scales_the_distance_from_grey() -> None:
    found = torch.stack(pixels(40, plain(150, 100, 50), saturation=0.5))[:, :, 0, 0].double()
    weights = torch.tensor([0.299, 0.587, 0.114], dtype=torch.double)  # of the three colours in grey
    assert (found @ weights - 109.25).abs().max() < 1.5  # 44.85 + 58.7 + 5.7
    range_of_each = found[:, 0] - found[:, 2]  # 100 in the image
    assert 48 <= range_of_each.min() < 60
    assert 140 < range_of_each.max() <= 152


def test_hue_turns_the_colour_circle() -> None:
    found = torch.stack(pixels(40, plain(200, 0, 0), hue=0.1))[:, :, 0, 0].int()
    assert (found[:, 0] - 200).abs().max() <= 1
    assert found[:, 1:].amin(1).max() <= 1
    assert (found[:, 1:].amax(0) > 60).all()  # to yellow and to magenta, half of the way at least at times
    assert found[:, 1:].max() <= 121  # 0.1 of the circle is 0.6 of a sixth of it


def test_an_erased_rectangle_has_the_mean_colour() -> None:
    image = noise(SIDE, SIDE)
    image[0] = 7  # nowhere the mean colour
    found = pixels(30, image, erasing=1.0)
    shapes = set()
    for one in found:
        rows, columns = (one != image).any(0).nonzero(as_tuple=True)
        top, bottom, left, right = rows.min(), rows.max() + 1, columns.min(), columns.max() + 1
        wanted = image.clone()
        wanted[:, top:bottom, left:right] = torch.tensor(ERASED_RGB, dtype=torch.uint8).view(3, 1, 1)
        assert torch.equal(one, wanted)
        shapes.add((int(bottom - top), int(right - left)))
    assert len(shapes) > 10


def test_erasing_comes_as_often_as_asked_for() -> None:
    image = noise(SIDE, SIDE)
    assert 25 < sum(torch.equal(found, image) for found in pixels(100, image, erasing=0.5)) < 75


def test_randaugment_changes_pixels() -> None:
    image = noise(SIDE, SIDE)
    found = pixels(20, image, randaugment=2)
    assert all((one.dtype, one.shape) == (torch.uint8, image.shape) for one in found)
    assert sum(not torch.equal(one, image) for one in found) > 12  # one of its 14 operations is to do nothing
    strong = pixels(20, image, randaugment=2, randaugment_magnitude=30)
    assert not all(map(torch.equal, found, strong))


# mixing


@pytest.mark.parametrize("alpha", [0.2, 1.0])
def test_mixup_has_the_pixels_and_classes_of_two_images_in_the_same_shares(alpha: float) -> None:
    greys = torch.tensor([0, 100, 200, 250])
    mixed = 0
    for found, shares in results(40, [plain(int(grey)) for grey in greys], mixup=1.0, mixup_alpha=alpha):
        assert (found.dtype, shares.dtype, shares.shape) == (torch.uint8, torch.float32, (4,))
        assert shares.sum() == pytest.approx(1)
        assert (shares > 0).sum() <= 2
        assert shares[0] > 0 or alpha < 1  # a share may be next to nothing
        assert found.min() == found.max()
        assert abs(int(found[0, 0, 0]) - float(shares @ greys.float())) <= 0.51
        mixed += bool(0.05 < shares[0] < 0.95)
    assert mixed >= 5


def test_cutmix_has_a_rectangle_of_another_image_and_its_class_by_area() -> None:
    greys = torch.tensor([0, 100, 200, 250])
    mixed = 0
    for found, shares in results(40, [plain(int(grey)) for grey in greys], cutmix=1.0):
        areas = torch.stack([(found == grey).all(0).float().mean() for grey in greys])
        assert shares.tolist() == pytest.approx(areas.tolist())
        assert shares.sum() == pytest.approx(1)
        assert (shares > 0).sum() <= 2
        if 0 < shares[0] < 1:
            rows, columns = (found[0] != 0).nonzero(as_tuple=True)
            assert (found[0, rows.min() : rows.max() + 1, columns.min() : columns.max() + 1] != 0).all()
            mixed += 1
    assert mixed >= 15


def test_each_kind_of_mixing_draws_shares_by_its_own_alpha() -> None:
    images = [plain(8 * k) for k in range(30)]
    mixups = results(30, images, mixup=1.0, mixup_alpha=1e6, cutmix_alpha=0.01)
    firsts = torch.stack([shares[0] for _, shares in mixups])
    assert ((firsts - 0.5).abs() < 0.01).sum() > 25  # but for an image that is its own partner
    assert ((firsts - 0.5).abs() < 0.01).logical_or(firsts > 0.99).all()
    cutmixes = results(30, images, cutmix=1.0, mixup_alpha=0.01, cutmix_alpha=1e6)
    firsts = torch.stack([shares[0] for _, shares in cutmixes])
    # the rectangle has half of the area less what lies outside: an eighth where its middle is at a corner
    assert ((firsts > 0.47) & (firsts < 0.9)).sum() > 25


def test_two_images_of_one_class_have_its_whole_share() -> None:
    images = [plain(0), plain(200)]
    augment = Augmenter(TransformSettings(mixup=1.0, mixup_alpha=1.0), lambda k: (images[k], 1), 2, 3)
    found = [augment(0, SIDE, np.random.default_rng(seed)) for seed in range(20)]
    assert all(shares.tolist() == pytest.approx([0, 1, 0]) for _, shares in found)
    assert len({int(image[0, 0, 0]) for image, _ in found}) > 4


@pytest.mark.parametrize("setting", ["mixup", "cutmix"])
def test_partners_are_drawn_from_all_images(setting: str) -> None:
    loaded: list[int] = []
    augment = augmenter([plain(0)] * 5, TransformSettings(**{setting: 1.0}))
    load = augment.load
    augment.load = lambda number: loaded.append(number) or load(number)
    for seed in range(60):
        augment(3, SIDE, np.random.default_rng(seed))
    assert loaded[::2] == [3] * 60
    assert set(loaded[1::2]) == {0, 1, 2, 3, 4}
    assert max(map(loaded[1::2].count, range(5))) < 30


def test_a_partner_is_augmented_too() -> None:
    images = [plain(0), torch.cat((plain(100)[:, :, :16], plain(200)[:, :, :16]), dim=2)]
    for found, shares in results(20, images, mixup=1.0, mixup_alpha=1.0, fliplr=1.0):
        wanted = shares[1] * images[1].flip(2)
        assert (found - wanted).abs().max() <= 0.51


def test_mixup_and_cutmix_come_as_often_as_asked_for() -> None:
    found = results(200, [plain(8 * k) for k in range(30)], mixup=0.5, cutmix=0.25, cutmix_alpha=1e6)
    # a rectangle has up to half of the area; mixed up, an image is of one grey; one in 30 is its own partner
    kinds = [len(image.unique()) + (shares.max() < 1) for image, shares in found]
    plains, mixups, cutmixes = (kinds.count(kind) for kind in (1, 2, 3))
    assert plains + mixups + cutmixes == 200
    assert 30 < cutmixes < 70
    assert 60 < mixups < 130


def test_nothing_is_mixed_and_no_partner_read_unless_asked_for() -> None:
    images = {0: plain(10)}
    augment = Augmenter(TransformSettings(fliplr=0.5), lambda number: (images[number], 1), 100, 2)
    for seed in range(10):
        assert augment(0, SIDE, np.random.default_rng(seed))[1].tolist() == [0, 1]


# whose random numbers


@pytest.fixture
def everything() -> Callable[[int], tuple[Tensor, Tensor]]:
    """Every augmentation of one of six images, by a seed."""
    augment = augmenter([noise(40, 50, seed) for seed in range(6)], EVERYTHING)
    return lambda seed: augment(2, SIDE, np.random.default_rng(seed))


def test_the_result_depends_on_the_generator_alone(everything: Callable[[int], tuple[Tensor, Tensor]]) -> None:
    wanted = [everything(seed) for seed in range(12)]
    torch.manual_seed(123)
    random.seed(123)
    np.random.seed(123)  # noqa: NPY002 - the old global generator must not matter
    for seed in reversed(range(12)):  # nor what came before
        for found, one in zip(everything(seed), wanted[seed], strict=True):
            assert torch.equal(found, one)
    assert len({image.numpy().tobytes() for image, _ in wanted}) == 12


def test_the_random_numbers_of_others_go_on_as_before(everything: Callable[[int], tuple[Tensor, Tensor]]) -> None:
    torch.manual_seed(5)
    before, plain_python = torch.get_rng_state(), random.getstate()
    old = np.random.get_state()[1].copy()  # noqa: NPY002
    for seed in range(12):
        everything(seed)
    assert torch.equal(torch.get_rng_state(), before)
    assert random.getstate() == plain_python
    assert np.array_equal(np.random.get_state()[1], old)  # noqa: NPY002


def test_within_the_context_torch_draws_from_the_generator() -> None:
    with torch_seeded_by(np.random.default_rng(1)):
        first = torch.rand(4)
    torch.rand(3)
    with torch_seeded_by(np.random.default_rng(1)):
        assert torch.equal(torch.rand(4), first)
    with torch_seeded_by(np.random.default_rng(2)):
        assert not torch.equal(torch.rand(4), first)


def test_after_an_error_too_random_numbers_go_on_as_before() -> None:
    before = torch.get_rng_state()

    def fail() -> None:
        with torch_seeded_by(np.random.default_rng(1)):
            torch.rand(1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert torch.equal(torch.get_rng_state(), before)


# the middle of an image


def test_the_middle_shows_seven_eighths_of_the_shorter_side() -> None:
    image = noise(32, 48)
    # 28 / 0.875 = 32: not resized; 2 rows and 10 columns on either side are cut off
    assert torch.equal(centre_crop(image, 28), image[:, 2:30, 10:38])
    assert torch.equal(centre_crop(image.mT, 28), image[:, 2:30, 10:38].mT)


def test_shrinking_is_smooth() -> None:
    def halved(image: Tensor, first: int) -> Tensor:
        """28 columns of an image of half the width: of four columns a triangle's weights."""
        weights = (0.125, 0.375, 0.375, 0.125)
        return sum(weight * image[..., 2 * first - 1 + k :: 2][..., :28] for k, weight in enumerate(weights))

    image = noise(64, 96)
    wanted = halved(halved(image.float(), 10).mT, 2).mT
    found = centre_crop(image, 28)
    assert (found.dtype, found.shape) == (torch.uint8, (3, 28, 28))
    assert (found - wanted).abs().max() <= 1


@pytest.mark.parametrize(("height", "width"), [(10, 10), (10, 300), (300, 10), (27, 28)])
def test_the_middle_of_a_small_or_long_image_is_a_square_of_it_enlarged(height: int, width: int) -> None:
    image = plain(10, 20, 30, side=300)[:, :height, :width]
    assert torch.equal(centre_crop(image, 28), plain(10, 20, 30, side=28))
