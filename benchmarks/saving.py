"""Time to save the state for --resume, in the training loop and in the background.

    python -m benchmarks.saving [--models yolov5n yolov5s yolov5m yolov5l yolov5x] [--folder DIR] [--device cpu]

Per model, for a state of weights, EMA and SGD's momentum: its size, the seconds that training waits until it is
serialised, and the seconds of a thread for checksum, writing, flushing and renaming. Medians of five.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from models.yolo import build_model
from utils.checkpoint.state_files import STATE_FORMAT, StateFiles
from utils.checkpoint.weight_files import serialised
from utils.files import ROOT, read_yaml
from utils.training.ema import ModelEMA

TIMES = 5
MIB = 2**20


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=[f"yolov5{size}" for size in "nsmlx"])
    parser.add_argument("--folder", default=None, help="folder for the files; default: a temporary folder")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    print(f"{'model':<10} {'MiB':>7} {'waits s':>8} {'writes s':>9}")
    for name in options.models:
        model = build_model(read_yaml(ROOT / "models" / f"{name}.yaml")).to(options.device)
        ema = ModelEMA(model)
        momentum = {k: {"momentum_buffer": torch.rand_like(p)} for k, p in enumerate(model.parameters())}
        state = {
            "format": STATE_FORMAT,
            "model": model.state_dict(),
            "ema": ema.model.state_dict(),
            "optimizer": momentum,
        }
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            states = StateFiles(Path(folder))
            waits, writes = [], []
            for _ in range(TIMES):
                waits.append(seconds(partial(serialised, state)))
                content = serialised(state)
                writes.append(seconds(partial(states.write, content)))
        size = len(content) / MIB
        print(f"{name:<10} {size:>7.0f} {statistics.median(waits):>8.3f} {statistics.median(writes):>9.3f}", flush=True)


if __name__ == "__main__":
    main()
