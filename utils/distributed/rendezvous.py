"""The rendezvous: connect the processes of a launch, and explain why they cannot connect.

Called by accelerator, devices and utils/doctor/.
"""

from __future__ import annotations

import errno
import math
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import psutil
import torch
from torch.distributed import PrefixStore, Store, TCPStore
from torch.distributed.rendezvous import register_rendezvous_handler, rendezvous

from utils.distributed.failure import hard_exit
from utils.distributed.ranks import (
    TOKEN,
    is_local_main,
    launch_number,
    local_world_size,
    ranks,
    store_is_hosted,
    threads_per_process,
    world_size,
)
from utils.distributed.store import store_key
from utils.errors import UserError, first_line

LOOPBACK = "127.0.0.1"
RUN_RENDEZVOUS = "lockstep://"  # init_method of torch's process group: `_rendezvous`
MAX_PORT = 2**16 - 1
NOTICE_SECONDS = 15.0  # time after which a process prints that it waits for the main process
RENDEZVOUS_MARGIN_SECONDS = 30.0  # added to the time-out; then a rendezvous that torch does not end is ended


def prepare_for_gloo() -> None:
    """Set the number of threads, and gloo's network interface to the one with a route to the main process.

    By default gloo uses the interface of the host name. On many machines that is the loopback, on others an interface
    that anybody on the network can reach, even if all processes are on this machine.
    """
    if not os.environ.get("OMP_NUM_THREADS"):
        threads = threads_per_process(local_world_size())
        os.environ["OMP_NUM_THREADS"] = str(threads)
        torch.set_num_threads(threads)
    if world_size() == 1 or os.environ.get("GLOO_SOCKET_IFNAME"):
        return
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((main_address()[0], 9))  # selects the route, sends nothing
        local_address = probe.getsockname()[0]
        for interface, addresses in psutil.net_if_addrs().items():
            if any(address.address == local_address for address in addresses):
                os.environ["GLOO_SOCKET_IFNAME"] = interface


def main_address() -> tuple[str, int]:
    """Return the address and port of the main process."""
    return os.environ.get("MASTER_ADDR", "127.0.0.1"), launch_number("MASTER_PORT", 29500, MAX_PORT)


def wait_for_main_address(timeout: float) -> TCPStore | None:
    """Wait until the main process can be reached; torch would print a warning for each attempt.

    Returns the run's store if this process hosts it on all interfaces; torch shares it while it is referenced. Raises
    `UserError` after `timeout` seconds, or if the main address leads to another process. It need not be one of this
    machine's addresses: that of a Kubernetes service is not.
    """
    if hosts_on_loopback():
        return None
    (address, port), hosted = main_address(), None
    if ranks().rank == 0 and not store_is_hosted():
        with rendezvous_errors(timeout):
            hosted = TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, multi_tenant=True)
    end, reason = time.monotonic() + timeout, "no answer"
    notice = time.monotonic() + NOTICE_SECONDS if is_local_main() else math.inf
    while (remaining := end - time.monotonic()) > 0:
        try:
            socket.create_connection((address, port), timeout=min(remaining, NOTICE_SECONDS)).close()
        except OSError as error:
            reason = error.strerror or str(error)
            time.sleep(0.2)
            if time.monotonic() > notice:
                notice = math.inf
                waiting = f"waiting for the main process at {address} port {port} ({reason.lower()})"
                print(f"{waiting}, at most {timeout:g} s (--dist-timeout)", flush=True)
        else:
            break
    else:
        raise UserError(
            f"the main process at {address} port {port} cannot be reached within {timeout:g} s ({reason.lower()}): "
            "start it, open the port, check the address, or raise --dist-timeout"
        )
    if hosted:
        mark, limit = os.urandom(16).hex(), timedelta(seconds=timeout)
        with suppress(RuntimeError):  # raised if another program answers
            TCPStore(address, port, timeout=limit, wait_for_workers=False).add(mark, 1)
        if not hosted.check([mark]):
            raise UserError(
                f"this process has RANK 0, but MASTER_ADDR {address} port {port} leads to another one; give each "
                "process a RANK of its own, and all of them the address of the one with RANK 0"
            )
    return hosted


@contextmanager
def rendezvous_errors(timeout: float) -> Iterator[None]:
    """Turn errors of the rendezvous within the `with` into a `UserError`, and end the process if it takes too long."""
    if world_size() == 1:
        yield
        return
    where = "{} port {}".format(*main_address())
    stuck = f"error: no rendezvous at {where} within {timeout:g} s; check whether another program uses this port"
    timer = threading.Timer(timeout + RENDEZVOUS_MARGIN_SECONDS, hard_exit, [stuck])
    timer.daemon = True
    timer.start()
    try:
        yield
    except (RuntimeError, OSError) as error:
        raise UserError(_explain(error, where, timeout)) from None
    finally:
        timer.cancel()


def _explain(error: BaseException, where: str, timeout: float) -> str:
    text = str(error)
    if "EADDRINUSE" in text or getattr(error, "errno", 0) == errno.EADDRINUSE:
        return (
            f"{where} is in use on this machine; give all processes another port (--main_process_port, --master_port)"
        )
    advice = f", or give all of them the same {TOKEN}" if os.environ.get(TOKEN) else ""
    if joined := re.search(r"(\d+)/(\d+) clients joined", text):
        return (
            f"only {joined[1]} of {joined[2]} processes connected to {where} within {timeout:g} s: start the others, "
            f"open the port, or raise --dist-timeout{advice}"
        )
    return (
        f"the processes cannot reach each other within {timeout:g} s ({first_line(error, 1000)}); if a machine has "
        f"several networks, name the interface in GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME{advice}"
    )


def loopback_store(port: int, timeout: timedelta, processes: int | None = None) -> TCPStore:
    """Host a store that only this machine can reach; torch's own stores listen on all interfaces.

    Args:
        port: port to listen on; 0 takes a free one
        processes: number of processes that the call waits for
    """
    listener = socket.create_server((LOOPBACK, port))
    number = listener.getsockname()[1]
    return TCPStore(
        LOOPBACK,
        number,
        processes,
        is_master=True,
        timeout=timeout,
        wait_for_workers=processes is not None,
        master_listen_fd=listener.detach(),
    )


def hosts_on_loopback() -> bool:
    """Return whether this process hosts the store and all processes reach it over the loopback interface."""
    here, address = ranks(), main_address()[0]
    return here.rank == 0 and not store_is_hosted() and address in ("localhost", LOOPBACK)


def _rendezvous(url: str, timeout: timedelta, **_: Any) -> Iterator[tuple[Store, int, int]]:
    """Connect to the run's store as torch does; the processes of a run make or open it nowhere else.

    The store's keys differ between restarts by the launcher, which may reuse the store: torch would otherwise find the
    addresses of the previous start and wait for an answer from one of them.
    """
    key = store_key("torch", os.environ.get(TOKEN, ""))
    if world_size() == 1 or hosts_on_loopback():
        port = main_address()[1] if world_size() > 1 else 0
        yield PrefixStore(key, loopback_store(port, timeout, world_size())), 0, world_size()
        return
    for store, rank, processes in rendezvous("env://", timeout=timeout):
        yield PrefixStore(key, store), rank, processes


register_rendezvous_handler(RUN_RENDEZVOUS.partition(":")[0], _rendezvous)
