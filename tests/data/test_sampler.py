"""Global batches: who is drawn when, in what shape, and that nothing but (seed, epoch) decides it."""

from __future__ import annotations

import pickle
from itertools import chain

import numpy as np
import pytest

from data.sampler import Draw, GlobalBatches, RectangularBatches, batch_shape, evaluation_batches, item_generator

SQUARE = (64, 64)


def draws(batches: GlobalBatches, epoch: int) -> list[list[Draw]]:
    """The batches of an epoch."""
    batches.set_epoch(epoch)
    return list(batches)


def images(batches: list[list[Draw]]) -> list[int]:
    return [draw.image for draw in chain.from_iterable(batches)]


# square batches


@pytest.mark.parametrize(
    ("count", "batch_size", "batches"), [(10, 4, 3), (12, 4, 3), (13, 4, 4), (3, 8, 1), (1, 1, 1), (7, 1, 7)]
)
def test_an_epoch_holds_every_image_once_and_fills_up_from_its_start(count: int, batch_size: int, batches: int) -> None:
    found = draws(GlobalBatches(count, batch_size, 0, SQUARE), 2)
    assert len(found) == len(GlobalBatches(count, batch_size, 0, SQUARE)) == batches
    assert {len(batch) for batch in found} == {batch_size}
    order = images(found)
    assert sorted(order[:count]) == list(range(count))
    assert all(order[position] == order[position % count] for position in range(len(order)))


def test_positions_run_on_through_the_epoch() -> None:
    found = draws(GlobalBatches(10, 4, 0, (32, 96)), 3)
    assert [draw.position for batch in found for draw in batch] == list(range(12))
    assert {(draw.epoch, draw.shape) for batch in found for draw in batch} == {(3, (32, 96))}


def test_a_draw_is_made_of_plain_numbers() -> None:
    draw = draws(GlobalBatches(10, 4, 0, SQUARE), 0)[1][2]
    assert [type(value) for value in (draw.epoch, draw.position, draw.image, *draw.shape)] == [int] * 5
    assert pickle.loads(pickle.dumps(draw)) == draw


def test_the_order_is_a_function_of_seed_and_epoch() -> None:
    first = GlobalBatches(50, 8, 7, SQUARE)
    epochs = [draws(first, epoch) for epoch in range(3)]
    np.random.seed(1)  # noqa: NPY002 - the old global generator must not matter
    assert draws(GlobalBatches(50, 8, 7, SQUARE), 2) == epochs[2]  # without the epochs before it
    assert draws(first, 0) == epochs[0]  # going back
    assert draws(first, 0) == epochs[0]  # staying
    assert images(epochs[0]) != images(epochs[1]) != images(epochs[2]) != images(epochs[0])
    assert images(draws(GlobalBatches(50, 8, 8, SQUARE), 0)) not in map(images, epochs)


def test_the_order_is_a_fair_shuffle() -> None:
    orders = np.array([images(draws(GlobalBatches(10, 5, 0, SQUARE), epoch)) for epoch in range(400)])
    # each image is first, second, ... about 40 times; 6 standard deviations of that count
    counts = np.array([np.bincount(column, minlength=10) for column in orders.T])
    assert np.abs(counts - 40).max() < 36


def test_the_order_does_not_depend_on_the_batch_size() -> None:
    assert images(draws(GlobalBatches(24, 4, 0, SQUARE), 1)) == images(draws(GlobalBatches(24, 12, 0, SQUARE), 1))


def test_halves_of_a_global_batch_are_the_batches_of_half_the_size() -> None:
    whole = draws(GlobalBatches(24, 8, 0, SQUARE), 1)
    halves = [half for batch in whole for half in (batch[:4], batch[4:])]
    assert halves == draws(GlobalBatches(24, 4, 0, SQUARE), 1)


def test_an_epoch_under_way_keeps_its_order() -> None:
    batches = GlobalBatches(12, 4, 0, SQUARE)
    under_way = iter(batches)
    first = next(under_way)
    batches.set_epoch(1)
    assert [first, *under_way] == draws(batches, 0)
    assert list(GlobalBatches(12, 4, 0, SQUARE)) == draws(batches, 0)  # epoch 0 unless told


def test_set_epoch_comes_in_through_the_attribute_sampler_too() -> None:
    batches = GlobalBatches(12, 4, 0, SQUARE)
    batches.sampler.set_epoch(5)
    assert list(batches) == draws(GlobalBatches(12, 4, 0, SQUARE), 5)
    assert (batches.batch_size, batches.drop_last) == (4, False)


@pytest.mark.parametrize("trained", [0, 1, 2, 3])
def test_batches_that_are_trained_are_left_out_once(trained: int) -> None:
    batches = GlobalBatches(10, 4, 7, SQUARE)
    whole = draws(batches, 2)
    for rest in (trained, 0):
        batches.set_epoch(2)
        batches.skip(rest)
        assert list(batches) == whole[rest:]
    batches.skip(trained)
    assert draws(batches, 2) == whole[trained:]
    assert draws(batches, 2) == whole
    assert draws(batches, 3) == draws(GlobalBatches(10, 4, 7, SQUARE), 3)
    assert len(batches) == 3  # of an epoch, whatever is left of it


# the generator of an item


def test_an_item_has_a_generator_by_seed_epoch_and_position() -> None:
    def numbers(seed: int, draw: Draw) -> tuple[float, ...]:
        return tuple(item_generator(seed, draw).random(4))

    draw = Draw(2, 5, 1, SQUARE)
    assert numbers(3, draw) == numbers(3, Draw(2, 5, 1, SQUARE))
    assert numbers(3, draw) == numbers(3, Draw(2, 5, 8, (32, 32)))  # the image is none of its business
    others = [numbers(4, draw), numbers(3, Draw(1, 5, 1, SQUARE)), numbers(3, Draw(2, 4, 1, SQUARE))]
    others += [numbers(2, Draw(3, 5, 1, SQUARE)), numbers(3, Draw(5, 2, 1, SQUARE))]  # the same numbers, swapped
    assert len({numbers(3, draw), *others}) == 6


def test_items_of_many_epochs_and_positions_all_differ() -> None:
    found = {
        item_generator(0, Draw(epoch, position, 0, SQUARE)).random() for epoch in range(20) for position in range(50)
    }
    assert len(found) == 1000


# shapes of batches


@pytest.mark.parametrize(
    ("aspects", "imgsz", "stride", "pad", "shape"),
    [
        pytest.param([0.5, 0.75], 640, 32, 0.0, (480, 640), id="landscape: as high as the highest"),
        pytest.param([1.25, 2.0], 640, 32, 0.0, (640, 512), id="portrait: as wide as the widest"),
        pytest.param([0.5, 1.5], 640, 32, 0.0, (640, 640), id="mixed"),
        pytest.param([1.0], 640, 32, 0.0, (640, 640), id="square"),
        pytest.param([0.5, 1.0], 640, 32, 0.0, (640, 640), id="landscape and square"),
        pytest.param([0.7], 640, 32, 0.0, (448, 640), id="448 are whole strides"),
        pytest.param([0.71], 640, 32, 0.0, (480, 640), id="454.4 is rounded up"),
        pytest.param([0.75], 640, 64, 0.0, (512, 640), id="480 is 7.5 strides of 64"),
        pytest.param([0.5, 0.75], 640, 32, 0.5, (512, 672), id="half a stride more: 15.5 and 20.5 strides"),
        pytest.param([0.76], 640, 32, 0.5, (512, 672), id="half a stride more: 15.7 strides"),
        pytest.param([0.01], 640, 32, 0.0, (32, 640), id="at least one stride"),
        pytest.param([100.0], 640, 32, 0.0, (640, 32), id="at least one stride wide"),
    ],
)
def test_the_shape_of_a_batch(
    aspects: list[float], imgsz: int, stride: int, pad: float, shape: tuple[int, int]
) -> None:
    assert batch_shape(np.array(aspects), imgsz, stride, pad) == shape


# images, width and height: landscape 0, 3, 5, 7, portrait 1, 2, 4, 6
SIZES = np.array([[64, 32], [32, 64], [30, 60], [60, 30], [45, 60], [64, 16], [48, 60], [64, 48]], np.int32)
# by height / width: 5 (1/4), 3 and 0 (1/2, the later first), 7 (3/4), 6 (5/4), 4 (4/3), 2 and 1 (2)
ORDER = [5, 3, 0, 7, 6, 4, 2, 1]


def test_rectangular_batches_have_images_of_like_aspect() -> None:
    found = draws(RectangularBatches(SIZES, 4, 0, 128, 32), 0)
    assert images(found) == ORDER
    # 3/4 of 128 are 96; 4/5 of 128 are 102.4, rounded up to 128
    assert [{draw.shape for draw in batch} for batch in found] == [{(96, 128)}, {(128, 128)}]
    found = draws(RectangularBatches(SIZES, 2, 0, 128, 32), 0)
    # heights 1/2 and 3/4; widths 4/5 (rounded up) and 1/2
    assert [batch[0].shape for batch in found] == [(64, 128), (96, 128), (128, 128), (128, 64)]
    assert [draw.position for batch in found for draw in batch] == list(range(8))


def test_a_rectangular_batch_of_both_kinds_is_square() -> None:
    found = draws(RectangularBatches(SIZES, 6, 0, 128, 32), 0)
    assert [batch[0].shape for batch in found] == [(128, 128), (128, 64)]


def test_rectangular_batches_have_one_order_and_fill_up_too() -> None:
    batches = RectangularBatches(SIZES, 3, 0, 128, 32)
    assert images(draws(batches, 0)) == images(draws(batches, 1)) == [*ORDER, 5]
    assert {draw.epoch for batch in draws(batches, 1) for draw in batch} == {1}
    assert {len(batch) for batch in draws(batches, 1)} == {3}


def test_rectangular_batches_that_are_trained_are_left_out() -> None:
    batches = RectangularBatches(SIZES, 2, 0, 128, 32)
    whole = draws(batches, 1)
    batches.skip(3)
    assert draws(batches, 1) == whole[3:]


@pytest.mark.parametrize("square", [False, True])
def test_an_evaluation_holds_a_prime_count_of_images_once_each(square: bool) -> None:
    rng = np.random.default_rng(0)
    found = evaluation_batches(rng.integers(20, 60, (13, 2)), 4, 64, 32, square)
    assert [len(batch) for batch in found] == [4, 4, 4, 1]
    assert sorted(images(found)) == list(range(13))
    assert [draw.position for batch in found for draw in batch] == list(range(13))
    assert all(len({draw.shape for draw in batch}) == 1 for batch in found)
    assert {draw.epoch for batch in found for draw in batch} == {0}


def test_square_evaluation_goes_through_the_images_as_they_stand() -> None:
    found = evaluation_batches(SIZES, 3, 64, 32, square=True)
    assert images(found) == list(range(8))
    assert {draw.shape for batch in found for draw in batch} == {(64, 64)}


def test_rectangular_evaluation_adds_half_a_stride() -> None:
    found = evaluation_batches(SIZES, 4, 128, 32, square=False)
    assert images(found) == ORDER
    # 96 / 32 + 0.5 and 128 / 32 + 0.5 are rounded up to 4 and 5; 102.4 / 32 + 0.5 = 3.7 to 4
    assert [batch[0].shape for batch in found] == [(128, 160), (160, 128)]
    found = evaluation_batches(SIZES, 4, 128, 32, square=False, pad=0.0)
    assert [batch[0].shape for batch in found] == [(96, 128), (128, 128)]


def test_the_last_rectangular_batch_has_the_shape_of_its_own_images() -> None:
    found = evaluation_batches(SIZES, 3, 128, 32, square=False, pad=0.0)
    assert images(found[2:]) == [2, 1]
    assert found[2][0].shape == (128, 64)


def test_equal_aspects_are_ordered_alike_whatever_the_machine() -> None:
    found = evaluation_batches(np.full((40, 2), 50), 8, 64, 32, square=False)
    assert images(found) == list(range(39, -1, -1))


def test_partners_are_what_follows_in_the_order() -> None:
    """Each image then has a part in as many items as it has partners, and one more: each is read but once."""
    batches = GlobalBatches(10, 4, 7, (64, 64), partners=3)
    for epoch in (0, 1):
        order = batches_of_one(GlobalBatches(10, 1, 7, (64, 64)), epoch)
        found = list(chain(*draws(batches, epoch)))[:10]
        assert [draw.image for draw in found] == order
        assert [draw.partners for draw in found] == [
            tuple(order[(k + step) % 10] for step in (1, 2, 3)) for k in range(10)
        ]
        counts = np.bincount([image for draw in found for image in (draw.image, *draw.partners)])
        assert counts.tolist() == [4] * 10


def batches_of_one(batches: GlobalBatches, epoch: int) -> list[int]:
    return images(draws(batches, epoch))


def test_partners_do_not_depend_on_the_batch_size() -> None:
    small, large = (list(chain(*draws(GlobalBatches(12, size, 3, (8, 8), partners=3), 1))) for size in (2, 6))
    assert small == large


def test_without_partners_a_draw_has_none() -> None:
    assert all(draw.partners == () for draw in chain(*draws(GlobalBatches(5, 2, 0, (8, 8)), 0)))
