"""The optimizer steps of a run: clipped, skipped if not finite, averaged, counted and logged. Called by train.py.

On a GPU nothing here waits for the device, which decides whether a step is taken; the host reads that one step later.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from utils.checkpoint import TrainingState, floating_buffers
from utils.distributed.deepspeed import gathered_parameters
from utils.distributed.model import DistributedModel
from utils.errors import UserError
from utils.training.log import DeviceValue, Point, StepLog
from utils.training.optimizer import Schedule, step_if

if TYPE_CHECKING:
    from models.tasks.contract import Criterion, Task
    from utils.batch import Batch
    from utils.run import Run

MAX_SKIPS = 20  # consecutive optimizer steps whose gradients are not finite, after which a run ends
MAX_NAMED_IMAGES = 5  # images that a message names
HIDDEN_STEP = 1e-6  # length of a step, as a share of all weights' length, that rounding (6e-8) may hide, with a margin
StepBatches = list[tuple[Tensor, list[str]]]  # loss terms and image paths of each batch between two optimizer steps


class EndedStep(NamedTuple):
    """An optimizer step about which the host does not know yet whether it was taken."""

    taken: DeviceValue  # bool
    batches: int  # number of batches accumulated in the step
    step: int
    step_batches: StepBatches


class OptimizerSteps:
    """The optimizer steps of a run, over the parts that train.py has made and whose state is loaded.

    The order of the calls, with two batches to a step; `finish`, `end_epoch` and `save` call `flush`:

        batch 1:                 add
        batch 2:         step -> add -> finish (on a GPU counts the step before) [-> save, every --save-steps]
        end of epoch:    end_epoch (counts the last step) -> save -> next_epoch
    """

    def __init__(
        self,
        run: Run,
        model: DistributedModel,
        state: TrainingState,
        schedule: Schedule,
        loss_names: Sequence[str],
        profile_steps: str = "",
        hashes: bool = False,
    ) -> None:
        self.run, self.model, self.state, self.schedule = run, model, state, schedule
        self.hashes = None
        if hashes:  # write hashes.csv
            from utils.training.hashes import StepHashes

            self.hashes = StepHashes(run, model, loss_names, state)
        # MFU is a share of the peak of both threads.
        batch_size, gflops = state.measured.batch_size, getattr(model.model, "gflops", 0.0) / (2 if model.second else 1)
        self.log = StepLog(run, loss_names, schedule, batch_size, state.progress, profile_steps, gflops)
        self.optimizer, self.ema, self.progress = state.optimizer, state.ema, state.progress
        buffers = [buffer for copy in model.copies for buffer in floating_buffers(copy).values()]
        self.guard = NonFiniteGuard([state.loss_sums, *buffers])
        self.skipped_in_a_row = 0
        self.update_averages: Callable[[Tensor], object] = self._update_averages
        self.step_batches: StepBatches = []  # the batches since the last step
        self.ended: deque[EndedStep] = deque()
        self.points: deque[Point] = deque()  # points of the step curves that are not yet logged
        with gathered_parameters(model.parameters):  # a copy on the host, until a step has changed them
            self.initial = [parameter.detach().to("cpu", copy=True) for parameter in model.parameters]

    @property
    def lag(self) -> int:
        """Number of steps whose counting may wait: one on a GPU, so that the next is queued before the host waits."""
        return int(self.model.accelerator.device.type == "cuda")

    def captured(self, task: Task, criterion: Criterion, wanted: bool) -> Criterion:
        """Let networks, loss and averages replay their kernels, if `wanted` and possible; return the loss to use."""
        if self.model.accelerator.device.type != "cuda":
            return criterion
        from utils.training.cuda_graph import CapturedCall, can_capture, capture_kernels

        capture = wanted and can_capture(self.model)
        if capture:
            self.update_averages = CapturedCall(self._update_averages)
        return capture_kernels(self.model, task, criterion, capture)

    def step(self) -> Tensor:
        """Clip the gradients and take a step if they are finite; return whether it was taken, bool () on the device.

        The norm is computed from the reduced gradients, so all processes skip the same steps.
        """
        accelerator, optimizer = self.run.accelerator, self.optimizer
        if self.hashes:
            self.hashes.add_gradients()
        norm = self.log.norm = accelerator.clip_grad_norm_(self.model.parameters, self.schedule.hyp.clip_norm)
        if accelerator.scaler is None and isinstance(norm, Tensor) and self.lag:
            return step_if(optimizer, norm.isfinite())  # not `if`: the host would wait for the GPU in each step
        finite = norm is None or math.isfinite(norm)
        if finite or accelerator.scaler is not None:  # a scaler skips by itself, and must see the overflow
            optimizer.step()
        taken = finite and not accelerator.optimizer_step_was_skipped
        return torch.full((), taken, device=accelerator.device)

    def add(self, losses: Sequence[Tensor], batches: Sequence[Batch]) -> None:
        """Add the batch and the share in its loss terms, (k,), of each local logical process to the epoch's sums."""
        local = torch.stack(list(losses)).detach()
        self.state.loss_sums += local
        self.log.add(local)
        if self.hashes:
            self.hashes.add(self.model.sum(list(local)), batches)
        paths = [[info.path for info in batch.infos] for batch in batches]
        self.step_batches += zip(local, paths, strict=True)

    def finish(self, taken: Tensor, batches: int, epoch_batches: int) -> None:
        """Update the EMA, or undo the changes of a skipped step, and log, after `batches` of the epoch."""
        progress = self.progress
        accumulated, progress.batch, progress.step = batches - progress.batch, batches, progress.step + 1
        self.update_averages(taken)
        if self.hashes:
            self.hashes.finish(progress)
        batches_of_step, self.step_batches = self.step_batches, []
        self.ended.append(EndedStep(DeviceValue(taken), accumulated, progress.step, batches_of_step))
        epoch = progress.epoch + batches / epoch_batches
        if self.log.is_due(progress.step, last=batches == epoch_batches):
            self.points.append(self.log.point(progress.step, epoch, self.optimizer, self.model.sum))
        self.flush(keep=self.lag)
        self.log.profile(progress.step)

    def _update_averages(self, taken: Tensor) -> None:
        self.guard.keep_if(taken)
        with gathered_parameters(self.model.parameters):
            self.ema.update(*self.model.copies, taken=taken)

    def flush(self, keep: int = 0) -> None:
        """Count and log all steps but the last `keep`. Raises `UserError` on every process if too many are skipped."""
        progress = self.progress
        while len(self.ended) > keep:
            ended = self.ended.popleft()
            taken = ended.taken.read()
            progress.taken += ended.batches * taken
            progress.skipped += not taken
            self.skipped_in_a_row = 0 if taken else self.skipped_in_a_row + 1
            if self.skipped_in_a_row >= MAX_SKIPS:
                self._fail(ended)
        if self.hashes:
            self.hashes.write(keep)
        while self.points and self.points[0].step <= progress.step - keep:
            point = self.points.popleft()
            self.run.log_point(self.log.values(point), point.step)

    def end_epoch(self) -> dict[str, float]:
        """Return the mean of each loss term over the epoch's batches, the same on every process; average statistics."""
        self.flush()
        self.check_training()
        self.model.average_statistics(self.ema.replicas)
        means = self.model.sum(list(self.state.loss_sums)) / self.progress.taken
        return dict(zip(self.log.terms, means.tolist(), strict=True))

    def next_epoch(self) -> None:
        self.progress.next_epoch()
        self.state.loss_sums.zero_()
        self.guard.snapshot()

    def save(self, keep_tensors: bool = True) -> None:
        """Save what --resume needs, of a finished run the counters only. All processes must call it together."""
        self.flush()
        self.check_training()
        self.state.save(self.run.files.save_state, keep_tensors)

    def check_training(self) -> None:
        """Raise `UserError` on every process if no weight has changed by a bit, but the last step was long enough."""
        with gathered_parameters(self.model.parameters if self.initial else ()):
            if not all(map(torch.equal, map(Tensor.cpu, self.model.parameters), self.initial)):
                self.initial = []
        # SGD's step is at least as long as the lowest rate times the clipped gradient's norm, Adam's a tenth of that.
        rate, norm = min(group["lr"] for group in self.optimizer.param_groups), float(self.log.norm or 0)
        length = rate * min(norm, self.schedule.hyp.clip_norm)
        if self.initial and math.isfinite(norm) and length > HIDDEN_STEP * nn.utils.get_total_norm(self.initial):
            raise UserError(
                f"no weight has changed, although the last optimizer step had the learning rate {rate:g} and gradients "
                f"of norm {norm:g}; nothing is saved; install the versions in constraints.txt, or use another launcher"
            )

    def _fail(self, ended: EndedStep) -> NoReturn:
        run, terms, images = self.run, dict[str, None](), list[str]()
        for losses, paths in run.collectives.gather([(losses.tolist(), paths) for losses, paths in ended.step_batches]):
            if bad := [name for name, value in zip(self.log.terms, losses, strict=True) if not math.isfinite(value)]:
                terms, images = terms | dict.fromkeys(bad), images + paths
        suspects = f" (not finite: {', '.join(terms)} of {', '.join(images[:MAX_NAMED_IMAGES])})" if terms else ""
        run.files.wait_for_writing()
        raise UserError(
            f"{MAX_SKIPS} optimizer steps in a row were skipped, because the gradients were not finite; the last is "
            f"step {ended.step}{suspects}; check the images and their labels, and try a lower lr0 than "
            f"{self.schedule.hyp.lr0:g}, or --mixed-precision no; the last good state is in {run.path}"
        )


class NonFiniteGuard:
    """Restores what the batches of a skipped step have changed in place: loss sums, BatchNorm's statistics."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.live = [tensor.detach() for tensor in tensors]
        self.saved = torch.cat([tensor.flatten() for tensor in self.live])
        parts = self.saved.split([tensor.numel() for tensor in self.live])
        self._parts = [part.view_as(live) for part, live in zip(parts, self.live, strict=True)]

    def snapshot(self) -> None:
        """Save the current values of the tensors, to restore them later."""
        torch.cat([tensor.flatten() for tensor in self.live], out=self.saved)

    @torch.no_grad()
    def keep_if(self, taken: Tensor) -> None:
        """Save the values after a step that was `taken`, bool () on the device, or restore them, without waiting."""
        now = torch.cat([tensor.flatten() for tensor in self.live])
        self.saved.copy_(torch.where(taken, now, self.saved))
        torch._foreach_copy_(self.live, self._parts)
