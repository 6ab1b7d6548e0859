"""Operations of the training loop that wait for the GPU, by task and precision: `set_sync_debug_mode` names each.

Without a GPU the operations that would wait are counted with the profiler.
"""

from __future__ import annotations

import itertools
import warnings
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu_parts.measuring import Machine, machine, row, write_yaml
from data.builtin import shapes_cls, shapes_seg
from tests.whole_runs import Parts, within
from utils.distributed.launch import reset_accelerate
from utils.files import ROOT

WAITING = {"aten::item", "aten::nonzero", "aten::masked_select", "aten::equal", "aten::_unique2", "aten::bincount"}
TITLE = "Waits in six batches of the loop, every batch a step; stated: the verdict on the last step, and fp16's scale"


def places(here: Machine, parts: Parts) -> Generator[Any, None, Counter[str]]:
    """Take eight steps with a tracker's step log; return where the last six wait, and how often."""
    parts.steps.log.enabled = True
    given = list(itertools.islice(itertools.cycle(list(parts.loader)), 8))
    yield from given[:2]
    if not here.on_gpu:
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            yield from given[2:]
        return Counter(event.name for event in profiled.events() if event.name in WAITING)
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield from given[2:]
    torch.cuda.set_sync_debug_mode("default")
    return Counter(f"{short(one.filename)}:{one.lineno}" for one in caught if "synchroniz" in str(one.message))


def short(file: str) -> str:
    """Return a path inside the repository, or the last parts of another."""
    path = Path(file)
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else "/".join(path.parts[-3:])


def main() -> None:
    """Measure the three tasks."""
    here = machine()
    counts, side = {"train": 32, "val": 4}, "64" if here.quick else "320"
    outlines = shapes_seg.draw_dataset(here.scratch / "outlines", **counts)
    names = dict(enumerate(shapes_seg.NAMES))
    content = {"path": str(outlines), "train": "images/train", "val": "images/val", "names": names}
    classes = shapes_cls.draw_dataset(here.scratch / "classes", **counts)
    tasks = {
        "yolov5n": here.photos(),
        "yolov5n-seg": write_yaml(here.scratch / "outlines.yaml", content),
        "resnet18": write_yaml(here.scratch / "classes.yaml", {"path": str(classes), "train": "train", "val": "val"}),
    }
    for model, data in tasks.items():
        for precision in ("no", "bf16", "fp16") if here.on_gpu else ("no",):
            recipe = {"lr0": 0.01} if model == "resnet18" else {"nbs": 8}
            hyp = write_yaml(here.scratch / f"{model}.yaml", recipe)
            what = ["--data", str(data), "--weights", "", "--cfg", f"{model}.yaml", "--hyp", str(hyp), "--imgsz", side]
            how = ["--batch-size", "8", "--device", here.device, "--workers", "0", "--noplots", "--no-wandb"]
            anchors = [] if model == "resnet18" else ["--noautoanchor"]
            flags = [*what, *how, *anchors, "--project", str(here.scratch / "runs"), "--mixed-precision", precision]
            found = within(flags, lambda parts: parts.take_steps(places(here, parts)))
            row(TITLE, model=model, precision=precision, waits=found.total(), where=", ".join(map(str, found.items())))
            reset_accelerate()


if __name__ == "__main__":
    main()
