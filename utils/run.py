"""A run: its folder, its log (console, charts, trackers) and the collectives. Called by the scripts.

The only module outside utils/distributed/ that knows which process is the main one. `RunFolder` writes settings.yaml,
results.csv, weights/, checkpoint/ and other files.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import yaml
from accelerate import Accelerator
from accelerate.utils import DynamoBackend
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from utils.checkpoint import StateFiles, serialise, weights_content
from utils.compare_runs import RECEIPT, tensors_hash
from utils.console import Bar, log
from utils.distributed.failure import GracefulStop, StopRequested, Watchdog, on_failure
from utils.distributed.launch import Precision, log_devices
from utils.distributed.ranks import Collectives
from utils.errors import UserError, plural, public
from utils.files import PART_NAME, SETTINGS_FILE, lock_folder, numbered_folder, write_bytes
from utils.receipt import Receipt

if TYPE_CHECKING:
    from utils.plots.pictures import Plotter
    from utils.tracking.trackers import Tracker

# What a run adds to, so that a new run removes it.
APPENDED = re.compile(
    r"results\.csv|speed\.csv|code\.diff|weights/epoch\d+\.pt|tensorboard/events\.out\.tfevents\.[^/]+|\.wandb\.json"
)
FAIL_SECONDS = 3.0  # time for each tracker before this process ends with an error
FILE_SUFFIXES, FOLDERS = (".csv", ".txt", ".yaml", ".pt", ".json", ".jpg"), ("weights", "checkpoint")
Job = Callable[[], object]
Jobs = Mapping[Path, Job]  # path -> the function that writes it
Errors = Mapping[Path, OSError]


class RunFolder:
    """The run folder. Every process makes the same calls; only the main one locks it and writes into it.

    One thread writes while training continues, each file whole or not at all. The first failure of a file is a warning;
    `finish_writing` repeats what has failed.
    """

    def __init__(self, path: Path, is_main: bool) -> None:
        self.path, self.is_main = path, is_main
        for file in (*path.glob("*"), *path.glob("weights/*")) if is_main else ():
            if file.suffix in FILE_SUFFIXES if file.is_dir() else file.name in FOLDERS:
                raise UserError(f"{file} is in the way of the run's files; remove it, or choose another --name")
        self._lock = lock_folder(path) if is_main else None
        self._states = StateFiles(path / "checkpoint")
        self._lines: list[str] = []  # lines of results.csv
        self._receipt = Receipt()
        self._thread = ThreadPoolExecutor(1)
        self._running: Future[Errors] | None = None
        self._failed: dict[Path, Job] = {}
        self._warned: set[Path] = set()

    def write_inputs(self, settings: Mapping[str, Any], problems: Sequence[str]) -> None:
        """Write settings.yaml: all settings, defaults included; and problems.txt: what was left out of the data set."""
        text = yaml.safe_dump(dict(settings), sort_keys=False, allow_unicode=True)
        lines = "".join(f"{public(problem)}\n" for problem in problems)
        self.write_documents({SETTINGS_FILE: text, **({"problems.txt": lines} if problems else {})})
        if self.is_main and not problems:  # an earlier run may have had some
            (self.path / "problems.txt").unlink(missing_ok=True)

    def write_documents(self, documents: Mapping[str, str]) -> None:
        """Write text files by name, and wait until they are written."""
        # The names of a data set's files, which may be any bytes, stand in them.
        files = {self.path / name: text.encode(errors="surrogateescape") for name, text in documents.items()}
        self._start({path: partial(write_bytes, path, content) for path, content in files.items()})
        self.wait_for_writing()

    def append_row(self, row: Mapping[str, float | int | None]) -> None:
        """Add a row to results.csv: 9 significant digits, empty for None. The first row's keys are the header."""
        if not self._lines:
            self._lines.append(",".join(row))
        self._lines.append(",".join("" if value is None else f"{value:.9g}" for value in row.values()))
        self._write_rows()

    def append_speed(self, row: Mapping[str, float]) -> None:
        """Add a row to speed.csv, whose values differ between equal runs, unlike those of results.csv."""
        if self.is_main:
            file = self.path / "speed.csv"
            with suppress(OSError), file.open("a", encoding="utf-8") as opened:  # the console has the main values too
                header = "" if file.stat().st_size else f"{','.join(row)}\n"
                opened.write(f"{header}{','.join(f'{value:.4g}' for value in row.values())}\n")

    def save_weights(self, files: Sequence[str], model: nn.Module, then: Job = lambda: None, **content: Any) -> None:
        """Write files of the same `weights_content` into weights/ in the background, then call `then`."""
        self._check_finite(model.state_dict())
        if files and self.is_main:
            data = serialise(weights_content(model, **content, receipt=self._receipt.sha256))
            jobs = {path: partial(write_bytes, path, data) for path in (self.path / "weights" / name for name in files)}
            self._start({**jobs, self.path / RECEIPT: partial(self._add_results, files, data)}, then)

    def write_receipt(self, receipt: Receipt, settings: Mapping[str, Any], resumed: bool = False) -> None:
        """Write receipt.yaml, which `save_weights` keeps current, and code.diff."""
        if self.is_main:
            self._receipt = receipt
            self.write_documents(receipt.begin(self.path, settings, resumed))

    def _add_results(self, files: Sequence[str], data: memoryview) -> None:
        self._receipt.results |= dict.fromkeys(files, tensors_hash(torch.load(io.BytesIO(data))["state"]))
        write_bytes(self.path / RECEIPT, self._receipt.text().encode())

    def save_state(self, state: Mapping[str, Any], final: bool = False) -> None:
        """Write a state for --resume, with the rows of results.csv, in the background; a `final` one replaces all."""
        self._check_finite(state.get("ema", {}))
        if self.is_main:
            data = serialise({**state, "rows": self._lines})
            self._start({self._states.folder: lambda: self._states.write(data, final)})

    def read_state(self) -> dict[str, Any] | None:
        """Return the newest complete state on the main process, None if there is none and on the others."""
        return self._states.read() if self.is_main else None

    def restore_to_state(self, state: Mapping[str, Any] | None) -> None:
        """Restore the rows of results.csv in `state`, and remove partly written files.

        If `state` is None, for a new run, the states, results and events of an earlier run in the folder are removed.
        """
        if not self.is_main:
            return
        states = self._states.files()
        for file in (*self.path.glob("*"), *self.path.glob("*/*")):
            is_earlier = file in states or APPENDED.fullmatch(file.relative_to(self.path).as_posix())
            if (PART_NAME.fullmatch(file.name) or (is_earlier and state is None)) and not file.is_dir():
                file.unlink(missing_ok=True)
        if state and state["rows"]:
            self._lines = list(state["rows"])
            self._write_rows()

    def wait_for_writing(self) -> None:
        """Wait until everything is written; an error is a warning."""
        running, self._running = self._running, None
        for path, error in running.result().items() if running else ():
            if path not in self._warned:
                self._warned.add(path)
                log(f"warning: {path} cannot be written now: {error.strerror or error}; training continues")

    def finish_writing(self) -> None:
        """Wait until everything is written. Raises `UserError` if a file cannot be written."""
        self.wait_for_writing()
        advice = f"continue with --resume {self.path}" if self._states.files() else "start the run again"
        for path, error in self._run(dict(self._failed)).items():
            raise UserError(f"{path} cannot be written: {error.strerror or error}; fix that, and {advice}")

    def _check_finite(self, weights: Mapping[str, Tensor]) -> None:
        """Raise `UserError` on every process, because all hold the same weights, if they are not finite."""
        bad = [name for name, value in weights.items() if value.is_floating_point() and not value.isfinite().all()]
        if bad:
            self.wait_for_writing()
            raise UserError(
                f"the weights are not finite in {plural(len(bad), 'tensor')}, first in {bad[0]}, so they are not "
                f"saved; {self.path} keeps what was saved before; try a lower lr0, or --mixed-precision no"
            )

    def _write_rows(self) -> None:
        self.write_documents({"results.csv": "".join(f"{line}\n" for line in self._lines)})

    def _start(self, jobs: Jobs, then: Job = lambda: None) -> None:
        """Start `jobs` once the previous ones have ended. Jobs write copies, because training changes the tensors."""
        self.wait_for_writing()
        if self.is_main:
            self._running = self._thread.submit(self._run, jobs, then)

    def _run(self, jobs: Jobs, then: Job = lambda: None) -> Errors:
        errors = {}
        for path, job in jobs.items():
            try:
                job()
                self._failed.pop(path, None)
            except OSError as error:
                errors[path], self._failed[path] = error, job
        if not errors:
            then()
        return errors


class Run:
    """A training or validation run. Every process makes the same calls; only the main one prints, draws and writes."""

    def __init__(self, accelerator: Accelerator, precision: Precision, quiet: bool = False) -> None:
        self.accelerator, self.quiet = accelerator, quiet
        self.collectives = Collectives()
        self.step = 0  # optimizer step at which pictures are logged
        self._is_main = accelerator.is_main_process
        self.path, self.files = Path(), RunFolder(Path(), False)  # the run folder and its writer, after `open_folder`
        self._plotter: Plotter | None = None
        self.trackers: list[Tracker] = []  # of the main process
        self._first_charts: tuple[str, ...] = ()  # not yet drawn
        self._watchdog = Watchdog(math.inf, self.path)
        self._stop = GracefulStop()
        log.reset(self._is_main, quiet, hold=True)
        self.devices = log_devices(accelerator, precision)  # of each process, in words

    def open_folder(self, project: str, name: str, exist_ok: bool, inputs: Iterable[str | Path] = ()) -> None:
        """Make the run folder, on all processes together, after all input has been checked; see `numbered_folder`."""
        name = numbered_folder(Path(project), name, exist_ok, inputs).name if self._is_main else ""
        # The name is broadcast, not the path: --project may differ between machines.
        self.path = Path(project) / self.collectives.broadcast(name)
        self.files = RunFolder(self.path, self._is_main)
        log.release(lambda line: self.with_wandb(lambda wandb_run: wandb_run.write_logs(f"{line}\n")))

    def bar(self, title: str, images: int, done: int = 0) -> Bar:
        """Return a progress bar, drawn by the main process only, with `done` images before the start."""
        return Bar(title, images, self._is_main and not self.quiet, done)

    def on_main(self, work: Job) -> None:
        """Call `work` on the main process; the others do not wait for it."""
        if self._is_main:
            work()

    # Ending early

    def watchdog(self, timeout: float) -> Watchdog:
        """Return a context that ends a run of several processes if one of them stalls; `timeout` in seconds."""
        self._watchdog = Watchdog(timeout, self.path)
        return self._watchdog

    def graceful_stop(self, time_limit: float) -> GracefulStop:
        """Return a context in which signals and the time limit, in hours, stop the run at the next `check_stop`."""
        self._stop = GracefulStop(time_limit)
        return self._stop

    def check_stop(self, step: int, lag: int = 0) -> None:
        """Raise `StopRequested` if all processes must stop at the end of this step; see `GracefulStop.stop_reason`."""
        if reason := self._stop.stop_reason(step, lag):
            raise StopRequested(reason)

    def stop_requested(self) -> str:
        """Return the signal that requests a stop, '' if there is none; a validation may then end early."""
        return self._stop.requested()

    def stop_together(self, reason: str) -> None:
        """Raise `StopRequested` on every process if any has a reason. All processes must call this together."""
        if reason := next(filter(None, self.collectives.gather([reason])), ""):
            raise StopRequested(reason)

    def keep_alive(self, work: str = "") -> None:
        """Reset the watchdog's timer: this process starts repeated work, such as a `training step`, or ""."""
        compiled = self.accelerator.state.dynamo_plugin.backend != DynamoBackend.NO  # any call may compile for minutes
        self._watchdog.keep_alive("" if compiled else work)

    # Pictures: drawn in the background; their errors are warnings

    def enable_plots(self, *documents: str) -> None:
        """Enable `plot` and `charts`; draw these text files after the first picture, so that no step is delayed."""
        if self._is_main:
            from utils.plots.pictures import Plotter  # only here, because not every run draws
            from utils.tracking.wandb import pictures

            self._plotter = Plotter(self.path, lambda files: self.log_media(partial(pictures, files)))
            self._first_charts = documents

    def plot(self, draw: Callable[[], Mapping[str, np.ndarray]]) -> None:
        """Write the pictures that `draw` returns, uint8 (h, w, 3) BGR by file name, into the run folder."""
        if self._plotter:
            self._plotter.draw(draw)
            if self._first_charts:
                self._plotter.draw_documents(*self._first_charts)
                self._first_charts = ()

    def charts(self, *documents: str) -> None:
        """Draw the pictures of these text files in the run folder, by default of all."""
        if self._plotter:
            self._plotter.draw_documents(*documents)

    # Trackers

    @property
    def is_tracked(self) -> bool:
        """Whether the main process has a tracker. All processes must read this together."""
        return self.collectives.broadcast(bool(self.trackers))

    def start_trackers(self, make: Callable[[], list[Tracker]], config: Mapping[str, Any], step: int) -> None:
        """Start the trackers that `make` returns, after `step` optimizer steps, with `config` without its secrets."""
        self.step = step
        if self._is_main:
            self.trackers = make()
            self.accelerator.log_with = self.trackers
            without_secrets = tree_map(lambda value: public(value) if isinstance(value, str) else value, dict(config))
            self.accelerator.init_trackers("", without_secrets)
            on_failure(self._fail_trackers)

    def _fail_trackers(self) -> None:
        for tracker in self.trackers:
            tracker.finish(FAIL_SECONDS, exit_code=1)

    def log_point(self, values: Mapping[str, Any], step: int) -> None:
        """Log values by key at an optimizer step, skipping None. The key "step" or "epoch" is their x axis."""
        self.step = step
        self.accelerator.log({key: value for key, value in values.items() if value is not None}, step=step)

    def log_media(self, make: Callable[[], Mapping[str, Any]]) -> None:
        """Log what `make` returns, called in a thread: W&B's pictures, tables and charts by key."""
        for tracker in self.trackers:
            tracker.log_media(make, self.step)

    def with_wandb(self, job: Callable[[Any], object]) -> None:
        """Call `job` with W&B's run, if there is one, in its thread."""
        for tracker in self.trackers:
            tracker.with_wandb(job)

    def finish(self, patience: float = math.inf) -> None:
        """Wait for pictures and trackers, for each at most `patience` seconds and at most its own time limit."""
        if self._plotter and not self._plotter.finish(patience):
            log(f"warning: the pictures are not finished; draw them with python -m utils.plots.pictures {self.path}")
        for tracker in self.trackers:
            tracker.finish(patience)
