"""Image files as pixels: upright whatever wrote them, three channels in OpenCV's order, and resized as asked."""

from __future__ import annotations

import io
import tempfile
import zlib
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from data.images import JPEG_END, MAX_PLAIN_PIXELS, plain_size, read_image, resize_long_side, scaled_shape
from data.labels import EXIF_ORIENTATION, _size_by_pillow, image_size
from utils.errors import UserError

RED, GREEN, BLUE, WHITE = (250, 10, 10), (10, 250, 10), (10, 10, 250), (240, 240, 240)

# What an image whose corners are stored as red green / blue white looks like upright, by its EXIF orientation.
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


def corners() -> np.ndarray:
    """48x32 pixels, RGB, in four colours."""
    image = np.zeros((32, 48, 3), np.uint8)
    image[:16, :24], image[:16, 24:], image[16:, :24], image[16:, 24:] = RED, GREEN, BLUE, WHITE
    return image


def write(file: Path, pixels: np.ndarray, **options: Any) -> Path:
    Image.fromarray(pixels).save(file, **options)
    return file


def write_oriented(file: Path, orientation: int) -> Path:
    """`corners()` with an EXIF orientation, in the format of the suffix, of high quality."""
    exif = Image.Exif()
    exif[EXIF_ORIENTATION] = orientation
    options = {".jpg": {"quality": 95, "subsampling": 0}, ".webp": {"lossless": True}}.get(file.suffix, {})
    return write(file, corners(), exif=exif, **options)


def check_upright(image: np.ndarray, orientation: int) -> None:
    """The four quarters of a BGR image have the colours that belong there, their middles exactly enough for JPEG."""
    height, width = (48, 32) if orientation >= 5 else (32, 48)
    assert (image.shape, image.dtype) == ((height, width, 3), np.uint8)
    quarters = ((image[: height // 2], 0), (image[height // 2 :], 1))
    for half, row in quarters:
        for part, column in ((half[:, : width // 2], 0), (half[:, width // 2 :], 1)):
            wanted = np.array(UPRIGHT[orientation][row][column])[::-1]
            assert np.abs(part[4:-4, 4:-4].astype(int) - wanted).max() <= 8


@pytest.mark.parametrize("suffix", [".bmp", ".png", ".tif", ".webp"])
def test_pixels_are_those_of_the_file_in_the_order_blue_green_red(tmp_path: Path, suffix: str) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (14, 21, 3), np.uint8)
    options = {"lossless": True} if suffix == ".webp" else {}
    image = read_image(write(tmp_path / f"a{suffix}", pixels, **options))
    assert (image.shape, image.dtype) == ((14, 21, 3), np.uint8)
    assert np.array_equal(image, pixels[..., ::-1])


def test_a_red_image_is_red(tmp_path: Path) -> None:
    image = read_image(write(tmp_path / "a.png", np.full((10, 10, 3), (255, 0, 0), np.uint8)))
    assert image[5, 5].tolist() == [0, 0, 255]


@pytest.mark.parametrize("suffix", [".jpg", ".png", ".webp", ".tif"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_image_is_read_upright_and_its_size_said_alike(tmp_path: Path, suffix: str, orientation: int) -> None:
    file = write_oriented(tmp_path / f"a{suffix}", orientation)
    image = read_image(file)
    check_upright(image, orientation)
    assert image_size(file) == (image.shape[1], image.shape[0])


@pytest.mark.parametrize("orientation", [1, 3, 6])
def test_what_opencv_cannot_read_pillow_reads_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, orientation: int
) -> None:
    file = write_oriented(tmp_path / "a.png", orientation)
    image = read_image(file)
    monkeypatch.setattr(cv2, "imread", lambda *_: None)
    other = read_image(file)
    check_upright(other, orientation)
    assert np.array_equal(other, image)
    assert other.flags.c_contiguous


def test_grey_palette_and_transparent_images_have_three_channels(tmp_path: Path) -> None:
    grey = write(tmp_path / "grey.png", np.full((10, 12), 70, np.uint8))
    assert np.array_equal(read_image(grey), np.full((10, 12, 3), 70))
    clear = write(tmp_path / "clear.png", np.full((10, 12, 4), (1, 2, 3, 0), np.uint8))
    assert np.array_equal(read_image(clear), np.full((10, 12, 3), (3, 2, 1)))
    palette = tmp_path / "palette.png"
    Image.new("RGB", (12, 10), (9, 8, 7)).quantize(4).save(palette)
    assert np.array_equal(read_image(palette), np.full((10, 12, 3), (7, 8, 9)))


def test_a_name_outside_ascii_is_read(tmp_path: Path) -> None:
    assert read_image(write(tmp_path / "bild ä 猫.png", corners())).shape == (32, 48, 3)


@pytest.mark.parametrize("content", [None, b"", b"not an image"])
def test_an_unreadable_image_is_named(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "a.jpg"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UserError, match=r"a\.jpg cannot be read as an image \(.*\); fix or remove it"):
        read_image(file)


# sizes


@pytest.mark.parametrize(
    ("width", "height", "size", "shape"),
    [
        (640, 480, 320, (320, 240)),
        (480, 640, 320, (240, 320)),
        (30, 20, 60, (60, 40)),
        (100, 33, 64, (64, 22)),  # 21.12
        (33, 100, 64, (22, 64)),
        (7, 7, 3, (3, 3)),
        (3, 2, 3, (3, 2)),
        (1000, 10, 50, (50, 1)),  # 0.5: never 0
    ],
)
def test_the_longer_side_becomes_the_size_and_the_other_is_rounded_up(
    width: int, height: int, size: int, shape: tuple[int, int]
) -> None:
    assert scaled_shape(width, height, size) == shape
    image = resize_long_side(np.zeros((height, width, 3), np.uint8), size, smooth=True)
    assert image.shape == (shape[1], shape[0], 3)


def framed() -> np.ndarray:
    """4x4 pixels: 0 around the 2x2 pixels of 160 in the middle."""
    image = np.zeros((4, 4, 3), np.uint8)
    image[1:3, 1:3] = 160
    return image


def test_smooth_shrinking_takes_the_mean_of_the_area() -> None:
    assert resize_long_side(framed(), 1, smooth=True).tolist() == [[[40, 40, 40]]]  # 4 x 160 / 16


def test_shrinking_otherwise_looks_at_the_four_pixels_in_the_middle() -> None:
    assert resize_long_side(framed(), 1, smooth=False).tolist() == [[[160, 160, 160]]]


@pytest.mark.parametrize("smooth", [False, True])
def test_enlarging_is_linear(smooth: bool) -> None:
    row = np.array([[[0] * 3, [100] * 3]], np.uint8)
    # centres of the new pixels in the old: -0.25, 0.25, 0.75, 1.25
    assert resize_long_side(row, 4, smooth)[..., 0].tolist() == [[0, 25, 75, 100]] * 2


@pytest.mark.parametrize("smooth", [False, True])
def test_an_image_of_the_right_size_is_not_touched(smooth: bool) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (20, 32, 3), np.uint8)
    assert np.array_equal(resize_long_side(pixels, 32, smooth), pixels)


# sizes without Pillow


def encoded(kind: str, mode: str = "RGB", **options: Any) -> bytes:
    """An image of 48x32 pixels, as the bytes of a file."""
    file = io.BytesIO()
    Image.fromarray(corners()).convert(mode).save(file, kind, **options)
    return file.getvalue()


def segment(kind: int, content: bytes) -> bytes:
    """A JPEG's."""
    return bytes([0xFF, kind]) + (len(content) + 2).to_bytes(2, "big") + content


def inserted(jpeg: bytes, *segments: bytes) -> bytes:
    """With more segments right after the first mark."""
    return jpeg[:2] + b"".join(segments) + jpeg[2:]


def chunk(kind: bytes, content: bytes) -> bytes:
    """A PNG's."""
    return len(content).to_bytes(4, "big") + kind + content + zlib.crc32(kind + content).to_bytes(4, "big")


def between(png: bytes, *chunks: bytes, before: bytes = b"IDAT") -> bytes:
    """With more chunks before the first of a kind."""
    place = png.index(before) - 4
    return png[:place] + b"".join(chunks) + png[place:]


def noted(**texts: str) -> PngInfo:
    info = PngInfo()
    for name, text in texts.items():
        info.add_text(name, text)
    return info


ROTATED, UPRIGHT_EXIF = Image.Exif(), Image.Exif()
ROTATED[EXIF_ORIENTATION], UPRIGHT_EXIF[EXIF_ORIENTATION] = 6, 1
XMP = b"http://ns.adobe.com/xap/1.0/\0<x tiff:Orientation='6' tiff:Orientation=\"6\"/>"
JPEG, PNG = encoded("jpeg"), encoded("png")
PLAIN = {
    "jpeg": JPEG,
    "grey jpeg": encoded("jpeg", "L"),
    "jpeg for print": encoded("jpeg", "CMYK"),
    "progressive jpeg": encoded("jpeg", progressive=True),
    "jpeg with a profile": encoded("jpeg", icc_profile=bytes(100)),
    "jpeg with a long profile": encoded("jpeg", icc_profile=bytes(150_000)),
    "jpeg with a comment": encoded("jpeg", comment=b"comment"),
    "jpeg of Photoshop": inserted(JPEG, segment(0xED, b"Photoshop 3.0\0" + b"8BIM\x04\x04\0\0\0\0\0\x020\0")),
    "jpeg of Adobe": inserted(JPEG, segment(0xEE, b"Adobe\0\x64\0\0\0\0\x01")),
    "jpeg with XMP": inserted(JPEG, segment(0xE1, XMP.replace(b"tiff:", b""))),
    "jpeg with nameless XMP": inserted(JPEG, segment(0xE1, b"XMP\0" + XMP[4:].replace(b"tiff:", b""))),
    "png": PNG,
    "grey png": encoded("png", "L"),
    "clear png": encoded("png", "RGBA"),
    "palette png": encoded("png", "P"),
    "png of many chunks": between(PNG, chunk(b"gAMA", bytes(4)), chunk(b"tIME", bytes(7)), chunk(b"pHYs", bytes(9))),
    "png with text": encoded("png", pnginfo=noted(Software="none"), dpi=(72, 72)),
    "png with late text": between(PNG, chunk(b"tEXt", b"date\0now"), before=b"IEND"),
}
UNUSUAL = {
    "turned jpeg": encoded("jpeg", exif=ROTATED),
    "jpeg turned by XMP": inserted(JPEG, segment(0xE1, XMP)),
    "jpeg with upright EXIF": encoded("jpeg", exif=UPRIGHT_EXIF),
    "jpeg with a false start": inserted(JPEG, segment(0xE0, b"JFIF\0")),
    "jpeg with a short profile": inserted(JPEG, segment(0xE2, b"ICC_PROFILE\0\1")),
    "jpeg of several images": inserted(JPEG, segment(0xE2, b"MPF\0II*\0\x08\0\0\0")),
    "jpeg cut in Photoshop's": inserted(JPEG, segment(0xED, b"Photoshop 3.0\x008BIM\x04\x04")),
    "jpeg with a bad table": inserted(JPEG, segment(0xDB, bytes(66))),
    "jpeg with filling": JPEG[:2] + b"\xff" + JPEG[2:],
    "jpeg without its end": JPEG[:-2],
    "jpeg with more after its end": JPEG + b"more",
    "jpeg of a header alone": JPEG[:100] + JPEG_END,
    "turned png": encoded("png", exif=ROTATED),
    "png turned late": between(PNG, chunk(b"eXIf", ROTATED.tobytes()[6:]), before=b"IEND"),
    "png turned by text": encoded(
        "png", pnginfo=noted(**{"Raw profile type exif": "\n\n\n" + ROTATED.tobytes().hex()})
    ),
    "png turned by late text": between(PNG, chunk(b"tEXt", b'xmp\0tiff:Orientation="6'), before=b"IEND"),
    "png with a short chunk": between(PNG, chunk(b"gAMA", bytes(3))),
    "png with a bad sum": between(PNG, chunk(b"gAMA", bytes(4))[:-1] + b"\0"),
    "png of 16 bits": encoded("png", "I;16"),
    "png without pixels": PNG[:33] + PNG[-12:],
    "png without its end": PNG[:-12],
    "png with more after its end": PNG + b"more",
    "bmp": encoded("bmp"),
    "webp": encoded("webp"),
    "tiff": encoded("tiff"),
    "text": b"text",
    "nothing": b"",
}


def agrees(file: Path) -> tuple[int, int] | None:
    """`plain_size` of a file; where it says a size Pillow must say the same, without any error."""
    size = plain_size(str(file))
    assert size is None or size == _size_by_pillow(file)
    return size


@pytest.mark.parametrize("name", PLAIN)
def test_ordinary_files_are_measured_without_pillow(tmp_path: Path, name: str) -> None:
    file = tmp_path / "a.jpg"
    file.write_bytes(PLAIN[name])
    assert agrees(file) == (48, 32)


@pytest.mark.parametrize("name", UNUSUAL)
def test_of_anything_unusual_only_pillow_tells_the_size(tmp_path: Path, name: str) -> None:
    file = tmp_path / "a.jpg"
    file.write_bytes(UNUSUAL[name])
    assert plain_size(str(file)) is None


def test_pillow_limits_the_size_of_huge_images(tmp_path: Path) -> None:
    head = (MAX_PLAIN_PIXELS // 8).to_bytes(4, "big") + (8).to_bytes(4, "big") + PNG[24:29]
    file = tmp_path / "a.png"
    file.write_bytes(PNG[:8] + chunk(b"IHDR", head) + PNG[33:])
    assert plain_size(str(file)) is None


@pytest.mark.parametrize("name", ["none.jpg", "", "a\0b.jpg"])
def test_what_cannot_be_opened_is_left_to_pillow(tmp_path: Path, name: str) -> None:
    assert plain_size(str(tmp_path / name)) is None


changes = st.tuples(st.integers(0, 10_000), st.integers(0, 2), st.sampled_from([0, 1, 2, 8, 65, 0xD8, 0xE1, 255]))


@settings(max_examples=250, deadline=None, derandomize=True)
@given(st.sampled_from([*PLAIN.values(), *UNUSUAL.values()]), st.lists(changes, min_size=1, max_size=3))
def test_no_damage_makes_a_size_that_pillow_would_not_say(content: bytes, places: list[tuple[int, int, int]]) -> None:
    damaged = bytearray(content)
    for place, how, value in places:
        if damaged:
            start = place % min(len(damaged), 800)
            damaged[start : start + (how > 0)] = [value] * (how < 2)  # one byte more, another, or one less
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "a.jpg")
        file.write_bytes(damaged)
        agrees(file)
