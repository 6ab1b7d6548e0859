"""Failures: an error, a lost process or a stalled one ends all processes, and one of them prints the reason.

Called by the scripts (`run_main`, `barrier`), spawn (`run_main`), utils/run.py (`Watchdog`), accelerator and stop.
"""

from __future__ import annotations

import errno
import faulthandler
import itertools
import os
import re
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import NamedTuple, NoReturn

from torch import distributed

from utils.background import Background
from utils.birth import collect_garbage, parent_number, record_exit_code
from utils.console import silence, surviving_output, wrapped
from utils.distributed.loader_processes import end_workers, remove_temporary_folders
from utils.distributed.ranks import (
    SPAWNED,
    adopt_launch,
    check_launch,
    is_local_main,
    ranks,
    store_is_hosted,
    world_size,
)
from utils.distributed.store import query_store, run_store
from utils.errors import UserError, first_line
from utils.user_code import explained

EXPLAIN_SECONDS = 5.0  # time that a failing process waits for another one to print the reason
ALARM_POLL_SECONDS = 1.0  # interval of the checks whether another process has failed
ROLL_CALL_SECONDS = 2.5  # time for the surviving processes to write that they are present
HEARTBEATS_SECONDS = 3.0  # time for the other processes to write their heartbeats
# Code that waits for other processes: a collective, or backward, which ends in one.
WAITING = ("torch/distributed/", "torch/autograd/", "deepspeed/comm/")


_barrier_numbers = itertools.count()  # the same on all processes
_on_failure: list[Callable[[str], object]] = []  # at most one listener, see `on_failure`


def on_failure(listener: Callable[[str], object]) -> None:
    """Call `listener` with the reason before this process ends with an error; it must return soon."""
    _on_failure[:] = [listener]


def notify_failure(reason: str) -> None:
    """Call the listener of `on_failure`, if there is one."""
    while _on_failure:
        with suppress(Exception):
            _on_failure.pop()(reason.removeprefix("error: "))


class Stopped(Exception):
    """The run ends early, on request, with the exit code `code`; everything is saved and printed."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code

    def __str__(self) -> str:
        return f"stopped, exit code {self.code}"


@record_exit_code()
@surviving_output()
def run_main(main: Callable[[], object]) -> None:
    """Call a script's `main`; turn a `UserError` into one line on stderr and exit code 1, Ctrl-C into exit code 130.

    Only one of all processes prints the line, also for a process that was lost. This process ends with its launcher,
    and its loader processes end with it.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL and SPAWNED not in os.environ:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # the scripts change it during their imports
    collect_garbage()
    try:
        adopt_launch()
        check_launch()
    except UserError as error:
        sys.exit(f"error: {error}")
    if not is_local_main():
        warnings.simplefilter("ignore")
        silence()
    exit_with_parent()
    try:
        with explained():
            main()
    except Stopped as stopped:
        if world_size() == 1 and not Background.abandoned:
            sys.exit(stopped.code)
        hard_exit("", stopped.code)
    except KeyboardInterrupt:
        _end("interrupted", 130)
    except Exception as error:
        if lost := lost_contact(error) or lost_contact(error.__cause__ or error):  # in a user's layer, perhaps
            _end_as_survivor(lost)
        if reason := str(error) if isinstance(error, UserError) else describe_system_failure(error):
            _end(f"error: {reason}", 1)
        if world_size() == 1:
            notify_failure(f"{type(error).__name__}: {first_line(error, 1000)}")
            if not Background.abandoned:
                raise
            traceback.print_exc()
            hard_exit("")
        traceback.print_exc()
        _end(f"error: {ranks()} failed: {type(error).__name__}: {str(error).partition(chr(10))[0]}", 1)
    finally:
        end_workers()
    by_zero = distributed.is_initialized() and "deepspeed" in sys.modules
    if distributed.is_initialized():
        distributed.destroy_process_group()
    if world_size() > 1 or by_zero or Background.abandoned:
        hard_exit("", 0)  # threads of DeepSpeed, or one that reads the store, may abort or block a regular exit


def lost_contact(error: BaseException) -> str:
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


def describe_system_failure(error: Exception) -> str:
    """Describe a killed loader process, or too few open files; return '' for any other error."""
    text = str(error)
    if getattr(error, "errno", 0) in (errno.EMFILE, errno.ENFILE) or text.startswith("Too many open files"):
        return "too many files are open; raise the limit with ulimit -n, or lower --workers"
    if not isinstance(error, RuntimeError) or "DataLoader worker" not in text:
        return ""
    if "unable to allocate shared memory(shm)" in text or "killed by signal: Bus error" in text:
        return "a loader process ran out of shared memory: make /dev/shm larger (docker --shm-size), or lower --workers"
    if re.search(r"DataLoader worker \(pid.*(killed by signal|exited unexpectedly)", text):
        return "a loader process was killed, possibly by the system because memory ran out; if so, lower --workers"
    return ""


def _end(message: str, code: int) -> NoReturn:
    """Print the reason, once for all processes, and exit."""
    notify_failure(message)
    end_workers()
    message = wrapped(message) if sys.stderr.isatty() else message
    if world_size() == 1:
        if Background.abandoned:
            hard_exit(message, code)  # a regular exit may wait for that thread
        print(message, file=sys.stderr)
        sys.exit(code)
    raise_alarm()
    exit_reporting_once(lambda: message, code)


def _end_as_survivor(message: str) -> NoReturn:
    """Exit with all surviving processes after one was lost; one of them names the lost process.

    If a process has already printed a reason, nothing more is printed.
    """
    notify_failure(message)
    end_workers()
    raise_alarm()
    time.sleep(ROLL_CALL_SECONDS)
    if query_store(lambda store: store.count("failed", 0), 0):
        hard_exit("")

    def explain() -> str:
        present: dict[int, bool] = query_store(lambda store: store.values("present"), {})
        missing = set(range(world_size())) - set(present) - {ranks().rank}
        lost = f"{process_names(sorted(missing))} ended without an error message, or cannot be reached"
        return f"error: {lost if missing else message}"

    exit_reporting_once(explain)


def exit_reporting_once(explain: Callable[[], str], code: int = 1) -> NoReturn:
    """Exit as `hard_exit` does. The first process to fail prints the result of `explain`; the others wait for it."""
    if is_first_to_fail():
        hard_exit(explain(), code)
    time.sleep(EXPLAIN_SECONDS)  # if this process exits earlier, the first one may be ended before it has printed
    hard_exit("", code)


def hard_exit(message: str, code: int = 1) -> NoReturn:
    """Print `message` if it is not empty, end the loader processes and exit without waiting for other threads."""
    if message:
        print(message, file=sys.stderr, flush=True)
    end_workers()
    remove_temporary_folders()
    sys.stdout.flush()
    # Not sys.exit: destroying the process group may wait for processes that have ended.
    os._exit(code)


def is_first_to_fail() -> bool:
    """Return whether this process is the first to call this; without a store, whether it prints for its machine."""
    calls = query_store(lambda store: store.count("failed"), 0)
    return calls == 1 if calls else is_local_main() or _main_is_gone()


def _main_is_gone() -> bool:
    """Return whether this process prints in place of the lost main process, which hosted the store."""
    here = ranks()
    return run_store() is not None and not store_is_hosted() and here.rank == here.local_rank == 1


def process_names(numbers: Iterable[int]) -> str:
    """Return the names of ranks: `process 1 on a and process 2 on b`."""
    names: dict[int, str] = query_store(lambda store: store.values("names"), {})
    return " and ".join(names.get(rank, f"process {rank}") for rank in numbers)


def start_failure_monitor() -> None:
    """Write this process's name to the store, and start a thread that ends this process if another one fails.

    The main thread may be waiting for the process that failed.
    """
    if world_size() > 1:
        query_store(lambda store: store.write("names", str(ranks())), None)
        threading.Thread(target=_await_alarm, daemon=True).start()


def raise_alarm() -> None:
    """Tell all processes that the run ends; the surviving ones then write to the store that they are present."""
    query_store(lambda store: store.write_once("alarm", True), None)


def _await_alarm() -> None:
    store = run_store()
    with suppress(RuntimeError):
        while store is not None and store.value("alarm") is None:
            time.sleep(ALARM_POLL_SECONDS)
        notify_failure("another process of the run has failed; see the console for the reason")
        query_store(lambda store: store.write("present", True), None)
        time.sleep(ROLL_CALL_SECONDS + EXPLAIN_SECONDS)
        hard_exit("")


def exit_with_parent() -> None:
    """End this process with the launcher that started it, if any, because a killed launcher passes no signal on."""
    if "TORCHELASTIC_RUN_ID" in os.environ or "TORCHELASTIC_USE_AGENT_STORE" in os.environ:
        threading.Thread(target=_follow, args=(parent_number(),), daemon=True).start()


def _follow(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    notify_failure("the launcher has ended")
    raise_alarm()
    exit_reporting_once(
        lambda: f"error: the launcher of {ranks()} has ended, so the run ends too; continue with --resume"
    )


@contextmanager
def barrier(seconds: float) -> Iterator[None]:
    """Let each process run the `with` block, then wait until all have finished it.

    Raises a `UserError` that names the processes that have not finished it `seconds` after this one.
    """
    yield
    store = run_store()
    if store is None or world_size() == 1:
        return
    name, end, pause = f"barrier/{next(_barrier_numbers)}", time.monotonic() + seconds, 0.005
    store.write(name, True)
    while len(finished := store.values(name)) < world_size():
        if time.monotonic() > end:
            late = process_names(sorted(set(range(world_size())) - set(finished)))
            raise UserError(
                f"{late} did not read the data within {seconds:g} s of the others (--dist-timeout), or cannot be "
                "reached; if a download or the label scan takes longer there, raise --dist-timeout"
            )
        time.sleep(pause)
        pause = min(2 * pause, ALARM_POLL_SECONDS)


# The watchdog


class Heartbeat(NamedTuple):
    """The state of a process without progress: the number of its batches, and whether it waits for other processes."""

    batches: int
    waits: bool


class Watchdog:
    """Ends a process if `beat` is not called for `timeout` seconds within the `with`; names the process at fault.

    Each process writes its Python stacks into `folder`/stacks. A run of a single process is not watched.
    """

    def __init__(self, timeout: float, folder: Path) -> None:
        self.timeout, self.file = timeout, folder / "stacks" / f"process{ranks().rank}.txt"
        self.batches, self.last, self.on = 0, time.monotonic(), False

    def beat(self) -> None:
        """Reset the timer: this process starts its next batch."""
        self.batches += 1
        self.last = time.monotonic()

    def __enter__(self) -> Watchdog:
        self.beat()
        self.on = world_size() > 1
        if self.on:
            threading.Thread(target=self.watch, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.on = False

    def watch(self) -> None:
        """Call `end` after `timeout` seconds without a beat; return at the end of the `with`."""
        while self.on:
            time.sleep(min(self.timeout / 10, 1.0))
            if self.on and time.monotonic() - self.last > self.timeout:
                self.end()

    def end(self) -> None:
        """Write the stacks and the heartbeat of this process, and exit with all processes."""
        waits = is_waiting(sys._current_frames()[threading.main_thread().ident or 0])
        heartbeat = Heartbeat(self.batches, waits)
        query_store(lambda store: store.write("heartbeats", heartbeat), None)
        with suppress(OSError):  # the process must end on a full disk too
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with self.file.open("w") as file:
                faulthandler.dump_traceback(file, all_threads=True)
        notify_failure(f"no progress for {self.timeout:g} s (--dist-timeout); the stacks are in {self.file.parent}")
        raise_alarm()
        time.sleep(HEARTBEATS_SECONDS)
        exit_reporting_once(lambda: self._explain(heartbeat))

    def _explain(self, heartbeat: Heartbeat) -> str:
        written: dict[int, list] = query_store(lambda store: store.values("heartbeats"), {})
        heartbeats = {rank: Heartbeat(*values) for rank, values in written.items()}
        heartbeats[ranks().rank] = heartbeat  # in case the store cannot be reached
        late = lagging_ranks(world_size(), heartbeats)
        what = "made no progress" if late <= set(heartbeats) else "made no progress, or could not be reached,"
        who = f"{process_names(sorted(late))} {what}" if late else "no process made progress"
        return (
            f"error: {who} for {self.timeout:g} s (--dist-timeout) while the others waited; the stack of each process "
            f"is in {self.file.parent}"
        )


def is_waiting(frame: FrameType | None) -> bool:
    """Return whether a stack ends in a wait for other processes.

    Args:
        frame: innermost frame of the stack
    """
    while frame is not None:
        name = frame.f_code.co_filename.replace("\\", "/")
        if any(part in name for part in WAITING):
            return True
        frame = frame.f_back
    return False


def lagging_ranks(processes: int, heartbeats: dict[int, Heartbeat]) -> set[int]:
    """Return the ranks that the others wait for: without a heartbeat, else not waiting, else behind."""
    absent = set(range(processes)) - set(heartbeats)
    if absent:
        return absent
    busy = {rank for rank, heartbeat in heartbeats.items() if not heartbeat.waits}
    if busy and len(busy) < processes:
        return busy
    behind = min(heartbeat.batches for heartbeat in heartbeats.values())
    late = {rank for rank, heartbeat in heartbeats.items() if heartbeat.batches == behind}
    return late if len(late) < processes else set()
