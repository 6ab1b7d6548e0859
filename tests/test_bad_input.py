"""A table of bad input: each row ends in one sentence before the first step, or in a warning, and changes no file."""

from __future__ import annotations

import io
import os
import pickle
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
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
from utils.checkpoint.weight_files import weights_content

PIXELS = np.random.default_rng(0).integers(0, 255, (48, 64, 3), np.uint8)
ROW = "0 0.5 0.5 0.25 0.25\n"
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


class Unknown:
    """A class of a module that exists nowhere else."""


def unknown_class() -> bytes:
    return pickle.dumps({"model": Unknown()}, protocol=2)


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


def hyp(**keys: Any) -> Callable[[Inputs], None]:
    return lambda inputs: inputs.write("hyp.yaml", {"lr0": 0.01, **keys})


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


@dataclass
class Case:
    """A row of the table: what spoils the inputs, and the message. {set} in flags is the folder of the inputs."""

    plant: Callable[[Inputs], None]
    message: str
    flags: str = ""
    code: int = 1
    script: str = "train"
    two: bool = False  # on two processes in every CI run too


ERRORS = {
    # labels
    "class of train": Case(label("3 0.5 0.5 0.2 0.2"), "train/0.txt, line 1 has class 3, but `names` of"),
    "class of val": Case(label("7 0.5 0.5 0.2 0.2", "val"), "labels/val/0.txt, line 1 has class 7, but `names` of"),
    "all in pixels": Case(every_label("0 10 10 20 20"), "line 1: coordinates outside 0 to 1"),
    "all in pixels, strict": Case(
        label("0 10 10 20 20"), "labels/train/0.txt, line 1: coordinates outside 0 to 1", "--strict"
    ),
    # images
    "strict": Case(image("bad.jpg", lambda: b""), "bad.jpg: not readable as an image", "--strict"),
    "no image is one": Case(listed(), "no image of `val:` can be used", "--data {set}/other.yaml"),
    # data sets
    "no data": Case(nothing, "data set '{set}/none.yaml' is not a file", "--data {set}/none.yaml"),
    "empty split": Case(data(val="empty"), "`val:` has no images in"),
    "missing folder": Case(data(val="images/none"), "`val: images/none` does not exist; looked for"),
    "missing split": Case(data(val=None), "data.yaml has no `val:`"),
    "no labels": Case(every_label(""), "no image of `train:` has a label; the label file of"),
    "names too few": Case(data(nc=5), "`nc` is 5 but `names` has 3 classes"),
    # hyperparameters
    "out of range": Case(hyp(mosaic=2), "hyp.yaml: mosaic must be a number, 0 to 1, not 2"),
    "misspelt hyp": Case(nothing, "'finetun' is not a file (did you mean 'finetune'?); give", "--hyp finetun"),
    "no hyp": Case(nothing, "hyperparameter file 'lowest' is not a file; give", "--hyp lowest"),
    "override": Case(nothing, "--hyp.lr0 must be a number, more than 0, not 'abc'", "--hyp.lr0 abc"),
    # flags
    "unknown flag": Case(nothing, "unknown flag --epoch (did you mean '--epochs'?)", "--epoch 3", code=2),
    "batch 0": Case(nothing, "--batch-size 0 is too small; give 1 or more", "--batch-size 0", two=True),
    "batch of logical processes": Case(
        nothing, "all 4 logical processes and cannot be shared evenly", "--batch-size 6 --logical-processes 4"
    ),
    "batch larger than the memory": Case(
        nothing, "GiB memory of this machine; give a smaller --batch-size or --imgsz", "--batch-size 1000000000"
    ),
    "no name": Case(
        nothing, "--name '' is not a valid run name; give one without a slash, such as --name exp", "--name="
    ),
    "profile": Case(nothing, "--profile 3:2: give the first and the last optimizer step", "--profile 3:2"),
    "device": Case(nothing, "--device 7", "--device 7"),
    "no device": Case(nothing, "--device gpu: give cpu, mps, or the numbers", "--device gpu"),
    "freeze": Case(nothing, "--freeze 99: the model has layers 0 to 3", "--freeze 99"),
    "image size": Case(nothing, "--imgsz must be a whole number, 1 to 16384", "--imgsz -8", code=2),
    "confidence": Case(nothing, "--conf-thres must be a number, 0 to 1", "--conf-thres 2", code=2, script="val"),
    # models
    "bad module": Case(
        row(1, [-1, 1, "Cnov", [8, 3, 2]]), "model.yaml, row 1: unknown module 'Cnov' (did you mean 'Conv'?)"
    ),
    "bad channels": Case(row(1, [-1, 1, "Conv", [-8]]), "the number of output channels, 1 to 4096, not -8"),
    "joined over the height": Case(row(2, [[1, 1], 1, "Concat", [2]]), "error: {set}/model.yaml, row 2: Concat "),
    "no model": Case(nothing, "model 'absent.yaml' is not a file; give", "--cfg absent.yaml"),
    "neither": Case(nothing, "no model is given; name one with --cfg", "--cfg="),
    "a set that is not here": Case(nothing, "xView", "--data data/xView"),
    "equal bytes without equal kernels": Case(
        nothing, "cannot be used with", "--no-deterministic --logical-processes 2"
    ),
    # weights
    "a name that no file can have": Case(nothing, "data set 'xxx", f"--data {'x' * 5000}"),
    "weights that no file can be": Case(nothing, "weights xxx", f"--weights {'x' * 5000}"),
    "no weights": Case(nothing, "weights {set}/none.pt are not a file", "--weights {set}/none.pt"),
    "not downloaded": Case(nothing, "releases/download", "--weights yolov5s.pt"),
    "empty weights": Case(text("w.pt", b""), "w.pt is empty; copy or download it again", "--weights {set}/w.pt"),
    "truncated": Case(
        lambda inputs: (inputs.weights(), inputs.write("w.pt", half((inputs.folder / "weights.pt").read_bytes())))[1],
        "w.pt is not a complete PyTorch weight file",
        "--weights {set}/w.pt",
    ),
    "truncated safetensors": Case(
        lambda inputs: inputs.write("w.safetensors", half(save({"w": torch.zeros(9)}))),
        "w.safetensors is not a complete .safetensors file",
        "--weights {set}/w.safetensors",
    ),
    "no repository": Case(nothing, "--weights hf:mine is not of the form hf:owner/name", "--weights hf:mine"),
    "text for weights": Case(text("w.pt", "<html>"), "w.pt is text, not a weight file", "--weights {set}/w.pt"),
    "NaN in weights": Case(
        lambda inputs: inputs.weights(state={"model.0.conv.weight": torch.full((8, 3, 3, 3), torch.nan)}),
        "{set}/weights.pt has values in model.0.conv.weight that are not finite",
        "--weights {set}/weights.pt",
    ),
    "another model's": Case(
        lambda inputs: torch.save({"fc.weight": torch.zeros(2, 2)}, inputs.folder / "w.pt"),
        "no tensor of {set}/w.pt fits the model",
        "--weights {set}/w.pt",
    ),
    "another task's": Case(
        lambda inputs: inputs.weights(task="pose", model={**inputs.model, "task": "pose"}),
        "weights.pt is a model for the task 'pose'",
        "--weights {set}/weights.pt --cfg=",
    ),
    "bare tensors": Case(
        lambda inputs: torch.save(build_model(inputs.model).state_dict(), inputs.folder / "w.pt"),
        "no model is given; name one with --cfg",
        "--weights {set}/w.pt --cfg=",
    ),
    "malicious": Case(
        lambda inputs: inputs.write("w.pt", pickle.dumps(Payload(inputs.folder / "ran"), protocol=2)),
        "w.pt holds classes as torch before 1.6 wrote them, which are not read",
        "--weights {set}/w.pt",
    ),
    "unknown class": Case(
        lambda inputs: inputs.write("w.pt", unknown_class()),
        "w.pt holds classes as torch before 1.6 wrote them, which are not read",
        "--weights {set}/w.pt",
    ),
    "other classes": Case(
        lambda inputs: (inputs.weights(), inputs.change(names=["cat"]), every_label("")(inputs))[0],
        "weights.pt has 3 classes and {set}/data.yaml has 1",
        "--weights {set}/weights.pt",
        script="val",
    ),
}
WARNINGS = {
    # images
    "truncated": Case(
        image("bad.jpg", lambda: half(encoded("JPEG"))), "bad.jpg: not readable as an image (image file is"
    ),
    "truncated TIFF": Case(image("bad.tif", lambda: half(encoded("TIFF"))), "bad.tif: not readable as an image"),
    "zero bytes": Case(image("bad.jpg", lambda: b""), "bad.jpg: not readable as an image"),
    "bomb": Case(image("bad.png", bomb), "bad.png: not readable as an image (Image size (3600000000 pixels) exceeds"),
    "dangling link": Case(link, "gone.jpg: not readable as an image"),
    # labels
    "pixels": Case(label("0 32 24 10 10"), "0.txt, line 1: coordinates outside 0 to 1"),
    # data sets
    "list with missing images": Case(listed("images/train/9.jpg"), "9.jpg: not readable as an image"),
    "list with other lines": Case(listed("notes"), "notes: not readable as an image"),
    "overlap": Case(data(val="images/train"), "4 of the 4 validation images are training images too"),
    "no labels in val": Case(every_label("", "val"), "no image of `val:` has a label"),
    "more than are shown": Case(
        every_label("\n".join(f"0 0.5 0.5 0.{n} 0" for n in range(1, 9))[:-1] + "0\n" + ROW),
        "27 more such problems in train; problems.txt in the run folder lists all",
    ),
    # outlines
    "boxes in segmentation": Case(
        outline("0.5 0.5 0.2 0.2", ROW), "train: 2 of 5 labels are boxes without an outline; their masks are rectangles"
    ),
    # weights
    "another model's": Case(
        lambda inputs: (inputs.weights(), [inputs.row(k, [-1, 1, "Conv", [16, 3, 2]]) for k in range(2)])[0],
        "these are weights of another model: only",
        "--weights {set}/weights.pt",
    ),
    "another task's": Case(
        lambda inputs: inputs.weights(task="segment"),
        "weights.pt is a model for another task, 'segment'",
        "--weights {set}/weights.pt",
    ),
    "classes in another order": Case(
        lambda inputs: inputs.weights(names={0: "dog", 1: "cat", 2: "cow"}),
        "2 of 3 classes have other names in {set}/weights.pt than in the data set, such as class 0",
        "--weights {set}/weights.pt",
    ),
}
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
    "plain state dict": lambda inputs: torch.save(build_model(inputs.model).state_dict(), inputs.folder / "weights.pt"),
}


@pytest.fixture
def inputs(tmp_path: Path) -> Inputs:
    inputs = Inputs(tmp_path / "set", tiny_detector())
    (inputs.folder / "empty").mkdir()
    inputs.write("other.yaml", {**inputs.data, "val": "bad.txt"})
    inputs.write("bad.txt", "model.jpg")
    return inputs


def flags_of(case: Case, inputs: Inputs) -> list[str]:
    folder = str(inputs.folder)
    own = ["--data", f"{folder}/data.yaml", "--imgsz", "64", "--workers", "0", "--batch-size", "2", "--device", "cpu"]
    more = ["--cfg", f"{folder}/model.yaml", "--hyp", f"{folder}/hyp.yaml", "--weights", "", "--epochs", "1"]
    project = ["--project", str(inputs.folder.parent / "runs"), "--noplots"]
    return [*own, *(more if case.script == "train" else []), *project, *case.flags.format(set=folder).split()]


@pytest.mark.parametrize("name", ERRORS)
def test_an_error(name: str, inputs: Inputs, call_main: CallMain) -> None:
    case = ERRORS[name]
    case.plant(inputs)
    with untouched(inputs.folder):
        code, printed = call_main(f"{case.script}.py", *flags_of(case, inputs))
    assert code == case.code
    sentence = printed.rstrip("\n")
    assert sentence.startswith("error: ")
    assert "\n" not in sentence
    assert case.message.format(set=inputs.folder) in sentence
    assert not (inputs.folder.parent / "runs").exists()  # no run folder for a run that never began


@pytest.mark.parametrize("name", WARNINGS)
def test_a_warning(name: str, inputs: Inputs, call_main: CallMain) -> None:
    case = WARNINGS[name]
    case.plant(inputs)
    with untouched(inputs.folder):
        code, printed = call_main(f"{case.script}.py", *flags_of(case, inputs))
    assert code == 0, printed
    warnings = [line for line in printed.splitlines() if line.startswith("warning: ")]
    assert sum(case.message.format(set=inputs.folder) in warning for warning in warnings) == 1, printed
    assert "Traceback" not in printed


@pytest.mark.parametrize("name", FINE)
def test_nothing_wrong(name: str, inputs: Inputs, call_main: CallMain) -> None:
    FINE[name](inputs)
    weights = inputs.folder / "weights.pt"
    with untouched(inputs.folder):
        case = Case(nothing, "", f"--weights {weights}" if weights.is_file() else "")
        code, printed = call_main("train.py", *flags_of(case, inputs))
    assert code == 0, printed
    assert "warning" not in printed.lower()
    assert "error" not in printed.lower()


def marked(cases: dict[str, Case]) -> list[Any]:
    return [pytest.param(name, marks=[] if case.two else [pytest.mark.long]) for name, case in cases.items()]


@pytest.mark.parametrize("name", marked(ERRORS))
def test_an_error_on_two_processes(name: str, inputs: Inputs, run_script: RunScript) -> None:
    case = ERRORS[name]
    case.plant(inputs)
    many = [] if "--device" in case.flags else ["--processes", "2"]
    with untouched(inputs.folder):
        printed = run_script(f"{case.script}.py", *flags_of(case, inputs), *many, fails=True, OMP_NUM_THREADS="1")
    assert printed.startswith("error: ")
    assert printed.count("\n") == 1
    assert case.message.format(set=inputs.folder) in printed


@pytest.mark.parametrize("name", marked(WARNINGS))
def test_a_warning_on_two_processes(name: str, inputs: Inputs, run_script: RunScript) -> None:
    case = WARNINGS[name]
    case.plant(inputs)
    with untouched(inputs.folder):
        printed = run_script(f"{case.script}.py", *flags_of(case, inputs), "--processes", "2", OMP_NUM_THREADS="1")
    assert printed.count(case.message.format(set=inputs.folder)) == 1
    assert "Traceback" not in printed


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
    code, printed = call_main("train.py", *flags_of(Case(nothing, ""), inputs))
    assert code == 0
    assert "0.jpg: not readable as an image (Permission denied" in printed
