"""What --resume needs: the state of a run, saved and loaded side by side, its files, and the settings to continue with.

train.py calls `resolve_settings` before anything else is read, and `read_saved_state` once the data set is known. The
weights are loaded before `Accelerator.prepare`, whose results a `TrainingState` holds. A state is replaced as a whole
and verified by a checksum. Weight files have tensors and plain values only: loading one runs no code.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map, tree_map_only

from utils.config.flags import AUTO, BUILT_IN_JOB, NEWEST, TrainOptions
from utils.config.parser import over_defaults
from utils.config.settings import RecipeOf, Settings, check_settings, resumed_options
from utils.console import log
from utils.distributed.deepspeed import gathered_parameters, load_optimizer_state, optimizer_state
from utils.distributed.launch import connect
from utils.distributed.ranks import Collectives, broadcast_from_main, world_size
from utils.errors import Stopped, UserError, first_line, plural, public
from utils.files import SETTINGS_FILE, VERSION, read_regular, read_yaml, write_bytes
from utils.summary import Summary

if TYPE_CHECKING:
    from utils.distributed.model import DistributedModel
    from utils.run import Run, RunFolder
    from utils.training.optimizer import ModelEMA

FORMAT, STATE_FORMAT = "lockstep-1", "lockstep-state-2"  # of a weight file, and of a state
STATES = "checkpoint"  # folder in a run folder
STATE_NAME = re.compile(r"\d{8,}-[0-9a-f]+\.pt")  # other files in the folder are the user's
CHECKSUM_DIGITS = 16  # hexadecimal digits in the name of a file
SAFETENSORS_SUFFIX = ".safetensors"
SAFETENSORS_KEY = "lockstep"  # metadata key of everything but the tensors, as JSON


# Weight files


def serialised(content: Any) -> memoryview:
    """Return the bytes of a file that `torch.load` reads as `content`."""
    buffer = io.BytesIO()
    # Contiguous, so that the file does not depend on the device.
    torch.save(tree_map_only(Tensor, Tensor.contiguous, content), buffer)
    return buffer.getbuffer()


def as_safetensors(content: Mapping[str, Any]) -> bytes:
    """Return the bytes of a `.safetensors` file with a `weights_content`; equal content gives equal bytes."""
    import safetensors.torch

    # Copies: tensors that share memory are refused. With a second key of the metadata, the order would vary.
    state = {key: value.clone(memory_format=torch.contiguous_format) for key, value in content["state"].items()}
    rest = {key: value for key, value in content.items() if key != "state"}
    return safetensors.torch.save(state, {SAFETENSORS_KEY: json.dumps(rest)})


def is_safetensors(data: bytes) -> bool:
    """Return whether a file's bytes begin like a `.safetensors` file, with the length of a header and the header."""
    return data[8:9] == b"{" and int.from_bytes(data[:8], "little") < len(data)


def read_safetensors(data: bytes) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of a `.safetensors` file, and the rest, {} if another program wrote it. Raises ValueError."""
    import safetensors.torch

    try:
        state = safetensors.torch.load(data)
    except safetensors.SafetensorError as error:
        raise ValueError(str(error).removeprefix("Error while deserializing: ")) from None
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return state, json.loads(header.get("__metadata__", {}).get(SAFETENSORS_KEY, "{}"))


def weights_content(
    model: nn.Module,
    yaml: Mapping[str, Any],
    names: Mapping[int, str],
    settings: Mapping[str, Any],
    half: bool = False,
    **origin: Any,
) -> dict[str, Any]:
    """Return the content of a weight file: the weights of `model` and all that is needed to use them.

    Args:
        settings: the run's settings, for information
        half: whether to store floating-point tensors as float16, except tensors with values beyond its range
        origin: `licence` and `origin`, see models/weights.py
    """
    return {
        "format": FORMAT,
        "task": yaml["task"],
        "model": dict(yaml),
        "names": dict(names),
        "state": {key: _stored(value.detach().cpu(), half) for key, value in model.state_dict().items()},
        "settings": dict(settings),
        **origin,
    }


def _stored(tensor: Tensor, half: bool) -> Tensor:
    if not half or not tensor.is_floating_point():
        return tensor
    halved = tensor.half()
    return halved if halved.isfinite().all() else tensor


# The state of a run


@dataclass(frozen=True)
class Identity:
    """What must not change when a run is resumed: classes, image size, images, labels, and most settings."""

    names: Mapping[int, str]  # class names
    imgsz: int  # pixels
    splits: Mapping[str, Mapping[str, str]]  # `Split.identity` of `train` and `val`
    settings: Mapping[str, Any] = field(default_factory=dict)  # compared with settings.yaml by `check_settings`

    def check(self, saved: Mapping[str, Any]) -> None:
        """Compare with a saved state; raise `UserError` if classes, image size, images or labels have changed."""
        before, now = ([*state["names"].values()] for state in (saved, vars(self)))
        changed = [f"the classes ({len(before)} then, {len(now)} now; names: in the data YAML)"] * (before != now)
        changed += [f"--imgsz (it was {saved['imgsz']})"] * (saved["imgsz"] != self.imgsz)
        for split, identity in self.splits.items():
            old = saved["splits"][split]
            changed += [f"the {key} of `{split}:`" for key, value in identity.items() if value != old.get(key)]
        if changed:
            raise UserError(
                f"what the run began with has changed: {', '.join(changed)}; restore it, or start a new run from its "
                "weights/last.pt"
            )


@dataclass(frozen=True)
class Decisions:
    """What a new run has decided from the memory, the weights and the environment; a resumed run keeps it."""

    batch_size: int  # images of a batch of all processes
    accumulation: int  # batches of an optimizer step
    known: float | None  # share of the classes that the initial weights know; None if most weights do not fit
    run_id: str  # the run's id in trackers


@dataclass
class Progress:
    """The counters of a run. They are equal on all processes, so that all decide alike."""

    epoch: int = 0  # the current epoch, or the next
    batch: int = 0  # trained batches of this epoch; after the last one comes the validation
    step: int = 0  # optimizer steps, including skipped ones
    best: float = float("-inf")  # highest fitness so far
    best_epoch: int = -1
    validated: int = -1  # the last validated epoch
    summary: Summary | None = None  # the best epoch's metrics
    skipped: int = 0  # optimizer steps whose gradients were not finite
    taken: int = 0  # batches of this epoch whose optimizer step was taken
    finished: bool = False

    def __str__(self) -> str:
        return f"in epoch {self.epoch + 1}" + (f", after batch {self.batch}" if self.batch else "")

    def record(self, summary: Summary | None) -> bool:
        """Record the metrics of the current epoch, if it is validated; return whether it is the best so far."""
        if summary is None:
            return False
        self.validated = self.epoch
        first = self.best_epoch < 0 and summary.fitness == self.best  # -inf, for NaN, is better than none
        if not (summary.fitness > self.best or first):
            return False
        self.best, self.best_epoch, self.summary = summary.fitness, self.epoch, summary
        return True

    def stalled(self, patience: int) -> bool:
        """Return whether `patience` epochs have passed without a better fitness; never if it is 0."""
        return 0 < patience <= self.validated - self.best_epoch

    def next_epoch(self) -> None:
        """Start the next epoch."""
        self.epoch, self.batch, self.taken = self.epoch + 1, 0, 0

    @classmethod
    def from_state(cls, saved: Mapping[str, Any]) -> Progress:
        """Return the progress whose fields, as plain values, are `saved`."""
        return cls(**{**saved, "summary": saved["summary"] and Summary(**saved["summary"])})


class TrainingState:
    """The prepared parts of a run that training changes. All processes must call its methods together.

    Args:
        parameters: the model's parameters, in the order of the optimizer's groups
        terms: number of loss terms
    """

    def __init__(
        self,
        identity: Identity,
        decisions: Decisions,
        model: DistributedModel,
        parameters: Sequence[nn.Parameter],
        ema: ModelEMA,
        optimizer: Any,
        terms: int,
    ) -> None:
        accelerator = model.accelerator
        self.identity, self.decisions, self.progress = identity, decisions, Progress()
        self.copies, self.parameters, self.ema, self.optimizer = model.copies, parameters, ema, optimizer
        self.scaler, self.logical, self.collectives = accelerator.scaler, model.logical, Collectives()
        self.loss_sums = torch.zeros(len(model.copies), terms, device=accelerator.device)  # over the epoch's batches
        self._saved_progress: dict[str, Any] | None = None

    def save(self, files: RunFolder, keep_tensors: bool = True) -> None:
        """Write the state into the run folder, unless it has just been written; of a finished run the counters only."""
        progress = {**asdict(self.progress), "summary": None}  # the summary changes with the best epoch only
        if progress == self._saved_progress:
            return
        self._saved_progress = progress
        with gathered_parameters(self.copies[0].parameters() if keep_tensors else ()):
            files.save_state(self.state(keep_tensors), final=not keep_tensors)

    def state(self, keep_tensors: bool = True) -> dict[str, Any]:
        """Return the state as tensors and plain values. Under ZeRO-3 the weights must be gathered."""
        counters = {
            "format": STATE_FORMAT,
            "version": VERSION,
            **vars(self.identity),
            "decisions": asdict(self.decisions),
            "progress": asdict(self.progress),
        }
        if not keep_tensors:
            return counters
        return {
            **counters,
            "model": dict(self.copies[0].state_dict()),
            **self.ema.state(),
            "optimizer": optimizer_state(self.optimizer, self.parameters),
            "rates": [group["lr"] for group in self.optimizer.param_groups],
            "scaler": self.scaler and self.scaler.state_dict(),
            "shares": self.collectives.gather(tree_map(Tensor.cpu, self._per_logical())),
        }

    def load(self, saved: Mapping[str, Any]) -> None:
        """Load what `state` returned, except for the weights.

        Call it after `Accelerator.prepare`, in which DDP copies the main process's buffers to all processes, and before
        anything copies `progress` or `loss_sums`, such as `NonFiniteGuard`.
        """
        with explain_misfit(saved):
            vars(self.progress).update(vars(Progress.from_state(saved["progress"])))
            logical, saved_values = self.logical, saved["shares"]
            local_values = saved_values[logical.local.start : logical.local.stop]
            if len(saved_values) != logical.count:
                # Another number of logical processes: each gets the mean statistics, and an equal part of the sums. In
                # float64 the mean of equal values is that value.
                mean = tree_map(lambda *values: torch.stack(values).double().mean(0), *saved_values)
                mean["totals"] *= len(saved_values) / logical.count
                local_values = [mean] * len(logical.local)
            # The view, because `copy_` alone would spread a single value.
            tree_map(lambda now, then: now.copy_(then.view_as(now)), self._per_logical(), local_values)
        load_optimizer_state(self.optimizer, self.parameters, saved["optimizer"])
        for group, rate in zip(self.optimizer.param_groups, saved["rates"], strict=True):
            group["lr"] = rate
        if self.scaler is not None and saved["scaler"]:
            self.scaler.load_state_dict(saved["scaler"])

    def _per_logical(self) -> list[dict[str, Any]]:
        """Return the tensors of each local logical process: loss sums, and the statistics of the model and its EMA."""
        return [
            {"totals": totals, "model": floating_buffers(model), "ema": floating_buffers(ema)}
            for totals, model, ema in zip(self.loss_sums, self.copies, self.ema.replicas, strict=True)
        ]


@contextmanager
def explain_misfit(saved: Mapping[str, Any]) -> Iterator[None]:
    """Raise `UserError` if a block, which loads a saved state, meets other keys or shapes than it has."""
    try:
        yield
    except (RuntimeError, LookupError, TypeError, ValueError) as error:
        reason = public(str(error).strip().rpartition("\n")[2].strip(), 160)  # torch names tensors in the last line
        version = saved.get("version", "that wrote it")
        raise UserError(
            f"the saved state does not fit this code ({reason}); resume with the code and Lockstep version {version}, "
            "or start a new run from its weights/last.pt"
        ) from error


def floating_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the floating-point buffers of a model by name, such as running statistics."""
    return {name: buffer for name, buffer in model.named_buffers() if buffer.is_floating_point()}


# Its files


class StateFiles:
    """The states in `checkpoint/` of a run: the two newest, or a finished run's only one, as NUMBER-CHECKSUM.pt."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.last: Path | None = None  # the file that was written or read last, which is intact

    def files(self) -> list[Path]:
        """Return the files, newest first."""
        return sorted((file for file in self.folder.glob("*.pt") if STATE_NAME.fullmatch(file.name)), reverse=True)

    def write(self, content: memoryview, final: bool = False) -> None:
        """Write a state, whole or not at all; then remove all others, except the last intact one if not `final`."""
        number = max((int(file.stem.partition("-")[0]) for file in self.files()), default=0) + 1
        path = self.folder / f"{number:08d}-{_checksum(content)}.pt"
        write_bytes(path, content)
        for old in self.files():
            if old != path and (final or old != self.last):
                old.unlink()
        self.last = path

    def read(self, warns: bool = True) -> dict[str, Any] | None:
        """Return the newest intact state, None without files; log damaged files if it `warns`. Raises `UserError`."""
        files = self.files()
        for file in files:
            try:
                content = read_regular(file)
            except OSError as error:
                raise UserError(f"{file} cannot be read: {error.strerror}") from None
            if file.stem.partition("-")[2] == _checksum(content):
                self.last = file
                return _load(file, content)
            if warns:
                log(f"warning: {file} is damaged (its checksum does not match); trying the one before")
        if files:
            raise UserError(
                f"all states in {self.folder} are damaged ({', '.join(file.name for file in files)}), so the run "
                "cannot go on; start a new one from its weights/last.pt"
            )
        return None


def _load(file: Path, content: bytes) -> dict[str, Any]:
    try:
        state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except (UnpicklingError, RuntimeError, EOFError, zipfile.BadZipFile, ValueError) as error:
        raise UserError(
            f"{file} was refused, and nothing in it was run: this program has not written it "
            f"({first_line(error)}); remove it"
        ) from None
    state = state if isinstance(state, dict) else {}
    if (form := state.get("format")) != STATE_FORMAT:
        version = state.get("version", "that wrote it")
        raise UserError(f"{file} has the format {form}, not {STATE_FORMAT}; resume with the Lockstep version {version}")
    return state


def _checksum(content: memoryview | bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:CHECKSUM_DIGITS]


# What a run continues with


def resolve_settings(given: Mapping[str, Any], recipe_of: RecipeOf) -> Settings:
    """Return the settings that a run starts or continues with; the main process decides for all.

    `given` are flags by name; if they name no data, model, weights or hyperparameters, the built-in job gives the rest.
    Raises `Stopped` with exit code 0 if the run is finished, and `UserError` if there is nothing to resume or a flag
    must not change.
    """
    settings = Settings(over_defaults(TrainOptions, given, BUILT_IN_JOB), given)
    options = settings.options
    if not options.resume:
        return settings
    if world_size() == 1:  # the processes that `spawn` starts get the settings from their parent
        return _settings_of_run(settings, recipe_of)
    if options.doctor and options.resume == AUTO:  # the flags are complete; the doctor names who cannot be reached
        return settings
    connect(options.device, options.dist_timeout)
    return broadcast_from_main(lambda: _settings_of_run(settings, recipe_of))


def read_saved_state(run: Run, settings: Settings, identity: Identity) -> dict[str, Any] | None:
    """Return the saved state of a run, None for a new run; restore the run folder to that state.

    Raises `UserError` if classes, image size, images or labels differ from the saved state's, before anything in the
    folder changes.
    """
    saved = run.collectives.broadcast(run.files.read_state()) if settings.saved else None
    if saved:
        identity.check(saved)
        settings.log_changes(torch.get_num_threads() if run.accelerator.device.type == "cpu" else 0)
        log(f"resuming {run.path} {Progress.from_state(saved['progress'])}")
    elif settings.is_fixed:
        log(f"{run.path} ended before it saved anything: it starts anew, with its settings")
    run.files.restore_to_state(saved)
    return saved


def _settings_of_run(settings: Settings, recipe_of: RecipeOf) -> Settings:
    """Return the settings of the run that --resume names, overridden by the given flags."""
    asked = settings.options
    run = find_run(asked.resume, Path(asked.project), asked.name, asked.exist_ok)
    if run is None:
        return settings
    saved = read_yaml(run / SETTINGS_FILE)
    if not {"epochs", "batch_size", "hyperparameters", "model"} <= saved.keys():
        raise UserError(f"{run} is not the folder of a training run, so it cannot be resumed; name one that is")
    states = StateFiles(run / STATES)
    state = states.read(warns=False)  # `read_saved_state` reads it again
    check_settings(saved, state.get("settings", {}) if state else {}, run / SETTINGS_FILE)
    options = resumed_options(settings.given, run, saved, recipe_of, world_size() > 1)
    if state is None:
        has_results = any(run.glob("weights/*.pt")) or (not options.nosave and (run / "results.csv").exists())
        if asked.resume == AUTO and not has_results:
            return Settings(options, settings.given, is_fixed=True)
        raise UserError(
            f"no state is in {states.folder}, so {run} cannot be resumed; restore the states, start a new run from its "
            "weights, or, if it has no results, start it again with --resume auto"
        )
    with explain_misfit(state):
        progress = Progress.from_state(state["progress"])
    if progress.finished and options.epochs > saved["epochs"]:
        raise UserError(
            f"{run} is finished and has not kept the optimizer's state, so --epochs {options.epochs} cannot continue "
            f"it; start a new run from {run / 'weights' / 'last.pt'}"
        )
    if progress.finished or progress.epoch >= options.epochs:
        print(f"{run} is finished: it has trained {plural(progress.epoch, 'epoch')}", flush=True)
        if progress.summary:
            progress.summary.write_result(run)
        raise Stopped(0)
    return Settings(options, settings.given, saved, is_fixed=True)


def find_run(resume: str, project: Path, name: str, exist_ok: bool) -> Path | None:
    """Return the run folder that --resume names; None if it is `auto` and there is no run. Raises `UserError`."""
    if resume in (NEWEST, AUTO):
        pattern = ".*" if resume == NEWEST else re.escape(name) if exist_ok else rf"{re.escape(name)}\d*"
        runs = [file.parent for file in project.glob(f"*/{SETTINGS_FILE}") if re.fullmatch(pattern, file.parent.name)]
        for run in sorted(runs, key=_last_written, reverse=True):
            settings = read_yaml(run / SETTINGS_FILE)  # without hyperparameters: of a validation
            # The second run `fold1` is in fold12, as is the first run `fold12`.
            if "hyperparameters" in settings and (resume == NEWEST or exist_ok or settings.get("name") == name):
                return run
        if resume == AUTO:
            return None
        raise UserError(f"there is no run to resume in {project}; name a run folder, or start one without --resume")
    path = Path(os.path.abspath(resume))
    for folder in (path, *path.parents[:2]):  # the run folder, or checkpoint/ or weights/last.pt in it
        if os.path.isfile(folder / SETTINGS_FILE):  # Path.is_file raises an error for a folder that may not be entered
            return folder
    raise UserError(
        f"--resume {path}: neither it nor its parent folders are a run folder of train.py (no {SETTINGS_FILE}); name "
        "one, or start a new run with --weights, as from a run of YOLOv5"
    )


def _last_written(run: Path) -> float:
    files = [run / SETTINGS_FILE, run / "results.csv", *(run / STATES).glob("*.pt")]
    return max(file.stat().st_mtime for file in files if file.exists())
