"""Weight files, and the state of a run for --resume: what is saved beside what is loaded, and the state's files.

The weights are loaded before `Accelerator.prepare`, whose results a `TrainingState` holds. A state is replaced as a
whole and verified by a checksum. Weight files have tensors and plain values only: loading one runs no code.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map, tree_map_only

from utils.console import log
from utils.distributed.deepspeed import gathered_parameters, load_optimizer_state, optimizer_state
from utils.distributed.ranks import Collectives
from utils.errors import UserError, first_line, public
from utils.files import VERSION, read_regular, write_bytes
from utils.summary import Summary

if TYPE_CHECKING:
    from utils.distributed.model import DistributedModel
    from utils.training.optimizer import ModelEMA

FORMAT, STATE_FORMAT = "lockstep-1", "lockstep-state-2"  # of a weight file, and of a state
STATES = "checkpoint"  # folder in a run folder
STATE_NAME = re.compile(r"\d{8,}-[0-9a-f]+\.pt")  # other files in the folder are the user's
CHECKSUM_DIGITS = 16  # hexadecimal digits in the name of a file
SAFETENSORS_SUFFIX = ".safetensors"
SAFETENSORS_KEY = "lockstep"  # metadata key of everything but the tensors, as JSON


# Weight files


def serialise(content: Any) -> memoryview:
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
    """Return the tensors of a `.safetensors` file, and the rest, {} of other programs. Raises SafetensorError."""
    import safetensors.torch

    state = safetensors.torch.load(data)
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
        origin: `licence` and `origin`, see models/weights.py, and `receipt`, the hash in receipt.yaml
    """
    state = {key: value.detach().cpu() for key, value in model.state_dict().items()}
    for key, value in state.items() if half else ():
        if value.is_floating_point() and (halved := value.half()).isfinite().all():
            state[key] = halved
    return {
        "format": FORMAT,
        "version": VERSION,
        "task": yaml["task"],
        "model": dict(yaml),
        "names": dict(names),
        "state": state,
        "settings": dict(settings),
        **origin,
    }


# The state of a run


@dataclass(frozen=True)
class Identity:
    """What must not change when a run is resumed: classes, image size, images, labels, and most settings."""

    names: Mapping[int, str]  # class names
    imgsz: int  # pixels
    splits: Mapping[str, Mapping[str, str]]  # `Split.identity` of `train` and `val`
    settings: Mapping[str, Any] = field(default_factory=dict)  # compared with settings.yaml when the run is resumed

    def check(self, saved: Mapping[str, Any]) -> None:
        """Compare with a saved state; raise `UserError` if classes, image size, images or labels have changed."""
        before, now = ([*state["names"].values()] for state in (saved, vars(self)))
        changed = [f"the classes ({len(before)} then, {len(now)} now; names: in the data YAML)"] * (before != now)
        changed += [f"--imgsz (it was {saved['imgsz']})"] * (saved["imgsz"] != self.imgsz)
        for split, identity in self.splits.items():
            old = saved["splits"][split]
            changed += [f"the {key} of `{split}:`" for key in {**old, **identity} if identity.get(key) != old.get(key)]
        if changed:
            raise UserError(
                f"what the run began with has changed: {', '.join(changed)}; restore it, or start a new run from its "
                "weights/last.pt"
            )


@dataclass(frozen=True)
class MeasuredConfig:
    """What a new run has taken from the memory, the weights and the environment; a resumed run keeps it."""

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
        is_first = self.best_epoch < 0 and summary.fitness == self.best  # -inf, for NaN, is better than none
        if not (summary.fitness > self.best or is_first):
            return False
        self.best, self.best_epoch, self.summary = summary.fitness, self.epoch, summary
        return True

    def stalled(self, patience: int) -> bool:
        """Return whether `patience` epochs have passed without a better fitness; never if it is 0."""
        return 0 < patience <= self.validated - self.best_epoch

    def next_epoch(self) -> None:
        self.epoch, self.batch, self.taken = self.epoch + 1, 0, 0

    @classmethod
    def from_state(cls, saved: Mapping[str, Any]) -> Progress:
        """Return the progress whose fields, as plain values, are `saved`."""
        return cls(**{**saved, "summary": saved["summary"] and Summary(**saved["summary"])})


@dataclass(eq=False)
class TrainingState:
    """The prepared parts of a run that training changes. All processes must call its methods together."""

    identity: Identity
    measured: MeasuredConfig
    model: DistributedModel
    parameters: Sequence[nn.Parameter]  # the model's, in the order of the optimizer's groups
    ema: ModelEMA
    optimizer: Any
    terms: int  # number of loss terms

    def __post_init__(self) -> None:
        accelerator, self.copies, self.logical = self.model.accelerator, self.model.copies, self.model.logical
        self.progress, self.scaler, self.collectives = Progress(), accelerator.scaler, Collectives()
        self.loss_sums = torch.zeros(len(self.copies), self.terms, device=accelerator.device)  # over an epoch's batches
        self._saved_progress: dict[str, Any] | None = None

    def save(self, write: Callable[[dict[str, Any], bool], None], keep_tensors: bool = True) -> None:
        """Let `RunFolder.save_state` write the state, unless it has just; of a finished run the counters only."""
        progress = {**asdict(self.progress), "summary": None}  # the summary changes with the best epoch only
        if progress == self._saved_progress:
            return
        self._saved_progress = progress
        with gathered_parameters(self.copies[0].parameters() if keep_tensors else ()):
            write(self.state(keep_tensors), not keep_tensors)

    def state(self, keep_tensors: bool = True) -> dict[str, Any]:
        """Return the state as tensors and plain values. Under ZeRO-3 the weights must be gathered."""
        counters = {
            "format": STATE_FORMAT,
            "version": VERSION,
            **vars(self.identity),
            "decisions": asdict(self.measured),
            "progress": asdict(self.progress),
        }
        if not keep_tensors:
            return counters
        return {
            **counters,
            "model": dict(self.copies[0].state_dict()),
            **self.ema.state(),
            "optimizer": optimizer_state(self.optimizer, self.parameters),
            "groups": [
                {name: value for name, value in group.items() if isinstance(value, (int, float, Tensor))}
                for group in self.optimizer.param_groups  # rates, and what some classes count there, as Prodigy does
            ],
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
        saved_groups = saved.get("groups") or [{"lr": rate} for rate in saved["rates"]]  # of earlier versions
        for group, values in zip(self.optimizer.param_groups, saved_groups, strict=True):
            tensors = {name: group[name] for name in values if isinstance(group.get(name), Tensor)}
            group.update(values | {name: tensor.copy_(values[name]) for name, tensor in tensors.items()})
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
