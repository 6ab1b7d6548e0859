"""The state of a run, with which --resume continues it bit by bit: saved and loaded side by side.

Called by train.py and utils/training/steps.py; resume.py uses `Identity`. The weights are loaded before
`Accelerator.prepare`, whose results a `TrainingState` holds. state_files.py writes the files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from utils.checkpoint.state_files import STATE_FORMAT
from utils.distributed.deepspeed import gathered_parameters, load_optimizer_state, optimizer_state
from utils.distributed.ranks import Collectives, world_size
from utils.errors import UserError
from utils.summary import Summary

if TYPE_CHECKING:
    from utils.checkpoint.run_folder import RunFolder
    from utils.distributed.logical import DistributedModel
    from utils.training.ema import ModelEMA


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

    def state(self) -> dict[str, Any]:
        """Return the counters as plain values."""
        return asdict(self)

    @classmethod
    def from_state(cls, saved: Mapping[str, Any]) -> Progress:
        """Return the progress whose `state` is `saved`."""
        return cls(**{**saved, "summary": saved["summary"] and Summary(**saved["summary"])})


class TrainingState:
    """The prepared parts of a run that training changes. All processes must call its methods together.

    Args:
        parameters: the model's parameters, in the order of the optimizer's groups
        optimizer: optimizer that Accelerate has prepared
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
        self.scaler, self.collectives = accelerator.scaler, Collectives(accelerator)
        self.loss_sums = torch.zeros(model.logical.local, terms, device=accelerator.device)  # over the epoch's batches
        self._saved_progress: dict[str, Any] | None = None

    def save(self, files: RunFolder, keep_tensors: bool = True) -> None:
        """Write the state into the run folder, unless it has just been written.

        Args:
            keep_tensors: False for a finished run, of which only the counters are kept
        """
        progress = {**self.progress.state(), "summary": None}  # the summary changes with the best epoch only
        if progress == self._saved_progress:
            return
        self._saved_progress = progress
        with gathered_parameters(self.copies[0].parameters() if keep_tensors else ()):
            files.save_state(self.state(keep_tensors), final=not keep_tensors)

    def state(self, keep_tensors: bool = True) -> dict[str, Any]:
        """Return the state as tensors and plain values. Under ZeRO-3 the weights must be gathered."""
        counters = {
            "format": STATE_FORMAT,
            **vars(self.identity),
            "decisions": asdict(self.decisions),
            "progress": self.progress.state(),
        }
        if not keep_tensors:
            return counters
        return {
            **counters,
            "model": self.copies[0].state_dict(),
            **self.ema.state(),
            "optimizer": optimizer_state(self.optimizer, self.parameters),
            "rates": [group["lr"] for group in self.optimizer.param_groups],
            "scaler": self.scaler and self.scaler.state_dict(),
            "shares": self.collectives.gather([self._share(number) for number in range(len(self.copies))]),
        }

    def load(self, saved: Mapping[str, Any]) -> None:
        """Load what `state` returned, except for the weights.

        Call it after `Accelerator.prepare`, in which DDP copies the main process's buffers to all processes, and before
        anything copies `progress` or `loss_sums`, such as `NonFiniteGuard`.
        """
        vars(self.progress).update(vars(Progress.from_state(saved["progress"])))
        self._load_shares(saved["shares"])
        load_optimizer_state(self.optimizer, self.parameters, saved["optimizer"])
        for group, rate in zip(self.optimizer.param_groups, saved["rates"], strict=True):
            group["lr"] = rate
        if self.scaler is not None and saved["scaler"]:
            self.scaler.load_state_dict(saved["scaler"])

    def _share(self, number: int) -> dict[str, Any]:
        """Return a logical process's share: loss sums, and the BatchNorm statistics of the model and its EMA."""
        statistics = {
            name: {key: buffer.cpu() for key, buffer in floating_buffers(model).items()}
            for name, model in self._models(number).items()
        }
        return {"totals": self.loss_sums[number].cpu(), **statistics}

    def _load_shares(self, shares: Sequence[Mapping[str, Any]]) -> None:
        """Load the shares of this process's logical processes.

        If a different number of shares was saved, each logical process gets an equal part of the sums, and the mean
        statistics.
        """
        local = len(self.copies)
        own = self.collectives.local_part(shares, local) or [_mean_share(shares, world_size() * local)] * local
        for number, share in enumerate(own):
            self.loss_sums[number].copy_(share["totals"])
            for name, model in self._models(number).items():
                for key, buffer in floating_buffers(model).items():
                    buffer.copy_(share[name][key])

    def _models(self, number: int) -> dict[str, nn.Module]:
        return {"model": self.copies[number], "ema": self.ema.replicas[number]}


def floating_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the floating-point buffers of a model by name, such as running statistics."""
    return {name: buffer for name, buffer in model.named_buffers() if buffer.is_floating_point()}


def _mean_share(shares: Sequence[Mapping[str, Any]], processes: int) -> dict[str, Any]:
    mean: dict[str, Any] = {"totals": sum(share["totals"] for share in shares) / processes}
    for name in ("model", "ema"):
        mean[name] = {
            # float64, so that the mean of equal values is that value
            key: torch.stack([share[name][key].double() for share in shares]).mean(0)
            for key in shares[0][name]
        }
    return mean
