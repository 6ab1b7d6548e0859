"""Starting: devices, precision, seed, and the meeting of the processes. The only place that makes an Accelerator."""

from __future__ import annotations

import io
import math
import os
import re
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
from accelerate import Accelerator, DataLoaderConfiguration, DistributedDataParallelKwargs, InitProcessGroupKwargs
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DynamoBackend, set_seed
from torch.distributed import PrefixStore, Store, TCPStore
from torch.distributed.rendezvous import register_rendezvous_handler, rendezvous

from utils.config.options import TrainOptions
from utils.distributed import deepspeed as zero
from utils.distributed.comm_hooks import bucket_size
from utils.distributed.exit import give_up, sign_in
from utils.distributed.ranks import attempt, key, place
from utils.distributed.spawn import fair_threads
from utils.errors import UserError
from utils.files import read_yaml

LAUNCHER_PRECISION = "ACCELERATE_MIXED_PRECISION"  # what `accelerate launch` leaves for the processes that it starts
VISIBLE = "CUDA_VISIBLE_DEVICES"
LATER = 10.0  # seconds after the time-out until torch ends a wait that nobody has explained: a watch knows more
AGAIN = "lockstep://"  # torch's name for our way of meeting after a launcher has started the processes anew
GRACE = 30.0  # seconds after the time-out until a meeting that torch does not end is ended


def start(device: str, mixed_precision: str, timeout: float, comm_hook: str = "") -> Accelerator:
    """An Accelerator on `device` ('' is the best there is), for global batches.

    Under a launcher all its processes meet here. `timeout`: seconds that they wait for each other, now and later.
    `comm_hook`: how the gradients will travel.
    Raises `UserError` where a device is missing or they do not meet.
    """
    processes = place().processes
    on_cpu = _choose_devices(device)
    if processes > 1:
        os.environ.setdefault("LOCAL_RANK", "0")  # Accelerate asks for it; some clusters set the other three only
        _refuse_uneven_launch()
        if on_cpu:
            _prepare_for_gloo()
        _wait_for_main_address(timeout)
    precision, by_zero = _precision(on_cpu or device == "mps", mixed_precision), zero.wanted()
    engine_precision = zero.prepare_environment(on_cpu, precision) if by_zero else ""
    # On the CPU DeepSpeed prints a line per process about an operation that it has built.
    with _meeting(timeout), redirect_stdout(io.StringIO()) if by_zero else nullcontext():
        accelerator = Accelerator(
            cpu=on_cpu and not by_zero,  # Accelerate's word for the CPU would switch DeepSpeed off silently
            mixed_precision="no" if by_zero else precision,
            dataloader_config=DataLoaderConfiguration(split_batches=True, dispatch_batches=False, non_blocking=True),
            step_scheduler_with_optimizer=False,
            kwargs_handlers=[
                InitProcessGroupKwargs(
                    timeout=timedelta(seconds=timeout + LATER),
                    backend="gloo" if by_zero and on_cpu else None,
                    init_method=AGAIN if attempt() else None,
                ),
                DistributedDataParallelKwargs(gradient_as_bucket_view=True, bucket_cap_mb=bucket_size(comm_hook)),
            ],
        )
    _held.clear()
    sign_in()
    if accelerator.num_processes != processes:
        raise UserError(
            f"the launcher started {processes} processes and {accelerator.num_processes} of them found each other; "
            "start them with accelerate launch, torch.distributed.run, or --processes"
        )
    if by_zero:
        zero.autocast(accelerator.state.deepspeed_plugin, engine_precision)
    return accelerator


# Devices


def device_numbers(device: str) -> list[int]:
    """The CUDA devices that `--device` names, as numbers among those that torch sees; none for '', cpu and mps."""
    if device in ("", "cpu", "mps"):
        return []
    words = device.replace("cuda:", "").replace(" ", "").split(",")
    numbers = [int(word) for word in words if word.isdecimal()]
    if len(numbers) < len(words) or len(set(numbers)) < len(numbers):
        raise UserError(f"--device {device}: give cpu, mps, or the numbers of CUDA devices such as 0 or 0,1")
    return numbers


def forget() -> None:
    """Let the next run of this process begin as a new process would: Accelerate keeps what it was first told."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def one_device(device: str) -> torch.device:
    """The device that `--device` names, for a program of a single process; '' is the best there is."""
    numbers = device_numbers(device)
    if len(numbers) > 1:
        raise UserError(f"--device {device}: one device is enough here; name one of them")
    _check_mps_exists(device)
    if numbers:
        _check_devices_exist(device, numbers, torch.cuda.device_count())
        return torch.device("cuda", numbers[0])
    if device:
        return torch.device(device)
    return torch.device("cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu")


def processes_to_start(device: str, processes: int) -> int:
    """How many processes plain python is to start: as many as devices are named, or `processes`.

    Raises `UserError` where the two contradict each other or the launcher.
    """
    named = len(device_numbers(device))
    if processes and named > 1 and processes != named:
        raise UserError(f"--processes {processes} --device {device}: one process per device; leave --processes out")
    if processes > 1 and named == 1:
        raise UserError(f"--processes {processes} --device {device}: name a device for each process, such as 0,1")
    if processes > 1 and device == "mps":
        raise UserError(f"--processes {processes} --device mps: an Apple GPU serves one process only")
    launched = place().processes
    if processes and launched > 1 and processes != launched:
        raise UserError(
            f"--processes {processes}: the launcher has started {launched} processes; "
            "leave --processes out and give the number to the launcher"
        )
    return processes or max(named, 1)


def check_batch_size(batch_size: int) -> None:
    """Raises `UserError` with the two nearest sizes where the processes cannot share a batch evenly."""
    processes = place().processes
    if not batch_size:
        raise UserError("--batch-size 0 is too small; give 1 or more, or -1 for what the GPU holds")
    if batch_size % processes and batch_size > 0:
        lower = batch_size // processes * processes
        sizes = f"{lower} or {lower + processes}" if lower else f"{processes}"
        raise UserError(
            f"--batch-size {batch_size} is the batch of all {processes} processes and cannot be shared evenly; "
            f"take {sizes}"
        )


def _choose_devices(device: str) -> bool:
    """Make only the CUDA devices visible that are named, so that local rank k has the k-th; is it the CPU instead?

    Nothing here may make torch look for devices before the environment says which.
    """
    _check_mps_exists(device)
    if device in ("cpu", "mps"):
        return device == "cpu"
    numbers, here = device_numbers(device), place().local_processes
    if numbers:
        there = torch.cuda.device_count()
        _check_devices_exist(device, numbers, there)
        if len(numbers) < here:
            raise UserError(
                f"--device {device} names {_count(len(numbers), 'device')} for the {here} processes of this machine; "
                "name one for each"
            )
        visible = os.environ.get(VISIBLE, "").split(",") if os.environ.get(VISIBLE) else list(map(str, range(there)))
        os.environ[VISIBLE] = ",".join(visible[number] for number in numbers)
    elif torch.cuda.is_available():
        if here > torch.cuda.device_count():
            raise UserError(
                f"the launcher started {here} processes on this machine, where torch sees "
                f"{_count(torch.cuda.device_count(), 'CUDA device')}; start as many processes, or give --device cpu"
            )
    else:
        return place().processes > 1 or not torch.backends.mps.is_available()
    return False


def _check_mps_exists(device: str) -> None:
    if device == "mps" and not torch.backends.mps.is_available():
        raise UserError("--device mps: this machine has no Apple GPU that torch can use; try --device cpu")


def _check_devices_exist(device: str, numbers: list[int], there: int) -> None:
    if max(numbers) >= there:
        found = f"torch sees {_count(there, 'CUDA device')} here" if there else "torch sees no CUDA device here"
        raise UserError(f"--device {device}: {found}; try --device {there - 1 if there else 'cpu'}")


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number > 1 else ''}"


def _precision(slow: bool, asked: str) -> str | None:
    """The flag's, else the launcher's (None), else what the device is fast at: bf16 or fp16 on CUDA, none elsewhere."""
    if asked:
        return asked
    if os.environ.get(LAUNCHER_PRECISION):
        return None
    if slow or not torch.cuda.is_available():
        return "no"
    return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"


# The meeting of the processes


def _refuse_uneven_launch() -> None:
    """`accelerate launch` gives each machine num_processes // num_machines processes and silently drops the rest."""
    with suppress(psutil.Error, SystemExit):
        command = psutil.Process(os.getppid()).cmdline()
        # accelerate launch ..., accelerate-launch ..., python -m accelerate.commands.launch ...
        start = next((k for k, word in enumerate(command) if word.endswith("launch")), None)
        if start is None or not any("accelerate" in word for word in command[: start + 1]):
            return
        from accelerate.commands.launch import launch_command_parser  # here, for few runs need it

        asked = launch_command_parser().parse_args(command[start + 1 :])
        config = read_yaml(Path(asked.config_file)) if asked.config_file else {}
        processes = asked.num_processes or config.get("num_processes") or 1
        machines = asked.num_machines or config.get("num_machines") or 1
        if processes % machines:
            raise UserError(
                f"accelerate launch starts equally many processes on every machine, and {processes} do not fit on "
                f"{machines} machines; take a multiple of {machines}, or start each machine by torch.distributed.run"
            )


def _prepare_for_gloo() -> None:
    """Threads, and the network interface that leads to the main process.

    gloo takes the interface of the host's name, which on many machines is the loopback.
    """
    if not os.environ.get("OMP_NUM_THREADS"):
        threads = fair_threads(place().local_processes)
        os.environ["OMP_NUM_THREADS"] = str(threads)
        torch.set_num_threads(threads)
    if place().processes == place().local_processes or os.environ.get("GLOO_SOCKET_IFNAME"):
        return
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((main_address()[0], 9))  # sends nothing: it asks for the route
        own = probe.getsockname()[0]
        for interface, addresses in psutil.net_if_addrs().items():
            if any(address.address == own for address in addresses):
                os.environ["GLOO_SOCKET_IFNAME"] = interface


def main_address() -> tuple[str, int]:
    """Where the processes meet."""
    return os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT") or 29500)


def _wait_for_main_address(timeout: float) -> None:
    """Wait until the main process can be reached. torch would fill the screen with its attempts."""
    if place().rank == 0:
        return
    address, port = main_address()
    end, reason = time.monotonic() + timeout, "no answer"
    while (left := end - time.monotonic()) > 0:
        try:
            socket.create_connection((address, port), timeout=left).close()
        except OSError as error:
            reason = error.strerror or str(error)
            time.sleep(0.2)
        else:
            return
    raise UserError(
        f"the main process at {address} port {port} cannot be reached within {timeout:g} s ({reason.lower()}): start "
        "it there, open the port, check the address, or raise --dist-timeout"
    )


@contextmanager
def _meeting(timeout: float) -> Iterator[None]:
    """Turn what goes wrong while the processes meet into a sentence, within a bounded time."""
    if place().processes == 1:
        yield
        return
    where = "{} port {}".format(*main_address())
    stuck = f"error: the processes did not meet at {where} within {timeout:g} s; is something else listening there?"
    alarm = threading.Timer(timeout + GRACE, give_up, [stuck])
    alarm.daemon = True
    alarm.start()
    try:
        yield
    except RuntimeError as error:
        raise UserError(_why_not_met(str(error), where, timeout)) from None
    finally:
        alarm.cancel()


def _why_not_met(text: str, where: str, timeout: float) -> str:
    if "EADDRINUSE" in text:
        return f"{where} is in use on this machine; give all processes another one (--main_process_port, --master_port)"
    if joined := re.search(r"(\d+)/(\d+) clients joined", text):
        return (
            f"only {joined[1]} of {joined[2]} processes came to {where} within {timeout:g} s: start the others, open "
            "the port, or raise --dist-timeout"
        )
    first = text.splitlines()[0]
    return (
        f"the processes do not reach each other within {timeout:g} s ({first}); where a machine has several networks, "
        "name the interface in GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME"
    )


def _rendezvous(url: str, timeout: timedelta, **_: Any) -> Iterator[tuple[Store, int, int]]:
    """torch's own, in a part of the store of its own for each attempt.

    A launcher that starts the processes anew may keep the store, where the last attempt's addresses still stand: torch
    takes one of these for that of a process which is only just coming, and waits for its answer.
    """
    for store, rank, processes in rendezvous("env://", timeout=timeout):
        yield PrefixStore(key("torch"), store), rank, processes


register_rendezvous_handler(AGAIN.partition(":")[0], _rendezvous)


# The way in for those who want no more than the store


def device_kind(device: str) -> str:
    """cpu, cuda or mps: what `--device` comes to here, made ready like for a run."""
    on_cpu = _choose_devices(device)
    if on_cpu and place().processes > 1:
        _prepare_for_gloo()
    return "cpu" if on_cpu else "mps" if device == "mps" or not torch.cuda.is_available() else "cuda"


_held: list[TCPStore] = []  # the store of `meet`, which the main process may host, until `start` has met there too


def meet(timeout: float) -> TCPStore:
    """The store where the processes of a launch meet. It waits for the main process, and for no other one."""
    _refuse_uneven_launch()
    _wait_for_main_address(timeout)
    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # by the launcher, or by `spread`
    with _meeting(timeout):
        _held[:] = [_store(timeout, host=place().rank == 0 and not hosted)]
    return _held[0]


def attend(timeout: float) -> TCPStore:
    """One more connection to that store: over one, a question waits for the question before it."""
    return _store(timeout, host=False)


def _store(timeout: float, host: bool) -> TCPStore:
    # Multi-tenant: torch, which opens this store for itself when the processes meet, takes the one that is there.
    return TCPStore(
        *main_address(),
        is_master=host,
        timeout=timedelta(seconds=timeout),
        wait_for_workers=False,
        multi_tenant=True,
    )


# What a run needs to know of its start


def seed_everything(seed: int) -> None:
    """Seed what is drawn outside the data path (the model's first weights) and ask for repeatable kernels."""
    set_seed(seed)
    if torch.cuda.is_available():
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS repeats itself only with a fixed workspace
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def loader_workers(asked: int) -> int:
    """Loader processes for each training process: as asked, at most this machine's cores shared among them."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(0, min(asked, cores // place().local_processes))


def device_name(accelerator: Accelerator) -> str:
    """This process's machine, device, and what that is."""
    device = accelerator.device
    return f"{socket.gethostname()} {device} ({_what(device)})"


def _what(device: torch.device) -> str:
    if device.type != "cuda":
        return f"{torch.get_num_threads()} threads"
    memory = torch.cuda.get_device_properties(device).total_memory / 2**30
    return f"{torch.cuda.get_device_name(device)}, {memory:.0f} GiB"


def device_table(devices: Sequence[str], verbose: bool) -> list[str]:
    """A line for each process's device, where there are several."""
    return [f"  process {rank}: {device}" for rank, device in enumerate(devices)] if len(devices) > 1 or verbose else []


def plan(options: TrainOptions, accelerator: Accelerator, batches: int) -> list[str]:
    """How the images of an epoch of so many batches become optimizer steps."""
    processes, accumulated = accelerator.num_processes, accelerator.gradient_accumulation_steps
    own = f"{processes} processes x {options.batch_size // processes}" if processes > 1 else "1 process"
    steps = math.ceil(batches / accumulated)
    return [
        f"batches of {options.batch_size} images ({own}) x {accumulated} accumulated: an optimizer step for every "
        f"{options.batch_size * accumulated} images",
        f"{batches} batches and {steps} steps an epoch, {options.epochs} epochs",
    ]


def describe(accelerator: Accelerator) -> str:
    """What the run runs on, for people."""
    device = accelerator.device
    processes = f"{accelerator.num_processes} process{'es' if accelerator.num_processes > 1 else ''}"
    precision = accelerator.mixed_precision
    if plugin := accelerator.state.deepspeed_plugin:
        stage, precision = zero.summary(plugin)
        processes += f" under DeepSpeed ZeRO-{stage}"
    compiler = accelerator.state.dynamo_plugin.backend
    by = "" if compiler == DynamoBackend.NO else f", compiled by {compiler.value.lower()}"
    return f"torch {torch.__version__}, {device} ({_what(device)}), {processes}, mixed precision {precision}{by}"
