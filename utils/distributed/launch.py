"""The start of a run: a process per device, how they connect, the Accelerator, its precision, and the seeds."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess
from multiprocessing.util import get_temp_dir
from pickle import PicklingError
from types import ModuleType
from typing import Any, NamedTuple

import psutil
import torch
from accelerate import Accelerator, DataLoaderConfiguration, DistributedDataParallelKwargs, PartialState
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DynamoBackend, gather_object, set_seed
from torch.distributed import PrefixStore, Store, TCPStore
from torch.distributed.rendezvous import register_rendezvous_handler

from utils.config.flags import PRECISIONS
from utils.console import log
from utils.distributed import deepspeed
from utils.distributed.failure import keep_freed_memory, run_main, stop_signals
from utils.distributed.ranks import (
    LOOPBACK,
    TASKS,
    RunStore,
    available_cores,
    broadcast_from_main,
    check_variable,
    launch_number,
    main_address,
    open_store,
    ranks,
    restart_key,
    store_is_hosted,
    variables_named,
    world_size,
)
from utils.distributed.tree import LogicalProcesses
from utils.errors import UserError, first_line, plural

RENDEZVOUS = "lockstep"  # init_method of torch's process group: `_rendezvous`
# Seconds added to torch's own time-out, so that the watchdog, which knows the lagging process, ends the run first.
COLLECTIVE_MARGIN_SECONDS = 10.0
SHUTDOWN_SECONDS = 10.0  # time between the failure of a spawned process and the killing of the others
VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
# Set by `accelerate launch`, from its file or command line. It is also 'no' if neither names a precision, so 'no' does
# not count as a choice; --mixed-precision no trains in float32.
LAUNCHER_PRECISION = "ACCELERATE_MIXED_PRECISION"
_chosen: list[Any] = []  # numbers of an earlier --device in this process, and the value of the variable that it set


# The Accelerator


class Precision(NamedTuple):
    """The precision of autocast, one of `PRECISIONS`, and the reason for it."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"mixed precision {self.name} ({self.reason})"


def start(device: str, mixed_precision: str, timeout: float) -> tuple[Accelerator, Precision]:
    """Connect all processes as `connect` does, and make an Accelerator for global batches. Raises `UserError`."""
    device_type, by_zero = connect(device, timeout), deepspeed.is_requested()
    precision = broadcast_from_main(lambda: choose_precision(mixed_precision, device_type, by_zero))
    if device_type == "cpu":
        keep_freed_memory()  # activations are allocated anew in each step
    with variables_named():
        return Accelerator(
            cpu=device_type == "cpu" and not by_zero,
            mixed_precision="no" if by_zero else precision.name,
            dataloader_config=DataLoaderConfiguration(split_batches=True, dispatch_batches=False, non_blocking=True),
            step_scheduler_with_optimizer=False,
            kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)],
        ), precision


def choose_precision(flag: str, device: str, by_zero: bool) -> Precision:
    """Return the precision that a flag names, else the launcher's, else the one in which the device is fast.

    Raises `UserError` for one that is not supported: DeepSpeed's autocast has no loss scaling, so no fp16, and
    Accelerate would silently compute fp16 on a CPU in float32.
    """
    launcher_precision = (os.environ.get(LAUNCHER_PRECISION) or "no").lower()
    if flag:
        precision = Precision(flag, "by a flag")
    elif launcher_precision != "no":
        precision = Precision(launcher_precision, f"named by the launcher, {LAUNCHER_PRECISION}")
    elif device != "cuda":
        precision = Precision("no", f"the default on {device}")
    elif torch.cuda.is_bf16_supported(including_emulation=False):
        precision = Precision("bf16", "the default on this GPU")
    else:
        precision = Precision("no" if by_zero else "fp16", "the default on this GPU, which has no fast bf16")
    supported = [name for name in PRECISIONS if name != "fp16" or not (by_zero or device == "cpu")]
    if precision.name not in supported:
        where = "with DeepSpeed" if by_zero else f"on {device}"
        raise UserError(f"{precision} is not supported {where}; use one of {', '.join(supported)}")
    return precision


def seed_everything(seed: int, deterministic: bool = True) -> None:
    """Seed the random numbers outside the data path (initial weights), and select deterministic kernels or say so."""
    set_seed(seed)
    if not deterministic:
        torch.use_deterministic_algorithms(False)  # an earlier run in this Python process may have set it
        log("--no-deterministic: on a GPU, equal runs differ by rounding")
    elif torch.cuda.is_available():
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic with a fixed workspace
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def reset_accelerate() -> None:
    """Reset Accelerate's global state, so that this process can start another run."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def log_plan(accumulated: int, logical: LogicalProcesses, batch_size: int, batches: int, epochs: int) -> None:
    """Log the batch size, how the processes share it, and the optimizer steps of an epoch of `batches`."""
    per_step, steps = plural(accumulated, "batch"), plural(math.ceil(batches / accumulated), "optimizer step")
    images = plural(batch_size * accumulated, "image")
    log(f"batch size {batch_size} ({logical.plan(batch_size)}), {per_step} per optimizer step ({images})")
    log(f"{plural(batches, 'batch')}, {steps} per epoch; {plural(epochs, 'epoch')}")


def log_devices(accelerator: Accelerator, precision: Precision) -> list[str]:
    """Log torch's version, device, precision and compiler of a run; return the host and device of each process.

    All processes must call it together. The devices are logged too if there are several.
    """
    device, hardware = accelerator.device, describe_device(accelerator.device)
    devices = gather_object([f"{socket.gethostname()} {device} ({hardware})"])
    line = f"torch {torch.__version__}, {device} ({hardware}), {plural(len(devices), 'process')}"
    if plugin := accelerator.state.deepspeed_plugin:
        line += f" under DeepSpeed ZeRO-{plugin.deepspeed_config['zero_optimization']['stage']}"
    if (compiler := accelerator.state.dynamo_plugin.backend) != DynamoBackend.NO:
        line += f", compiled by {compiler.value.lower()}"
    log(f"{line}, {precision}")
    if len(devices) > 1:
        log(*(f"  process {rank}: {name}" for rank, name in enumerate(devices)))
    elif {"ACCELERATE_USE_CPU", "MASTER_ADDR"} <= os.environ.keys():  # set together if it was to start several
        log("warning: accelerate launch started one process only; give the script --processes N instead")
    return devices


# The process group


def connect(device: str, timeout: float) -> str:
    """Connect all processes, unless they are connected, and return the device's kind. Raises `UserError`."""
    if PartialState._shared_state:
        return PartialState().device.type
    device_type, by_zero = select_device_type(device), deepspeed.is_requested()
    is_launched = world_size() > 1 or "LOCAL_RANK" in os.environ
    for name in ("DEEPSPEED", "FSDP", "MEGATRON_LM", "PARALLELISM_CONFIG", "SAGEMAKER")[is_launched:]:
        is_off = os.environ.get(f"ACCELERATE_USE_{name}", "").lower() in ("", "false", "no", "off", "0")
        check_variable(f"ACCELERATE_USE_{name}", is_off, "and not supported by this launch")
    if world_size() > 1:
        _prepare_processes()
    elif not os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(min(torch.get_num_threads(), cores_per_process()))  # torch ignores a container's quota
    for name in TASKS if world_size() == 1 else ():
        os.environ.pop(name, None)  # Accelerate would wait for the other tasks of mpirun
    if by_zero:
        launch_number("ACCELERATE_DEEPSPEED_ZERO_STAGE", 2, maximum=3)
        deepspeed.prepare_environment(device_type == "cpu")
    try:
        with variables_named():
            PartialState(
                cpu=device_type == "cpu" and not by_zero,  # with cpu=True Accelerate would silently not use DeepSpeed
                timeout=timedelta(seconds=timeout + COLLECTIVE_MARGIN_SECONDS),
                backend="gloo" if by_zero and device_type == "cpu" else None,
                init_method=f"{RENDEZVOUS}://",
            )
    except (RuntimeError, OSError, UnicodeError) as error:
        address, port = main_address()
        raise UserError(
            f"the processes cannot connect: {address} port {port} cannot be reached within {timeout:g} s by all of "
            f"them ({first_line(error, 300)}): start all with one free and open port (--main_process_port), raise "
            "--dist-timeout, or name the network's interface in GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME"
        ) from None
    log.is_main = ranks().rank == 0  # not the first process of each machine
    return device_type


def _prepare_processes() -> None:
    """Set the number of threads, and gloo's network interface to the one with a route to the main process.

    By default gloo uses the interface of the host name: the loopback, or one that others on the network can reach.
    """
    os.environ.setdefault("LOCAL_RANK", "0")  # needed by Accelerate, and not set on some clusters
    os.environ["MASTER_ADDR"] = main_address()[0]
    if not launch_number("OMP_NUM_THREADS"):
        os.environ["OMP_NUM_THREADS"] = str(max(cores_per_process(), 1))
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    with suppress(OSError, UnicodeError, KeyError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        interfaces = {known.address: name for name, addresses in psutil.net_if_addrs().items() for known in addresses}
        probe.connect((main_address()[0], 9))  # selects the route, sends nothing
        (here, _), (main, _) = probe.getsockname(), probe.getpeername()
        if main != here != LOOPBACK and ranks().rank == 0 and not store_is_hosted():
            log(f"warning: MASTER_ADDR {main} is no address of this machine, which has rank 0; correct the wrong one")
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interfaces[here])


def _rendezvous(url: str, timeout: timedelta, **_: Any) -> Iterator[tuple[Store, int, int]]:
    """Connect to the store as torch does, but not find the addresses of before a restart in a launcher's store."""
    seconds = timeout.total_seconds() - COLLECTIVE_MARGIN_SECONDS
    store, keys = open_store(seconds), [restart_key(f"connected/{rank}") for rank in range(world_size())]
    store.set(keys[ranks().rank], "")
    end = time.monotonic() + seconds
    while not store.check(keys) and time.monotonic() < end:
        time.sleep(0.05)  # not `store.wait`: no other thread could learn that a process has failed
    if missing := [str(rank) for rank, key in enumerate(keys) if not store.check([key])]:
        raise UserError(
            f"{len(keys) - len(missing)} of {len(keys)} processes have connected within {seconds:g} s; not connected: "
            f"rank {', '.join(missing)}; start what is missing, or raise --dist-timeout"
        )
    yield PrefixStore(restart_key("torch"), store), ranks().rank, world_size()


register_rendezvous_handler(RENDEZVOUS, _rendezvous)


# Devices


def select_device_type(device: str) -> str:
    """Prepare the devices of a run; return the kind that `--device` selects: cpu, cuda or mps.

    Only the named CUDA devices become visible, so that local rank k gets the k-th. Raises `UserError` if there are
    fewer devices than named or than processes, if they are not supported, or if the process has used others.
    """
    if not device and os.environ.get("ACCELERATE_USE_CPU", "").lower() == "true":  # set by accelerate launch --cpu
        device = "cpu"
    numbers, visible = device_numbers(device), os.environ.get(VISIBLE_DEVICES)
    if _chosen == [numbers, visible]:
        return "cuda"
    if (any(numbers) and torch.cuda.is_initialized()) or (numbers and _chosen[1:] == [visible]):
        raise UserError(f"--device {device}: this Python process has used another GPU; restart Python")
    devices, here = devices_named(device), ranks().local_world_size
    device_type = devices[0].type
    if device_type == "cuda" and len(devices) < here:
        raise UserError(
            f"{f'--device {device} names' if device else 'torch sees'} {plural(len(devices), 'CUDA device')} for the "
            f"{here} processes of this machine; use one for each, or --device cpu"
        )
    if device_type == "cuda" and device:
        visible = visible or ",".join(map(str, range(torch.cuda.device_count())))
        os.environ[VISIBLE_DEVICES] = ",".join(visible.split(",")[selected.index] for selected in devices)
        _chosen[:] = numbers, os.environ[VISIBLE_DEVICES]
    return device_type


def devices_named(device: str) -> list[torch.device]:
    """Return the devices that `--device` names, or all of the best kind. Raises `UserError` if one is absent."""
    numbers, has_apple_gpu = device_numbers(device), torch.backends.mps.is_available()
    count = 0 if device in ("cpu", "mps") else torch.cuda.device_count()
    if (device == "mps" and not has_apple_gpu) or max(numbers, default=-1) >= count:
        raise UserError(f"--device {device} is absent; torch sees {plural(count, 'CUDA device')}; name one, or cpu")
    if numbers or (count and not device):
        return [torch.device("cuda", number) for number in numbers or range(count)]
    return [torch.device(device or ("mps" if has_apple_gpu and world_size() == 1 else "cpu"))]


def device_numbers(device: str) -> list[int]:
    """Return torch's numbers of the CUDA devices that `--device` names; [] for '', cpu and mps. Raises `UserError`."""
    if device in ("", "cpu", "mps"):
        return []
    numbers = device.replace("cuda:", "").replace("cuda", "0").replace(" ", "").split(",")
    if not all(map(str.isdecimal, numbers)) or len(set(numbers)) < len(numbers):
        raise UserError(f"--device {device}: give cpu, mps, or the numbers of CUDA devices such as 0 or 0,1")
    return list(map(int, numbers))


def cores_per_process() -> int:
    """Return this process's share of the cores that its machine allows, rounded down."""
    return available_cores() // ranks().local_world_size


def describe_device(device: torch.device) -> str:
    """Return the threads of a CPU, or the name and memory of a GPU."""
    if device.type != "cuda":
        return plural(torch.get_num_threads(), "thread")
    memory = torch.cuda.get_device_properties(device).total_memory / 2**30
    return f"{torch.cuda.get_device_name(device)}, {memory:.0f} GiB"


# A process per device


def spawn(main: Callable[[], object], processes: int, device: str = "") -> bool:
    """Start processes on this machine, each of which calls `main`, wait for all, and exit with a failed one's code.

    Their number is `processes`, or that of the named devices. Returns False without starting any if one is enough or if
    a launcher has started this process. Raises `UserError`.
    """
    named_devices, launched_processes = len(device_numbers(device)), world_size()
    expected = launched_processes if launched_processes > 1 else 1 if device == "mps" else named_devices or processes
    if processes and processes != expected:
        raise UserError(
            f"--processes {processes}: it is {expected}, by the launcher or by --device {device} with one process per "
            f"GPU; give --processes {expected}"
        )
    processes = processes or named_devices
    if processes < 2 or launched_processes > 1 or "LOCAL_RANK" in os.environ:
        return False
    gpus = named_devices or (0 if device == "cpu" or "ACCELERATE_USE_CPU" in os.environ else torch.cuda.device_count())
    if processes > (limit := gpus or 4 * cores_per_process()):
        raise UserError(f"--processes {processes}: at most {limit} here, {'one per GPU' if gpus else '4 per CPU core'}")
    # The parent hosts the store, on the loopback only: its port is taken from now on, and it outlives the processes.
    listener = socket.create_server((LOOPBACK, 0))
    port = listener.getsockname()[1]
    store = TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    environment = {
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # tells torch that the store is already hosted
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
    }
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else each process prints a stack if another one ends
    get_temp_dir()  # the folder of multiprocessing's sockets, made here for all processes
    context, script = multiprocessing.get_context("spawn"), sys.modules["__main__"]
    started = [context.Process(target=_enter, args=(rank, main, environment)) for rank in range(processes)]
    try:
        # Called from Python, they do not run the caller's script again, which may lack a guard, or be stdin.
        if getattr(main, "func", main).__module__ != "__main__":
            sys.modules["__main__"] = ModuleType("__main__")
        for process in started:
            process.start()
    except (PicklingError, AttributeError, TypeError) as error:
        reason = f"the processes cannot import a function of this call ({first_line(error)})"
        raise UserError(f"{reason}; put it into a file, and name that with --hooks (hooks=)") from None
    finally:
        sys.modules["__main__"] = script
    _wait(started, RunStore(store))
    return True


def _enter(rank: int, main: Callable[[], object], environment: dict[str, str]) -> None:
    multiprocessing.set_start_method(None, force=True)  # a spawned loader process would have its own copy of the data
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until GracefulStop handles it
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    run_main(main)


def _wait(started: Sequence[SpawnProcess], store: RunStore) -> None:
    """Wait for all processes; if one fails, exit with its code, or raise a `UserError` that names it."""
    received: list[int] = []  # numbers of the received signals
    killed = ""

    def pass_on(number: int, _: object) -> None:
        again = bool(received) and number == signal.SIGINT
        received.append(number)
        for process in started:
            if process.is_alive():
                process.kill() if again else os.kill(process.pid or 0, number)

    before = {number: signal.signal(number, pass_on) for number in stop_signals()}
    try:
        while not any(process.exitcode for process in started) and any(process.is_alive() for process in started):
            wait([process.sentinel for process in started if process.is_alive()], timeout=1.0)
        for rank, code in enumerate(process.exitcode or 0 for process in started):
            if code < 0 and not received and store.write_once("reason", "killed") == "killed":  # nobody has printed it
                killed = f"process {rank} on {socket.gethostname()} was killed by {signal.Signals(-code).name}"
        end = time.monotonic() + SHUTDOWN_SECONDS
        for process in started:
            process.join(max(end - time.monotonic(), 0))
    finally:
        for process in started:
            process.kill()
        for process in started:
            process.join()
        for number, handler in before.items():
            signal.signal(number, handler)
    codes = [process.exitcode or 0 for process in started]
    if killed:
        raise UserError(f"{killed}, possibly by the system because memory ran out")
    ended_by = received[-1] if received and min(codes) < 0 else 0  # a signal that a process did not handle yet
    if ended_by == signal.SIGINT:
        raise KeyboardInterrupt
    if any(codes):
        sys.exit(128 + ended_by if ended_by else max(*codes, 1))  # else a process has printed the reason
