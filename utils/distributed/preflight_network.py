"""The preflight's test of the network: an all-reduce among all processes, over the other ports. Called by preflight."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
from torch import distributed

from utils.distributed.preflight_report import MIB, Finding, ProcessFacts, by_value, places
from utils.distributed.ranks import ranks
from utils.distributed.rendezvous import main_address, new_connection
from utils.errors import UserError, first_line

MESSAGE_BYTES = 16 * MIB  # of an all-reduce
REPETITIONS = 5  # the fastest one counts
SLOW_SECONDS = 1.0  # of the first repetition, above which there is no other one
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


class Measured(NamedTuple):
    """Seconds of an all-reduce; or its error, and whether the processes were connected."""

    seconds: float
    connected: bool
    error: str


def measure(kind: str, limit: float) -> Measured:
    """Measure an all-reduce on devices of a kind, in a thread, which is abandoned after `limit` seconds."""
    done: list[float] = []
    errors: list[str] = []
    connected = threading.Event()

    def work() -> None:
        try:
            done.append(_all_reduce(kind, limit, connected))
        except (RuntimeError, UserError) as error:
            errors.append(first_line(error, 1000))

    # NCCL's own watchdog would abort the process at the time-out.
    os.environ.update(TORCH_NCCL_ASYNC_ERROR_HANDLING="0", TORCH_NCCL_ENABLE_MONITORING="0")
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(limit)
    return Measured(done[0] if done else 0.0, connected.is_set(), "" if done else errors[0] if errors else "no answer")


def _all_reduce(kind: str, limit: float, connected: threading.Event) -> float:
    """Return the seconds of the slowest process for one message. Sets `connected` after the first small message."""
    here = ranks()
    store = new_connection(limit, "doctor")
    device = torch.device(kind, here.local_rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    distributed.init_process_group(
        BACKENDS[kind], store=store, rank=here.rank, world_size=here.world_size, timeout=timedelta(seconds=limit)
    )
    _slowest(0.0, device)
    connected.set()
    message = torch.zeros(MESSAGE_BYTES // 4, device=device)
    times: list[float] = []
    while len(times) < REPETITIONS:
        begun = time.perf_counter()
        distributed.all_reduce(message)
        if kind == "cuda":
            torch.cuda.synchronize(device)
        times.append(_slowest(time.perf_counter() - begun, device))
        if times[0] > SLOW_SECONDS:  # the same decision on all processes
            break
    return min(times)


def _slowest(seconds: float, device: torch.device) -> float:
    """Return the maximum over all processes."""
    shared = torch.tensor(seconds, device=device)
    distributed.all_reduce(shared, distributed.ReduceOp.MAX)
    return shared.item()


def judge_measurement(
    facts: Sequence[ProcessFacts], measured: Mapping[int, Measured], limit: float
) -> tuple[list[str], list[Finding]]:
    """Return the line of a successful measurement, and errors. measured: by rank."""
    results = [(process, measured.get(process.rank, Measured(0.0, False, "no answer"))) for process in facts]
    failed = [(process, result) for process, result in results if result.error]
    size, backend = f"{MESSAGE_BYTES // MIB} MiB", facts[0].backend
    if not failed:
        seconds = max(result.seconds for _, result in results)
        speed = f"{seconds * 1000:.1f} ms, {MESSAGE_BYTES / seconds / 1e6:.0f} MB/s"
        return [f"all-reduce of {size} among {len(facts)} processes over {backend}: {speed}"], []
    if all(result.connected for _, result in failed):
        text = (
            f"the processes are connected, but an all-reduce of {size} did not end within {limit:g} s: the network is "
            "slow or drops large packets; compare the MTU (ip link) on all machines"
        )
        return [], [Finding(True, text)]
    holders = by_value((process, result.error) for process, result in failed)
    reasons = "; ".join(f"{places(processes)}: {error}" for error, processes in holders.items())
    address, port = main_address()
    text = (
        f"the processes reach {address} port {port}, but not each other at other ports within {limit:g} s ({reasons}); "
        "open all ports between the machines in their firewalls, or set the network interface in "
        f"{backend.upper()}_SOCKET_IFNAME"
    )
    return [], [Finding(True, text)]
