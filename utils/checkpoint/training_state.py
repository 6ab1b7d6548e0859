"""The state of a run, with which --resume continues it bit by bit: saved and loaded side by side.

Called by utils/training/optimizer_steps.py; resume.py uses `Identity`. `load_weights` comes before
`Accelerator.prepare`, whose results a `TrainingState` holds. state_files.py writes the files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from utils.checkpoint.progress import Progress
from utils.checkpoint.state_files import STATE_FORMAT
from utils.distributed.deepspeed import gathered_parameters, load_optimizer_state, optimizer_state
from utils.distributed.ranks import world_size
from utils.errors import UserError

if TYPE_CHECKING:
    from utils.distributed.collectives import Collectives
    from utils.run_folder import RunFolder
    from utils.training.ema import ModelEMA


@dataclass(frozen=True)
class Identity:
    """What must not change when a run is resumed: classes, image size, images, labels, and most settings."""

    names: Mapping[int, str]  # class names
    imgsz: int  # pixels
    splits: Mapping[str, Mapping[str, str]]  # `Split.identity` of `train` and `val`
    settings: Mapping[str, Any] = field(default_factory=dict)  # compared with settings.yaml by `check_settings`

    def state(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return dict(vars(self))

    def check(self, saved: Mapping[str, Any]) -> None:
        """Compare with a saved state; raise `UserError` if classes, image size, images or labels have changed."""
        before, now = list(saved["names"].values()), list(self.names.values())
        if before != now:
            raise UserError(
                f"the classes have changed since the run began ({len(before)} then, {len(now)} now: "
                f"{_first_difference(before, now)}); fix names: in the data YAML, or start a new run from its "
                "weights/last.pt"
            )
        if saved["imgsz"] != self.imgsz:
            raise UserError(f"--imgsz is {self.imgsz} now, and the run was started with {saved['imgsz']}; leave it out")
        for split, identity in self.splits.items():
            old = saved["splits"][split]
            if changed := [key for key, value in identity.items() if value != old.get(key)]:
                raise UserError(
                    f"the {', '.join(changed)} of `{split}:` have changed since the run began ({old.get('count')} "
                    f"images then, {identity.get('count')} now); restore them, or start a new run from its "
                    "weights/last.pt"
                )


def can_continue(saved: Mapping[str, Any]) -> bool:
    """Return whether a state has the tensors to continue training; a finished run's has them with --keep-state."""
    return "model" in saved


def load_weights(saved: Mapping[str, Any], model: nn.Module, ema: ModelEMA) -> None:
    """Load the weights of a state, before `Accelerator.prepare`, which partitions them under ZeRO-3."""
    model.load_state_dict(saved["model"])
    ema.load_state(saved)


@dataclass(kw_only=True)
class TrainingState:
    """The prepared parts of a run that training changes. All processes must call its methods together."""

    identity: Identity
    progress: Progress
    replicas: Sequence[nn.Module]  # the model of each local logical process, without the wrappers of Accelerate
    parameters: Sequence[nn.Parameter]  # the model's parameters, in the order of the optimizer's groups
    ema: ModelEMA
    optimizer: Any  # prepared by Accelerate
    scaler: Any  # Accelerate's gradient scaler, or None
    loss_sums: Tensor  # (local logical processes, terms), over this epoch's batches
    collectives: Collectives
    wandb_id: str
    _saved_progress: dict[str, Any] | None = field(default=None, init=False)

    def save(self, files: RunFolder, keep_tensors: bool = True) -> None:
        """Write the state into the run folder, unless it has just been written.

        Args:
            keep_tensors: whether to keep the tensors of a finished run, so that it can be continued
        """
        progress = {**self.progress.state(), "summary": None}  # the summary changes with the best epoch only
        if progress == self._saved_progress:
            return
        self._saved_progress = progress
        if self.progress.finished and not keep_tensors:
            files.save_state(self._without_tensors(), final=True)
            return
        with gathered_parameters(self.replicas[0].parameters()):
            files.save_state(self.state())

    def state(self) -> dict[str, Any]:
        """Return the state as tensors and plain values. Under ZeRO-3 the weights must be gathered."""
        return {
            **self._without_tensors(),
            "model": self.replicas[0].state_dict(),
            **self.ema.state(),
            "optimizer": optimizer_state(self.optimizer, self.parameters),
            "rates": [group["lr"] for group in self.optimizer.param_groups],
            "scaler": self.scaler and self.scaler.state_dict(),
            "shares": self.collectives.gather([self._share(number) for number in range(len(self.replicas))]),
        }

    def _without_tensors(self) -> dict[str, Any]:
        """Return the state without tensors, which is all that a finished run needs."""
        return {
            "format": STATE_FORMAT,
            **self.identity.state(),
            "progress": self.progress.state(),
            "wandb_id": self.wandb_id,
        }

    def load_state(self, saved: Mapping[str, Any]) -> None:
        """Load what `state` returned, except for the weights (`load_weights`).

        Call it after `Accelerator.prepare`, in which DDP copies the main process's buffers to all processes, and before
        anything copies `progress` or `loss_sums`, such as `NonFiniteGuard`.
        """
        self.progress.load_state(saved["progress"])
        self.progress.finished = False  # a finished run that is resumed has more epochs now
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
        local = len(self.replicas)
        own = self.collectives.local_part(shares, local) or [_mean_share(shares, world_size() * local)] * local
        for number, share in enumerate(own):
            self.loss_sums[number].copy_(share["totals"])
            for name, model in self._models(number).items():
                for key, buffer in floating_buffers(model).items():
                    buffer.copy_(share[name][key])

    def _models(self, number: int) -> dict[str, nn.Module]:
        return {"model": self.replicas[number], "ema": self.ema.replicas[number]}


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


def _first_difference(before: Sequence[str], now: Sequence[str]) -> str:
    pairs = enumerate(zip_longest(before, now, fillvalue="none"))
    return next((f"class {number} was {old} and is {new}" for number, (old, new) in pairs if old != new), "")
