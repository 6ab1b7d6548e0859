"""Compositions: four flags at once, with values from a table, hold what each of them holds alone.

With --logical-processes: the same bytes on one and on two processes, and after a kill on two and a resume on one.
Without it: the weights of SGD in fp32 within rounding, by DDP with --sync-bn and by DeepSpeed. Or the same sentence.
"""

from __future__ import annotations

import datetime
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState, GradientState

import train
from job import settings_of
from tests.conftest import RECIPE, ROOT, OnProcesses
from tests.curves import floats, identical
from tests.making import noise, tiny_anchor_free, tiny_detector, write_image, write_yaml
from tests.models.tasks.mask_batches import tiny_segmenter
from tests.whole_runs import Left
from utils.distributed.ranks import ranks
from utils.errors import UserError
from utils.training.steps import OptimizerSteps

# Flags with their values; some exclude each other.
OF_ALL = """--multi-scale/--cos-lr/--nosave/--noval/--sync-bn/--hashes/--single-cls/--image-weights/--cache ram|disk|val
--freeze 1|backbone|head|*.bn/--mixed-precision bf16/--label-smoothing 0.1/--optimizer Adam|AdamW/--batch-size 4|16|28
--epochs 1|3/--seed 3/--patience 1/--save-period 1/--workers 1|2/--hyp.nbs 0|8|32/--hyp.clip_norm 0.1
--hyp.ema_share 0.5/--hyp.lr_factor {backbone: 0.1, head: 1}/--hyp.mixup 0.5|1/--hyp.flipud 0.5/--zero 1|2|3"""
OF_BOXES = f"""{OF_ALL}/--rect/--close-mosaic 1/--noautoanchor/--hyp.mosaic 0|0.5/--hyp.copy_paste 0.5/--hyp.degrees 20
--hyp.shear 5/--hyp.perspective 0.0005/--hyp.fl_gamma 1.5/--hyp.class_weights {{disc: 5}}/--augmentations OWN"""
FLAGS = {
    "detect": OF_BOXES,
    "p6": OF_BOXES,
    "anchor-free": OF_BOXES,
    "segment": f"{OF_BOXES}/--mask-ratio 2/--no-overlap",
    "classify": f"{OF_ALL}/--hyp.cutmix 0.5/--hyp.randaugment 2/--hyp.erasing 0.5",
}
OWN = str(ROOT / "examples" / "own_augmentations.py")
EXACT = ("--logical-processes", "4")
ROUNDING = 3e-7  # relative norm of the difference of all weights; measured: 2e-8

Job = tuple[str, ...]  # a model, and words of the command line
# By the flag that is noticed to be missing if process 1 ignores it
FIXED: dict[str, Job] = {
    "--hyp.flipud": ("ten", "--batch-size", "4", "--rect", "--hyp.nbs", "4", "--hyp.flipud", "0.5"),
    "--image-weights": ("p6", "--multi-scale", "--label-smoothing", "0.1", "--hyp.fl_gamma", "1.5", "--image-weights"),
    "--hyp.mixup": ("anchor-free", "--cache", "--close-mosaic", "1", "--sync-bn", "--hyp.mixup", "1"),
    "--no-overlap": ("segment", "--hyp.copy_paste", "1", "--hyp.degrees", "20", "--optimizer", "AdamW", "--no-overlap"),
    "--mixed-precision": ("detect", "--single-cls", "--cos-lr", "--mixed-precision", "bf16", "--freeze", "1"),
    "--hyp.cutmix": ("classify", "--hyp.cutmix", "1", "--hyp.clip_norm", "0.1", "--hyp.nbs", "0", "--freeze", "*.bn"),
}


def draw_job(draw: random.Random) -> Job:
    """Draw a model, and four flags of the table with a value of each."""
    model = draw.choice(list(FLAGS))
    rows = [row.partition(" ") for row in draw.sample(FLAGS[model].replace("\n", "/").split("/"), 4)]
    words = [word for name, _, values in rows for word in (name, draw.choice(values.split("|"))) if word]
    return model, *(OWN if word == "OWN" else word for word in words)


def train_all(
    runs: Sequence[Sequence[str]], is_killed: bool = False, ignored: Sequence[str] = (), stages: Sequence[str] = ()
) -> list[str]:
    """Train with each command line, one after another; return the sentences by which runs were refused, or ''.

    is_killed: whether each run ends before its second state is saved. ignored: the flag that process 1 ignores in each
    run. stages: DeepSpeed's in each run.
    """
    save, refusals = OptimizerSteps.save, []

    def leave(steps: OptimizerSteps, keep_tensors: bool = True) -> None:
        if steps.progress.step > 1:
            steps.run.files.finish_writing()
            raise Left
        save(steps, keep_tensors)

    for number, words in enumerate(runs):
        if stages:
            os.environ.update(ACCELERATE_USE_DEEPSPEED="true", ACCELERATE_DEEPSPEED_ZERO_STAGE=stages[number])
        if ignored and ranks().rank == 1:
            words = without(ignored[number], words)
        refusals.append("")
        with pytest.MonkeyPatch.context() as patch:
            if is_killed:
                patch.setattr(OptimizerSteps, "save", leave)
            try:
                train.train(settings_of(words))
            except Left:
                pass
            except UserError as error:
                refusals[-1] = str(error)
        AcceleratorState._reset_state()
        GradientState._reset_state()
    return refusals


def without(name: str, words: Sequence[str]) -> list[str]:
    """Remove a flag, with its value if it has one."""
    start = words.index(name) if name in words else len(words)
    has_value = start + 1 < len(words) and not words[start + 1].startswith("--")
    return [*words[:start], *words[start + 1 + has_value :]]


@pytest.fixture
def command(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., list[str]]:
    """Return a function that makes the command line of a job."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for number in range(10):
        write_image(tmp_path / f"images/{number}.png", noise(60 + number, 48, number), "0 0.5 0.5 0.3 0.3")
    ten = {"path": str(tmp_path), "train": "images", "val": "images", "names": ["square"]}
    sets = {"ten": write_yaml(tmp_path / "data.yaml", ten)}
    names = {"segment": "drawn_outlines", "classify": "drawn_classes"}
    p6 = {"backbone": [[-1, 1, "Conv", [8, 3, 2]]] * 6, "head": [[[3, 5], 1, "Detect", ["nc", "anchors"]]]}
    models = {"detect": tiny_detector(), "ten": tiny_detector(), "p6": {**tiny_detector(), **p6}}
    models |= {"anchor-free": tiny_anchor_free(), "segment": tiny_segmenter()}
    files = {name: str(write_yaml(tmp_path / f"{name}.yaml", {**yaml, "nc": 6})) for name, yaml in models.items()}
    how = "--epochs 2 --batch-size 8 --workers 0 --device cpu --noplots --dist-timeout 60 --optimizer SGD"
    gains = [f"--hyp.{name}={value}" for name, value in RECIPE.items()]

    def make(job: Job, name: str, *more: str) -> list[str]:
        model, *words = job
        data = sets.get(model) or request.getfixturevalue(names.get(model, "small_data"))
        what = ["--data", str(data), "--weights=", "--cfg", files.get(model, "yolov5n-cls.yaml")]
        recipe = ["--imgsz", "64", "--hyp", "low"] if model in files else ["--imgsz", "32"]
        return [*what, *recipe, *how.split(), *gains, *words, *more, "--project", str(tmp_path), "--name", name]

    return make


Make = Callable[..., list[str]]


def differs(folder: Path, name: str, other: str, number: int) -> str:
    """Return why two runs of a job are not equal to the byte, or ''."""
    try:
        identical(folder / f"{other}{number}", folder / f"{name}{number}")
    except (AssertionError, OSError) as error:
        return f"{other}: {error or type(error)}"
    return ""


def check(jobs: Sequence[Job], killed: int, command: Make, on: OnProcesses, folder: Path) -> list[str]:
    """Train each job in all ways, the first ones with a kill; return those that are wrong, with the reason."""
    rounded = [job for job in jobs if not {"--optimizer", "--mixed-precision"} & {*job}]

    def lines(name: str, chosen: Sequence[Job], *more: str) -> list[list[str]]:
        return [command(job, f"{name}{jobs.index(job)}", *more) for job in chosen]

    def compare(chosen: Sequence[Job], one: list[list[str]], two: list[list[str]]) -> dict[Job, str]:
        """Return the sentence by which each job is refused, or ''; note those with several."""
        said = {job: {*sentences} for job, *sentences in zip(chosen, *one, *two, strict=True)}
        wrong.extend(f"{' '.join(job)}: {sentences}" for job, sentences in said.items() if len(sentences) > 1)
        return {job: max(sentences) for job, sentences in said.items()}

    wrong: list[str] = []
    exact = compare(jobs, on(1, train_all, lines("one", jobs, *EXACT)), on(2, train_all, lines("two", jobs, *EXACT)))
    on(2, train_all, lines("killed", jobs[:killed], *EXACT, "--save-steps", "1"), True)
    on(1, train_all, [["--resume", str(folder / f"killed{number}")] for number in range(killed)])
    plain, ddp = lines("plain", rounded), lines("ddp", rounded, "--sync-bn")
    near = compare(rounded, on(1, train_all, plain), on(2, train_all, ddp))
    for number, job in enumerate(jobs):
        reasons = [] if exact[job] else [differs(folder, "one", "two", number)]
        reasons += [differs(folder, "one", "killed", number)] if number < killed and not exact[job] else []
        if not near.get(job, "refused"):
            expected = floats(folder / f"plain{number}")
            gap = float((floats(folder / f"ddp{number}") - expected).norm() / expected.norm())
            reasons.append(f"{gap:.1e}" if gap > ROUNDING else "")
            print("GAP", gap, job)
        wrong += [f"{' '.join(job)}: {reason}" for reason in reasons if reason]
    return wrong


def test_six_fixed_ones(command: Make, on_processes: OnProcesses, tmp_path: Path) -> None:
    """A job on which process 1 ignores a flag is noticed. Ten images are validated after a kill, as before it."""
    assert not check([*FIXED.values()], 2, command, on_processes, tmp_path)
    assert ",10,10," in (tmp_path / "killed0" / "classes.csv").read_text()
    mutants = [command(job, f"mutant{number}", *EXACT) for number, job in enumerate(FIXED.values())][:3]
    assert on_processes(2, train_all, mutants, False, [*FIXED]) == [[""] * 3] * 2
    assert [number for number in range(3) if not differs(tmp_path, "one", "mutant", number)] == []


@pytest.mark.long
def test_thirty_drawn_ones(command: Make, on_processes: OnProcesses, tmp_path: Path) -> None:
    """SEED draws those of another day. A job that is wrong becomes a fixed one."""
    seed = int(os.environ.get("SEED") or f"{datetime.date.today():%Y%m%d}")
    draw = random.Random(seed)
    drawn = [draw_job(draw) for _ in range(int(os.environ.get("N", 30)))]
    jobs = [job for job in drawn if "--zero" not in job]
    wrong = check(jobs, len(jobs), command, on_processes, tmp_path)
    assert not wrong, f"SEED={seed}: {wrong}"
