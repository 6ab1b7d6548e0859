"""Global batches: order, partners and shapes as a function of (seed, epoch), for training and evaluation."""

from __future__ import annotations

import pickle
from itertools import chain

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data import sampler
from data.sampler import (
    GlobalBatches,
    SampleIndex,
    Sampling,
    batch_shape,
    batch_sizes,
    evaluation_batches,
    item_generator,
    training_batches,
)
from utils.batch import Instances
from utils.errors import UserError

SQUARE = (64, 64)


def epoch_of(batches: GlobalBatches, epoch: int) -> list[list[SampleIndex]]:
    """Return the batches of an epoch."""
    batches.set_epoch(epoch)
    return list(batches)


def images(batches: list[list[SampleIndex]]) -> list[int]:
    return [sample.image for sample in chain.from_iterable(batches)]


# Square batches


@pytest.mark.parametrize(
    ("count", "batch_size", "batches"), [(10, 4, 3), (12, 4, 3), (13, 4, 4), (3, 8, 1), (1, 1, 1), (7, 1, 7)]
)
def test_an_epoch_holds_every_image_once_and_fills_up_from_its_start(count: int, batch_size: int, batches: int) -> None:
    epoch = epoch_of(GlobalBatches(count, batch_size, 0, (32, 96)), 2)
    assert len(epoch) == len(GlobalBatches(count, batch_size, 0, SQUARE)) == batches
    assert {len(batch) for batch in epoch} == {batch_size}
    order = images(epoch)
    assert sorted(order[:count]) == list(range(count))
    assert all(order[position] == order[position % count] for position in range(len(order)))
    samples = list(chain(*epoch))
    assert [sample.position for sample in samples] == list(range(batches * batch_size))
    assert {(sample.epoch, sample.shape, sample.partners) for sample in samples} == {(2, (32, 96), ())}
    assert pickle.loads(pickle.dumps(epoch)) == epoch


def test_halves_of_a_global_batch_are_the_batches_of_half_the_size() -> None:
    whole = epoch_of(GlobalBatches(24, 8, 0, SQUARE, partners=3), 1)
    halves = [half for batch in whole for half in (batch[:4], batch[4:])]
    assert halves == epoch_of(GlobalBatches(24, 4, 0, SQUARE, partners=3), 1)


@pytest.mark.parametrize("trained", [0, 1, 2, 3])
def test_skipped_batches_are_left_out_once(trained: int) -> None:
    batches = GlobalBatches(10, 4, 7, SQUARE)
    whole = epoch_of(batches, 2)
    for rest in (trained, 0):
        batches.set_epoch(2)
        batches.skip(rest)
        assert list(batches) == whole[rest:]
    batches.skip(trained)
    assert epoch_of(batches, 2) == whole[trained:]
    assert epoch_of(batches, 2) == whole
    assert epoch_of(batches, 3) == epoch_of(GlobalBatches(10, 4, 7, SQUARE), 3)
    assert len(batches) == 3  # of the whole epoch


# The generator of an item


def test_an_item_has_a_generator_by_seed_epoch_and_position() -> None:
    def numbers(seed: int, sample: SampleIndex) -> tuple[float, ...]:
        return tuple(item_generator(seed, sample).random(4))

    sample = SampleIndex(2, 5, 1, SQUARE)
    assert numbers(3, sample) == numbers(3, SampleIndex(2, 5, 1, SQUARE))
    assert numbers(3, sample) == numbers(3, SampleIndex(2, 5, 8, (32, 32)))  # whatever the image
    others = {
        numbers(seed, SampleIndex(epoch, position, 1, SQUARE))
        for seed in range(5)
        for epoch in range(6)
        for position in range(6)
    }
    assert numbers(3, sample) in others
    assert len(others) == 5 * 6 * 6


# Shapes of batches


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=8), st.integers(1, 40), st.sampled_from([8, 32, 64]))
def test_a_batch_has_the_smallest_shape_that_holds_its_images(aspects: list[float], strides: int, stride: int) -> None:
    imgsz = strides * stride
    needed = np.max([(imgsz * min(aspect, 1), imgsz * min(1 / aspect, 1)) for aspect in aspects], 0)
    for side, least in zip(batch_shape(np.array(aspects), imgsz, stride, 0.0), needed, strict=True):
        assert side % stride == 0
        assert side >= least - 1e-6
        assert side < least + stride


# Images, width and height: landscape 0, 3, 5, 7, portrait 1, 2, 4, 6
SIZES = np.array([[64, 32], [32, 64], [30, 60], [60, 30], [45, 60], [64, 16], [48, 60], [64, 48]], np.int32)
# By height / width: 5 (1/4), 3 and 0 (1/2, the later first), 7 (3/4), 6 (5/4), 4 (4/3), 2 and 1 (2)
ORDER = [5, 3, 0, 7, 6, 4, 2, 1]


# Images 0 to 4 of a split; the fourth is background.
INSTANCES = Instances(np.array([0, 0, 1, 2, 2, 2, 4]), np.array([0, 1, 0, 0, 0, 1, 3]))


def rectangular(batch_size: int, seed: int, imgsz: int, stride: int) -> GlobalBatches:
    return training_batches(Sampling(rect=True), INSTANCES, SIZES, batch_size, seed, imgsz, stride, mixed=7)


def test_rectangular_batches_have_images_of_like_aspect() -> None:
    batches = epoch_of(rectangular(4, 0, 128, 32), 0)
    assert images(batches) == ORDER
    # 3/4 of 128 are 96; 4/5 of 128 are 102.4, rounded up to 128
    assert [{sample.shape for sample in batch} for batch in batches] == [{(96, 128)}, {(128, 128)}]
    batches = epoch_of(rectangular(2, 0, 128, 32), 0)
    # heights 1/2 and 3/4; widths 4/5 (rounded up) and 1/2
    assert [batch[0].shape for batch in batches] == [(64, 128), (96, 128), (128, 128), (128, 64)]
    assert [sample.position for batch in batches for sample in batch] == list(range(8))


@pytest.mark.parametrize("square", [False, True])
def test_an_evaluation_holds_a_prime_count_of_images_once_each(square: bool) -> None:
    rng = np.random.default_rng(0)
    batches = evaluation_batches(rng.integers(20, 60, (13, 2)), 4, 64, 32, square)
    assert [len(batch) for batch in batches] == [4, 4, 4, 1]
    assert sorted(images(batches)) == list(range(13))
    assert [sample.position for batch in batches for sample in batch] == list(range(13))
    assert all(len({sample.shape for sample in batch}) == 1 for batch in batches)
    assert {sample.epoch for batch in batches for sample in batch} == {0}


def test_rectangular_evaluation_adds_half_a_stride() -> None:
    batches = evaluation_batches(SIZES, 4, 128, 32, square=False)
    assert images(batches) == ORDER
    # 96 / 32 + 0.5 and 128 / 32 + 0.5 are rounded up to 4 and 5; 102.4 / 32 + 0.5 = 3.7 to 4
    assert [batch[0].shape for batch in batches] == [(128, 160), (160, 128)]


def test_equal_aspects_are_ordered_by_falling_index() -> None:
    batches = evaluation_batches(np.full((40, 2), 50), 8, 64, 32, square=False)
    assert images(batches) == list(range(39, -1, -1))


def test_the_partners_of_a_window_are_around_an_item(monkeypatch: pytest.MonkeyPatch) -> None:
    """All images of the window come, at the ends of the order those of the first or the last one."""
    monkeypatch.setattr(sampler, "PARTNERS_WINDOW", 10)
    seen: list[set[int]] = [set() for _ in range(40)]
    for epoch in range(60):
        order = images(epoch_of(GlobalBatches(40, 1, 7, SQUARE), epoch))
        samples = list(chain(*epoch_of(GlobalBatches(40, 8, 7, SQUARE, partners=3), epoch)))
        assert [sample.image for sample in samples] == order
        for place, sample in enumerate(samples):
            seen[place].update(order.index(partner) for partner in sample.partners)
    assert seen == [set(range(first, first + 10)) for first in np.clip(np.arange(40) - 5, 0, 30).tolist()]


# Other orders

WEIGHTS = [1 / 4 + 1 / 2, 1 / 4, 2 / 4 + 1 / 2, 0, 1]
SAMPLINGS = (
    Sampling(),
    Sampling(image_weights=True),
    Sampling(multi_scale=True),
    Sampling(image_weights=True, multi_scale=True),
    Sampling(rect=True, multi_scale=True),
)


def batches_of(
    sampling: Sampling, batch_size: int = 4, seed: int = 7, instances: Instances = INSTANCES
) -> GlobalBatches:
    """Five images at 128 pixels."""
    return training_batches(sampling, instances, SIZES[:5], batch_size, seed, 128, 32, mixed=7)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_samples_are_a_function_of_seed_and_epoch(sampling: Sampling) -> None:
    first = batches_of(sampling)
    epochs = [epoch_of(first, epoch) for epoch in range(9)]
    np.random.seed(1)  # noqa: NPY002 - the old global generator must not matter
    for epoch in (8, 0, 3):
        assert epoch_of(batches_of(sampling), epoch) == epochs[epoch] == epoch_of(first, epoch)
    assert epoch_of(batches_of(sampling, seed=8), 0) not in epochs
    assert {len(epoch) for epoch in epochs} == {len(first)}
    assert len({repr(samples) for samples in epochs}) > 4


def test_images_are_sampled_in_proportion_to_their_weights() -> None:
    """And so are partners, within six standard deviations."""
    batches = batches_of(Sampling(image_weights=True), 5)
    samples = [sample for epoch in range(400) for sample in chain(*epoch_of(batches, epoch))]
    assert len(samples) == 2000
    share = np.array(WEIGHTS) / sum(WEIGHTS)
    for numbers in ([sample.image for sample in samples], *zip(*(sample.partners for sample in samples), strict=True)):
        counts = np.bincount(numbers, minlength=5)
        assert counts[3] == 0
        assert counts == pytest.approx(2000 * share, abs=6 * 2000**0.5 / 2)
    assert {len(sample.partners) for sample in samples} == {7}


def test_only_one_flag_may_set_the_order() -> None:
    with pytest.raises(UserError, match="--rect and --image-weights"):
        Sampling(rect=True, image_weights=True)


@pytest.mark.parametrize(
    ("close", "mixed"), [(0, [True] * 5), (2, [True, True, True, False, False]), (5, [False] * 5), (9, [False] * 5)]
)
def test_the_last_epochs_are_not_mixed(close: int, mixed: list[bool]) -> None:
    sampling = Sampling(close_mosaic=close, epochs=5)
    assert [sampling.mixes(epoch) for epoch in range(5)] == mixed


# Sizes of batches


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


def test_rectangular_batches_keep_their_shape_at_another_size() -> None:
    plain, scaled = batches_of(Sampling(rect=True), 2), batches_of(Sampling(rect=True, multi_scale=True), 2)
    seen = set()
    for epoch in range(30):
        for before, after in zip(epoch_of(plain, epoch), epoch_of(scaled, epoch), strict=True):
            assert [sample.image for sample in before] == [sample.image for sample in after]
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
    assert [sample.image for sample in batches.largest()] == [sample.image for sample in next(iter(batches))]
    assert {sample.shape for sample in batches.largest()} == {shape}
