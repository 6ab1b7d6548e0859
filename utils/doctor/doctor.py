"""The doctor (`train.py --doctor`): checks every process of a launch before a job starts. Called by train.py.

The processes exchange their facts through the doctor's own store, which needs only the main process's port.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import HashStore, TCPStore

from utils.distributed.failure import hard_exit
from utils.distributed.ranks import ranks, world_size
from utils.distributed.rendezvous import (
    hosts_on_loopback,
    loopback_store,
    main_address,
    rendezvous_errors,
    wait_for_main_address,
)
from utils.distributed.store import RunStore, run_store
from utils.doctor.comparison import Finding, compare, format_ranks, table
from utils.doctor.process_facts import Inputs, ProcessFacts, examine_process
from utils.errors import UserError, plural

NOTICE_SECONDS = 15.0  # time after which the main process prints which processes it waits for
MARGIN_SECONDS = 30.0  # time that the other processes wait for the main one's answer after its time-out
LEAVE_SECONDS = 5.0  # time that the main process, which may host the store, waits for the others to leave it
POLL_SECONDS = 0.05  # interval at which the store is polled


def run_doctor(flags: Mapping[str, Any], read: Callable[[], Inputs]) -> None:
    """Check all processes of this launch; the main one prints lines about the data, a table, errors and warnings.

    If the job would fail, all processes end here with exit code 1.

    Args:
        flags: flags of the command line by name, including `comm_hook`, `device`, `dist_timeout`, `project` and
            `workers`
        read: returns the inputs of the job; raises `UserError`
    """
    main, timeout = ranks().rank == 0, flags["dist_timeout"]
    store = _open_store(timeout)
    # These two keys never change, so that processes with another version of the code are reported.
    store.count(f"facts/{ranks().rank}/times")
    store.write("facts", dataclasses.asdict(examine_process(flags, read)))
    if main:
        facts = collect_facts(store, timeout)
        findings = [*check_ranks(store, facts, timeout), *compare(facts)]
        errors = sum(finding.serious for finding in findings)
        verdict = f"the job would fail: {plural(errors, 'error')} to fix first" if errors else "the job can start"
        print(*facts[0].messages, *table(facts), *findings, verdict, sep="\n", flush=True)
        store.write_once("errors", errors)
        _wait(lambda: store.count("left", 0) >= len(facts) - 1, LEAVE_SECONDS)
    elif not _wait(lambda: store.value("errors") is not None, timeout + MARGIN_SECONDS):
        raise UserError(f"the main process has not answered for {timeout:g} s: check its output, and the network")
    else:
        errors = store.value("errors")
        store.count("left")
    if errors:
        hard_exit("")


def collect_facts(store: RunStore, timeout: float) -> list[ProcessFacts]:
    """Return the facts of all processes that write them within `timeout` seconds, in the order of the ranks."""

    def complete() -> bool:
        return not _missing_ranks(store)

    if not _wait(complete, min(NOTICE_SECONDS, timeout)) and timeout > NOTICE_SECONDS:
        missing = format_ranks(_missing_ranks(store))
        print(f"waiting for {missing}, at most {timeout:g} s (--dist-timeout)", flush=True)
        _wait(complete, timeout - NOTICE_SECONDS)
    known = {field.name for field in dataclasses.fields(ProcessFacts)}
    return [
        ProcessFacts(**{name: value for name, value in facts.items() if name in known})
        for _, facts in sorted(store.values("facts").items())
    ]


def check_ranks(store: RunStore, facts: Sequence[ProcessFacts], timeout: float) -> list[Finding]:
    """Return an error for the ranks that have written no facts, and for each rank that several processes have."""
    errors = []
    if missing := sorted(set(range(world_size())) - {process.rank for process in facts}):
        address, port = main_address()
        errors.append(
            f"no answer from {format_ranks(missing)} within {timeout:g} s: start the same command there, check its "
            f"output, and open {address} port {port} to it"
        )
    for rank in range(world_size()):
        if (times := store.count(f"facts/{rank}/times", 0)) > 1:
            errors.append(
                f"{times} processes have rank {rank}; give each machine its own --machine_rank, or each process its "
                "own RANK"
            )
    return [Finding(True, text) for text in errors]


def _missing_ranks(store: RunStore) -> list[int]:
    return sorted(set(range(world_size())) - set(store.values("facts")))


def _wait(ready: Callable[[], bool], seconds: float) -> bool:
    """Wait until `ready` returns True, for at most `seconds`; return whether it did."""
    end = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > end:
            return False
        time.sleep(POLL_SECONDS)
    return True


def _open_store(timeout: float) -> RunStore:
    """Connect to the store that the launcher or the main process hosts. Does not wait for other processes."""
    if world_size() == 1:
        return RunStore(HashStore(), "doctor")
    hosted = wait_for_main_address(timeout)
    if connected := run_store("doctor"):  # with --resume
        return connected
    limit = timedelta(seconds=timeout)
    with rendezvous_errors(timeout):
        if hosts_on_loopback():
            return RunStore(loopback_store(main_address()[1], limit), "doctor")
        return RunStore(hosted or TCPStore(*main_address(), timeout=limit, wait_for_workers=False), "doctor")
