"""The optimizer steps of a run: clipped, skipped if not finite, averaged, counted and logged. Called by train.py.

On a GPU nothing here waits for the device, which decides whether a step is taken; the host reads that one step later.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from utils.checkpoint.progress import Progress
from utils.checkpoint.training_state import Identity, TrainingState, floating_buffers, load_weights
from utils.config.hyperparameters import Recipe
from utils.config.select import select
from utils.console import RemainingTime
from utils.distributed.distributed_model import DistributedModel
from utils.distributed.logical_processes import LogicalProcesses, SyncOptions
from utils.distributed.prepare import place_model, prepare
from utils.errors import UserError
from utils.training.cuda_graph import RecordedCall, can_record
from utils.training.ema import ModelEMA, ramp_messages, ramp_of
from utils.training.nonfinite_steps import DeviceValue, NonFiniteGuard, Window, explain_skipped_steps
from utils.training.optimizer import (
    NO_FACTORS,
    Factors,
    Schedule,
    build_optimizer,
    grouped_parameters,
    start_momentum,
    step_if,
    warmup_messages,
)
from utils.training.profiler import StepProfiler
from utils.training.rising_loss import RisingLoss
from utils.training.step_log import Point, StepLog

if TYPE_CHECKING:
    from models.tasks.contract import Model
    from utils.run import Run

CLIP_NORM = 10.0  # largest L2 norm of the gradients of an optimizer step, as in YOLOv5


@dataclass(frozen=True)
class OptimizerOptions(SyncOptions):
    """The flags of the optimizer, its schedule and its log."""

    epochs: int
    optimizer: str
    cos_lr: bool
    scale_lr: bool
    log_interval: int
    max_skips: int
    wandb_id: str
    profile: str = ""
    no_cuda_graph: bool = False


class EndedStep(NamedTuple):
    """An optimizer step about which the host does not know yet whether it was taken."""

    taken: DeviceValue  # bool
    batches: int  # number of batches accumulated in the step
    step: int
    window: Window


class OptimizerSteps:
    """The optimizer steps of a run, over the parts that `prepare_training` makes."""

    def __init__(
        self,
        run: Run,
        model: DistributedModel,
        state: TrainingState,
        schedule: Schedule,
        step_log: StepLog,
        options: OptimizerOptions,
    ) -> None:
        self.run, self.model, self.state, self.schedule = run, model, state, schedule
        self.step_log, self.batch_size = step_log, options.batch_size
        self.optimizer, self.ema, self.progress = state.optimizer, state.ema, state.progress
        # The state must have been loaded: the guard copies the tensors.
        buffers = [buffer for replica in model.replicas for buffer in floating_buffers(replica).values()]
        self.update_averages: Callable[[Tensor], object] = self._update_averages
        if not options.no_cuda_graph and can_record(model):
            self.update_averages = RecordedCall(self._update_averages)
        self.rising = RisingLoss(model.sum, enabled=not self.progress.step)
        self.guard = NonFiniteGuard([state.loss_sums, *buffers], options.max_skips)
        trained = self.progress.epoch * schedule.batches + self.progress.batch
        self.remaining = RemainingTime(options.epochs * schedule.batches - trained)
        self.ended: deque[EndedStep] = deque()
        self.points: deque[Point] = deque()  # points of the step curves that are not yet logged
        epoch_steps = math.ceil(schedule.batches / run.accelerator.gradient_accumulation_steps)
        last_step, artifact = options.epochs * epoch_steps, f"run_{options.wandb_id}_profile"
        self.profiler = StepProfiler(run, options.profile, self.progress.step, last_step, artifact)

    @property
    def behind(self) -> int:
        """Number of steps whose counting may wait: one on a GPU, so that the next is queued before the host waits."""
        return int(self.state.loss_sums.is_cuda)

    def add_batch(self, losses: Tensor, paths: Iterable[Iterable[str]]) -> None:
        """Record a batch.

        Args:
            losses: share of each local logical process in the batch's loss terms, (n, k)
            paths: image paths of each local logical process
        """
        self.state.loss_sums += losses
        self.step_log.add_batch(losses)
        for share, images in zip(losses, paths, strict=True):
            self.guard.add_batch(share, images)
        self.remaining.done += 1
        if rise := self.rising.add_batch(losses):
            self.run.print(
                f"warning: the loss rose {rise}: a learning rate of {self.schedule.peak:.2g} may destroy the weights; "
                "lower it with --hyp.lr0, or lengthen the warm-up with --hyp.warmup_share"
            )

    def step(self) -> Tensor:
        """Clip the gradients and take a step if they are finite; return whether it was taken, bool () on the device.

        The norm is computed from the reduced gradients, so all processes skip the same steps.
        """
        accelerator, optimizer = self.run.accelerator, self.optimizer
        norm = self.step_log.norm = accelerator.clip_grad_norm_(self.model.parameters, CLIP_NORM)
        if accelerator.scaler is None and isinstance(norm, Tensor) and norm.device.type in ("cpu", "cuda"):
            return step_if(optimizer, norm.isfinite())
        finite = norm is None or math.isfinite(norm)
        if finite or accelerator.scaler is not None:  # a scaler skips by itself, and must see the overflow
            optimizer.step()
        taken = finite and not accelerator.optimizer_step_was_skipped
        return torch.full((), taken, device=accelerator.device)

    def finish_step(self, taken: Tensor, batches: int, epoch_batches: int) -> None:
        """Update the EMA, or undo the changes of a skipped step, and log.

        Args:
            batches: number of batches of the epoch so far
        """
        progress = self.progress
        accumulated, progress.batch, progress.step = batches - progress.batch, batches, progress.step + 1
        self.update_averages(taken)
        self.ended.append(EndedStep(DeviceValue(taken), accumulated, progress.step, self.guard.end_window()))
        if self.step_log.is_due(progress.step, last=batches == epoch_batches):
            epoch = progress.epoch + batches / epoch_batches
            self.points.append(self.step_log.point(progress.step, epoch, self.optimizer, self.batch_size))
        self.flush_pending(keep=self.behind)
        self.profiler.after(progress.step)

    def _update_averages(self, taken: Tensor) -> None:
        self.guard.keep_if(taken)
        with self.model.gathered():
            self.ema.update(*self.model.replicas, taken=taken)

    def flush_pending(self, keep: int = 0) -> None:
        """Count taken and skipped steps, all but the last `keep`, and log their points.

        Raises `UserError` on every process after too many skipped steps in a row.
        """
        progress = self.progress
        while len(self.ended) > keep:
            ended = self.ended.popleft()
            taken = ended.taken.read()
            progress.taken += ended.batches * taken
            progress.skipped += not taken
            if self.guard.count(taken):
                self._fail(ended)
        while self.points and self.points[0].step <= progress.step - keep:
            point = self.points.popleft()
            self.run.log_point(self.step_log.values(point), point.step)

    def _fail(self, ended: EndedStep) -> NoReturn:
        run, guard = self.run, self.guard
        suspects = run.collectives.gather(guard.suspects(ended.window, self.step_log.terms))
        images = sum(run.collectives.gather([sum(len(paths) for _, paths in ended.window)]))
        precision, lr0 = run.precision.name, self.schedule.lr0
        with self.model.gathered():
            skipped, bare = guard.skipped_in_a_row, self.model.bare
            cause = explain_skipped_steps(ended.step, skipped, suspects, images, bare, precision, lr0)
        run.files.wait_for_writing()
        raise UserError(f"{cause}; the last good state is in {run.path}")


def prepare_training(
    run: Run,
    model: Model,
    loader: DataLoader[Any],
    hyp: Recipe,
    options: OptimizerOptions,
    loss_names: Sequence[str],
    identity: Identity,
    saved: Mapping[str, Any] | None,
    factors: Factors = NO_FACTORS,
) -> tuple[OptimizerSteps, DataLoader[Any]]:
    """Make optimizer, schedule and EMA, let Accelerate prepare them, and load the `saved` state if there is one.

    Returns the steps and the prepared loader. All processes must call it together.

    Args:
        factors: factors of the learning rates, by parameter name
    """
    accelerator = run.accelerator
    place_model(accelerator, model)
    logical = LogicalProcesses.of(options, accelerator)
    factor = hyp.lr_factor * (logical.count if options.scale_lr else 1)
    hyp = replace(hyp, lr0=hyp.lr0 * factor, warmup_bias_lr=hyp.warmup_bias_lr * hyp.lr_factor)
    decay, groups = hyp.decay(options.batch_size), tuple(grouped_parameters(model, factors))
    optimizer: Any = build_optimizer(model, options.optimizer, hyp.lr0, hyp.momentum, decay, factors)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    schedule = select(Schedule, hyp, epochs=options.epochs, batches=len(loader), cosine=options.cos_lr, groups=groups)
    accumulation = accelerator.gradient_accumulation_steps
    updates = options.epochs * math.ceil(len(loader) / accumulation)
    ema = ModelEMA(model, ramp_of(hyp.ema_share, updates))
    run.print(*warmup_messages(schedule), *ramp_messages(ema.ramp, updates))
    if saved:
        load_weights(saved, model, ema)  # before `prepare`, in which ZeRO-3 partitions them
    distributed, optimizer, loader = prepare(
        accelerator,
        model,
        optimizer,
        loader,
        options,
        precision=run.precision.name,
        clip_norm=CLIP_NORM,
        keep_norms=bool(hyp.keep_norms),
    )
    ema.replicas = logical.replicate(ema.model)
    start_momentum(optimizer)
    state = TrainingState(
        identity=identity,
        progress=Progress(),
        replicas=distributed.replicas,
        parameters=parameters,
        ema=ema,
        optimizer=optimizer,
        scaler=accelerator.scaler,
        loss_sums=torch.zeros(logical.local, len(loss_names), device=accelerator.device),
        collectives=run.collectives,
        wandb_id=options.wandb_id,
    )
    if saved:
        state.load_state(saved)
    epoch_steps = math.ceil(len(loader) / accumulation)
    interval, shares = options.log_interval, logical.local
    step_log = StepLog(loss_names, accelerator, interval, epoch_steps, enabled=run.is_tracked, shares=shares)
    return OptimizerSteps(run, distributed, state, schedule, step_log, options), loader
