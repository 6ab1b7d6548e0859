"""Record a network's kernels as CUDA graphs, so that the host launches two graphs a step, not thousands of kernels.

Called by steps. A step of a small network takes as long as the host takes to launch its kernels, whatever
the GPU. A graph repeats the same kernels on the same memory, so no byte of a run changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from accelerate.utils import DynamoBackend
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from utils.distributed.logical import DistributedModel

WARM_UP_CALLS = 3  # batches before the recording: libraries then have their handles and workspaces
# Largest share of a device's memory that training may use with a recording. What a graph uses is lent to nothing else,
# so validation and other batches need memory of their own.
MEMORY_SHARE = 0.4
RECORDABLE_PACKAGES = {"models", "torch", "torchvision", "utils"}  # whose layers are known to work
CAPTURE_MODE = "thread_local"  # other threads, such as the one that pins batches, may use CUDA during a recording


def can_record(model: DistributedModel) -> bool:
    """Return whether kernels of a training step can be recorded: on one GPU, where none waits for another process.

    A user's layer may do what a recording does not repeat, such as counting its calls.
    """
    accelerator = model.accelerator
    alone = accelerator.num_processes == 1 and accelerator.state.deepspeed_plugin is None
    packages = {type(layer).__module__.partition(".")[0] for layer in model.layers}
    return accelerator.device.type == "cuda" and alone and packages <= RECORDABLE_PACKAGES


def record_networks(model: DistributedModel, warn: Callable[[str], object]) -> None:
    """Let the logical processes' networks record their kernels after a few batches.

    A compiled model has kernels of its own, and only a `YoloModel` has rows.

    Args:
        warn: is called with a sentence if a recording fails
    """
    compiled = model.accelerator.state.dynamo_plugin.backend != DynamoBackend.NO
    recordings: list[RecordedRows] = []
    if not compiled:
        recordings += [RecordedRows(each, warn, recordings) for each in model.copies if hasattr(each, "recorder")]


class RecordedRows:
    """Takes the place of a `YoloModel`'s `run_rows`: replays a recording for training batches of the recorded shape.

    Other calls run the rows: those of the first batches, of evaluation, and of the rows after a head's hints.

    Args:
        together: all recordings of a process, which are made together: once a replay has begun a step, its parameters
            belong to autograd's graph of that step
    """

    def __init__(self, model: Any, warn: Callable[[str], object], together: Sequence[RecordedRows]) -> None:
        self.model, self.run_rows, self.warn, self.together = model, model.run_rows, warn, together
        self.calls, self.enabled = 0, True
        self.recording: Recording | None = None
        model.recorder = self

    def __call__(self, images: Tensor, until: int) -> dict[int, Any]:
        """Do the same as `YoloModel.run_rows` for the rows before `until`."""
        maps = {-1: images}
        if not self.enabled or not self.model.training:
            return self.run_rows(maps, 0, until)
        if self.recording is None and torch.is_grad_enabled():
            self.calls += 1
            if self.calls > WARM_UP_CALLS:
                self._record(images, until)
        if self.recording is None or not self.recording.fits(images, until):
            return self.run_rows(maps, 0, until)
        return self.recording(images)

    def drop(self) -> None:
        """Free the recording's memory, and make no other."""
        self.recording, self.enabled = None, False

    def _record(self, images: Tensor, until: int) -> None:
        """Record all models of the process, or none."""
        total = torch.cuda.get_device_properties(images.device).total_memory
        too_large = torch.cuda.max_memory_allocated(images.device) > MEMORY_SHARE * total
        try:
            for each in () if too_large else self.together:
                each.recording = Recording(each.model, each.run_rows, images, until)
        except RuntimeError as error:
            too_large, cause = True, str(error).splitlines()[0]
            self.warn(f"warning: the network's kernels cannot be recorded as a CUDA graph, which is slower: {cause}")
        for each in self.together if too_large else ():
            each.drop()


class Recording:
    """The kernels of the forward and the backward pass of a model's rows, for images of one shape.

    Nothing is computed while they are recorded.

    Raises RuntimeError if a layer waits for the device, or if the memory is too small.

    Args:
        run_rows: the model's own method
        images: a batch of that shape, (b, 3, h, w)
        until: number of rows to run
    """

    def __init__(self, model: nn.Module, run_rows: Callable[..., Any], images: Tensor, until: int) -> None:
        self.until, self.images = until, torch.empty_like(images)
        self.parameters = [each for each in model.parameters() if each.requires_grad]
        self.forward, self.backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        pool, dtype = torch.cuda.graph_pool_handle(), torch.get_autocast_dtype("cuda")
        # Without autocast's cache: a replay must convert the weights anew.
        with (
            torch.autocast("cuda", dtype, torch.is_autocast_enabled("cuda"), cache_enabled=False),
            torch.cuda.graph(self.forward, pool, capture_error_mode=CAPTURE_MODE),
        ):
            outputs = run_rows({-1: self.images}, 0, until)
        leaves, self.structure = tree_flatten(outputs)
        trained = [each for each in leaves if each.requires_grad]
        self.upstream = [torch.zeros_like(each) for each in trained]
        self.gradients: Sequence[Tensor | None] = [None] * len(self.parameters)
        if trained and self.parameters:
            with torch.cuda.graph(self.backward, pool, capture_error_mode=CAPTURE_MODE):
                self.gradients = torch.autograd.grad(trained, self.parameters, self.upstream, allow_unused=True)
        self.outputs = [each.detach() for each in leaves]
        self.is_trained = [each.requires_grad for each in leaves]

    def fits(self, images: Tensor, until: int) -> bool:
        """Return whether the recording is one of these rows for such images."""
        return (images.shape, images.dtype, until) == (self.images.shape, self.images.dtype, self.until)

    def __call__(self, images: Tensor) -> dict[int, Any]:
        """Run the rows; the outputs are overwritten by the next call."""
        outputs: dict[int, Any] = tree_unflatten(_Replay.apply(self, images, *self.parameters), self.structure)
        return outputs


class _Replay(torch.autograd.Function):
    """Replays a `Recording` of images, whose parameters are given so that autograd asks for their gradients."""

    @staticmethod
    def forward(ctx: Any, recording: Recording, images: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.recording = recording
        recording.images.copy_(images)
        recording.forward.replay()
        outputs = [each.detach() for each in recording.outputs]
        untrained = [each for each, trained in zip(outputs, recording.is_trained, strict=True) if not trained]
        ctx.mark_non_differentiable(*untrained)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        recording = ctx.recording
        given = [each for each, trained in zip(upstream, recording.is_trained, strict=True) if trained]
        for kept, each in zip(recording.upstream, given, strict=True):
            kept.zero_() if each is None else kept.copy_(each)
        recording.backward.replay()
        # Copies, because the next replay overwrites the recorded gradients, and a step may accumulate several batches'.
        copies = iter(torch._foreach_mul([each for each in recording.gradients if each is not None], 1.0))
        return None, None, *(None if each is None else next(copies) for each in recording.gradients)


class RecordedCall:
    """Calls a function of one tensor, and replays its kernels from the fourth call on, if they can be recorded.

    Args:
        call: function that changes the same tensors in place each time, and waits for nothing
    """

    def __init__(self, call: Callable[[Tensor], object]) -> None:
        self.call, self.calls = call, 0
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, given: Tensor) -> None:
        """Call the function, or replay it with the value of `given`."""
        self.calls += 1
        if self.calls == WARM_UP_CALLS + 1:
            self._record(given)
        if self.graph is None:
            self.call(given)
        else:
            self.given.copy_(given)
            self.graph.replay()

    def _record(self, given: Tensor) -> None:
        self.given, graph = given.clone(), torch.cuda.CUDAGraph()
        with suppress(RuntimeError):
            with torch.cuda.graph(graph, capture_error_mode=CAPTURE_MODE):
                self.call(self.given)
            self.graph = graph
