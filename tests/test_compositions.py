"""Compositions: four flags at once, with values from a table, hold what each of them holds alone.

With --logical-processes: the same bytes on one and on two processes, and after a kill on two and a resume on one.
Without it: the weights of SGD in fp32 within rounding, by DDP with --sync-bn and by DeepSpeed. Or the same sentence.
"""

from __future__ import annotations

import datetime
import os
import random
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from accelerate.state import AcceleratorState, GradientState

import train
from models.loading import recipe_of
from tests.conftest import RECIPE, ROOT, OnProcesses
from tests.curves import floats, identical
from tests.making import noise, tiny_anchor_free, tiny_detector, write_image, write_yaml
from tests.models.tasks.mask_batches import tiny_segmenter
from tests.whole_runs import Left
from utils.config.settings import read_settings
from utils.distributed.ranks import ranks
from utils.errors import UserError
from utils.training.steps import OptimizerSteps

# Flags with their values; some exclude each other.
OWN = ROOT / "examples" / "own_augmentations.py"
OF_ALL = """--multi-scale; --cos-lr; --noval; --sync-bn; --single-cls; --image-weights; --label-smoothing 0.1
--cache ram|disk|val; --freeze 1|backbone|head|*.bn; --mixed-precision bf16; --optimizer Adam|AdamW; --batch-size 4|16
--epochs 1|3; --seed 3; --patience 1; --save-period 1; --workers 1|2; --hyp.nbs 0|8|32; --hyp.clip_norm 0.1
--hyp.ema_share 0.5; --hyp.lr_factor {backbone: 0.1, head: 1}; --hyp.mixup 0.5|1; --hyp.flipud 0.5; --zero 1|2|3"""
OF_BOXES = f"""{OF_ALL}; --rect; --close-mosaic 1; --noautoanchor; --hyp.mosaic 0|0.5; --hyp.copy_paste 0.5
--hyp.degrees 20; --hyp.shear 5; --hyp.perspective 0.0005; --hyp.fl_gamma 1.5; --hyp.class_weights {{disc: 5}}
--augmentations {OWN}"""
FLAGS = dict.fromkeys(("detect", "p6", "anchor-free"), OF_BOXES)
FLAGS["segment"] = f"{OF_BOXES}; --mask-ratio 2; --no-overlap"
FLAGS["classify"] = f"{OF_ALL}; --hyp.cutmix 0.5; --hyp.randaugment 2; --hyp.erasing 0.5"
TrainJobs = Callable[..., list[set[str]]]  # see `train_jobs`
EXACT = ("--logical-processes", "4")
ROUNDING = 3e-7  # relative norm of the difference of all weights; measured: 6e-8
INEXACT = {"--optimizer", "--mixed-precision"}  # larger differences

Job = tuple[str, ...]  # a model, and words of the command line
# By the flag that is noticed to be missing if process 1 ignores it
FIXED: dict[str, Job] = {
    "--hyp.flipud": ("ten", "--batch-size", "4", "--rect", "--hyp.nbs", "4", "--hyp.flipud", "0.5"),
    "--image-weights": ("p6", "--multi-scale", "--label-smoothing", "0.1", "--hyp.fl_gamma", "1.5", "--image-weights"),
    "--hyp.mixup": ("anchor-free", "--cache", "--close-mosaic", "1", "--sync-bn", "--hyp.mixup", "1"),
    "--rect": ("segment", "--hyp.copy_paste=1", "--hyp.class_weights={disc: 5}", "--optimizer", "Adam", "--rect"),
    "--mixed-precision": ("detect", "--single-cls", "--cos-lr", "--mixed-precision", "bf16", "--freeze", "1"),
    "--hyp.cutmix": ("classify", "--hyp.cutmix", "1", "--hyp.clip_norm", "0.1", "--hyp.nbs", "0", "--freeze", "*.bn"),
}


def train_all(
    runs: Sequence[list[str]], ending: str = "", ignored: Sequence[str] = (), stages: Sequence[str] = ()
) -> list[str]:
    """Train with each command line, one after another; return the sentences by which runs were refused, or ''.

    ending: "killed" before the second state is saved, or "resumed" from the first. ignored: the flag that process 1
    ignores in each run. stages: that of DeepSpeed in each.
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
            start = words.index(ignored[number])
            words = words[:start] + words[start + 1 + (not words[start + 1].startswith("--")) :]
        if ending == "resumed":
            words = ["--resume", f"{words[-3]}/{words[-1]}"]  # the project and the name
        refusals.append("")
        with pytest.MonkeyPatch.context() as patch:
            if ending == "killed":
                patch.setattr(OptimizerSteps, "save", leave)
            try:
                with suppress(Left):
                    train.train(read_settings(words, recipe_of))
            except UserError as error:
                refusals[-1] = str(error)
        AcceleratorState._reset_state()
        GradientState._reset_state()
    return refusals


@pytest.fixture
def train_jobs(
    request: pytest.FixtureRequest, on_processes: OnProcesses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> TrainJobs:
    """Return a function that trains jobs into folders NAME0, NAME1, ...; it returns their refusals, {""} for none."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for number in range(10):
        write_image(tmp_path / f"images/{number}.png", noise(60 + number, 48, number), "0 0.5 0.5 0.3 0.3")
    ten = write_yaml(tmp_path / "data.yaml", {"path": ".", "train": "images", "val": "images", "names": ["square"]})
    data = {"segment": "drawn_outlines", "classify": "drawn_classes"}
    p6 = {"backbone": [[-1, 1, "Conv", [8, 3, 2]]] * 6, "head": [[[3, 5], 1, "Detect", ["nc", "anchors"]]]}
    models = {"detect": tiny_detector(), "ten": tiny_detector(), "p6": {**tiny_detector(), **p6}}
    models |= {"anchor-free": tiny_anchor_free(), "segment": tiny_segmenter()}
    files = {name: str(write_yaml(tmp_path / f"{name}.yaml", {**yaml, "nc": 6})) for name, yaml in models.items()}
    how = "--epochs 2 --batch-size 8 --workers 0 --device cpu --noplots --dist-timeout 60 --optimizer SGD"
    gains = [f"--hyp.{name}={value}" for name, value in RECIPE.items()]

    def command(job: Job, *more: str) -> list[str]:
        model, *words = job
        file = ten if model == "ten" else request.getfixturevalue(data.get(model, "small_data"))
        what = ["--data", str(file), "--weights=", "--cfg", files.get(model, "yolov5n-cls.yaml")]
        recipe = ["--imgsz", "64", "--hyp", "low"] if model in files else ["--imgsz", "32"]
        return [*what, *recipe, *how.split(), *gains, *words, *more, "--project", str(tmp_path)]

    def train(count: int, jobs: Sequence[Job], name: str, *more: str, **options: Any) -> list[set[str]]:
        runs = [[*command(job, *more), "--name", f"{name}{number}"] for number, job in enumerate(jobs)]
        return [{*said} for said in zip(*on_processes(count, partial(train_all, **options), runs), strict=True)]

    return train


def check_bytes(train: TrainJobs, jobs: Sequence[Job], killed: int, folder: Path) -> list[str]:
    """Return the jobs that differ on one and two processes; of the first ones also after a kill and a resume."""
    said = [one | two for one, two in zip(train(1, jobs, "one", *EXACT), train(2, jobs, "two", *EXACT), strict=True)]
    train(2, jobs[:killed], "killed", *EXACT, "--save-steps", "1", ending="killed")
    train(1, jobs[:killed], "killed", ending="resumed")
    wrong = [f"{job}: {sentences}" for job, sentences in zip(jobs, said, strict=True) if len(sentences) > 1]
    for number, job in enumerate(jobs):
        for other in ("two", "killed")[: 2 if number < killed else 1] if said[number] == {""} else ():
            wrong += [f"{job}: {other}: {reason}" for reason in differences(folder, number, other)]
    return wrong


def differences(folder: Path, number: int, other: str) -> list[str]:
    """Return how a job's run differs from that of one process, [] if it does not."""
    try:
        identical(folder / f"{other}{number}", folder / f"one{number}")
    except (AssertionError, OSError) as error:
        return [str(error) or repr(error)]
    return []


def check_weights(train: TrainJobs, jobs: Sequence[Job], folder: Path, stages: Sequence[str] = ()) -> list[str]:
    """Return the jobs whose weights differ on one process and on two, by DDP or by stages of DeepSpeed."""
    one, two, wrong = *(f"{count}{'zero' if stages else 'ddp'}" for count in "12"), list[str]()
    said = zip(train(1, jobs, one), train(2, jobs, two, "--sync-bn", stages=stages), strict=True)
    for number, (job, (alone, both)) in enumerate(zip(jobs, said, strict=True)):
        wrong += [f"{job}: {two}: {alone | both}"] * (alone != both)
        if alone == both == {""}:
            expected = floats(folder / f"{one}{number}")
            gap = float((floats(folder / f"{two}{number}") - expected).norm() / expected.norm())
            wrong += [f"{job}: {two}: {gap:.1e}"] * (gap > ROUNDING and not {*job} & INEXACT)
    return wrong


def test_six_fixed_ones(train_jobs: TrainJobs, tmp_path: Path) -> None:
    """Ten images are validated after a kill too. A run in which process 1 ignores a flag is noticed."""
    jobs = [*FIXED.values()]
    assert check_bytes(train_jobs, jobs, 2, tmp_path) == []
    assert ",10,10," in (tmp_path / "killed0" / "classes.csv").read_text()
    assert check_weights(train_jobs, [job for job in jobs if not {*job} & INEXACT], tmp_path) == []
    assert train_jobs(2, jobs[:3], "mutant", *EXACT, ignored=[*FIXED]) == [{""}] * 3
    assert all(differences(tmp_path, number, "mutant") for number in range(3))


@pytest.mark.long
def test_thirty_drawn_ones(train_jobs: TrainJobs, tmp_path: Path) -> None:
    """Drawn by the date, or by SEED. One that is wrong becomes a fixed one. DeepSpeed excludes `EXACT`."""
    seed = int(os.environ.get("SEED") or f"{datetime.date.today():%Y%m%d}")
    draw, jobs, zero, stages = random.Random(seed), list[Job](), list[Job](), list[str]()
    for model in (draw.choice(list(FLAGS)) for _ in range(30)):
        rows = [row.partition(" ") for row in draw.sample(re.split("; |\n", FLAGS[model]), 4)]
        drawn = {name: draw.choice(values.split("|")) for name, _, values in rows}
        stages += [drawn.pop(name) for name in ("--zero",) if name in drawn]
        job = (model, *(word for row in drawn.items() for word in row if word))
        (zero if len(stages) > len(zero) else jobs).append(job)
    wrong = check_bytes(train_jobs, jobs, len(jobs), tmp_path) + check_weights(train_jobs, jobs, tmp_path)
    wrong += check_weights(train_jobs, zero, tmp_path, stages=stages)
    refused = train_jobs(2, zero, "refused", *EXACT, stages=stages)
    assert (wrong, [said for said in refused if len(said) > 1 or "" in said]) == ([], []), f"SEED={seed}"
