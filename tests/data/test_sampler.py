"""Global batches: who is drawn when, in what shape, and that nothing but (seed, epoch) decides it."""

from __future__ import annotations

import pickle
from itertools import chain
from typing import Any

import numpy as np
import pytest

from data.sampler import (
    GlobalBatches,
    Instances,
    Order,
    RectangularBatches,
    Repeated,
    SampleIndex,
    Sampling,
    batch_shape,
    batch_sizes,
    evaluation_batches,
    image_weights,
    item_generator,
    repeat_factors,
    training_batches,
)
from utils.errors import UserError

SQUARE = (64, 64)


def draws(batches: GlobalBatches, epoch: int) -> list[list[SampleIndex]]:
    """The batches of an epoch."""
    batches.set_epoch(epoch)
    return list(batches)


def images(batches: list[list[SampleIndex]]) -> list[int]:
    return [draw.image for draw in chain.from_iterable(batches)]


# square batches


@pytest.mark.parametrize(
    ("count", "batch_size", "batches"), [(10, 4, 3), (12, 4, 3), (13, 4, 4), (3, 8, 1), (1, 1, 1), (7, 1, 7)]
)
def test_an_epoch_holds_every_image_once_and_fills_up_from_its_start(count: int, batch_size: int, batches: int) -> None:
    found = draws(GlobalBatches(Order(count), batch_size, 0, SQUARE), 2)
    assert len(found) == len(GlobalBatches(Order(count), batch_size, 0, SQUARE)) == batches
    assert {len(batch) for batch in found} == {batch_size}
    order = images(found)
    assert sorted(order[:count]) == list(range(count))
    assert all(order[position] == order[position % count] for position in range(len(order)))


def test_positions_run_on_through_the_epoch() -> None:
    found = draws(GlobalBatches(Order(10), 4, 0, (32, 96)), 3)
    assert [draw.position for batch in found for draw in batch] == list(range(12))
    assert {(draw.epoch, draw.shape) for batch in found for draw in batch} == {(3, (32, 96))}


def test_a_draw_is_made_of_plain_numbers() -> None:
    draw = draws(GlobalBatches(Order(10), 4, 0, SQUARE), 0)[1][2]
    assert [type(value) for value in (draw.epoch, draw.position, draw.image, *draw.shape)] == [int] * 5
    assert pickle.loads(pickle.dumps(draw)) == draw


def test_the_order_is_a_function_of_seed_and_epoch() -> None:
    first = GlobalBatches(Order(50), 8, 7, SQUARE)
    epochs = [draws(first, epoch) for epoch in range(3)]
    np.random.seed(1)  # noqa: NPY002 - the old global generator must not matter
    assert draws(GlobalBatches(Order(50), 8, 7, SQUARE), 2) == epochs[2]  # without the epochs before it
    assert draws(first, 0) == epochs[0]  # going back
    assert draws(first, 0) == epochs[0]  # staying
    assert images(epochs[0]) != images(epochs[1]) != images(epochs[2]) != images(epochs[0])
    assert images(draws(GlobalBatches(Order(50), 8, 8, SQUARE), 0)) not in map(images, epochs)


def test_the_order_is_a_fair_shuffle() -> None:
    orders = np.array([images(draws(GlobalBatches(Order(10), 5, 0, SQUARE), epoch)) for epoch in range(400)])
    # each image is first, second, ... about 40 times; 6 standard deviations of that count
    counts = np.array([np.bincount(column, minlength=10) for column in orders.T])
    assert np.abs(counts - 40).max() < 36


def test_the_order_does_not_depend_on_the_batch_size() -> None:
    assert images(draws(GlobalBatches(Order(24), 4, 0, SQUARE), 1)) == images(
        draws(GlobalBatches(Order(24), 12, 0, SQUARE), 1)
    )


def test_halves_of_a_global_batch_are_the_batches_of_half_the_size() -> None:
    whole = draws(GlobalBatches(Order(24), 8, 0, SQUARE), 1)
    halves = [half for batch in whole for half in (batch[:4], batch[4:])]
    assert halves == draws(GlobalBatches(Order(24), 4, 0, SQUARE), 1)


def test_an_epoch_under_way_keeps_its_order() -> None:
    batches = GlobalBatches(Order(12), 4, 0, SQUARE)
    under_way = iter(batches)
    first = next(under_way)
    batches.set_epoch(1)
    assert [first, *under_way] == draws(batches, 0)
    assert list(GlobalBatches(Order(12), 4, 0, SQUARE)) == draws(batches, 0)  # epoch 0 unless told


def test_set_epoch_comes_in_through_the_attribute_sampler_too() -> None:
    batches = GlobalBatches(Order(12), 4, 0, SQUARE)
    batches.sampler.set_epoch(5)
    assert list(batches) == draws(GlobalBatches(Order(12), 4, 0, SQUARE), 5)
    assert (batches.batch_size, batches.drop_last) == (4, False)


@pytest.mark.parametrize("trained", [0, 1, 2, 3])
def test_batches_that_are_trained_are_left_out_once(trained: int) -> None:
    batches = GlobalBatches(Order(10), 4, 7, SQUARE)
    whole = draws(batches, 2)
    for rest in (trained, 0):
        batches.set_epoch(2)
        batches.skip(rest)
        assert list(batches) == whole[rest:]
    batches.skip(trained)
    assert draws(batches, 2) == whole[trained:]
    assert draws(batches, 2) == whole
    assert draws(batches, 3) == draws(GlobalBatches(Order(10), 4, 7, SQUARE), 3)
    assert len(batches) == 3  # of an epoch, whatever is left of it


# the generator of an item


def test_an_item_has_a_generator_by_seed_epoch_and_position() -> None:
    def numbers(seed: int, draw: SampleIndex) -> tuple[float, ...]:
        return tuple(item_generator(seed, draw).random(4))

    draw = SampleIndex(2, 5, 1, SQUARE)
    assert numbers(3, draw) == numbers(3, SampleIndex(2, 5, 1, SQUARE))
    assert numbers(3, draw) == numbers(3, SampleIndex(2, 5, 8, (32, 32)))  # the image is none of its business
    others = [numbers(4, draw), numbers(3, SampleIndex(1, 5, 1, SQUARE)), numbers(3, SampleIndex(2, 4, 1, SQUARE))]
    others += [
        numbers(2, SampleIndex(3, 5, 1, SQUARE)),
        numbers(3, SampleIndex(5, 2, 1, SQUARE)),
    ]  # the same numbers, swapped
    assert len({numbers(3, draw), *others}) == 6


def test_items_of_many_epochs_and_positions_all_differ() -> None:
    found = {
        item_generator(0, SampleIndex(epoch, position, 0, SQUARE)).random()
        for epoch in range(20)
        for position in range(50)
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
    batches = GlobalBatches(Order(10), 4, 7, (64, 64), partners=3, near=True)
    for epoch in (0, 1):
        order = batches_of_one(GlobalBatches(Order(10), 1, 7, (64, 64)), epoch)
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
    small, large = (
        list(chain(*draws(GlobalBatches(Order(12), size, 3, (8, 8), partners=3, near=True), 1))) for size in (2, 6)
    )
    assert small == large


def test_without_partners_a_draw_has_none() -> None:
    assert all(draw.partners == () for draw in chain(*draws(GlobalBatches(Order(5), 2, 0, (8, 8)), 0)))


# other orders

# Images 0 to 4 of a split; the fourth is background.
FOUND = Instances(np.array([0, 0, 1, 2, 2, 2, 4]), np.array([0, 1, 0, 0, 0, 1, 3]))
WEIGHTS = [1 / 4 + 1 / 2, 1 / 4, 2 / 4 + 1 / 2, 0, 1]
SAMPLINGS = (
    Sampling(image_weights=True),
    Sampling(repeat_factor=0.9),
    Sampling(multi_scale=True),
    Sampling(image_weights=True, multi_scale=True, partners="near"),
    Sampling(rect=True, multi_scale=True),
)


def batches_of(sampling: Sampling, batch_size: int = 4, seed: int = 7, found: Instances = FOUND) -> GlobalBatches:
    """Five images at 128 pixels."""
    return training_batches(sampling, found, SIZES[:5], batch_size, seed, 128, 32, near=3, mixed=7)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_draws_are_a_function_of_seed_and_epoch(sampling: Sampling) -> None:
    first = batches_of(sampling)
    epochs = [draws(first, epoch) for epoch in range(9)]
    np.random.seed(1)  # noqa: NPY002 - the old global generator must not matter
    for epoch in (8, 0, 3):
        assert draws(batches_of(sampling), epoch) == epochs[epoch] == draws(first, epoch)
    assert draws(batches_of(sampling, seed=8), 0) not in epochs
    assert {len(epoch) for epoch in epochs} == {len(first)}
    assert len({repr(draws) for draws in epochs}) > 4


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_run_that_goes_on_draws_what_it_would_have(sampling: Sampling) -> None:
    batches = batches_of(sampling, 2)
    whole = draws(batches, 2)
    batches.skip(1)
    assert draws(batches, 2) == whole[1:]


@pytest.mark.parametrize("sampling", SAMPLINGS[:2])
def test_an_order_and_its_partners_do_not_depend_on_the_batch_size(sampling: Sampling) -> None:
    small, large = (list(chain(*draws(batches_of(sampling, size), 1))) for size in (2, 6))
    assert small == large[: len(small)] or large == small[: len(large)]


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_batch_has_one_shape_and_plain_numbers(sampling: Sampling) -> None:
    for epoch in range(4):
        for batch in draws(batches_of(sampling), epoch):
            assert len(batch) == 4
            assert len({draw.shape for draw in batch}) == 1
            numbers = [(draw.position, draw.image, *draw.shape, *draw.partners) for draw in batch]
            assert {type(value) for value in chain(*numbers)} == {int}


def test_an_image_weighs_what_its_instances_do() -> None:
    assert image_weights(FOUND, 5) == pytest.approx(WEIGHTS)


def test_images_are_drawn_in_proportion_to_their_weights() -> None:
    """As many as there are. Partners too, over each of which six standard deviations are left."""
    batches = batches_of(Sampling(image_weights=True), 5)
    found = [draw for epoch in range(400) for draw in chain(*draws(batches, epoch))]
    assert len(found) == 2000
    share = np.array(WEIGHTS) / sum(WEIGHTS)
    for numbers in ([draw.image for draw in found], *zip(*(draw.partners for draw in found), strict=True)):
        counts = np.bincount(numbers, minlength=5)
        assert counts[3] == 0
        assert counts == pytest.approx(2000 * share, abs=6 * 2000**0.5 / 2)
    assert {len(draw.partners) for draw in found} == {7}


def test_partners_are_of_the_order_that_is_drawn() -> None:
    batches = batches_of(Sampling(image_weights=True), 5)
    for epoch in range(20):
        found = list(chain(*draws(batches, epoch)))
        assert {number for draw in found for number in draw.partners} <= {draw.image for draw in found}


def test_where_no_image_weighs_anything_all_are_alike() -> None:
    nothing = Instances(np.zeros(0, np.int64), np.zeros(0, np.int64))
    batches = batches_of(Sampling(image_weights=True), 5, found=nothing)
    counts = np.bincount([number for epoch in range(200) for number in images(draws(batches, epoch))], minlength=5)
    assert counts == pytest.approx(np.full(5, 200), abs=80)
    factors = repeat_factors(nothing, 5, 0.5)
    assert factors.tolist() == [1] * 5


def test_an_image_is_repeated_for_its_rarest_class() -> None:
    """Classes 0 to 3 are in 3, 2, 0 and 1 of five images."""
    factors = repeat_factors(FOUND, 5, 0.5)
    assert factors == pytest.approx([(0.5 / 0.4) ** 0.5, 1, (0.5 / 0.4) ** 0.5, 1, (0.5 / 0.2) ** 0.5])


@pytest.mark.parametrize(
    "factors",
    [
        pytest.param([1, 1.2, 1, 2.5, 3.9, 1.1, 1.1], id="rounded down"),
        pytest.param([1.9, 1.9, 1, 1.8, 2.0], id="rounded up, which none may come to more than its next number by"),
        pytest.param([1, 1, 1.9, 1], id="one image alone"),
        pytest.param([1, 1.3, 1], id="too little for a draw"),
        pytest.param([1, 1, 2], id="whole numbers"),
        pytest.param(np.random.default_rng(0).uniform(1, 4, 1000).tolist(), id="many"),
    ],
)
def test_an_image_is_drawn_as_often_as_its_factor_says(factors: list[float]) -> None:
    order, epochs = Repeated(np.array(factors)), 300
    assert order.count == sum(map(int, factors)) + round(sum(factor % 1 for factor in factors))
    drawn = [order.draw(np.random.default_rng(epoch)) for epoch in range(epochs)]
    assert {len(numbers) for numbers in drawn} == {order.count}
    counts = np.array([np.bincount(numbers, minlength=len(factors)) for numbers in drawn])
    assert (counts >= np.floor(factors)).all()
    assert (counts <= np.ceil(factors)).all()
    # each fraction is met but for the rounding of their sum, and for six standard deviations
    unmet = 0.5 / max(sum(factor % 1 for factor in factors), 0.5)
    assert counts.mean(0) == pytest.approx(np.array(factors), abs=unmet + 3 / epochs**0.5)


def test_repeated_draws_are_shuffled() -> None:
    drawn = Repeated(np.full(50, 2.0)).draw(np.random.default_rng(0))
    assert (np.diff(drawn) != 0).mean() > 0.9


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"rect": True, "image_weights": True}, "--rect and --image-weights"),
        ({"rect": True, "repeat_factor": 0.1}, "--rect and --repeat-factor"),
        ({"image_weights": True, "repeat_factor": 0.1}, "--image-weights and --repeat-factor"),
    ],
)
def test_only_one_flag_may_say_the_order(flags: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=named):
        Sampling(**flags)


@pytest.mark.parametrize(
    ("close", "mixed"), [(0, [True] * 5), (2, [True, True, True, False, False]), (5, [False] * 5), (9, [False] * 5)]
)
def test_the_last_epochs_are_not_mixed(close: int, mixed: list[bool]) -> None:
    sampling = Sampling(close_mosaic=close, epochs=5)
    assert [sampling.mixes(epoch) for epoch in range(5)] == mixed


def test_what_is_unlike_the_usual_is_said() -> None:
    def said(**flags: Any) -> tuple[str, ...]:
        return batches_of(Sampling(epochs=20, **flags)).messages

    assert said() == ()
    assert said(image_weights=True) == (
        "--image-weights: 5 draws an epoch of 5 images; 1 without labels are never drawn",
    )
    assert said(repeat_factor=0.5) == ("--repeat-factor 0.5: 6 draws an epoch of 5 images",)
    assert said(multi_scale=True, close_mosaic=3) == (
        "--multi-scale: each batch at one of 5 sizes, 64 to 192 pixels",
        "--close-mosaic 3: no images mixed of several from epoch 18 on",
    )


# sizes of batches


@pytest.mark.parametrize(
    ("imgsz", "stride", "sizes"),
    [
        (640, 32, range(320, 961, 32)),
        (1280, 64, range(640, 1921, 64)),
        (96, 32, range(64, 145, 32)),
        (64, 32, range(64, 97, 32)),
        (40, 8, range(24, 61, 8)),
        (32, 32, range(32, 49, 32)),
    ],
)
def test_sizes_are_whole_strides_from_half_to_one_and_a_half(imgsz: int, stride: int, sizes: range) -> None:
    assert batch_sizes(imgsz, stride) == sizes


def test_each_size_comes_as_often() -> None:
    batches = batches_of(Sampling(multi_scale=True), 1)
    shapes = [batch[0].shape for epoch in range(200) for batch in draws(batches, epoch)]
    assert all(height == width for height, width in shapes)
    counts = np.bincount([height // 32 for height, _ in shapes])
    assert counts.tolist()[:2] == [0, 0]
    assert counts[2:] == pytest.approx(np.full(5, 200), abs=80)


def test_parts_of_a_batch_have_its_size() -> None:
    """That of the batch's number: a process's slice is at the size of the whole."""
    batches = batches_of(Sampling(multi_scale=True), 2)
    shapes = [[batch[0].shape for batch in draws(batches, epoch)] for epoch in range(30)]
    assert len({shape for epoch in shapes for shape in epoch}) == 5
    other = batches_of(Sampling(multi_scale=True, image_weights=True), 2, found=FOUND)
    assert [[batch[0].shape for batch in draws(other, epoch)] for epoch in range(30)] == shapes


def test_rectangular_batches_keep_their_shape_at_another_size() -> None:
    plain, scaled = batches_of(Sampling(rect=True), 2), batches_of(Sampling(rect=True, multi_scale=True), 2)
    seen = set()
    for epoch in range(30):
        for before, after in zip(draws(plain, epoch), draws(scaled, epoch), strict=True):
            assert [draw.image for draw in before] == [draw.image for draw in after]
            zoom = max(after[0].shape) / max(before[0].shape)
            seen.add(zoom)
            for old, new in zip(before[0].shape, after[0].shape, strict=True):
                assert new % 32 == 0
                assert old * zoom <= new < old * zoom + 32
    assert len(seen) == 5


@pytest.mark.parametrize(
    ("sampling", "shape"),
    [(Sampling(), (128, 128)), (Sampling(multi_scale=True), (192, 192)), (SAMPLINGS[-1], (192, 192))],
)
def test_the_largest_batch(sampling: Sampling, shape: tuple[int, int]) -> None:
    batches = batches_of(sampling)
    assert [draw.image for draw in batches.largest()] == [draw.image for draw in next(iter(batches))]
    assert {draw.shape for draw in batches.largest()} == {shape}
