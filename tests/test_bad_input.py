"""A table of bad input: each row ends in one sentence before the first step, or in a warning, which name what is wrong,
and changes no file."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from PIL import Image

from models.yolo import build_model
from tests.conftest import CallMain, RunScript
from tests.curves import untouched
from tests.making import noise, tiny_detector
from tests.models.tasks.mask_batches import tiny_segmenter
from utils.checkpoint import weights_content

ROW, OUTLINE = "0 0.5 0.5 0.25 0.25\n", "0 0.1 0.1 0.9 0.1 0.9 0.9\n"
WEIGHTS = "--weights {set}/weights.pt"


class Inputs:
    """The files of a user: `set/` with a data YAML, images and labels, a model YAML, hyperparameters and weights."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.data: dict[str, Any] = {"train": "images/train", "val": "images/val", "names": ["cat", "dog", "cow"]}
        self.model = tiny_detector()
        for split, count in (("train", 4), ("val", 2)):
            for number in range(count):
                self.image(f"{number}.jpg", encoded("JPEG"), split)
        self.write("data.yaml", self.data)
        self.write("model.yaml", self.model)
        self.write("hyp.yaml", {"lr0": 0.01})

    def write(self, name: str, content: Any) -> None:
        """Write a file of `set/`: bytes, text, or the content of a YAML."""
        file = self.folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if not isinstance(content, (str, bytes)):
            content = yaml.safe_dump(content, sort_keys=False)
        file.write_bytes(content if isinstance(content, bytes) else content.encode())

    def image(self, name: str, content: bytes, split: str = "train") -> None:
        """Write an image with a label."""
        self.write(f"images/{split}/{name}", content)
        self.write(f"labels/{split}/{Path(name).stem}.txt", ROW)

    def label(self, rows: str, split: str = "train") -> None:
        """Replace the label file of the first image."""
        self.write(f"labels/{split}/0.txt", rows)

    def labels(self, rows: str, *splits: str) -> None:
        """Replace all label files of splits."""
        for split in splits:
            for file in (self.folder / "labels" / split).iterdir():
                file.write_text(rows)

    def change(self, **keys: Any) -> None:
        """Change values of the data YAML; None removes a key."""
        self.write("data.yaml", {key: value for key, value in {**self.data, **keys}.items() if value is not None})

    def row(self, number: int, row: Any) -> None:
        """Replace a row of the model's backbone."""
        self.model["backbone"][number] = row
        self.write("model.yaml", self.model)

    def segmenter(self, rows: str) -> None:
        """Train a segmenter, on these labels of the first image."""
        self.write("model.yaml", tiny_segmenter())
        self.labels(OUTLINE, "train", "val")
        self.label(rows)

    def listed(self, line: str) -> None:
        """Train on a list file with the first images and another line."""
        self.write("train.txt", f"images/train/0.jpg\nimages/train/1.jpg\n{line}")
        self.change(train="train.txt")

    def weights(self, **changes: Any) -> None:
        content = weights_content(build_model(self.model), {**self.model, "task": "detect"}, {0: "cat"}, {})
        torch.save({**content, **changes}, self.folder / "weights.pt")

    def bare_weights(self) -> None:
        torch.save(build_model(self.model).state_dict(), self.folder / "weights.pt")


def encoded(kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(noise(64, 48)).save(buffer, kind, **options)
    return buffer.getvalue()


def half(content: bytes) -> bytes:
    return content[: len(content) // 2]


MANY_ROWS = "\n".join(f"0 0.5 0.5 0.{n} 0" for n in range(1, 9)) + "\n" + ROW  # without a height
Plant = Callable[[Inputs], object]
Case = tuple[Plant | None, str, str]  # spoils the inputs; what the message names; flags, {set}: the folder

# By the flags: the files are as they should be.
OF_FLAGS = {
    # files
    "--data {set}/none.yaml": "{set}/none.yaml",
    f"--data {'x' * 5000}": "'xxx",
    "--data data/xView": "xView",
    "--cfg yolov8n.yaml": "yolov9t.yaml",
    "--task classify": "classify",
    "--cfg=": "--cfg",
    # values
    "--batch-size 0": "--batch-size 0",
    "--batch-size 1000000000": "--batch-size",
    "--batch-size 65": "--batch-size 65",  # of fewer images
    "--optimizer adamw": "'AdamW'?",
    "--optimizer absent:Lion": "No module named 'absent'",
    "--optimizer NAdam --hyp.optimizer_args [1]": "--hyp.optimizer_args must be names with values",
    "--local_rank x": "--local-rank",
    "--verbose=False": "--quiet",
    "--device 7": "--device 7",
    "--freeze backbon": "--freeze 'backbon'",
    "--hyp.lr_factor 0.1": "--hyp.lr_factor",
    "--fitness recal=1": "recal=1",
    "val.py --conf-thres 2": "--conf-thres",
}
ERRORS: dict[str, Case] = {
    **{flags: (None, named, flags) for flags, named in OF_FLAGS.items()},
    # labels and images
    "class of train": (lambda i: i.label("3 0.5 0.5 0.2 0.2"), "train/0.txt, line 1 has class 3", ""),
    "class of val": (lambda i: i.label("7 0.5 0.5 0.2 0.2", "val"), "val/0.txt, line 1 has class 7", ""),
    "all in pixels": (lambda i: i.labels("0 10 10 20 20", "train"), ".txt, line 1", ""),
    "strict": (lambda i: i.label("0 10 10 20 20"), "train/0.txt, line 1", "--strict"),
    "all with key points": (lambda i: i.labels("0 .5 .5 .2 .2" + 17 * " .5 .5 2", "train"), "`kpt_shape: [17, 3]`", ""),
    # data sets and hyperparameters
    "no labels": (lambda i: i.labels("", "train"), "`train:`", ""),
    "half a character": (lambda i: i.change(names=["cat", "d\ud800", "cow"]), r"'d\ud800'", ""),
    # models and a user's files
    "no hooks": (lambda i: i.write("my.py", "A = []"), "{set}/my.py has no function", "--hooks {set}/my.py"),
    "unread row": (lambda i: i.row(1, ["image", 1, "Conv", [16, 3, 2]]), "reads row 0 ", ""),
    "joined over the height": (lambda i: i.row(2, [[1, 1], 1, "Concat", [2]]), "model.yaml, row 2: Concat", ""),
    # weights
    "no weights": (lambda i: i.write("weights.pt", b""), "weights.pt", WEIGHTS),
    "another task's": (
        lambda i: i.weights(task="pose", model={**i.model, "task": "pose"}), "'pose'", f"{WEIGHTS} --cfg=",
    ),
    "classes from 1": (
        lambda i: i.weights(names={1: "cat", 2: "dog", 3: "cow"}), "weights.pt has the classes [1, 2, 3]", WEIGHTS,
    ),
    "bare tensors": (lambda i: i.bare_weights(), "--cfg", f"{WEIGHTS} --cfg="),
    "other classes": (
        lambda i: (i.weights(), i.change(names=["cat"]), i.labels("", "train", "val")),
        "weights.pt has 3 classes", f"val.py {WEIGHTS}",
    ),
}  # fmt: skip
WARNINGS: dict[str, Case] = {
    "truncated image": (lambda i: i.image("bad.jpg", half(encoded("JPEG"))), "bad.jpg", ""),
    "truncated TIFF": (lambda i: i.image("bad.tif", half(encoded("TIFF"))), "bad.tif", ""),
    "pixels": (lambda i: i.label("0 32 24 10 10"), "0.txt, line 1", ""),
    "list with missing images": (lambda i: i.listed("images/train/9.jpg"), "9.jpg", ""),
    "list with other lines": (lambda i: i.listed("notes"), "notes", ""),
    "overlap": (lambda i: i.change(val="images/train"), "4 of the 4 validation images", ""),
    "no labels in val": (lambda i: i.labels("", "val"), "`val:`", ""),
    "more than are shown": (lambda i: i.labels(MANY_ROWS, "train"), "27 more such problems", ""),
    "boxes in segmentation": (lambda i: i.segmenter(f"{ROW}0 0.5 0.5 0.2 0.2\n"), "train: 2 of 5 labels are boxes", ""),
    "of other layers": (
        lambda i: (i.weights(), [i.row(k, [-1, 1, "Conv", [16, 3, 2]]) for k in range(2)]),
        "weights of another model", WEIGHTS,
    ),
    "classes in another order": (
        lambda i: i.weights(names={0: "dog", 1: "cat", 2: "cow"}), "2 of 3 classes", WEIGHTS,
    ),
}  # fmt: skip
FINE: dict[str, Plant] = {
    "empty label file": lambda i: i.label(""),
    "boxes and polygons": lambda i: i.label(ROW + "1 0.1 0.1 0.9 0.1 0.9 0.9\n"),
    "an outline that crosses itself": lambda i: i.segmenter("0 0.1 0.1 0.9 0.9 0.9 0.1 0.1 0.9"),
    "a key of another program": lambda i: i.change(flip_idx=[1, 0]),
    "no split for validation": lambda i: i.change(val=None),
    "key points": lambda i: (i.change(kpt_shape=[1, 3]), i.label("0 .7 .3 .1 .2 .7 .3 2\n" + ROW)),
    "plain state dict": lambda i: i.bare_weights(),
}


@pytest.fixture
def inputs(tmp_path: Path) -> Inputs:
    return Inputs(tmp_path / "set")


def arguments(flags: str, inputs: Inputs) -> list[str]:
    """Return the script and its flags."""
    folder, words = str(inputs.folder), flags.format(set=inputs.folder).split()
    script = words.pop(0) if words[:1] == ["val.py"] else "train.py"
    own = ["--data", f"{folder}/data.yaml", "--imgsz", "64", "--workers", "0", "--batch-size", "2", "--device", "cpu"]
    more = ["--cfg", f"{folder}/model.yaml", "--hyp", f"{folder}/hyp.yaml", "--weights", "", "--epochs", "1"]
    project = ["--project", str(inputs.folder.parent / "runs"), "--noplots"]
    return [script, *own, *(more if script == "train.py" else []), *project, *words]


def check(name: str, inputs: Inputs, run: Callable[[list[str]], tuple[int, str]]) -> None:
    """Plant a case, and check what a run prints and leaves."""
    plant, named, flags = {**WARNINGS, **ERRORS}[name]
    if plant:
        plant(inputs)
    named = named.format(set=inputs.folder)
    with untouched(inputs.folder):
        code, printed = run(arguments(flags, inputs))
    if name in ERRORS:
        assert code in (1, 2)
        assert printed.startswith("error: ")
        assert printed.count("\n") == 1
        assert named in printed
        assert not (inputs.folder.parent / "runs").exists()  # no run folder for a run that never began
    else:
        assert code == 0, printed
        assert sum(line.startswith("warning: ") and named in line for line in printed.splitlines()) == 1, printed
        assert "Traceback" not in printed


@pytest.mark.parametrize("name", [*ERRORS, *WARNINGS], ids=lambda name: name[:60])
def test_bad_input(name: str, inputs: Inputs, call_main: CallMain) -> None:
    check(name, inputs, lambda words: call_main(*words))


@pytest.mark.parametrize("name", FINE)
def test_nothing_wrong(name: str, inputs: Inputs, call_main: CallMain) -> None:
    FINE[name](inputs)
    with untouched(inputs.folder):
        code, printed = call_main(*arguments(WEIGHTS if (inputs.folder / "weights.pt").is_file() else "", inputs))
    assert code == 0, printed
    assert "warning" not in printed.lower()
    assert "error" not in printed.lower()


@pytest.mark.parametrize("script", ["", "val.py "])
@pytest.mark.parametrize(("mark", "named"), [("results.csv", "no run has written"), (".lock", "an input of this run")])
def test_a_folder_of_the_user_is_no_run_folder(
    script: str, mark: str, named: str, inputs: Inputs, call_main: CallMain
) -> None:
    """Nor is an earlier run's with the weights to start from, or with the data set."""
    inputs.weights()
    inputs.write(mark, "")
    flags = f"{script}{WEIGHTS} --exist-ok --project {inputs.folder.parent} --name set"
    with untouched(inputs.folder):
        code, printed = call_main(*arguments(flags, inputs))
    assert (code, printed.count("\n")) == (1, 1)
    assert printed.startswith(f"error: --exist-ok: {inputs.folder} has ")
    assert named in printed


@pytest.mark.parametrize(("other", "recipe"), [(False, "finetune"), (True, "scratch-small")])
def test_weights_that_do_not_fit_do_not_choose_the_recipe(
    other: bool, recipe: str, inputs: Inputs, call_main: CallMain
) -> None:
    plant = WARNINGS["of other layers"][0] if other else lambda i: i.weights()
    plant(inputs)  # type: ignore[misc]
    _, printed = call_main(*arguments(f"{WEIGHTS} --hyp auto", inputs))
    assert f"--hyp {recipe}, " in printed


LONG = [pytest.param(name, marks=pytest.mark.long, id=name[:60]) for name in [*ERRORS, *WARNINGS]]


@pytest.mark.parametrize("name", ["--batch-size 0", *LONG])
def test_two_processes(name: str, inputs: Inputs, run_script: RunScript) -> None:
    def run(words: list[str]) -> tuple[int, str]:
        many = [] if words.count("--device") > 1 else ["--processes", "2"]
        return int(name in ERRORS), run_script(*words, *many, fails=name in ERRORS, OMP_NUM_THREADS="1")

    check(name, inputs, run)
