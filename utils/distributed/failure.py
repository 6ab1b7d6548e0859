"""How a run ends: an error, a lost process or a stalled one ends all processes, and one of them prints the reason.

Every script ends in `run_main`. A process that fails raises an alarm in the run's store, which a thread of each process
polls, because the main thread may be waiting for the one that failed. Loader processes end with their parent.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import gc
import itertools
import multiprocessing
import os
import re
import shutil
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.util import get_temp_dir
from pathlib import Path
from types import FrameType
from typing import NoReturn

from torch import distributed

from utils.background import Background
from utils.console import silence, surviving_output, wrapped
from utils.distributed.ranks import check_launch, is_local_main, query_store, ranks, run_store, world_size
from utils.errors import UserError, first_line
from utils.user_code import explained

EXPLAIN_SECONDS = 5.0  # time that a failing process waits for another one to print the reason
POLL_SECONDS = 1.0  # interval of the checks whether another process has failed, or the parent has ended
ROLL_CALL_SECONDS = 2.5  # time for the other processes to write that they are present, or their heartbeats
# Code that waits for other processes: a collective, or backward, which ends in one.
WAITING = ("torch/distributed/", "torch/autograd/", "deepspeed/comm/")
PR_SET_PDEATHSIG = 1  # option of Linux's prctl
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # parameters of glibc's mallopt
LOADER_MEMORY_BYTES = 2**28  # freed memory that a loader process keeps
PARENT = os.getppid()

_barrier_numbers = itertools.count()  # the same on all processes
_on_failure: list[Callable[[str], object]] = []  # at most one listener, see `on_failure`


class Stopped(Exception):
    """The run ends early, on request, with the exit code `code`; everything is saved and printed."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


@contextmanager
def _quick_exit() -> Iterator[None]:
    """Let a script, which has turned the garbage collector off for its imports, end without Python's slow clean-up."""
    code, is_script = 1, not gc.isenabled()
    if is_script:
        gc.freeze()
        gc.enable()
    try:
        yield
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        raise
    finally:
        if is_script:
            atexit.register(_leave, code)


def _leave(code: int) -> None:
    """Exit at once, after all other `atexit` functions. Threads have ended."""
    atexit.unregister(_leave)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # closed, or absent
            stream.flush()
    os._exit(code)


@_quick_exit()
@surviving_output()
def run_main(main: Callable[[], object]) -> None:
    """Call a script's `main`; turn a `UserError` into one line on stderr and exit code 1, Ctrl-C into exit code 130.

    Only one of all processes prints the line, also for a process that was lost.
    """
    try:
        check_launch()
    except UserError as error:
        sys.exit(f"error: {error}")
    if not is_local_main():
        warnings.simplefilter("ignore")
        silence()
    if "TORCHELASTIC_USE_AGENT_STORE" in os.environ:
        threading.Thread(target=_follow_launcher, daemon=True).start()
    try:
        with explained():
            main()
    except Stopped as stopped:
        if world_size() > 1 or Background.abandoned:
            hard_exit("", stopped.code)
        sys.exit(stopped.code)
    except KeyboardInterrupt:
        _end("interrupted", 130)
    except Exception as error:
        if lost := lost_contact(error) or lost_contact(error.__cause__ or error):  # in a user's layer, perhaps
            _end(f"error: {lost}", survivor=True)
        if reason := str(error) if isinstance(error, UserError) else describe_loader_failure(error):
            _end(f"error: {reason}")
        if world_size() == 1:
            notify_failure(f"{type(error).__name__}: {first_line(error, 1000)}")
            if not Background.abandoned:
                raise
        traceback.print_exc()
        if world_size() == 1:
            hard_exit("")
        _end(f"error: {ranks()} failed: {type(error).__name__}: {first_line(error, 1000)}")
    finally:
        end_workers()
    if connected := distributed.is_initialized():
        distributed.destroy_process_group()
    if connected or Background.abandoned:
        hard_exit("", 0)  # threads of DeepSpeed, or one that reads the store, may abort or block a regular exit


# Who failed, and who is lost


def on_failure(listener: Callable[[str], object]) -> None:
    """Call `listener` with the reason before this process ends with an error; it must return soon."""
    _on_failure[:] = [listener]


def notify_failure(reason: str) -> None:
    """Call the listener of `on_failure`, if there is one."""
    while _on_failure:
        with suppress(Exception):
            _on_failure.pop()(reason.removeprefix("error: "))


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
    return f"the connection to the other processes broke ({first_line(error, 1000)}); see their output for the reason"


def _end(message: str, code: int = 1, survivor: bool = False) -> NoReturn:
    """Exit with all processes; one of them prints the message.

    Args:
        survivor: whether another process was lost; if it was not an error that is printed, its name is
    """
    notify_failure(message)
    end_workers()
    message = wrapped(message) if sys.stderr.isatty() else message
    if world_size() == 1 and not Background.abandoned:
        print(message, file=sys.stderr)
        sys.exit(code)
    end_together(lambda: _name_the_lost(message) if survivor else message, code, ROLL_CALL_SECONDS * survivor)


def _name_the_lost(message: str) -> str:
    present: dict[int, bool] = query_store(lambda store: store.values("present"), {})
    missing = set(range(world_size())) - set(present) - {ranks().rank}
    return f"error: {names(missing)} ended without an error message, or cannot be reached" if missing else message


def end_together(explain: Callable[[], str], code: int = 1, roll_call: float = 0.0) -> NoReturn:
    """End all processes; the first that calls this prints `explain()`; without the store, one of each machine.

    Args:
        roll_call: seconds for the others to write what `explain` reads
    """
    query_store(lambda store: store.write_once("alarm", True), None)
    time.sleep(roll_call)
    calls = query_store(lambda store: store.count("failed"), 0)
    if calls == 1 or (not calls and is_local_main()):
        hard_exit(explain(), code)
    time.sleep(EXPLAIN_SECONDS)  # if this process exits earlier, the first one may be ended before it has printed
    hard_exit("", code)


def hard_exit(message: str, code: int = 1) -> NoReturn:
    """Print `message` if it is not empty, end the loader processes and exit without waiting for other threads."""
    if message:
        print(message, file=sys.stderr, flush=True)
    end_workers()
    if multiprocessing.parent_process() is None:  # else the folder belongs to the parent
        shutil.rmtree(get_temp_dir(), ignore_errors=True)
    sys.stdout.flush()
    # Not sys.exit: destroying the process group may wait for processes that have ended.
    os._exit(code)


def names(numbers: Iterable[int]) -> str:
    """Return the names of ranks: `process 1 on a and process 2 on b`."""
    known: dict[int, str] = query_store(lambda store: store.values("names"), {})
    return " and ".join(known.get(rank, f"process {rank}") for rank in sorted(numbers))


def start_failure_monitor() -> None:
    """Write this process's name to the store, and start a thread that ends this process if another one fails."""
    if world_size() > 1:
        query_store(lambda store: store.write("names", str(ranks())), None)
        threading.Thread(target=_await_alarm, daemon=True).start()


def _await_alarm() -> None:
    store = run_store()
    with suppress(RuntimeError):
        while store is not None and store.value("alarm") is None:
            time.sleep(POLL_SECONDS)
        notify_failure("another process of the run has failed; see the console for the reason")
        query_store(lambda store: store.write("present", True), None)
        time.sleep(ROLL_CALL_SECONDS + EXPLAIN_SECONDS)
        hard_exit("")


def _follow_launcher() -> None:
    """End this process with the one that started it: a killed launcher passes no signal on."""
    parent = multiprocessing.parent_process()
    while os.getppid() == (parent.pid if parent else PARENT):
        time.sleep(POLL_SECONDS)
    reason = f"the launcher of {ranks()} has ended, so the run ends too; continue with --resume"
    notify_failure(reason)
    end_together(lambda: f"error: {reason}")


# Who hangs


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
            raise UserError(
                f"{names(set(range(world_size())) - set(finished))} did not read the data within {seconds:g} s of the "
                "others (--dist-timeout), or cannot be reached; if a download or the label scan takes longer there, "
                "raise --dist-timeout"
            )
        time.sleep(pause)
        pause = min(2 * pause, POLL_SECONDS)


Heartbeat = tuple[int, bool]  # of a process without progress: its batches, and whether it waits for other processes


class Watchdog:
    """Ends all processes if `beat` is not called for `timeout` seconds within the `with`; names the one at fault.

    Each process writes its Python stacks into `folder`/stacks. A run of a single process is not watched.
    """

    def __init__(self, timeout: float, folder: Path) -> None:
        self.timeout, self.folder = timeout, folder / "stacks"
        self.batches, self.last, self.on = 0, time.monotonic(), False

    def beat(self) -> None:
        """Reset the timer: this process starts its next batch."""
        self.batches, self.last = self.batches + 1, time.monotonic()

    def __enter__(self) -> Watchdog:
        self.beat()
        self.on = world_size() > 1
        if self.on:
            threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.on = False

    def _watch(self) -> None:
        while self.on:
            time.sleep(min(self.timeout / 10, 1.0))
            if self.on and time.monotonic() - self.last > self.timeout:
                self._end()

    def _end(self) -> NoReturn:
        """Write the stacks and the heartbeat of this process, and exit with all processes."""
        own = (self.batches, is_waiting(sys._current_frames()[threading.main_thread().ident or 0]))
        query_store(lambda store: store.write("heartbeats", own), None)
        with suppress(OSError):  # the process must end on a full disk too
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / f"process{ranks().rank}.txt").open("w") as file:
                faulthandler.dump_traceback(file, all_threads=True)
        notify_failure(f"no progress for {self.timeout:g} s (--dist-timeout); the stacks are in {self.folder}")
        end_together(lambda: self._explain(own), roll_call=ROLL_CALL_SECONDS)

    def _explain(self, own: Heartbeat) -> str:
        written: dict[int, Heartbeat] = query_store(lambda store: store.values("heartbeats"), {})
        heartbeats = written | {ranks().rank: own}
        late = lagging_ranks(world_size(), heartbeats)
        what = "made no progress" if late <= set(heartbeats) else "made no progress, or could not be reached,"
        return (
            f"error: {f'{names(late)} {what}' if late else 'no process made progress'} for {self.timeout:g} s "
            f"(--dist-timeout) while the others waited; the stack of each process is in {self.folder}"
        )


def is_waiting(frame: FrameType | None) -> bool:
    """Return whether a stack, given by its innermost frame, waits for other processes."""
    while frame is not None:
        if any(part in frame.f_code.co_filename.replace("\\", "/") for part in WAITING):
            return True
        frame = frame.f_back
    return False


def lagging_ranks(processes: int, heartbeats: dict[int, Heartbeat]) -> set[int]:
    """Return the ranks that the others wait for: without a heartbeat, else not waiting, else behind."""
    if absent := set(range(processes)) - set(heartbeats):
        return absent
    busy = {rank for rank, (_, waits) in heartbeats.items() if not waits}
    if busy and len(busy) < processes:
        return busy
    behind = min(batches for batches, _ in heartbeats.values())
    late = {rank for rank, (batches, _) in heartbeats.items() if batches == behind}
    return late if len(late) < processes else set()


# Loader processes


def init_worker(number: int) -> None:
    """Make a loader process ignore signals sent to the whole job, and end with its parent, or on its SIGTERM."""
    # W&B's import hooks call a thread that a forked process lacks; a user's function may import a package.
    sys.meta_path[:] = [finder for finder in sys.meta_path if not type(finder).__module__.startswith("wandb.")]
    keep_freed_memory(LOADER_MEMORY_BYTES)
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # on Linux it ends at once with its parent
    signal.set_wakeup_fd(-1)
    for name in ("SIGINT", "SIGUSR1", "SIGHUP"):
        if hasattr(signal, name):  # Windows has only the first signal
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    if hasattr(signal, "sigtimedwait"):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_await_end, daemon=True).start()


def _await_end() -> None:
    parent = multiprocessing.parent_process()
    while parent and os.getppid() == parent.pid:
        received = signal.sigtimedwait({signal.SIGTERM}, POLL_SECONDS)
        if received and received.si_pid == parent.pid:
            break
    os._exit(0)


def end_workers() -> None:
    """Kill the loader processes of this process, which is about to end."""
    workers = multiprocessing.active_children()
    handler = None
    with suppress(AttributeError, ValueError):  # Windows has no SIGCHLD, and only the main thread may set handlers
        handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's would report killed ones as an error
    for worker in workers:
        worker.kill()
    for worker in workers:
        worker.join(1)
    if handler is not None:
        signal.signal(signal.SIGCHLD, handler)


def describe_loader_failure(error: Exception) -> str:
    """Describe the end of a loader process; return '' for any other error."""
    text = str(error)
    if not isinstance(error, RuntimeError) or "DataLoader worker" not in text:
        return ""
    if "unable to allocate shared memory(shm)" in text or "killed by signal: Bus error" in text:
        return "a loader process ran out of shared memory: make /dev/shm larger (docker --shm-size), or lower --workers"
    if re.search(r"DataLoader worker \(pid.*(killed by signal|exited unexpectedly)", text):
        return "a loader process was killed, possibly by the system because memory ran out; if so, lower --workers"
    return ""


def keep_freed_memory(most_bytes: int = -1) -> None:
    """Let this process keep freed memory, up to `most_bytes` at the end of the heap; -1 sets no limit.

    The system fills new pages with zeros: a tenth of a training step on the CPU, and most of an image's augmentation.
    """
    with suppress(OSError, AttributeError):  # not glibc
        library = ctypes.CDLL(None)
        library.mallopt(M_MMAP_MAX, 0)  # large blocks have mappings of their own, which are always returned
        library.mallopt(M_TRIM_THRESHOLD, most_bytes)
