"""Ending all processes together: one of them prints the reason.

Called by the scripts (`run_main`), by spawn, and by what ends a run early (watchdog, graceful_stop, barrier).
"""

from __future__ import annotations

import gc
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

from utils.background import Background
from utils.console import silence, surviving_output
from utils.distributed.loader_processes import end_workers, loader_died, remove_temporary_folder
from utils.distributed.ranks import SPAWNED, check_launch, ranks, speaks_for_machine, world_size
from utils.distributed.store import ask_run_store, run_store
from utils.errors import UserError, first_line

TIME_LIMIT = "time"  # the reason of a stop that no signal has requested
EXPLAIN_SECONDS = 5.0  # that a failing process waits for another one to print the reason
ALARM_POLL_SECONDS = 1.0  # between two checks whether another process has failed
ROLL_CALL_SECONDS = 2.5  # in which the surviving processes write that they are present


_on_failure: list[Callable[[str], object]] = []  # at most one, see `on_failure`


def on_failure(listener: Callable[[str], object]) -> None:
    """Call `listener` with the reason before this process ends by an error; it must return soon."""
    _on_failure[:] = [listener]


def tell_of_failure(reason: str) -> None:
    """Call the listener of `on_failure`, if there is one."""
    while _on_failure:
        with suppress(Exception):
            _on_failure.pop()(reason.removeprefix("error: "))


class Stopped(Exception):
    """The run ends early, on request, with the exit code `code`; everything is saved and printed."""

    def __init__(self, code: int) -> None:
        super().__init__(f"stopped, exit code {code}")
        self.code = code


class StopRequested(Stopped):
    """All processes stop early, at the same step. reason: a signal's name, or `TIME_LIMIT`."""

    def __init__(self, reason: str) -> None:
        super().__init__(0 if reason == TIME_LIMIT else 128 + signal.Signals[reason])
        self.reason, self.by_time_limit = reason, reason == TIME_LIMIT


@surviving_output()
def run_main(main: Callable[[], object]) -> None:
    """Call a script's `main`; turn a `UserError` into one line on stderr and exit code 1, Ctrl-C into exit code 130.

    One of all processes prints the line, also for a process that was lost. This process ends with its launcher, and its
    loader processes end with it.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL and SPAWNED not in os.environ:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # the scripts change it during their imports
    gc.enable()  # the scripts disable it during their imports
    try:
        check_launch()
    except UserError as error:
        sys.exit(f"error: {error}")
    if not speaks_for_machine():
        warnings.simplefilter("ignore")
        silence()
    follow_launcher()
    try:
        main()
    except UserError as error:
        _end(f"error: {error}", 1)
    except Stopped as stopped:
        if world_size() == 1 and not Background.abandoned:
            sys.exit(stopped.code)
        give_up("", stopped.code)
    except KeyboardInterrupt:
        _end("interrupted", 130)
    except Exception as error:
        if lost := lost_contact(error):
            _end_as_survivor(lost)
        if reason := loader_died(error):
            _end(f"error: {reason}", 1)
        if world_size() == 1:
            tell_of_failure(f"{type(error).__name__}: {first_line(error, 1000)}")
            raise
        traceback.print_exc()
        _end(f"error: {ranks()} failed: {type(error).__name__}: {str(error).partition(chr(10))[0]}", 1)
    finally:
        end_workers()
    by_zero = distributed.is_initialized() and "deepspeed" in sys.modules
    if distributed.is_initialized():
        distributed.destroy_process_group()
    if world_size() > 1 or by_zero or Background.abandoned:
        give_up("", 0)  # threads of DeepSpeed, or one that reads the store, may abort a regular exit, or hang in it


def lost_contact(error: Exception) -> str:
    """Describe an error of torch's communication between processes; return '' for any other error."""
    text = str(error)
    known = isinstance(error, RuntimeError) and re.search(r"gloo|nccl", text, re.IGNORECASE)
    if not known and not isinstance(error, distributed.DistError):
        return ""
    if waited := re.search(r"[Tt]imed out (?:waiting|after) (\d+) ?ms", text):
        return (
            f"another process has not answered for {int(waited[1]) / 1000:g} s (--dist-timeout): it hangs, or the "
            "network between the machines is down"
        )
    if closed := re.search(r"(?:closed by peer|Read error|Write error) \[?([\w.:]+?)\]?:\d+", text):
        return f"a process on {closed[1]} has ended or cannot be reached any more; see its output for the reason"
    return f"the connection to the other processes broke ({first_line(error, 1000)}); see their output for the reason"


def _end(message: str, code: int) -> NoReturn:
    """Print the reason, once for all processes, and exit."""
    tell_of_failure(message)
    end_workers()
    if world_size() == 1:
        print(message, file=sys.stderr)
        sys.exit(code)
    raise_alarm()
    give_up_after_first(lambda: message, code)


def _end_as_survivor(message: str) -> NoReturn:
    """Exit with all surviving processes after one was lost; one of them names it unless it has printed a reason."""
    tell_of_failure(message)
    end_workers()
    raise_alarm()
    time.sleep(ROLL_CALL_SECONDS)
    if ask_run_store(lambda store: store.count("failed", 0), 0):
        give_up("")

    def explain() -> str:
        present: dict[int, bool] = ask_run_store(lambda store: store.values("present"), {})
        missing = set(range(world_size())) - set(present) - {ranks().rank}
        lost = f"{process_names(sorted(missing))} ended without an error message, or cannot be reached"
        return f"error: {lost if missing else message}"

    give_up_after_first(explain)


def give_up_after_first(explain: Callable[[], str], code: int = 1) -> NoReturn:
    """Exit as `give_up` does. The first process to fail prints the result of `explain`; the others wait for that."""
    if is_first_to_fail():
        give_up(explain(), code)
    time.sleep(EXPLAIN_SECONDS)  # if this process exits earlier, the first one may be ended before it has printed
    give_up("", code)


def give_up(message: str, code: int = 1) -> NoReturn:
    """Print `message` if it is not empty, end the loader processes and exit without waiting for other threads."""
    if message:
        print(message, file=sys.stderr, flush=True)
    end_workers()
    remove_temporary_folder()
    sys.stdout.flush()
    # Not sys.exit: destroying the process group may wait for processes that have ended.
    os._exit(code)


def is_first_to_fail() -> bool:
    """Return whether this process is the first to call this; without the store, whether it prints for its machine."""
    calls = ask_run_store(lambda store: store.count("failed"), 0)
    return calls == 1 if calls else speaks_for_machine() or _main_is_gone()


def _main_is_gone() -> bool:
    """Return whether the main process of this machine hosted the store, and this process prints in its place."""
    here = ranks()
    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return run_store() is not None and not hosted and here.rank == here.local_rank == 1


def process_names(numbers: Iterable[int]) -> str:
    """Return the names of ranks: `process 1 on a and process 2 on b`."""
    names: dict[int, str] = ask_run_store(lambda store: store.values("names"), {})
    return " and ".join(names.get(rank, f"process {rank}") for rank in numbers)


def sign_in() -> None:
    """Write this process's name to the store, and start a thread that ends this process if another one fails.

    The main thread may be waiting for the process that failed.
    """
    if world_size() > 1:
        ask_run_store(lambda store: store.write("names", str(ranks())), None)
        threading.Thread(target=_await_alarm, daemon=True).start()


def raise_alarm() -> None:
    """Tell all processes that the run ends; those that still run write so to the store."""
    ask_run_store(lambda store: store.write_once("alarm", True), None)


def _await_alarm() -> None:
    store = run_store()
    with suppress(RuntimeError):
        while store is not None and not store.is_written("alarm"):
            time.sleep(ALARM_POLL_SECONDS)
        tell_of_failure("another process of the run has failed; see the console for the reason")
        ask_run_store(lambda store: store.write("present", True), None)
        time.sleep(ROLL_CALL_SECONDS + EXPLAIN_SECONDS)
        give_up("")


def follow_launcher() -> None:
    """End this process with the launcher that started it, if any: a launcher may be killed without passing it on."""
    if "TORCHELASTIC_RUN_ID" in os.environ or "TORCHELASTIC_USE_AGENT_STORE" in os.environ:
        threading.Thread(target=_follow, args=(os.getppid(),), daemon=True).start()


def _follow(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    tell_of_failure("the launcher has ended")
    raise_alarm()
    give_up_after_first(
        lambda: f"error: the launcher of {ranks()} has ended, so the run ends too; continue with --resume"
    )
