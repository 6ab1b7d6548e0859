"""docs/migrating.md names every flag of YOLOv5 and describes it correctly; a run with many of YOLOv5's flags."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import yaml

from tests.conftest import RunScript
from tests.curves import same_curve
from tests.making import options_of
from utils.config.flags import REFUSED, DetectOptions, ExportOptions, TrainOptions, ValOptions, flags_of
from utils.files import ROOT

PAGE = ROOT / "docs" / "migrating.md"
# All flags of YOLOv5's scripts, with their other names.
TRAIN = """
    weights cfg data hyp epochs batch-size imgsz img img-size rect resume nosave noval noautoanchor noplots
    evolve evolve_population resume_evolve bucket cache image-weights device multi-scale single-cls optimizer
    sync-bn workers project name exist-ok quad cos-lr label-smoothing patience freeze save-period seed
    local_rank entity upload_dataset bbox_interval artifact_alias
"""
VAL = """
    data weights batch-size imgsz img img-size conf-thres iou-thres max-det task device workers single-cls
    augment verbose save-txt save-hybrid save-conf save-json project name exist-ok half dnn
"""
DETECT = """
    weights source data imgsz img img-size conf-thres iou-thres max-det device view-img save-txt save-format
    save-csv save-conf save-crop nosave classes agnostic-nms augment visualize update project name exist-ok
    line-thickness hide-labels hide-conf half dnn vid-stride
"""
EXPORT = """
    data weights imgsz img img-size batch-size device half inplace keras optimize int8 per-tensor dynamic cache
    simplify mlmodel opset verbose workspace nms agnostic-nms topk-per-class topk-all iou-thres conf-thres
    include
"""
CLASSIFY = ["model", "pretrained", "lr0", "decay", "cutoff", "dropout"]
# Files of YOLOv5 with a row in the page
OTHERS = "hubconf.py segment/train.py segment/val.py segment/predict.py classify/ opt.yaml hyp.yaml detect.py export.py"
FATES = ("as there", "differs", "refused")


def section(heading: str) -> str:
    """Return a section of the page, up to the next heading of its level or a higher one."""
    level = heading.partition(" ")[0]
    text = PAGE.read_text(encoding="utf-8").partition(f"\n{heading}\n")[2]
    assert text, heading
    return re.split(rf"\n#{{2,{len(level)}}} ", text)[0]


def rows(heading: str) -> list[list[str]]:
    """Return the cells of a section's first table, without its head."""
    table = re.search(r"\n\|[-|]+\|\n((?:\|.*\n)+)", section(heading))
    assert table, heading
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[1].splitlines()]


def flags(cell: str) -> list[str]:
    return [name.removeprefix("--") for name in re.findall(r"`(--[\w-]+)`", cell)]


def fates(script: str) -> list[tuple[str, str]]:
    """Return the flags of a script's section, each with what became of it."""
    same = section(f"### {script}").partition("As in YOLOv5:")[2].partition("\n\n")[0]
    listed = [(name, "as there") for name in flags(same)]
    return listed + [(name, row[1]) for row in rows(f"### {script}") for name in flags(row[0])]


SCRIPTS: dict[str, tuple[type, str]] = {
    "train.py": (TrainOptions, TRAIN),
    "val.py": (ValOptions, VAL),
    "detect.py": (DetectOptions, DETECT),
    "export.py": (ExportOptions, EXPORT),
}
FATES_OF_FLAGS = [
    pytest.param(kind, name, fate, id=f"{script}{name}")
    for script, (kind, _) in SCRIPTS.items()
    for name, fate in fates(script)
]


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_flag_of_yolov5_is_there_once(script: str) -> None:
    named = [name for name, _ in fates(script)]
    assert len(named) == len(set(named))
    theirs = set(SCRIPTS[script][1].split())
    assert theirs <= set(named) <= theirs | {"batch", "conf", "iou"}  # there argparse's abbreviations


@pytest.mark.parametrize(("kind", "name", "fate"), FATES_OF_FLAGS)
def test_a_flag_is_what_the_page_says(kind: type, name: str, fate: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert fate in FATES
    known = {other: field for field in flags_of(kind) for other in (field.name, *field.metadata["aliases"])}
    field = known.get(name.replace("-", "_")) or known.get(name)
    for spelling in (name.replace("_", "-"), name.replace("-", "_")):
        if field is None:
            with pytest.raises(SystemExit) as caught:
                options_of(kind, [f"--{spelling}"])
            assert (fate, caught.value.code) == ("refused", 2)
            assert capsys.readouterr().err == f"error: --{spelling} {REFUSED[name.replace('-', '_')]}\n"
        else:
            lowest = f"{max(1, field.metadata['within'].minimum):.0f}"
            value = {int: lowest, float: "0.5", tuple: "1"}.get(type(field.default), "text")
            words = [] if field.type == "bool" else [(field.metadata["choices"] or [value])[0]]
            options = options_of(kind, [f"--{spelling}", *words])
            assert fate != "refused"
            assert getattr(options, field.name) != field.default or (words and words[0] in str(field.default))


def test_the_flags_of_classification_say_what_replaces_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert [name for row in rows("### classify/train.py") for name in flags(row[0])] == CLASSIFY
    for name in CLASSIFY:
        with pytest.raises(SystemExit):
            options_of(TrainOptions, [f"--{name}", "1"])
        assert f"--{name} " in capsys.readouterr().err


def test_the_fate_of_a_file() -> None:
    named = " ".join(row[0] for row in rows("## Files and programs"))
    assert [name for name in OTHERS.split() if name not in named] == []


def test_what_is_new_is_a_flag() -> None:
    for script in ("train.py", "detect.py"):
        new = flags(section(f"### {script}").partition("\nNew here:")[2])
        assert new
        known = {field.name for field in flags_of(SCRIPTS[script][0])}
        assert {name.replace("-", "_") for name in new} <= known


# A run with a habit

LAYER = """
import torch
from torch import nn


class Gate(nn.Module):
    def __init__(self, c1, c2):
        super().__init__()
        self.cv = nn.Conv2d(c1, c2, 1)

    def forward(self, x):
        return x * torch.sigmoid(self.cv(x))
"""
MODEL = {
    "nc": 80,
    "depth_multiple": 0.33,
    "width_multiple": 0.25,
    "anchors": [[10, 13, 16, 30, 33, 23], [30, 61, 62, 45, 59, 119]],
    "backbone": [
        *([-1, 1, "Conv", [channels, 3, 2]] for channels in (64, 128, 256)),
        [-1, 1, "nn.Dropout2d", [0.1]],
        [-1, 1, "Gate", [256]],
        [-1, 1, "Conv", [512, 3, 2]],
    ],
    "head": [[-1, 1, "nn.Identity", []], [[4, 6], 1, "Detect", ["nc", "anchors"]]],
}


@pytest.fixture
def habit(small_data: Path, tmp_path: Path) -> tuple[str, ...]:
    """Flags of a job with the user's own model, layer and recipe, on labels that are polygons."""
    content = yaml.safe_load(small_data.read_text())
    shutil.copytree(content["path"], tmp_path / "set")
    for file in (tmp_path / "set" / "labels").rglob("*.txt"):
        rows = [list(map(float, line.split())) for line in file.read_text().splitlines()]
        corners = [
            (label, x - w / 2, y - h / 2, x + w / 2, y - h / 2, x + w / 2, y + h / 2, x - w / 2, y + h / 2)
            for label, x, y, w, h in rows
        ]
        file.write_text("".join(f"{' '.join(f'{min(max(v, 0), v):g}' for v in row)}\n" for row in corners))
    (tmp_path / "set.yaml").write_text(yaml.safe_dump({**content, "path": str(tmp_path / "set")}))
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(MODEL))
    (tmp_path / "mine.py").write_text(LAYER)
    (tmp_path / "hyp.yaml").write_text("copy_paste: 0.5\nwarmup_epochs: 1\nnbs: 8\n")
    files = {"cfg": "mine.yaml", "layers": "mine.py", "data": "set.yaml", "hyp": "hyp.yaml"}
    return tuple(word for flag, name in files.items() for word in (f"--{flag}", str(tmp_path / name)))


@pytest.mark.long
def test_the_curve_with_them_all(habit: tuple[str, ...], run_script: RunScript, tmp_path: Path) -> None:
    """The curve is the same on one process and two; val.py needs --layers too."""
    flags = (
        *habit,
        "--weights=",
        "--img_size=64",
        "--batch=4",
        "--epochs=2",
        "--workers=0",
        "--device=cpu",
        "--sync_bn",
    )
    more = ("--multi-scale", "--image_weights", "--close_mosaic=1", "--cache=val", "--project", str(tmp_path))
    printed = run_script("train.py", *flags, *more, "--name=one", OMP_NUM_THREADS="1")
    for message in ("--image-weights: ", "--multi-scale: each batch at one of ", "--close-mosaic 1: ", "--cache "):
        assert message in printed
    run_script("train.py", *flags, *more, "--name=two", "--processes=2", OMP_NUM_THREADS="1")
    same_curve(tmp_path / "two", tmp_path / "one")
    best = ("--weights", str(tmp_path / "one" / "weights" / "best.pt"), "--imgsz=64", "--device=cpu", "--workers=0")
    assert "--layers" in run_script("val.py", *habit[4:6], *best, fails=True)
    assert "mAP50" in run_script("val.py", *habit[2:6], *best, "--project", str(tmp_path / "val"))
