"""How processes end together: one prints why, once, and the others end with it.

Called by the scripts (`run_main`), by spawn, and by what ends a run early (watchdog, graceful_stop, barrier).
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import NoReturn

from torch import distributed

from utils.console import silence
from utils.distributed.loader_processes import end_workers, loader_died
from utils.distributed.ranks import ranks, speaks_for_machine, world_size
from utils.distributed.store import ask_run_store, run_store
from utils.errors import UserError, first_line

TIME_LIMIT = "time"  # the reason to stop that is no signal's name
EXPLAIN_SECONDS = 5.0  # that a failing process leaves another one to print why
ALARM_POLL_SECONDS = 1.0  # between two looks whether another process has failed
ROLL_CALL_SECONDS = 2.5  # in which the processes that are left write that they are


class Stopped(Exception):
    """The run ends early, as requested: everything is saved and printed. `code` is the exit code."""

    def __init__(self, code: int) -> None:
        super().__init__(f"stopped, exit code {code}")
        self.code = code


class StopRequested(Stopped):
    """The run is to stop early, at a point where all processes are. reason: a signal's name, or `TIME_LIMIT`."""

    def __init__(self, reason: str) -> None:
        super().__init__(0 if reason == TIME_LIMIT else 128 + signal.Signals[reason])
        self.reason, self.by_time_limit = reason, reason == TIME_LIMIT


def run_main(main: Callable[[], object]) -> None:
    """Call a script's `main`; turn a `UserError` into one line on stderr and exit code 1, Ctrl-C into exit code 130.

    Of many processes one prints. Losing another process is an error of this kind too. No process that this one has
    started outlives it, and it does not outlive the launcher that started it.
    """
    if not speaks_for_machine():
        warnings.simplefilter("ignore")
        silence()
    follow_launcher()
    try:
        main()
    except UserError as error:
        _end(f"error: {error}", 1)
    except Stopped as stopped:
        _leave(stopped.code)
    except KeyboardInterrupt:
        _end("interrupted", 130)
    except Exception as error:
        if lost := lost_contact(error):
            _end_as_survivor(lost)
        if reason := loader_died(error):
            _end(f"error: {reason}", 1)
        if world_size() == 1:
            raise
        traceback.print_exc()
        _end(f"error: {ranks()} failed: {type(error).__name__}: {str(error).partition(chr(10))[0]}", 1)
    finally:
        end_workers()
    by_zero = distributed.is_initialized() and "deepspeed" in sys.modules
    if distributed.is_initialized():
        distributed.destroy_process_group()
    if world_size() > 1 or by_zero:
        give_up("", 0)  # threads of DeepSpeed, or one that asks the store, may abort an orderly exit


# What went wrong


def lost_contact(error: Exception) -> str:
    """Return a sentence for an error of torch's communication between processes; '' for any other error."""
    text = str(error)
    known = isinstance(error, RuntimeError) and re.search(r"gloo|nccl", text, re.IGNORECASE)
    if not known and not isinstance(error, distributed.DistError):
        return ""
    if waited := re.search(r"[Tt]imed out (?:waiting|after) (\d+) ?ms", text):
        return (
            f"another process has not answered for {int(waited[1]) / 1000:g} s (--dist-timeout): it hangs, or the "
            "network between the machines is cut"
        )
    if closed := re.search(r"(?:closed by peer|Read error|Write error) \[?([\w.:]+?)\]?:\d+", text):
        return f"a process on {closed[1]} has ended or cannot be reached any more; what it printed says why"
    return f"the contact with the other processes broke ({first_line(error, 1000)}); what they printed says why"


# Ending


def _end(message: str, code: int) -> NoReturn:
    """Print why, once for all processes, and exit."""
    end_workers()
    if world_size() == 1:
        print(message, file=sys.stderr)
        sys.exit(code)
    raise_alarm()
    if is_first_to_fail():
        give_up(message, code)
    time.sleep(EXPLAIN_SECONDS)  # an exit of this one may end the other one before it has printed
    give_up("", code)


def _leave(code: int) -> NoReturn:
    """Exit with all the others; everything is printed."""
    if world_size() == 1:
        sys.exit(code)
    give_up("", code)


def _end_as_survivor(message: str) -> NoReturn:
    """Exit with all that are left, for another process is gone: it may have printed why, else one of them names it."""
    end_workers()
    raise_alarm()
    time.sleep(ROLL_CALL_SECONDS)
    if ask_run_store(lambda store: store.count("failed", 0), 0):
        give_up("", 1)
    if is_first_to_fail():
        present: dict[int, bool] = ask_run_store(lambda store: store.values("present"), {})
        gone = set(range(world_size())) - set(present) - {ranks().rank}
        lost = f"{process_names(sorted(gone))} ended without a word, or cannot be reached"
        give_up(f"error: {lost if gone else message}")
    time.sleep(EXPLAIN_SECONDS)
    give_up("", 1)


def give_up(message: str, code: int = 1) -> NoReturn:
    """Exit at once, whatever the other processes and threads of this one do; its loader processes end too."""
    if message:
        print(message, file=sys.stderr, flush=True)
    end_workers()
    sys.stdout.flush()
    # Not by sys.exit: taking the process group down in order may wait for processes that are gone.
    os._exit(code)


# What failing processes write for each other


def is_first_to_fail() -> bool:
    """Is this the first process that asks? The run's store counts; if it is gone, one process of each machine is."""
    count = ask_run_store(lambda store: store.count("failed"), 0)
    return count == 1 if count else speaks_for_machine() or _main_is_gone()


def _main_is_gone() -> bool:
    """Is the store gone with the main process of this machine, so that the next process is to speak?"""
    here = ranks()
    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return run_store() is not None and not hosted and here.rank == here.local_rank == 1


def process_names(numbers: Iterable[int]) -> str:
    """Return names of these ranks for people: `process 1 on a and process 2 on b`."""
    names: dict[int, str] = ask_run_store(lambda store: store.values("names"), {})
    return " and ".join(names.get(rank, f"process {rank}") for rank in numbers)


def sign_in() -> None:
    """Write this process's name, once all have met, and from now on answer if another process fails.

    A thread answers, for the main one may wait for the process that failed; then it ends this process.
    """
    if world_size() > 1:
        ask_run_store(lambda store: store.write("names", str(ranks())), None)
        threading.Thread(target=_await_alarm, daemon=True).start()


def raise_alarm() -> None:
    """Let all processes know that this run ends, and that they are to write whether they are still there."""
    ask_run_store(lambda store: store.write_once("alarm", True), None)


def _await_alarm() -> None:
    store = run_store()
    with suppress(RuntimeError):
        while store is not None and not store.is_written("alarm"):
            time.sleep(ALARM_POLL_SECONDS)
        ask_run_store(lambda store: store.write("present", True), None)
        time.sleep(ROLL_CALL_SECONDS + EXPLAIN_SECONDS)
        give_up("", 1)


# Ending with the process that started this one


def follow_launcher() -> None:
    """End with the process that has started this one if that is a launcher, which may be killed without a signal."""
    if "TORCHELASTIC_RUN_ID" in os.environ or "TORCHELASTIC_USE_AGENT_STORE" in os.environ:
        threading.Thread(target=_follow, args=(os.getppid(),), daemon=True).start()


def _follow(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    give_up("", 1)
