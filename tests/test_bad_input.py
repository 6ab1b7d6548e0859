"""A table of bad input: each row ends in one sentence before the first step, or in a warning, which name what is wrong,
and changes no file."""

from __future__ import annotations

import io
import os
import pickle
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import save

from models.yolo import build_model
from tests.conftest import CallMain, RunScript
from tests.curves import untouched
from tests.making import tiny_detector
from tests.models.tasks.mask_batches import tiny_segmenter
from utils.checkpoint import weights_content

PIXELS = np.random.default_rng(0).integers(0, 255, (48, 64, 3), np.uint8)
ROW = "0 0.5 0.5 0.25 0.25\n"
WEIGHTS, WEIGHT = "--weights {set}/weights.pt", "model.0.conv.weight"
ROTATED, NONSENSE = 6, 99  # values of EXIF's orientation


class Inputs:
    """The files of a user: `set/` with a data YAML, images and labels, a model YAML, hyperparameters and weights."""

    def __init__(self, folder: Path, model: dict[str, Any]) -> None:
        self.folder = folder
        self.data: dict[str, Any] = {"train": "images/train", "val": "images/val", "names": ["cat", "dog", "cow"]}
        self.model, self.hyp = model, {"lr0": 0.01}
        for split, count in (("train", 4), ("val", 2)):
            for number in range(count):
                self.image(f"{number}.jpg", encoded("JPEG"), ROW, split)
        self.write("data.yaml", self.data)
        self.write("model.yaml", model)
        self.write("hyp.yaml", self.hyp)

    def write(self, name: str, content: Any) -> None:
        """Write a file of `set/`: bytes, text, or the content of a YAML."""
        file = self.folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if not isinstance(content, (str, bytes)):
            content = yaml.safe_dump(content, sort_keys=False)
        file.write_bytes(content if isinstance(content, bytes) else content.encode())

    def image(self, name: str, content: bytes, rows: str | bytes = ROW, split: str = "train") -> None:
        self.write(f"images/{split}/{name}", content)
        self.write(f"labels/{split}/{Path(name).stem}.txt", rows)

    def label(self, rows: str | bytes, split: str = "train") -> None:
        """Replace the label file of the first image."""
        self.write(f"labels/{split}/0.txt", rows)

    def change(self, **keys: Any) -> None:
        """Change values of the data YAML; None removes a key."""
        self.write("data.yaml", {key: value for key, value in {**self.data, **keys}.items() if value is not None})

    def row(self, number: int, row: Any) -> None:
        """Add a row to the model's backbone."""
        self.model["backbone"][number] = row
        self.write("model.yaml", self.model)

    def cut(self, name: str) -> None:
        self.write(name, half((self.folder / name).read_bytes()))

    def weights(self, **changes: Any) -> None:
        content = weights_content(build_model(self.model), {**self.model, "task": "detect"}, {0: "cat"}, {})
        torch.save({**content, **changes}, self.folder / "weights.pt")


def encoded(kind: str, mode: str = "RGB", **options: Any) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(PIXELS).convert(mode).save(buffer, kind, **options)
    return buffer.getvalue()


def half(content: bytes) -> bytes:
    return content[: len(content) // 2]


def exif(orientation: int) -> bytes:
    block = Image.Exif()
    block[0x0112] = orientation
    return encoded("JPEG", exif=block)


def bomb() -> bytes:
    """Return a PNG of a few bytes whose header says 3.6 billion pixels."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    size = struct.pack(">IIBBBBB", 60000, 60000, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", size) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def animated() -> bytes:
    buffer = io.BytesIO()
    frames = [Image.fromarray(PIXELS), Image.fromarray(255 - PIXELS)]
    frames[0].save(buffer, "WEBP", save_all=True, append_images=frames[1:])
    return buffer.getvalue()


class Payload:
    """Writes a file where it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.file,))


def loop(inputs: Inputs) -> None:
    (inputs.folder / "images/train/again").symlink_to(inputs.folder / "images/train")


def link(inputs: Inputs) -> None:
    (inputs.folder / "images/train/gone.jpg").symlink_to(inputs.folder / "nowhere.jpg")


def roboflow(inputs: Inputs) -> None:
    """Move the files to where Roboflow's exports have them."""
    for name, split in (("train", "train"), ("valid", "val")):
        (inputs.folder / name).mkdir()
        for kind in ("images", "labels"):
            (inputs.folder / kind / split).rename(inputs.folder / name / kind)
    inputs.change(train="../train/images", val="../valid/images", test="../test/images", nc=3, roboflow={"version": 1})


def listed(*lines: str) -> Callable[[Inputs], None]:
    """Train on a list file with the first images and these lines."""

    def plant(inputs: Inputs) -> None:
        inputs.write("train.txt", "\n".join(["images/train/0.jpg", "images/train/1.jpg", *lines]))
        inputs.change(train="train.txt")

    return plant


def image(name: str, content: Callable[[], bytes]) -> Callable[[Inputs], None]:
    return lambda inputs: inputs.image(name, content())


def label(rows: str | bytes, split: str = "train") -> Callable[[Inputs], None]:
    return lambda inputs: inputs.label(rows, split)


def every_label(rows: str, split: str = "train") -> Callable[[Inputs], None]:
    def plant(inputs: Inputs) -> None:
        for file in (inputs.folder / "labels" / split).iterdir():
            file.write_text(rows)

    return plant


def data(**keys: Any) -> Callable[[Inputs], None]:
    return lambda inputs: inputs.change(**keys)


def text(name: str, content: str | bytes) -> Callable[[Inputs], None]:
    return lambda inputs: inputs.write(name, content)


def row(number: int, row: Any) -> Callable[[Inputs], None]:
    return lambda inputs: inputs.row(number, row)


def outline(points: str, *others: str) -> Callable[[Inputs], None]:
    """Train a segmenter on the outline of an object of the first image; others: more rows."""

    def plant(inputs: Inputs) -> None:
        inputs.write("model.yaml", tiny_segmenter())
        every_label("0 0.1 0.1 0.9 0.1 0.9 0.9\n")(inputs)
        every_label("0 0.1 0.1 0.9 0.1 0.9 0.9\n", "val")(inputs)
        inputs.label("\n".join((f"0 {points}", *others)))

    return plant


def nothing(inputs: Inputs) -> None:
    """Leave the files as they are: the flags are wrong."""


Case = tuple[
    Callable[[Inputs], object], str, str
]  # spoils the inputs; what the message names; flags, {set}: the folder


def of_flags(table: dict[str, str]) -> dict[str, Case]:
    """Return cases of flags, by what the message names: the files are as they should be."""
    return {flags: (nothing, named, flags) for flags, named in table.items()}


def of_weights(**cases: tuple[Callable[[Inputs], object], str]) -> dict[str, Case]:
    """Return cases of a weight file: weights.pt or w.pt."""
    return {name: (plant, named, "--weights {set}/" + named.split()[0]) for name, (plant, named) in cases.items()}


def saved(name: str, content: Callable[[Inputs], object]) -> Callable[[Inputs], object]:
    return lambda inputs: torch.save(content(inputs), inputs.folder / name)


ERRORS: dict[str, Case] = {
    **of_flags({
        # files
        "--data {set}/none.yaml": "{set}/none.yaml",
        "--data {set}/other.yaml": "`val:`",  # no image of it is one
        f"--data {'x' * 5000}": "'xxx",
        "--data data/xView": "xView",
        "--hyp finetun": "'finetune'",
        "--hyp lowest": "'lowest'",
        "--hyp.lr0 abc": "--hyp.lr0",
        "--cfg absent.yaml": "absent.yaml",
        "--cfg=": "--cfg",
        "--weights {set}/none.pt": "{set}/none.pt",
        f"--weights {'x' * 5000}": "xxx",
        "--weights yolov5s.pt": "releases/download",
        "--weights hf:mine": "hf:mine",
        # values
        "--epoch 3": "'--epochs'",
        "--batch-size 0": "--batch-size 0",
        "--batch-size 6 --logical-processes 4": "all 4 logical processes",
        "--batch-size 1000000000": "--batch-size",
        "--no-deterministic --logical-processes 2": "--no-deterministic",
        "--name=": "--name",
        "--profile 3:2": "--profile 3:2",
        "--device 7": "--device 7",
        "--device gpu": "--device gpu",
        "--freeze 99": "--freeze 99",
        "--freeze backbon": "--freeze 'backbon'",
        "--hyp.lr_factor 0.1": "--hyp.lr_factor",
        '--hyp.lr_factor {{"neck":1}}': "lr_factor: 'neck'",
        "--fitness recal=1": "recal=1",
        "--fitness recall=high": "--fitness 'recall=high'",
        "--imgsz -8": "--imgsz",
        "val.py --conf-thres 2": "--conf-thres",
    }),
    # labels and images
    "class of train": (label("3 0.5 0.5 0.2 0.2"), "train/0.txt, line 1 has class 3", ""),
    "class of val": (label("7 0.5 0.5 0.2 0.2", "val"), "val/0.txt, line 1 has class 7", ""),
    "all in pixels": (every_label("0 10 10 20 20"), ".txt, line 1", ""),
    "strict": (label("0 10 10 20 20"), "train/0.txt, line 1", "--strict"),
    "strict image": (image("bad.jpg", lambda: b""), "bad.jpg", "--strict"),
    # data sets and hyperparameters
    "empty split": (data(val="empty"), "`val:`", ""),
    "missing folder": (data(val="images/none"), "`val: images/none`", ""),
    "missing split": (data(val=None), "data.yaml has no `val:`", ""),
    "no labels": (every_label(""), "`train:`", ""),
    "names too few": (data(nc=5), "`nc` is 5", ""),
    "out of range": (lambda inputs: inputs.write("hyp.yaml", {"mosaic": 2}), "hyp.yaml: mosaic", ""),
    # models and a user's files
    "no augmentations": (text("own.py", "AUGMENTATIONS = []"), "{set}/own.py", "--augmentations {set}/own.py"),
    "bad module": (row(1, [-1, 1, "Cnov", [8, 3, 2]]), "model.yaml, row 1: unknown module 'Cnov'", ""),
    "bad channels": (row(1, [-1, 1, "Conv", [-8]]), "model.yaml, row 1", ""),
    "joined over the height": (row(2, [[1, 1], 1, "Concat", [2]]), "model.yaml, row 2: Concat", ""),
    # weights
    **of_weights(
        empty=(text("w.pt", b""), "w.pt is empty"),
        text=(text("w.pt", "<html>"), "w.pt is text"),
        truncated=(lambda inputs: (inputs.weights(), inputs.cut("weights.pt")), "weights.pt is not a complete"),
        tensors=(lambda inputs: inputs.write("w.safetensors", half(save({"w": torch.zeros(9)}))), "w.safetensors"),
        malicious=(lambda inputs: inputs.write("w.pt", pickle.dumps(Payload(inputs.folder / "ran"), 2)), "w.pt"),
        another_models=(saved("w.pt", lambda _: {"fc.weight": torch.zeros(2, 2)}), "w.pt"),
        not_finite=(lambda inputs: inputs.weights(state={WEIGHT: torch.full((8, 3, 3, 3), torch.nan)}), "weights.pt"),
    ),
    "another task's": (
        lambda inputs: inputs.weights(task="pose", model={**inputs.model, "task": "pose"}),
        "'pose'", f"{WEIGHTS} --cfg=",
    ),
    "bare tensors": (
        saved("weights.pt", lambda inputs: build_model(inputs.model).state_dict()), "--cfg", f"{WEIGHTS} --cfg=",
    ),
    "other classes": (
        lambda inputs: (inputs.weights(), inputs.change(names=["cat"]), every_label("")(inputs)),
        "weights.pt has 3 classes", f"val.py {WEIGHTS}",
    ),
}  # fmt: skip
MANY_ROWS = "\n".join(f"0 0.5 0.5 0.{n} 0" for n in range(1, 9))[:-1] + "0\n" + ROW
WARNINGS: dict[str, Case] = {
    "truncated image": (image("bad.jpg", lambda: half(encoded("JPEG"))), "bad.jpg", ""),
    "truncated TIFF": (image("bad.tif", lambda: half(encoded("TIFF"))), "bad.tif", ""),
    "zero bytes": (image("bad.jpg", lambda: b""), "bad.jpg", ""),
    "bomb": (image("bad.png", bomb), "bad.png", ""),
    "dangling link": (link, "gone.jpg", ""),
    "pixels": (label("0 32 24 10 10"), "0.txt, line 1", ""),
    "list with missing images": (listed("images/train/9.jpg"), "9.jpg", ""),
    "list with other lines": (listed("notes"), "notes", ""),
    "overlap": (data(val="images/train"), "4 of the 4 validation images", ""),
    "no labels in val": (every_label("", "val"), "`val:`", ""),
    "more than are shown": (every_label(MANY_ROWS), "27 more such problems in train", ""),
    "boxes in segmentation": (outline("0.5 0.5 0.2 0.2", ROW), "train: 2 of 5 labels are boxes", ""),
    "of other layers": (
        lambda inputs: (inputs.weights(), [inputs.row(k, [-1, 1, "Conv", [16, 3, 2]]) for k in range(2)]),
        "weights of another model", WEIGHTS,
    ),
    "of the same layers": (lambda inputs: inputs.weights(task="segment"), "'segment'", WEIGHTS),
    "classes in another order": (
        lambda inputs: inputs.weights(names={0: "dog", 1: "cat", 2: "cow"}), "2 of 3 classes", WEIGHTS,
    ),
}  # fmt: skip
FINE = {
    "animated": image("x.webp", animated),
    "nonsense in EXIF": image("x.jpg", lambda: exif(NONSENSE)),
    "damaged EXIF": image(
        "x.jpg", lambda: exif(ROTATED).replace(b"II*\x00", b"II*\x07").replace(b"MM\x00*", b"MM\x07*")
    ),
    "empty label file": label(""),
    "boxes and polygons": label(ROW + "1 0.1 0.1 0.9 0.1 0.9 0.9\n"),
    "an outline that crosses itself": outline("0.1 0.1 0.9 0.9 0.9 0.1 0.1 0.9"),
    "loop of links": loop,
    "Roboflow's layout": roboflow,
    "a key of another program": data(flip_idx=[1, 0]),
    "key points": lambda inputs: (inputs.change(kpt_shape=[1, 3]), inputs.label("0 .7 .3 .1 .2 .7 .3 2\n" + ROW))[0],
    "plain state dict": saved("weights.pt", lambda inputs: build_model(inputs.model).state_dict()),
}


@pytest.fixture
def inputs(tmp_path: Path) -> Inputs:
    inputs = Inputs(tmp_path / "set", tiny_detector())
    (inputs.folder / "empty").mkdir()
    inputs.write("other.yaml", {**inputs.data, "val": "bad.txt"})
    inputs.write("bad.txt", "model.jpg")
    return inputs


def arguments(flags: str, inputs: Inputs) -> list[str]:
    """Return the script and its flags."""
    folder, words = str(inputs.folder), flags.format(set=inputs.folder).split()
    script = words.pop(0) if words[:1] == ["val.py"] else "train.py"
    own = ["--data", f"{folder}/data.yaml", "--imgsz", "64", "--workers", "0", "--batch-size", "2", "--device", "cpu"]
    more = ["--cfg", f"{folder}/model.yaml", "--hyp", f"{folder}/hyp.yaml", "--weights", "", "--epochs", "1"]
    project = ["--project", str(inputs.folder.parent / "runs"), "--noplots"]
    return [script, *own, *(more if script == "train.py" else []), *project, *words]


def check_error(printed: str, named: str, inputs: Inputs) -> None:
    assert printed.startswith("error: ")
    assert printed.count("\n") == 1
    assert named.format(set=inputs.folder) in printed
    assert not (inputs.folder.parent / "runs").exists()  # no run folder for a run that never began


def check_warning(printed: str, named: str, inputs: Inputs) -> None:
    warnings = [line for line in printed.splitlines() if line.startswith("warning: ")]
    assert sum(named.format(set=inputs.folder) in warning for warning in warnings) == 1, printed
    assert "Traceback" not in printed


@pytest.mark.parametrize("name", ERRORS, ids=lambda name: name[:60])
def test_an_error(name: str, inputs: Inputs, call_main: CallMain) -> None:
    plant, named, flags = ERRORS[name]
    plant(inputs)
    with untouched(inputs.folder):
        code, printed = call_main(*arguments(flags, inputs))
    assert code in (1, 2)
    check_error(printed, named, inputs)


@pytest.mark.parametrize("name", WARNINGS)
def test_a_warning(name: str, inputs: Inputs, call_main: CallMain) -> None:
    plant, named, flags = WARNINGS[name]
    plant(inputs)
    with untouched(inputs.folder):
        code, printed = call_main(*arguments(flags, inputs))
    assert code == 0, printed
    check_warning(printed, named, inputs)


@pytest.mark.parametrize("name", FINE)
def test_nothing_wrong(name: str, inputs: Inputs, call_main: CallMain) -> None:
    FINE[name](inputs)
    with untouched(inputs.folder):
        code, printed = call_main(*arguments(WEIGHTS if (inputs.folder / "weights.pt").is_file() else "", inputs))
    assert code == 0, printed
    assert "warning" not in printed.lower()
    assert "error" not in printed.lower()


LONG = [pytest.param(name, marks=pytest.mark.long, id=name[:60]) for name in [*ERRORS, *WARNINGS]]


@pytest.mark.parametrize("name", ["--batch-size 0", *LONG])
def test_two_processes(name: str, inputs: Inputs, run_script: RunScript) -> None:
    plant, named, flags = {**WARNINGS, **ERRORS}[name]
    plant(inputs)
    many = [] if "--device" in flags else ["--processes", "2"]
    with untouched(inputs.folder):
        printed = run_script(*arguments(flags, inputs), *many, fails=name in ERRORS, OMP_NUM_THREADS="1")
    (check_error if name in ERRORS else check_warning)(printed, named, inputs)


def test_without_permission(inputs: Inputs, call_main: CallMain, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may read everything, so for root the system's answer is simulated."""
    closed = inputs.folder / "images/train/0.jpg"
    closed.chmod(0)
    if os.geteuid() == 0:

        def refusing(opened: Callable[..., Any]) -> Callable[..., Any]:
            def open_or_refuse(file: Any, *more: Any, **named: Any) -> Any:
                if file in (closed, str(closed)):
                    raise PermissionError(13, "Permission denied", str(file))
                return opened(file, *more, **named)

            return open_or_refuse

        for module in (os, Image):
            monkeypatch.setattr(module, "open", refusing(module.open))
    code, printed = call_main(*arguments("", inputs))
    assert code == 0
    assert "0.jpg" in printed
