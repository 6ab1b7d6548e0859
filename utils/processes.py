"""The processes of a run: what a launcher says of them, starting them without one, and how they end together."""

from __future__ import annotations

import logging
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple, NoReturn

from torch import distributed
from torch.multiprocessing.spawn import ProcessContext, ProcessExitedException, start_processes

from utils.errors import UserError

PATIENCE = 5.0  # seconds that a failing process leaves another one to say why
ANSWER = 3.0  # seconds to wait for the run's store when a process fails; it may be gone


class Place(NamedTuple):
    """Where a launcher has put this process: its number among all, and among those of its machine."""

    rank: int
    processes: int
    local_rank: int
    local_processes: int


def place() -> Place:
    """What the launcher has left in the environment; without one, the only process."""
    rank, processes, local_rank = (int(os.environ.get(name) or 0) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    local = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    return Place(rank, max(processes, 1), local_rank, local)


def speaks() -> bool:
    """Is this the process that speaks for its machine while nothing is agreed with the others?"""
    return place().local_rank == 0


def spread(main: Callable[[], object], processes: int) -> bool:
    """Start so many processes on this machine, each of which calls `main`, and wait for all of them.

    False, with nothing done, where this process is to do the work itself: it is to be the only one, or a launcher has
    started it. When one process fails the others are ended, and this one exits with its code.
    """
    if processes == 1 or place().processes > 1 or "LOCAL_RANK" in os.environ:
        return False
    # The store where they meet is held here: its port is taken from now on, and it outlives any of them.
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # torch's word for: nobody needs to open the store
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
    }
    # More threads than cores would slow each other down; torch reads this once, when a process starts.
    os.environ.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // processes, 1)))
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)  # it tells of each process that it ends
    work = (main, environment, multiprocessing.get_start_method())
    context = start_processes(_enter, work, nprocs=processes, join=False, start_method="spawn")
    assert context is not None
    _wait(context, store)
    return True


def _enter(rank: int, main: Callable[[], object], environment: dict[str, str], workers: str) -> None:
    # A spawned process would spawn its loader's processes too, each with a copy of all that they read.
    multiprocessing.set_start_method(workers, force=True)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C is answered once, by the process that started this one
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    run_main(main)


def _wait(context: ProcessContext, store: distributed.Store) -> None:
    try:
        while not context.join():
            pass
    except ProcessExitedException as ended:
        if ended.exit_code > 0 or _failures(store) > 1:
            sys.exit(max(ended.exit_code, 1))  # somebody has said why
        raise UserError(
            f"process {ended.error_index} was ended by {ended.signal_name}; where nobody did that, "
            "it may have been the system, short of memory"
        ) from None
    finally:
        for process in context.processes:
            process.terminate()


def run_main(main: Callable[[], object]) -> None:
    """Call a script's `main`; a `UserError` becomes one line on stderr and exit code 1, Ctrl-C exit code 130.

    Of many processes one speaks. Losing another process is an error of this kind too.
    """
    if not speaks():
        warnings.simplefilter("ignore")
    try:
        main()
    except UserError as error:
        _end(f"error: {error}", 1)
    except KeyboardInterrupt:
        _end("interrupted", 130)
    except RuntimeError as error:
        lost = lost_contact(error)
        if not lost:
            raise
        _end(f"error: {lost}", 1)
    if distributed.is_initialized():
        distributed.destroy_process_group()
    if "deepspeed" in sys.modules:
        give_up("", 0)  # its threads may abort a process that takes itself down in order, after all is done


def lost_contact(error: RuntimeError) -> str:
    """A sentence for an error of torch's communication between processes; '' for any other error."""
    text = str(error)
    if not isinstance(error, distributed.DistError) and not re.search(r"gloo|nccl", text, re.IGNORECASE):
        return ""
    if waited := re.search(r"[Tt]imed out (?:waiting|after) (\d+) ?ms", text):
        return (
            f"another process has not answered for {int(waited[1]) / 1000:g} s (--dist-timeout): it hangs, or the "
            "network between the machines is cut"
        )
    if closed := re.search(r"closed by peer \[?([\w.:]+?)\]?:\d+", text):
        return f"a process on {closed[1]} has ended or cannot be reached any more; what it printed says why"
    return f"the contact with the other processes broke ({text.splitlines()[0]}); what they printed says why"


def _end(message: str, code: int) -> NoReturn:
    """Say why, once for all processes, and exit."""
    if place().processes == 1:
        print(message, file=sys.stderr)
        sys.exit(code)
    if _is_first_to_fail():
        give_up(message, code)
    time.sleep(PATIENCE)  # an exit of this one may end the other one before it has spoken
    give_up("", code)


def give_up(message: str, code: int = 1) -> NoReturn:
    """Exit at once, whatever the other processes and threads of this one do; its loader processes end too."""
    if message:
        print(message, file=sys.stderr, flush=True)
    for worker in multiprocessing.active_children():
        worker.terminate()
    sys.stdout.flush()
    # Not by sys.exit: taking the process group down in order may wait for processes that are gone.
    os._exit(code)


def _is_first_to_fail() -> bool:
    """Is this the first process to fail? The run's store counts; where it is gone, one speaks per machine."""
    answer: list[int] = []

    def ask() -> None:
        with suppress(RuntimeError):
            answer.append(_failures(distributed.distributed_c10d._get_default_store()))

    if distributed.is_initialized():
        # In a thread of its own, for over a dead line the question would wait for many minutes.
        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(ANSWER)
    return answer[0] == 1 if answer else speaks()


def _failures(store: distributed.Store) -> int:
    """Count one more process that fails, at the bottom of the run's store, where all see the same number."""
    while isinstance(store, distributed.PrefixStore):
        store = store.underlying_store
    return store.add(f"lockstep/failed/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", 1)
