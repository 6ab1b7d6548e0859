"""How a run ends: an error, a lost process or a stalled one ends all processes, and one of them prints the reason.

Every script ends in `run_main`. A process that fails raises an alarm in the run's store, which a thread of each process
polls, because the main thread may be waiting for the one that failed. A killed process cannot: the others notice it by
a broken collective, by `launch.spawn`, or by the `Watchdog`. Loader processes end with their parent.
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
from typing import NoReturn

from torch import distributed

from utils.console import Background, log
from utils.distributed.ranks import check_launch, query_store, ranks, run_store, store_is_hosted, world_size
from utils.errors import UserError, first_line
from utils.user_code import explained

EXPLAIN_SECONDS = 5.0  # time that a failing process waits for another one to print the reason
POLL_SECONDS = 1.0  # interval of the checks whether another process has failed, or the parent has ended
ROLL_CALL_SECONDS = 2.5  # time for the other processes to write that they are present
# Code that waits for other processes: a collective, or backward, which ends in one.
WAITING = ("torch/distributed/", "torch/autograd/", "deepspeed/comm/")
PR_SET_PDEATHSIG = 1  # option of Linux's prctl
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # parameters of glibc's mallopt
LOADER_DIED = (
    r"DataLoader worker (\(pid.*(killed by signal|exited unexpectedly)|(?s:.*)unable to allocate shared memory)"
)
LOADER_MEMORY_BYTES = 2**28  # freed memory that a loader process keeps
PARENT = os.getppid()

_barrier_numbers = itertools.count()  # the same on all processes
_on_failure: list[Callable[[], object]] = []  # at most one listener, see `on_failure`


def run_main(main: Callable[[], object]) -> None:
    """Call a script's `main`; turn a `UserError` into one line on stderr and exit code 1, Ctrl-C into exit code 130.

    Only one of all processes prints the line, also for a process that was lost.
    """
    if is_script := not gc.isenabled():  # it has turned the garbage collector off for its imports
        gc.freeze()
        gc.enable()
    code = 1
    try:
        code = _run(main)
    finally:
        if is_script:  # once threads have ended
            atexit.register(_leave, code)
    if code:
        sys.exit(code)


def _leave(code: int) -> None:
    """Exit after all other `atexit` functions, without Python's clean-up, which takes a second."""
    atexit.unregister(_leave)
    atexit._run_exitfuncs()
    hard_exit("", code)


def _run(main: Callable[[], object]) -> int:
    """Call `main`, and print its error, if it has one; return the exit code, or end the process with all others."""
    message, code, lost, processes = "", 1, False, 1
    try:
        check_launch()
        processes = world_size()
        if ranks().local_rank:
            warnings.simplefilter("ignore")
            log.is_main = False
        if processes > 1:
            threading.Thread(target=_watch_others, daemon=True).start()
        with explained():
            main()
        code = 0
    except SystemExit as end:  # the reason is printed
        code = int(end.code or 0)
    except KeyboardInterrupt:
        message, code = "interrupted", 130
    except Exception as error:
        cause = known_cause(error) or known_cause(error.__cause__ or error)  # in a user's layer, perhaps
        message, lost = f"error: {cause or error}", bool(cause)
        if not cause and not isinstance(error, UserError):
            reason = f"{ranks()} failed: {type(error).__name__}: {first_line(error, 1000)}"
            notify_failure()  # before a traceback, which may be the end
            if processes == 1 and not Background.abandoned:
                raise
            traceback.print_exc()
            message = f"error: {reason}" if processes > 1 else ""
    finally:
        log.reset()  # it refers to the run, with its loaders
        end_workers()
    connected = distributed.is_initialized()
    if message and processes > 1:
        end_together(message, code, "ended without an error message, or cannot be reached" if lost else "")
    if message:
        notify_failure()
        print(message, file=sys.stderr)
    elif connected and not code:
        distributed.destroy_process_group()
    if connected or processes > 1 or Background.abandoned:
        hard_exit("", code)  # threads of DeepSpeed, or one that reads the store, may abort or block a regular exit
    return code


def on_failure(listener: Callable[[], object]) -> None:
    """Call `listener` before this process ends with an error; it must return soon."""
    _on_failure[:] = [listener]


def notify_failure() -> None:
    """Call the listener of `on_failure`, if there is one."""
    while _on_failure:
        with suppress(Exception):
            _on_failure.pop()()


def known_cause(error: BaseException) -> str:
    """Describe an error of torch's communication between processes or of its loader processes; '' for any other."""
    if not isinstance(error, RuntimeError):
        return ""
    if isinstance(error, distributed.DistError) or re.search(r"(?i)gloo|nccl", str(error)):
        return f"the connection to the other processes broke ({first_line(error, 1000)}); see their output"
    if not re.search(LOADER_DIED, str(error)):
        return ""
    return (
        "a loader process was killed, possibly by the system because memory or /dev/shm ran out; if so, lower "
        "--workers, or make /dev/shm larger (docker --shm-size)"
    )


# Who failed, and who is lost


def end_together(message: str, code: int = 1, culprit: str = "", stalled: bool = False) -> NoReturn:
    """End all processes; the first that calls this prints the message; without the store, one of each machine does.

    Args:
        culprit: what is wrong with processes that do not answer the alarm; they are named instead of the message
        stalled: whether to name the processes that the others wait for, if all answer
    """
    waits = is_waiting()
    notify_failure()
    query_store(lambda store: store.write_once("alarm", True), None)
    query_store(lambda store: store.write("present", waits), None)
    time.sleep(ROLL_CALL_SECONDS if culprit else 0)
    calls = query_store(lambda store: store.count("failed"), 0)
    if calls == 1 or (not calls and not ranks().local_rank):
        answers: dict[int, bool] = {**query_store(lambda store: store.values("present"), {}), ranks().rank: waits}
        late = set(range(world_size())) - set(answers)
        late = late or {rank for rank, waits in answers.items() if stalled and not waits}
        named = culprit and 0 < len(late) < world_size()
        hard_exit(f"error: {names(late)} {culprit}" if named else message, code)
    time.sleep(EXPLAIN_SECONDS)  # if this process exits earlier, the first one may be ended before it has printed
    hard_exit("", code)


def hard_exit(message: str, code: int = 1) -> NoReturn:
    """Print `message` if it is not empty, end the loader processes and exit without waiting for other threads."""
    if message:
        print(message, file=sys.stderr, flush=True)
    end_workers()
    if multiprocessing.parent_process() is None:  # else the folder belongs to the parent
        shutil.rmtree(get_temp_dir(), ignore_errors=True)
    with suppress(OSError):  # its reader has ended, or its disk is full
        sys.stdout.flush()
    os._exit(code)  # not sys.exit: destroying the process group may wait for processes that have ended


def names(numbers: Iterable[int]) -> str:
    """Return the names of ranks: `process 1 on a and process 2 on b`."""
    known: dict[int, str] = query_store(lambda store: store.values("names"), {})
    return " and ".join(known.get(rank, f"process {rank}") for rank in sorted(numbers))


def _watch_others() -> None:
    """End this process if another one fails, or with its launcher: a killed one passes no signal on."""
    parent = multiprocessing.parent_process()
    launcher = (parent.pid if parent else PARENT) if store_is_hosted() else None
    with suppress(RuntimeError, ValueError):  # the process group is just being destroyed
        while not ((store := run_store()) and store.value("alarm")):
            if launcher and os.getppid() != launcher:
                end_together(f"error: the launcher of {ranks()} has ended, so the run ends too; continue with --resume")
            time.sleep(POLL_SECONDS)
        notify_failure()
        query_store(lambda store: store.write("present", is_waiting()), None)
        time.sleep(ROLL_CALL_SECONDS + EXPLAIN_SECONDS)
        hard_exit("")


# Who hangs


@contextmanager
def barrier(seconds: float) -> Iterator[None]:
    """Let each process run the `with` block, then wait until all have finished it.

    Raises a `UserError` that names the processes that have not finished it `seconds` after this one.
    """
    yield
    store, name, end = run_store(), f"barrier/{next(_barrier_numbers)}", time.monotonic() + seconds
    if store is None:
        return
    store.write(name, True)
    while missing := set(range(world_size())) - set(store.values(name)):
        if time.monotonic() > end:
            raise UserError(
                f"{names(missing)} did not read the data within {seconds:g} s of the others, or cannot be reached; if "
                "a download or the label scan takes longer there, raise --dist-timeout"
            )
        time.sleep(0.02)


class Watchdog:
    """Ends all processes if `beat` is not called for `timeout` seconds within the `with`; names the one at fault.

    Each process writes its Python stacks into `folder`/stacks. A run of a single process is not watched.
    """

    def __init__(self, timeout: float, folder: Path) -> None:
        self.timeout, self.folder, self.on = timeout, folder / "stacks", False

    def beat(self) -> None:
        """Reset the timer: this process starts its next batch."""
        self.last = time.monotonic()

    def __enter__(self) -> Watchdog:
        self.beat()
        self.on = world_size() > 1
        if self.on:
            threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.on = False

    def _watch(self) -> None:
        while time.monotonic() - self.last <= self.timeout:
            time.sleep(min(self.timeout / 10, 1.0))
            if not self.on:
                return
        with suppress(OSError):  # the process must end on a full disk too
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / f"process{ranks().rank}.txt").open("w") as file:
                faulthandler.dump_traceback(file, all_threads=True)
        reason = f"for {self.timeout:g} s (--dist-timeout); the stack of each process is in {self.folder}"
        culprit = f"made no progress, or cannot be reached, {reason}"
        end_together(f"error: no process made progress {reason}", culprit=culprit, stalled=True)


def is_waiting() -> bool:
    """Return whether the main thread waits for other processes."""
    stack = traceback.walk_stack(sys._current_frames().get(threading.main_thread().ident or 0))
    files = [frame.f_code.co_filename.replace("\\", "/") for frame, _ in stack]
    return any(part in file for part in WAITING for file in files)


# Loader processes


def init_worker(number: int) -> None:
    """Make a loader process ignore signals sent to the whole job, and end with its parent, or on its SIGTERM."""
    # W&B's import hooks call a thread that a forked process lacks; a user's function may import a package.
    sys.meta_path[:] = [finder for finder in sys.meta_path if not type(finder).__module__.startswith("wandb.")]
    keep_freed_memory(LOADER_MEMORY_BYTES)
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # on Linux; elsewhere torch's loop looks for it
    signal.set_wakeup_fd(-1)
    for name in ("SIGINT", "SIGUSR1", "SIGHUP"):
        if hasattr(signal, name):  # Windows has only the first signal
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    if hasattr(signal, "sigtimedwait"):  # and sigwaitinfo
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_await_end, daemon=True).start()


def _await_end() -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)


def end_workers() -> None:
    """Kill the loader processes of this process, which is about to end."""
    with suppress(AttributeError, ValueError):  # Windows has no SIGCHLD, and only the main thread may set handlers
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's would report killed ones as an error
    workers = multiprocessing.active_children()
    for worker in workers:
        worker.kill()
    for worker in workers:
        worker.join(1)


def keep_freed_memory(most_bytes: int = -1) -> None:
    """Let this process keep freed memory, up to `most_bytes` at the end of the heap; -1 sets no limit.

    The system fills new pages with zeros: a tenth of a training step on the CPU, and most of an image's augmentation.
    """
    with suppress(OSError, AttributeError):  # not glibc
        library = ctypes.CDLL(None)
        library.mallopt(M_MMAP_MAX, 0)  # large blocks have mappings of their own, which are always returned
        library.mallopt(M_TRIM_THRESHOLD, most_bytes)
