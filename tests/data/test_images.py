"""Image files: pixels upright whatever wrote them, sizes without decoding, and resizing."""

from __future__ import annotations

import io
import zlib
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import ExifTags, Image

from data.images import image_size, read_image, read_reduced, read_whole_image, resize_long_side, scaled_shape
from tests.making import plain, write_image
from utils.errors import UserError

RED, GREEN, BLUE, WHITE = (250, 10, 10), (10, 250, 10), (10, 10, 250), (240, 240, 240)

# The corners of an upright image, by the EXIF orientation of a file with red green / blue white.
UPRIGHT = {
    1: ((RED, GREEN), (BLUE, WHITE)),
    2: ((GREEN, RED), (WHITE, BLUE)),  # mirrored
    3: ((WHITE, BLUE), (GREEN, RED)),  # turned by 180 degrees
    4: ((BLUE, WHITE), (RED, GREEN)),  # upside down
    5: ((RED, BLUE), (GREEN, WHITE)),  # transposed
    6: ((BLUE, RED), (WHITE, GREEN)),  # to be turned clockwise
    7: ((WHITE, GREEN), (BLUE, RED)),  # transposed the other way
    8: ((GREEN, WHITE), (RED, BLUE)),  # to be turned anticlockwise
}


def corners(width: int = 48, height: int = 32) -> np.ndarray:
    """Return an image in four colours, RGB."""
    image = np.array([[RED, GREEN], [BLUE, WHITE]], np.uint8)
    return cv2.resize(image, (width, height), interpolation=cv2.INTER_NEAREST)


def oriented(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    return exif


def check_upright(image: np.ndarray, orientation: int) -> None:
    assert (image.dtype, image.flags.c_contiguous) == (np.uint8, True)
    for half, colours in zip(np.array_split(image, 2), UPRIGHT[orientation], strict=True):
        for quarter, colour in zip(np.array_split(half, 2, axis=1), colours, strict=True):
            assert np.abs(quarter[4:-4, 4:-4, ::-1].astype(int) - colour).max() <= 8  # a JPEG is inexact


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize(
    ("suffix", "options"),
    [
        (".jpg", {"quality": 95, "subsampling": 0}),
        (".png", {}),
        (".webp", {"lossless": True}),
        (".tif", {}),
        (".tiff", {"compression": "lzma"}),  # which OpenCV cannot read
    ],
    ids=str,
)
def test_an_image_is_read_upright_and_has_the_size_of_its_pixels(
    tmp_path: Path, suffix: str, options: dict[str, Any], orientation: int
) -> None:
    file = write_image(tmp_path / f"a{suffix}", corners(), exif=oriented(orientation), **options)
    image, (height, width) = read_image(file), (48, 32) if orientation >= 5 else (32, 48)
    assert (image.shape, image_size(file)) == ((height, width, 3), (width, height))
    check_upright(image, orientation)


@pytest.mark.parametrize(
    ("name", "image", "colour"),
    [
        ("grey.png", Image.new("L", (40, 30), 70), (70, 70, 70)),
        ("two.png", Image.new("1", (40, 30), 1), (255, 255, 255)),
        ("palette.png", Image.new("RGB", (40, 30), (9, 80, 200)).quantize(4), (9, 80, 200)),
        ("a.webp", Image.new("RGBA", (40, 30), (200, 100, 50, 255)), (200, 100, 50)),
        ("clear.png", Image.new("RGBA", (40, 30), (200, 100, 50, 0)), (200, 100, 50)),
        ("grey-alpha.png", Image.new("LA", (40, 30), (70, 90)), (70, 70, 70)),
        ("print.jpg", Image.new("CMYK", (40, 30), (0, 255, 255, 0)), (255, 0, 0)),
        ("deep.png", Image.fromarray(np.full((30, 40), 0x80FF, np.uint16)), (128, 128, 128)),
    ],
)
def test_images_of_every_kind_have_three_channels(
    tmp_path: Path, name: str, image: Image.Image, colour: tuple[int, int, int]
) -> None:
    image.save(tmp_path / name)
    pixels = read_image(tmp_path / name)
    assert (pixels.dtype, pixels.shape) == (np.uint8, (30, 40, 3))
    assert np.abs(pixels[..., ::-1].astype(int) - colour).max() <= 3


def test_16_bits_of_every_reader_are_the_same_and_other_numbers_are_refused(tmp_path: Path) -> None:
    deep = np.arange(65536, dtype=np.uint16).reshape(128, 512)
    expected = read_image(write_image(tmp_path / "a.png", deep))
    by_pillow = write_image(tmp_path / "b.tif", deep, compression="lzma")  # which OpenCV cannot read
    assert np.array_equal(read_whole_image(by_pillow), expected)
    assert image_size(by_pillow) == (512, 128)
    for kind in (np.int32, np.float32):
        with pytest.raises(UserError, match=r"a\.tif"):
            read_whole_image(write_image(tmp_path / "a.tif", np.zeros((30, 40), kind)))


def encoded(kind: str, mode: str = "RGB", **options: Any) -> bytes:
    """Return an image of 48x32 pixels as the bytes of a file."""
    file = io.BytesIO()
    Image.fromarray(corners()).convert(mode).save(file, kind, **options)
    return file.getvalue()


def with_segment(kind: int, content: bytes) -> bytes:
    """Return a JPEG with one more segment after its start."""
    return JPEG[:2] + bytes([0xFF, kind]) + (len(content) + 2).to_bytes(2, "big") + content + JPEG[2:]


JPEG, PNG = encoded("jpeg"), encoded("png")
TEXT = len(b"date\0now").to_bytes(4, "big") + b"tEXtdate\0now" + zlib.crc32(b"tEXtdate\0now").to_bytes(4, "big")
UPRIGHT_FILES = {
    "jpeg": JPEG,
    "jpeg in grey": encoded("jpeg", "L"),
    "jpeg for print": encoded("jpeg", "CMYK"),
    "jpeg, progressive": encoded("jpeg", progressive=True),
    "jpeg with a long profile": encoded("jpeg", icc_profile=bytes(150_000)),
    "jpeg with upright EXIF": encoded("jpeg", exif=oriented(1)),
    "jpeg with damaged EXIF": with_segment(0xE1, b"Exif\0\0MM\0*\0\0"),
    "jpeg of Photoshop": with_segment(0xED, b"Photoshop 3.0\0" + b"8BIM\x04\x04\0\0\0\0\0\x020\0"),
    "jpeg with more after its end": JPEG + b"more",
    "jpeg without its end": JPEG[:-2],
    "jpeg, progressive, without its end": encoded("jpeg", progressive=True)[:-2],
    "png": PNG,
    "png of 16 bits": encoded("png", "I;16"),
    "png with late text": PNG[:-12] + TEXT + PNG[-12:],
    "png with more after its end": PNG + b"more",
    "animated png": encoded("png", save_all=True, append_images=[Image.fromarray(plain(48, 32))]),
    "gif": encoded("gif"),
}
BROKEN_FILES = {
    "jpeg cut short": JPEG[: len(JPEG) * 3 // 4],
    "png cut short": PNG[:-40],
    "png without its end": PNG[:-12],
    "png with a wrong byte": PNG[:60] + bytes([PNG[60] ^ 1]) + PNG[61:],
    "png with a header of a wrong checksum": PNG[:29] + b"\0\0\0\0" + PNG[33:],
    "webp cut short": encoded("webp")[:-10],
    "bmp cut short": encoded("bmp")[:-10],
    "text": b"text",
    "nothing": b"",
}


@pytest.mark.parametrize("name", [*UPRIGHT_FILES, *BROKEN_FILES])
def test_a_whole_file_has_the_size_of_its_pixels_and_a_broken_one_is_refused(
    tmp_path: Path, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """The decoders print nothing of their own."""
    file = tmp_path / "a.jpg"
    file.write_bytes({**UPRIGHT_FILES, **BROKEN_FILES}[name])
    if name in UPRIGHT_FILES:
        assert (image_size(file), read_image(file).shape) == ((48, 32), (32, 48, 3))
    else:
        with pytest.raises(UserError, match=r"a\.jpg .*\([^<>]*\)"):
            read_whole_image(file)
    assert capfd.readouterr() == ("", "")


def test_a_truncated_jpeg_is_used_as_far_as_it_goes_and_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The first half is nearly as if whole, at any scale; one without a pixel is left out."""
    file, problems = write_image(tmp_path / "a.jpg", np.tile(corners(), (4, 4, 1))), list[str]()
    whole, content = read_image(file), file.read_bytes()
    file.write_bytes(content[: len(content) * 3 // 4])
    assert (image_size(file, problems.append), problems) == ((192, 128), [f"{file}: truncated, restored"])
    for pixels in (read_image(file), read_image(file, 4), read_whole_image(file)):
        assert np.abs(pixels[:64].astype(int) - whole[:64]).mean() < 2
        assert (pixels[-8:] == 128).all()
    assert capfd.readouterr() == (f"warning: {problems[0]}\n", "")
    file.write_bytes(content[: content.index(b"\xff\xda") + 14])
    with pytest.raises(UserError, match=r"a\.jpg"):
        read_whole_image(file)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(1, 200), st.integers(1, 200), st.integers(1, 200), st.booleans())
def test_the_longer_side_becomes_the_size_and_the_other_is_rounded_up(
    width: int, height: int, size: int, smooth: bool
) -> None:
    image = resize_long_side(plain(width, height), size, smooth)
    scaled = scaled_shape(width, height, size)
    assert (image.shape[1::-1], max(scaled)) == (scaled, size)
    exact = min(width, height) * size / max(width, height)
    assert exact - 1e-9 <= min(scaled) < exact + 1
    assert (width <= height) == (scaled[0] <= scaled[1]) or width == height or scaled[0] == scaled[1]


def test_shrinking_is_smooth_by_the_mean_of_the_area_or_quick_by_the_four_pixels_in_the_middle() -> None:
    """Of 4x4 pixels with 160 in the middle; enlarging is linear, from the centres of pixels."""
    image, row = plain(4, 4, 0), np.array([[[0] * 3, [100] * 3]], np.uint8)
    image[1:3, 1:3] = 160
    for smooth, mean in ((True, 40), (False, 160)):
        assert resize_long_side(image, 1, smooth).tolist() == [[[mean] * 3]]
        assert resize_long_side(row, 4, smooth)[..., 0].tolist() == [[0, 25, 75, 100]] * 2


@pytest.mark.parametrize(
    ("width", "height", "size", "decoded"),
    [
        (4000, 3000, 640, (1000, 750)),  # an eighth would be 500 wide
        (3000, 4000, 640, (750, 1000)),
        (2560, 1920, 640, (640, 480)),
        (2559, 1920, 640, (1280, 960)),  # a quarter of 2559 is less than 640, though rounded up it would be 640
        (4032, 3024, 320, (504, 378)),
        (1999, 1013, 320, (500, 254)),
        (1221, 2001, 900, (611, 1001)),
        (8000, 500, 320, (1000, 63)),  # less than an eighth is not possible
        (2048, 1371, 1280, (2048, 1371)),
    ],
)
def test_a_large_jpeg_is_decoded_at_the_smallest_scale_that_is_not_below_the_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int, height: int, size: int, decoded: tuple[int, int]
) -> None:
    """And upright, in the shape of its true size."""
    orientation = width % 8 + 1
    sides = (height, width) if orientation >= 5 else (width, height)
    file = write_image(tmp_path / "a.jpg", corners(*sides), exif=oriented(orientation), quality=95)
    assert image_size(file) == (width, height)
    shapes, decode = [], cv2.imdecode
    monkeypatch.setattr("cv2.imdecode", lambda *args: shapes.append(decode(*args).shape[1::-1]) or decode(*args))
    image = read_reduced(file, width, height, size)
    assert image.shape == (*scaled_shape(width, height, size)[::-1], 3)
    check_upright(image, orientation)
    assert shapes == [decoded]
