"""Curves of the steps, the profile, and the row and lines of an epoch. During an epoch nothing waits for the device."""

from __future__ import annotations

import math
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil
import torch
from accelerate.utils import ProfileKwargs
from torch import Tensor
from tqdm import tqdm

from utils.batch import layout
from utils.config.flags import profile_window
from utils.console import TERMINAL, Bar, log
from utils.errors import plural
from utils.summary import Summary

if TYPE_CHECKING:
    from models.tasks.contract import Metrics
    from utils.checkpoint import Progress
    from utils.run import Run
    from utils.tracking.run_log import RunLog
    from utils.training.optimizer import Schedule
    from utils.training.steps import OptimizerSteps

POINTS_PER_EPOCH, MAX_POINT_STEPS = 20, 50  # points of the step curves, and most steps between two of them
BYTES_PER_GIB = 2**30
LOW_FITNESS = 0.01  # a run with a lower fitness probably has something wrong
TRACE_FOLDER = "profile"  # folder in the run folder
LARGEST_OPERATORS = 10
# Dense peaks by NVIDIA's data sheets, in TFLOP/s: bf16 and fp16, TF32, and fp32; those without TF32 have fp32 there.
GPU_PEAKS = {
    **{"H200": (989.4, 494.7, 66.9), "H100 PCIe": (756, 378, 51), "H100": (989.4, 494.7, 66.9)},
    **{"A100": (312, 156, 19.5), "A10": (125, 62.5, 31.2), "RTX A6000": (154.8, 77.4, 38.7)},
    **{"L40S": (362, 183, 91.6), "L4": (121, 60.5, 30.3), "V100": (125, 15.7, 15.7), "T4": (65, 8.1, 8.1)},
    **{"RTX 4090": (165.2, 82.6, 82.6), "RTX 3090": (71, 35.6, 35.6)},
}
PEAK_SIDE, PEAK_TRIES = {"cuda": 8192, "cpu": 512}, 5  # rows, per CPU thread, of a product that measures a peak
TRAINING_FACTOR = 3  # operations of a training step's forward and backward pass, as multiples of the forward pass


class DeviceValue:
    """A small tensor that is copied to the host asynchronously, to be read later."""

    def __init__(self, value: Tensor) -> None:
        self.on_host, self.copied = value, None
        if value.is_cuda:
            self.on_host = torch.empty(value.shape, dtype=value.dtype, pin_memory=True).copy_(value, non_blocking=True)
            self.copied = torch.cuda.Event()
            self.copied.record()

    def read(self) -> Any:
        """Return the value as a number or a list of numbers once the device has computed it."""
        if self.copied is not None:
            self.copied.synchronize()
        return self.on_host.tolist() if self.on_host.ndim else self.on_host.item()


class Point(NamedTuple):
    """A point of the step curves: values on the host, and values that the device is still computing."""

    step: int
    host_values: dict[str, float]
    device_values: DeviceValue


class StepLog:
    """The curves of the optimizer steps, the values beside the progress bar, and the profile."""

    def __init__(
        self,
        run: Run,
        terms: Sequence[str],
        schedule: Schedule,
        batch_size: int,
        progress: Progress,
        window: str = "",
        gflops: float = 0.0,
    ) -> None:
        self.run, self.terms, self.batch_size, self.device = run, terms, batch_size, run.accelerator.device
        steps = math.ceil(schedule.batches / run.accelerator.gradient_accumulation_steps)  # of an epoch
        self.interval = min(max(round(steps / POINTS_PER_EPOCH), 1), MAX_POINT_STEPS)
        self.enabled = run.is_tracked
        self.left = (schedule.epochs - progress.epoch) * schedule.batches - progress.batch  # batches at the start
        self.done, self.started = 0, time.monotonic()
        self.norm: Any = None  # norm of the last step's gradient
        # Of all devices, as a share of their peak, at one image per second.
        peak = run.accelerator.num_processes * peak_flops(self.device, run.accelerator.mixed_precision)
        self.image_mfu = TRAINING_FACTOR * gflops * 1e9 / peak
        self.bar = Bar("", 0, False)
        self.first_step, last_step = profile_window(window)
        self.last_step = min(last_step, schedule.epochs * steps)
        self._profile: Any = None
        self._profiling = ExitStack()
        self._restart()
        self.profile(progress.step)

    def start_epoch(self, bar: Bar) -> None:
        """Start accumulating; `bar` measures how long the epoch waits for batches."""
        self.bar = bar
        self._restart()

    def _restart(self) -> None:
        self.batches, self.waited, self.since = 0, self.bar.waited, time.monotonic()
        self.sums: Any = 0  # of the loss terms, (local logical processes, k)

    def add(self, losses: Tensor) -> None:
        """Add the share of each local logical process in the loss terms of a batch, (local logical processes, k)."""
        self.sums = self.sums + losses
        self.batches += 1
        self.done += 1

    def is_due(self, step: int, last: bool) -> bool:
        """Return whether this optimizer step has a point; `last` says whether it is the last one of the epoch."""
        return self.enabled and (last or step % self.interval == 0)

    def point(self, step: int, epoch: float, optimizer: Any, total: Callable[[Sequence[Tensor]], Tensor]) -> Point:
        """Return the point of this step, in a fractional epoch; `total` sums over logical processes. All call it."""
        accelerator = self.run.accelerator
        seconds = max(time.monotonic() - self.since, 1e-9)
        rate = self.batches * self.batch_size / seconds
        host_values = {"step": step, "step/epoch": epoch}
        for number, group in enumerate(optimizer.param_groups):
            momentum = group["betas"][0] if "betas" in group else group.get("momentum", 0.0)
            host_values |= {f"step/lr{number}": group["lr"], f"step/momentum{number}": momentum}
        host_values["step/images_per_second"] = rate
        host_values["step/images_per_second_per_device"] = rate / accelerator.num_processes
        host_values["step/mfu"] = rate * self.image_mfu
        if accelerator.scaler is not None:
            host_values["step/loss_scale"] = accelerator.scaler.get_scale()
        # Mean losses, and over processes: gradient norm, mean share of waiting, the largest GPU memory in GiB.
        norm = torch.as_tensor(math.nan if self.norm is None else self.norm, dtype=torch.float32)
        on_host = torch.tensor([(self.bar.waited - self.waited) / seconds, peak_memory(self.device)])
        on_host = on_host.pin_memory() if self.device.type == "cuda" else on_host
        losses = total(list(self.sums / self.batches))
        local = torch.cat((norm.detach().to(self.device).view(1), on_host.to(self.device, non_blocking=True)))
        norms, waits, memory = accelerator.gather(local[None]).unbind(1)
        self._restart()
        device_values = torch.cat((losses, norms[:1], waits.mean()[None], memory.amax()[None]))
        return Point(step, host_values, DeviceValue(device_values))

    def values(self, point: Point) -> dict[str, float]:
        """Return the values of a point by key, without values that this device lacks."""
        *losses, norm, waiting, memory = point.device_values.read()
        values = {**point.host_values, **{f"step/{term}": loss for term, loss in zip(self.terms, losses, strict=True)}}
        if norm == norm or self.norm is not None:
            values["step/gradient_norm"] = norm
        values["step/data_wait"] = waiting
        if memory:
            values["step/gpu_memory"] = memory
        return values

    def update_bar(self, loss_sums: Tensor, batches: int, of_batches: int, best: Summary | None) -> None:
        """Show values beside the progress bar if it is time for that, which reads the sums over an epoch's batches."""
        if not self.bar.due:
            return
        means = loss_sums.sum(0) * self.run.accelerator.num_processes / batches  # estimated from this process
        losses = dict(zip(self.terms, means.tolist(), strict=True))
        seconds_left = (time.monotonic() - self.started) * (self.left / self.done - 1)  # seconds, validations included
        values = [f"batch {batches}/{of_batches}", _loss_text(losses, 3), f"left {tqdm.format_interval(seconds_left)}"]
        if best:
            title, value = list((best.headline or best.metrics).items())[-1]
            values.append(f"best {title} {value:.3f}")
        memory = peak_memory(self.device) or psutil.Process().memory_info().rss / BYTES_PER_GIB
        values += [f"wait {self.bar.waiting:.0%}", f"memory {memory:.1f} GiB"]
        self.bar.show(values)

    def profile(self, step: int) -> None:
        """Start or end the profile after an optimizer step (--profile). All processes must call it together."""
        if step == self.last_step and self._profile:
            self._profiling.close()
            device = "device" if self.device.type == "cuda" else "cpu"
            averages, self._profile = self._profile.key_averages(), None
            table = averages.table(f"self_{device}_time_total", row_limit=LARGEST_OPERATORS, max_name_column_width=44)
            title = f"profile of the optimizer steps {self.first_step} to {step}: {self.run.path / TRACE_FOLDER}"
            log(title, *table.splitlines())
        if step + 1 == self.first_step:
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise Kineto prints when it starts and stops
            kinds: Any = ["cpu"] + ["cuda"] * (self.device.type == "cuda")
            options = ProfileKwargs(activities=kinds, output_trace_dir=str(self.run.path / TRACE_FOLDER))
            self._profile = self._profiling.enter_context(self.run.accelerator.profile(options))


def peak_flops(device: torch.device, precision: str) -> float:
    """Return the highest floating-point operations per second of a device in a precision of autocast, see `GPU_PEAKS`.

    That of an unknown device, and of a CPU's threads, is measured by a product of matrices, a convolution of one pixel.
    """
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    if known := next((peaks for gpu, peaks in GPU_PEAKS.items() if re.search(rf"\b{gpu}\b", name)), None):
        return 1e12 * known[0 if precision != "no" else 1 if torch.backends.cudnn.allow_tf32 else 2]
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    side, on_cpu, seconds = PEAK_SIDE.get(device.type, 1024), device.type == "cpu", math.inf
    parts = torch.get_num_threads() if on_cpu else 1
    sizes = (1, side, 32, parts * side // 32), (side, side, 1, 1)
    columns, weight = (torch.ones(size, dtype=dtype, device=device).to(memory_format=layout(device)) for size in sizes)
    for _ in range(PEAK_TRIES):
        started_at = time.perf_counter()
        torch.conv2d(columns, weight, dilation=1 + on_cpu)  # see `use_onednn`; MKL's product is slow on AMD
        if not on_cpu:
            torch.accelerator.synchronize(device)
        seconds = min(seconds, time.perf_counter() - started_at)
    return 2 * parts * side**3 / seconds


def peak_memory(device: torch.device) -> float:
    """Return the peak memory of tensors on a GPU so far, in GiB; 0 on other devices."""
    return torch.cuda.max_memory_allocated(device) / BYTES_PER_GIB if device.type == "cuda" else 0.0


def epoch_line(
    epoch: int, epochs: int, losses: Mapping[str, float], summary: Summary | None, rate: float, mfu: float = 0.0
) -> str:
    """Return the console line of an epoch, counted from 0; one wider than the terminal has fewer digits, or no rate."""
    headline = (summary.headline or summary.metrics) if summary else {}
    scores = [" ".join(f"{title} {value:.3f}" for title, value in headline.items())] if headline else []
    images, share = [f"{rate:.0f} img/s"] if rate else [], [f"MFU {mfu:.0%}"] if mfu else []
    for digits, rest in ((4, images + share), (3, images + share), (3, images), (3, []), (2, [])):
        line = f"epoch {epoch + 1}/{epochs}: " + ", ".join([_loss_text(losses, digits), *scores, *rest])
        if len(line) <= shutil.get_terminal_size(TERMINAL).columns:
            break
    return line


def _loss_text(losses: Mapping[str, float], digits: int) -> str:
    return " ".join(f"{name.removesuffix('_loss')} {value:.{digits}f}" for name, value in losses.items())


def log_best_epoch(progress: Progress, best: Summary) -> None:
    """Print the table of the best epoch, with a hint if the fitness is near 0."""
    terms = f" (a sum, 0 to {best.highest_fitness:g})" if best.highest_fitness != 1 else ""
    log(f"best epoch: {progress.best_epoch + 1} of {progress.epoch}, fitness {progress.best:.4f}{terms}", *best.table())
    if 0 <= progress.best / best.highest_fitness < LOW_FITNESS:
        log("the fitness is near 0: docs/map-is-zero.md lists the causes")


def log_epoch(
    run_log: RunLog,
    steps: OptimizerSteps,
    losses: Mapping[str, float],
    summary: Summary | None,
    improved: bool,
    metric_names: Sequence[str],
    metrics: Metrics,
    started_at: float,
) -> dict[str, float | None]:
    """Write the epoch's row of results.csv and its documents, print its line, log it to the trackers; return the row.

    The validation, without a `summary` if there was none, began at `started_at`, a time of `time.monotonic`.
    """
    run, progress, bar = steps.run, steps.progress, steps.log.bar
    row: dict[str, float | None] = {  # YOLOv5's columns
        "epoch": progress.epoch,
        **{f"train/{name}": value for name, value in losses.items()},
        **{f"metrics/{name}": summary.metrics[name] if summary else None for name in metric_names},
        **{f"val/{name}": summary.losses[name] if summary else None for name in losses},
        **{f"x/lr{number}": group["lr"] for number, group in enumerate(steps.optimizer.param_groups)},
    }
    run.files.append_row(row)
    mfu = bar.rate * steps.log.image_mfu
    log(epoch_line(progress.epoch, steps.schedule.epochs, losses, summary, bar.rate, mfu))
    if progress.skipped:
        log(f"  {plural(progress.skipped, 'optimizer step')} skipped so far: gradients that are not finite")
    if summary and improved:
        run.files.write_documents(metrics.documents(summary))
    timing = {
        "images_per_second": bar.rate,
        "mfu": mfu,
        "train_seconds": bar.seconds,
        "validation_seconds": time.monotonic() - started_at,
        "data_wait": bar.waiting,
        "steps_skipped": progress.skipped,
    }
    run.files.append_speed({"epoch": progress.epoch, **timing})
    run_log.log_epoch(row, timing, summary, progress)
    if summary:
        run_log.log_examples(partial(metrics.examples, summary), progress.epoch)
    return row
