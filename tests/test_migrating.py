"""docs/migrating.md names every flag of YOLOv5 and describes it correctly; a run with many of YOLOv5's flags."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.conftest import RunScript
from tests.curves import same_curve
from tests.making import options_of
from utils.config.flags import REFUSED, DetectOptions, ExportOptions, TrainOptions, ValOptions, flags_of
from utils.errors import UserError
from utils.files import ROOT

PAGE = ROOT / "docs" / "migrating.md"
# All flags of YOLOv5's scripts, with their other names.
TRAIN = """
    weights cfg data hyp epochs batch-size imgsz img img-size rect resume nosave noval noautoanchor noplots
    evolve evolve_population resume_evolve bucket cache image-weights device multi-scale single-cls optimizer
    sync-bn workers project name exist-ok quad cos-lr label-smoothing patience freeze save-period seed
    local_rank entity upload_dataset bbox_interval artifact_alias ndjson-console ndjson-file
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
def test_a_flag_is_what_the_page_says(kind: type, name: str, fate: str) -> None:
    assert fate in FATES
    known = {other: field for field in flags_of(kind) for other in (field.name, *field.metadata["aliases"])}
    field = known.get(name.replace("-", "_")) or known.get(name)
    for spelling in (name.replace("_", "-"), name.replace("-", "_")):
        if field is None:
            with pytest.raises(UserError) as caught:
                options_of(kind, [f"--{spelling}"])
            assert fate == "refused"
            assert str(caught.value) == f"'--{name.replace('_', '-')}' {REFUSED[name.replace('-', '_')]}"
        else:
            lowest = f"{max(1, field.metadata['within'].minimum):.0f}"
            value = {int: lowest, float: "0.5", tuple: "1"}.get(type(field.default), "text")
            words = [] if field.type == "bool" else [(field.metadata["choices"] or [value])[0]]
            options = options_of(kind, [f"--{spelling}", *words])
            assert fate != "refused"
            assert getattr(options, field.name) != field.default or (words and words[0] in str(field.default))


@pytest.mark.long
def test_the_curve_with_them_all(run_script: RunScript, small_data: Path, tmp_path: Path) -> None:
    """YOLOv5's habits on one process and two, with the user's own model and layer; val.py needs --layers too."""
    layers = ("--layers", str(ROOT / "examples" / "own_layer.py"))
    what = ("--data", str(small_data), "--cfg", str(ROOT / "examples" / "own_layer.yaml"), "--weights=", *layers)
    how = ("--img_size=64", "--batch=4", "--epochs=2", "--workers=0", "--device=cpu", "--sync_bn", "--hyp.nbs=8")
    more = ("--multi-scale", "--image_weights", "--close_mosaic=1", "--cache=val", "--project", str(tmp_path))
    for name, processes in (("one", "1"), ("two", "2")):
        run_script("train.py", *what, *how, *more, "--name", name, "--processes", processes, OMP_NUM_THREADS="1")
    same_curve(tmp_path / "two", tmp_path / "one", losses=0.02, weights=0.01)
    best = ("--weights", str(tmp_path / "one" / "weights" / "best.pt"), "--imgsz=64", "--device=cpu", "--workers=0")
    validate = ("val.py", "--data", str(small_data), *best, "--project", str(tmp_path / "val"))
    assert "--layers" in run_script(*validate, fails=True)
    assert "mAP50" in run_script(*validate, *layers)
