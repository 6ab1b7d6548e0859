"""Capture kernels as CUDA graphs, so that the host launches a few graphs a step, not thousands of kernels.

Called by train.py and steps. A step of a small network takes as long as the host takes to launch its kernels, whatever
the GPU. A graph repeats the same kernels on the same memory, so no byte of a run changes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import InitVar, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import DynamoBackend
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_flatten, tree_unflatten

from utils.console import log
from utils.distributed.model import DistributedModel

if TYPE_CHECKING:
    from models.tasks.contract import Criterion, Function, Task

WARM_UP_CALLS = 3  # calls before a capture: libraries then have their handles and workspaces
# Largest share of a device's memory that training may use with a capture. A graph keeps the memory that it uses, so
# validation and other batches need memory of their own.
MEMORY_SHARE = 0.4
MAX_CAPTURES = 12  # of a function; with further shapes it is called
CAPTURABLE_PACKAGES = {"models", "torch", "torchvision", "utils"}  # whose layers are known to work
CAPTURE_MODE = "thread_local"  # other threads, such as the one that pins batches, may use CUDA during a capture


def can_capture(model: DistributedModel) -> bool:
    """Return whether the kernels of a training step on a GPU can be captured: no layer may wait for another process.

    A user's layer may do what a capture does not repeat, such as counting its calls. A compiled model has kernels of
    its own.
    """
    state = model.accelerator.state
    packages = {type(layer).__module__.partition(".")[0] for layer in model.layers}
    waits = state.deepspeed_plugin is not None or any(isinstance(layer, nn.SyncBatchNorm) for layer in model.layers)
    compiled = state.dynamo_plugin.backend != DynamoBackend.NO
    return packages <= CAPTURABLE_PACKAGES and not (waits or compiled)


def capture_kernels(model: DistributedModel, task: Task, criterion: Criterion, enabled: bool) -> Criterion:
    """Let the networks and the loss of a training replay their kernels, if `enabled`; return the loss to train with."""
    if not enabled:
        return criterion.for_gpu(lambda function: function)
    capturer = Capturer(copies=not model.logical.exact)
    networks: Any = model.copies
    if hasattr(networks[0], "capturer"):  # only a `YoloModel` has rows
        together = RowsTogether(model, task, capturer) if len(networks) > 1 else None
        for number, network in enumerate(networks):
            network.capturer = CapturedRows(network, capturer, together, number)
    return criterion.for_gpu(partial(capturer.captured, turns=len(networks)))


class Capturer:
    """Captures the functions of a training step, as long as there is memory for it and none fails."""

    def __init__(self, copies: bool = True) -> None:
        self.enabled = True
        self.copies = copies  # whether to copy the gradients of parameters, which the next replay overwrites
        self.memory: set[int] = set()  # addresses of captured outputs, which other captures read in place

    def captured(self, function: Function, module: nn.Module | None = None, turns: int = 1) -> Function:
        """Return a function that does the same, and replays its kernels if it can.

        Args:
            function: takes and returns tensors in nested lists, tuples and dicts; changes nothing but buffers, in place
            module: module whose parameters it uses
            turns: number of calls in a step: each has captures of its own, as their outputs are read until the end
        """
        return CapturedFunction(function, module, self, turns)

    def has_room(self, device: torch.device) -> bool:
        """Return whether training leaves enough memory for captures."""
        total = torch.cuda.get_device_properties(device).total_memory
        return self.enabled and torch.cuda.max_memory_allocated(device) <= MEMORY_SHARE * total

    def fail(self, error: Exception) -> None:
        """Make no further capture."""
        self.enabled, cause = False, str(error).splitlines()[0]
        log(f"warning: kernels cannot be captured as a CUDA graph, which is slower: {cause}")


class CapturedRows:
    """Takes the place of a `YoloModel`'s `run_rows` in training."""

    def __init__(self, model: Any, capturer: Capturer, together: RowsTogether | None = None, number: int = 0) -> None:
        self.model, self.capturer, self.together, self.number = model, capturer, together, number
        self.parts: dict[tuple[int, int], Function] = {}  # by first row and end

    def __call__(self, maps: dict[int, Any], first: int, until: int, hints: Sequence[Tensor] = ()) -> dict[int, Any]:
        """Do the same as `YoloModel.run_rows`."""
        if not (self.model.training and torch.is_grad_enabled()):
            return self.model.run_rows(maps, first, until, hints)
        if self.together and self.together.model.batches and first == 0:
            return self.together.maps(self.number, maps[-1], until)
        if (first, until) not in self.parts:
            run = partial(self.model.run_rows, first=first, until=until)
            self.parts[first, until] = self.capturer.captured(lambda maps, hints: run(maps, hints=hints), self.model)
        return self.parts[first, until](maps, tuple(hints))


class RowsTogether:
    """Runs the rows of all logical processes' networks in one capture, at the same time: a share of a batch is small.

    The task makes the inputs of the other networks when the first one is called.
    """

    def __init__(self, model: DistributedModel, task: Task, capturer: Capturer) -> None:
        self.model, self.task = model, task
        self.networks: Sequence[Any] = model.copies
        self.streams = [torch.cuda.Stream() for _ in self.networks]
        self.captured = capturer.captured(self._run, nn.ModuleList(self.networks))
        self.until = 0
        self.outputs: list[dict[int, Any]] = []
        model.joined_graphs = True

    def maps(self, number: int, images: Tensor, until: int) -> dict[int, Any]:
        """Return what network `number` returns for its batch; the first call of a step runs all networks."""
        if number == 0:
            self.until = until
            inputs = [self.task.inputs(batch) for batch in self.model.batches[1:]]
            self.outputs = self.captured(images, *inputs)
        return self.outputs[number]

    def _run(self, *images: Tensor) -> list[dict[int, Any]]:
        outputs, current = [], torch.cuda.current_stream()
        streams = self.streams if torch.cuda.is_current_stream_capturing() else [current] * len(images)
        for network, batch_images, stream in zip(self.networks, images, streams, strict=True):
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                outputs.append(network.run_rows({-1: batch_images}, 0, self.until))
        for stream in streams:
            current.wait_stream(stream)
        return outputs


class CapturedFunction:
    """A function, see `Capturer.captured`, whose kernels are replayed from the fourth call of the same shapes on."""

    def __init__(self, function: Function, module: nn.Module | None, capturer: Capturer, turns: int) -> None:
        self.part, self.capturer, self.turns, self.turn = _Part(function, module), capturer, turns, 0
        self.parameters = {name: tensor for name, tensor in self.part.named_parameters() if tensor.requires_grad}
        self.calls: Counter[Any] = Counter()
        self.captures: dict[Any, Capture] = {}
        self.pools: list[Any] = [None] * turns  # of memory: only one capture of a turn is used in a step

    def __call__(self, *inputs: Any) -> Any:
        """Call the function, or replay it with these inputs; a replay's outputs are overwritten by the next one."""
        leaves, structure = tree_flatten(inputs)
        turn, self.turn = self.turn, (self.turn + 1) % self.turns
        key = (turn, *((tensor.shape, tensor.dtype, tensor.requires_grad) for tensor in leaves))
        if key not in self.captures:
            self.calls[key] += 1
            full = len(self.captures) >= MAX_CAPTURES * self.turns
            if self.calls[key] <= WARM_UP_CALLS or full or not self.capturer.has_room(leaves[0].device):
                return self.part(*inputs)
            try:
                self.captures[key] = self._capture(leaves, structure, turn)
            except RuntimeError as error:
                self.capturer.fail(error)
                return self.part(*inputs)
        capture = self.captures[key]
        outputs = _Replay.apply(capture, len(leaves), *leaves, *self.parameters.values())
        return tree_unflatten(outputs, capture.structure)

    def _capture(self, leaves: Sequence[Tensor], structure: Any, turn: int) -> Capture:
        self.pools[turn] = self.pools[turn] or torch.cuda.graph_pool_handle()
        memory = self.capturer.memory
        inputs = [tensor.detach() if tensor.data_ptr() in memory else torch.empty_like(tensor) for tensor in leaves]
        inputs = [buffer.requires_grad_(tensor.requires_grad) for buffer, tensor in zip(inputs, leaves, strict=True)]
        capture = Capture(self.part, self.parameters, inputs, structure, self.pools[turn], self.capturer.copies)
        memory.update(tensor.data_ptr() for tensor in capture.outputs)
        return capture


class _Part(nn.Module):
    """A function and the module whose parameters it uses, so that a capture can give it others."""

    def __init__(self, function: Function, module: nn.Module | None) -> None:
        super().__init__()
        self.function, self.module = function, module

    def forward(self, *inputs: Any) -> Any:
        return self.function(*inputs)


@dataclass(eq=False)
class Capture:
    """The kernels of the forward and the backward pass of a function, for inputs of certain shapes.

    Nothing is computed while they are captured. Raises RuntimeError if something waits for the device, or if the memory
    is too small.
    """

    part: InitVar[nn.Module]
    parameters: InitVar[Mapping[str, Tensor]]  # of `part`, which are trained
    inputs: Sequence[Tensor]  # which a replay reads; they are filled before it
    structure: Any  # nested lists, tuples and dicts of the inputs, then of the outputs
    pool: InitVar[Any]
    copies: bool

    def __post_init__(self, part: nn.Module, parameters: Mapping[str, Tensor], pool: Any) -> None:
        # Aliases, since the parameters themselves may belong to autograd's graph of this step, or to DDP.
        inputs, aliases = self.inputs, {name: tensor.detach().requires_grad_() for name, tensor in parameters.items()}
        self.forward, self.backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        # Without autocast's cache: a replay must convert the weights anew.
        with (
            torch.autocast("cuda", enabled=torch.is_autocast_enabled("cuda"), cache_enabled=False),
            torch.cuda.graph(self.forward, pool, capture_error_mode=CAPTURE_MODE),
        ):
            outputs = functional_call(part, aliases, tree_unflatten(inputs, self.structure))
        leaves, self.structure = tree_flatten(outputs)
        trained, sources = ([tensor for tensor in tensors if tensor.requires_grad] for tensors in (leaves, inputs))
        self.upstream = [torch.zeros_like(tensor) for tensor in trained]
        self.is_trained = [tensor.requires_grad for tensor in leaves]
        self.outputs = [tensor.detach() for tensor in leaves]
        sources += aliases.values()
        gradients: Sequence[Tensor | None] = [None] * len(sources)
        if trained and sources:
            with torch.cuda.graph(self.backward, pool, capture_error_mode=CAPTURE_MODE):
                gradients = torch.autograd.grad(trained, sources, self.upstream, allow_unused=True)
        count = len(sources) - len(aliases)
        input_gradients = iter(gradients[:count])
        self.input_gradients = [next(input_gradients) if tensor.requires_grad else None for tensor in inputs]
        self.parameter_gradients = gradients[count:]


class _Replay(torch.autograd.Function):
    """Replays a `Capture`. It takes inputs and parameters so that autograd asks for their gradients."""

    @staticmethod
    def forward(ctx: Any, capture: Capture, count: int, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.capture = capture
        ctx.set_materialize_grads(False)
        _copy(capture.inputs, inputs[:count])
        capture.forward.replay()
        outputs = [tensor.detach() for tensor in capture.outputs]
        untrained = [tensor for tensor, trained in zip(outputs, capture.is_trained, strict=True) if not trained]
        ctx.mark_non_differentiable(*untrained)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        capture = ctx.capture
        received = [tensor for tensor, trained in zip(upstream, capture.is_trained, strict=True) if trained]
        for buffer, tensor in zip(capture.upstream, received, strict=True):
            if tensor is None:
                buffer.zero_()
        _copy(capture.upstream, received)
        capture.backward.replay()
        parameter_gradients = capture.parameter_gradients
        gradients = [tensor for tensor in parameter_gradients if tensor is not None]
        if gradients and capture.copies:
            copies = iter(torch._foreach_mul(gradients, 1.0))
            parameter_gradients = [None if tensor is None else next(copies) for tensor in parameter_gradients]
        return None, None, *capture.input_gradients, *parameter_gradients


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor | None]) -> None:
    """Copy the sources that are not where they are to be already."""
    pairs = [(target, tensor) for target, tensor in zip(targets, sources, strict=True) if tensor is not None]
    pairs = [(target, tensor) for target, tensor in pairs if target.data_ptr() != tensor.data_ptr()]
    if pairs:
        torch._foreach_copy_([target for target, _ in pairs], [tensor for _, tensor in pairs])


class CapturedCall:
    """Calls a function of one tensor, and replays its kernels from the fourth call on, if they can be captured.

    The function changes the same tensors in place each time, and waits for nothing.
    """

    def __init__(self, call: Callable[[Tensor], object]) -> None:
        self.call, self.calls = call, 0
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, value: Tensor) -> None:
        """Call the function, or replay it with the content of `value`."""
        self.calls += 1
        if self.calls == WARM_UP_CALLS + 1:
            self.input, graph = value.clone(), torch.cuda.CUDAGraph()
            with suppress(RuntimeError):
                with torch.cuda.graph(graph, capture_error_mode=CAPTURE_MODE):
                    self.call(self.input)
                self.graph = graph
        if self.graph is None:
            self.call(value)
        else:
            self.input.copy_(value)
            self.graph.replay()
