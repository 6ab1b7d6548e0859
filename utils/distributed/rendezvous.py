"""The rendezvous: how the processes of a launch reach each other, and what to say if they do not.

Called by accelerator and, before there is an Accelerator, by preflight and utils/checkpoint/resume.py.
"""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch
from torch.distributed import HashStore, PrefixStore, Store, TCPStore
from torch.distributed.rendezvous import register_rendezvous_handler, rendezvous

from utils.distributed.exit import give_up
from utils.distributed.ranks import fair_threads, local_world_size, ranks, world_size
from utils.distributed.store import RunStore, store_key
from utils.errors import UserError, first_line
from utils.files import read_yaml

T = TypeVar("T")
RESTART_METHOD = "lockstep://"  # torch's name for the rendezvous after a launcher has started the processes anew
RENDEZVOUS_MARGIN_SECONDS = 30.0  # after the time-out, until a rendezvous that torch does not end is ended


def refuse_uneven_launch() -> None:
    """Raise `UserError` if `accelerate launch` is to start processes that cannot be spread evenly over the machines.

    It gives each machine num_processes // num_machines processes and silently drops the rest.
    """
    with suppress(psutil.Error, SystemExit):
        command = psutil.Process(os.getppid()).cmdline()
        # accelerate launch ..., accelerate-launch ..., python -m accelerate.commands.launch ...
        start = next((k for k, word in enumerate(command) if word.endswith("launch")), None)
        if start is None or not any("accelerate" in word for word in command[: start + 1]):
            return
        from accelerate.commands.launch import launch_command_parser  # here, for few runs need it

        flags = launch_command_parser().parse_args(command[start + 1 :])
        config = read_yaml(Path(flags.config_file)) if flags.config_file else {}
        processes = flags.num_processes or config.get("num_processes") or 1
        machines = flags.num_machines or config.get("num_machines") or 1
        if processes % machines:
            raise UserError(
                f"accelerate launch starts equally many processes on every machine, and {processes} do not fit on "
                f"{machines} machines; take a multiple of {machines}, or start each machine by torch.distributed.run"
            )


def prepare_for_gloo() -> None:
    """Set the number of threads, and the network interface that leads to the main process.

    gloo takes the interface of the host's name, which on many machines is the loopback.
    """
    if not os.environ.get("OMP_NUM_THREADS"):
        threads = fair_threads(local_world_size())
        os.environ["OMP_NUM_THREADS"] = str(threads)
        torch.set_num_threads(threads)
    if world_size() == local_world_size() or os.environ.get("GLOO_SOCKET_IFNAME"):
        return
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((main_address()[0], 9))  # sends nothing: it asks for the route
        local_address = probe.getsockname()[0]
        for interface, addresses in psutil.net_if_addrs().items():
            if any(address.address == local_address for address in addresses):
                os.environ["GLOO_SOCKET_IFNAME"] = interface


def main_address() -> tuple[str, int]:
    """Return address and port of the main process, where the processes meet."""
    return os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT") or 29500)


def wait_for_main_address(timeout: float) -> None:
    """Wait until the main process can be reached; torch would print each of its attempts.

    Raises `UserError` if it cannot be within `timeout` seconds.
    """
    if ranks().rank == 0:
        return
    address, port = main_address()
    end, reason = time.monotonic() + timeout, "no answer"
    while (remaining := end - time.monotonic()) > 0:
        try:
            socket.create_connection((address, port), timeout=remaining).close()
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
def rendezvous_errors(timeout: float) -> Iterator[None]:
    """Turn what goes wrong while the processes meet into a `UserError`, within a bounded time."""
    if world_size() == 1:
        yield
        return
    where = "{} port {}".format(*main_address())
    stuck = f"error: the processes did not meet at {where} within {timeout:g} s; is something else listening there?"
    timer = threading.Timer(timeout + RENDEZVOUS_MARGIN_SECONDS, give_up, [stuck])
    timer.daemon = True
    timer.start()
    try:
        yield
    except RuntimeError as error:
        raise UserError(_explain(error, where, timeout)) from None
    finally:
        timer.cancel()


def _explain(error: BaseException, where: str, timeout: float) -> str:
    text = str(error)
    if "EADDRINUSE" in text:
        return f"{where} is in use on this machine; give all processes another one (--main_process_port, --master_port)"
    if joined := re.search(r"(\d+)/(\d+) clients joined", text):
        return (
            f"only {joined[1]} of {joined[2]} processes came to {where} within {timeout:g} s: start the others, open "
            "the port, or raise --dist-timeout"
        )
    return (
        f"the processes do not reach each other within {timeout:g} s ({first_line(error, 1000)}); if a machine has "
        "several networks, name the interface in GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME"
    )


def _rendezvous(url: str, timeout: timedelta, **_: Any) -> Iterator[tuple[Store, int, int]]:
    """torch's own rendezvous, in a part of the store for each attempt.

    A launcher that starts the processes anew may keep the store, where the last attempt's addresses are still written:
    torch takes one of these for that of a process which is only just starting, and waits for its answer.
    """
    for store, rank, processes in rendezvous("env://", timeout=timeout):
        yield PrefixStore(store_key("torch"), store), rank, processes


register_rendezvous_handler(RESTART_METHOD.partition(":")[0], _rendezvous)


# Connections to the store before there is an Accelerator

_hosted: list[TCPStore] = []  # the store of `connect`, which the main process may host, until `start` has met there too


def connect(timeout: float, topic: str) -> RunStore:
    """Return the store where the processes of a launch meet. Waits for the main process, and for no other one.

    Raises `UserError` if that one cannot be reached within `timeout` seconds. With one process it is a store in memory.
    """
    if world_size() == 1:
        return RunStore(HashStore(), topic)
    refuse_uneven_launch()
    wait_for_main_address(timeout)
    by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # or by `spawn`
    with rendezvous_errors(timeout):
        _hosted[:] = [_tcp_store(timeout, host=ranks().rank == 0 and not by_launcher)]
    return RunStore(_hosted[0], topic)


def release_store() -> None:
    """Let go of the store of `connect`, once the processes have met there."""
    _hosted.clear()


def new_connection(timeout: float, topic: str) -> Store:
    """Return one more connection to the store of `connect`, for a process group of torch's.

    Over a single one, a question waits for the answer to the question before it.
    """
    return PrefixStore(store_key(topic), _tcp_store(timeout, host=False))


def _tcp_store(timeout: float, host: bool) -> TCPStore:
    # Multi-tenant: torch, which opens this store for itself when the processes meet, takes the one that is there.
    return TCPStore(
        *main_address(),
        is_master=host,
        timeout=timedelta(seconds=timeout),
        wait_for_workers=False,
        multi_tenant=True,
    )
