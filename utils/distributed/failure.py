"""How a run ends: on a signal, or by an error, a lost process or a stalled one, and one process prints the reason.

Every script ends in `run_main`. A process that fails raises an alarm in the run's store, which a thread of each process
polls, because the main thread may be waiting for the one that failed. A killed process cannot: the others notice it by
a broken collective, by `launch.spawn`, or by the `Watchdog`. A signal or the time limit ends all processes at the same
optimizer step (`GracefulStop`). Loader processes end with their parent.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import gc
import multiprocessing
import os
import re
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Any, NoReturn

import psutil
from accelerate import PartialState
from torch import distributed

from utils.console import Background, log
from utils.distributed.ranks import RunStore, check_launch, open_store, ranks, run_store, store_is_hosted, world_size
from utils.errors import Stopped, UserError, first_line
from utils.summary import RESULT
from utils.user_code import as_user_error

EXPLAIN_SECONDS = 5.0  # time that a failing process waits for another one to print the reason
POLL_SECONDS = 1.0  # interval of the checks whether another process has failed, or the parent has ended
ROLL_CALL_SECONDS = 2.5  # time for all processes to write that they are present
ANSWER_SECONDS = 3.0  # time that the store may take besides; if the network is down, its answer takes many minutes
# Code that waits for other processes: a collective, or backward, which ends in one.
WAITING = ("torch/distributed/", "torch/autograd/", "deepspeed/comm/")
PR_SET_PDEATHSIG = 1  # option of Linux's prctl
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # parameters of glibc's mallopt
LOADER_DIED = r"DataLoader worker \(pid|unable to allocate shared memory"
LOADER_MEMORY_BYTES = 2**28  # freed memory that a loader process keeps
STALL_FACTOR, MIN_STALL_SECONDS = 20, 60.0  # a step stalls after 20 times the longest of the last ones
REMEMBERED_TIMES = 50  # steps whose durations count
TIME_LIMIT = "time"  # reason of a stop that no signal has requested
# Windows has only the first two signals.
STOP_SIGNALS = tuple(s for s in signal.Signals if s.name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP"))
SECOND_INTERRUPT_SECONDS = 0.5  # shortest time between two Ctrl-C, because a single one may arrive more than once

_on_failure: list[Callable[[], object]] = []  # at most one listener, see `on_failure`


def run_main(main: Callable[[], object]) -> None:
    """Call a script's `main`; turn a `UserError` into one line of one process and its exit code, Ctrl-C into 130."""
    code = 1
    if not gc.isenabled():  # a script, which has turned the garbage collector off for its imports
        gc.freeze()
        gc.enable()
        atexit.register(lambda: hard_exit("", code))  # Python's own clean-up takes a second
    code = _run(main)
    if code:
        sys.exit(code)


def _run(main: Callable[[], object]) -> int:
    """Call `main`, and print its error, if it has one; return the exit code, or end the process with all others."""
    message, culprit, code, processes = "", "", 1, 1
    try:
        check_launch()
        processes = world_size()
        if ranks().local_rank:
            warnings.simplefilter("ignore")
            log.is_main = False
        if processes > 1:
            threading.Thread(target=_watch_others, daemon=True).start()
        with as_user_error():
            main()
        code = 0
    except SystemExit as end:  # the reason is printed
        code = int(end.code or 0)
        if isinstance(end, StopRequested):  # everything is saved: one more Ctrl-C would print a traceback of clean-up
            signal.signal(signal.SIGINT, signal.SIG_IGN)
    except KeyboardInterrupt:
        message, code = "interrupted", 130
    except Exception as error:
        message, code = f"error: {error}", error.code if isinstance(error, UserError) else 1
        if cause := known_cause(error.__cause__ or error):  # the former in a user's layer
            message, culprit = f"error: {cause}", "ended without an error message, or cannot be reached"
        elif not isinstance(error, UserError):
            notify_failure()  # before a traceback, which may be the end
            if processes == 1 and not Background.abandoned:
                raise
            traceback.print_exc()
            message = f"error: {ranks()} failed: {type(error).__name__}: {first_line(error, 1000)}"
    finally:
        log.reset()  # it refers to the run, with its loaders
    connected = distributed.is_initialized()
    if message and processes > 1:
        end_together(message, code, culprit)
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
    text = str(error) if isinstance(error, RuntimeError) else ""
    if re.search(r"(?i)gloo|nccl", text) or isinstance(error, distributed.DistError):
        return f"the connection to the other processes broke ({first_line(error, 1000)}); see their output"
    if re.search(LOADER_DIED, text):
        return (
            "a loader process was killed, possibly by the system because memory or /dev/shm ran out; if so, lower "
            "--workers, or make /dev/shm larger (docker --shm-size)"
        )
    return ""


# Who failed, and who is lost


def end_together(message: str, code: int = 1, culprit: str = "", stalled: bool = False) -> NoReturn:
    """End all processes; the first that calls this prints the message; without the store, one of each machine does.

    With a `culprit`, such as `made no progress`, it prints the names of the processes that do not answer the alarm and
    this text instead. In a `stalled` run only processes that wait for others answer.
    """

    def explain() -> None:
        with suppress(RuntimeError, OSError, UnicodeError, UserError):  # the store has ended, or cannot be opened
            # Without a store, the first process of a machine prints the message before the others would.
            store = run_store() or RunStore(open_store(EXPLAIN_SECONDS + min(ranks().local_rank, 2)))
            store.write_once("alarm", stalled)
            time.sleep(ROLL_CALL_SECONDS if culprit else 0)
            if is_first := store.write_once("reason", ranks().rank) == ranks().rank:
                answers, names = store.values("present"), store.values("names")
                late = [names.get(rank, [f"process {rank}"])[0] for rank in range(world_size()) if rank not in answers]
                late_message = f"error: {' and '.join(late)} {culprit}"
                print(late_message if culprit and answers and late else message, file=sys.stderr, flush=True)
            if not is_first or (ranks().rank == 0 and not store_is_hosted()):
                time.sleep(EXPLAIN_SECONDS)  # for the first one to print, and for others to read this one's store
            hard_exit("", code)

    notify_failure()
    thread = threading.Thread(target=explain, daemon=True)
    thread.start()
    thread.join(ROLL_CALL_SECONDS + EXPLAIN_SECONDS + ANSWER_SECONDS)
    hard_exit("" if ranks().local_rank and run_store() else message, code)


def hard_exit(message: str, code: int = 1) -> NoReturn:
    """Print `message` if it is not empty, and exit without waiting for threads; loader processes end with this one."""
    if message:
        print(message, file=sys.stderr, flush=True)
    if multiprocessing.parent_process() is None:  # else the folder belongs to the parent
        shutil.rmtree(get_temp_dir(), ignore_errors=True)
    with suppress(OSError):  # its reader has ended, or its disk is full
        sys.stdout.flush()
    os._exit(code)  # not sys.exit: destroying the process group may wait for processes that have ended


def _watch_others() -> None:
    """End this process if another one fails, or with its launcher: a killed one passes no signal on."""
    launcher = os.getppid() if store_is_hosted() else None
    with suppress(RuntimeError, ValueError):  # the process group is just being destroyed
        while (store := run_store()) is None or (stalled := store.value("alarm")) is None:
            if launcher and os.getppid() != launcher:
                end_together(f"error: the launcher of {ranks()} has ended, so the run ends too; continue with --resume")
            time.sleep(POLL_SECONDS)
        if is_waiting() or not stalled:
            store.write("present", True)
        notify_failure()
        time.sleep(ROLL_CALL_SECONDS + EXPLAIN_SECONDS)
        hard_exit("")


# Who hangs


@contextmanager
def barrier(seconds: float) -> Iterator[None]:
    """Run the `with` block, then wait for all processes; all end if one takes `seconds` longer than this one."""
    yield
    if distributed.is_initialized():
        with Watchdog(seconds):
            PartialState().wait_for_everyone()


class Watchdog:
    """Ends all processes if one calls `keep_alive` too late within the `with`; names the one at fault.

    The limit is `timeout` seconds, and for repeated work, such as a step, `STALL_FACTOR` times the longest of the last
    ones. Each process writes its Python stacks into `folder`/stacks if there is one. A run of one process is not
    watched.
    """

    def __init__(self, timeout: float, folder: Path | None = None) -> None:
        self.timeout, self.folder, self.on = timeout, folder, False
        self.last, self.limit, self.work = time.monotonic(), timeout, ""
        self.durations: defaultdict[str, deque[float]] = defaultdict(partial(deque, maxlen=REMEMBERED_TIMES))

    def keep_alive(self, work: str = "") -> None:
        """Reset the timer: this process starts repeated work, such as a `training step`, or "" something else."""
        now = time.monotonic()
        if self.work:
            self.durations[self.work].append(now - self.last)
        self.last, self.work = now, work
        limits = [max(MIN_STALL_SECONDS, STALL_FACTOR * duration) for duration in self.durations[work] if work]
        self.limit = min(self.timeout, max(limits, default=self.timeout))

    def __enter__(self) -> Watchdog:
        self.keep_alive()
        self.on = world_size() > 1
        if self.on:
            threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.on = False

    def _watch(self) -> None:
        # Waking up is counted, not the clock: it goes on while the whole machine sleeps.
        last, idle, interval = self.last, 0.0, min(self.timeout / 10, 1.0)
        while idle <= self.limit:
            time.sleep(interval)
            if not self.on:
                return
            idle = idle + interval if last == self.last else 0.0
            last = self.last
        reason = f"for {self.timeout:g} s (--dist-timeout)"
        if self.limit < self.timeout:
            longest = max(self.durations[self.work])
            reason = f"for {self.limit:.0f} s (the last {self.work}s took at most {longest:.2g} s each)"
        if self.folder:
            stacks = self.folder / "stacks"
            reason += f"; the stack of each process is in {stacks}"
            with suppress(OSError):  # the process must end on a full disk too
                stacks.mkdir(parents=True, exist_ok=True)
                with (stacks / f"process{ranks().rank}.txt").open("w") as file:
                    faulthandler.dump_traceback(file, all_threads=True)
        culprit = f"made no progress, or cannot be reached, {reason}"
        end_together(f"error: no process made progress {reason}", culprit=culprit, stalled=True)


def is_waiting() -> bool:
    """Return whether the main thread waits for other processes."""
    stack = traceback.walk_stack(sys._current_frames().get(threading.main_thread().ident or 0))
    files = [frame.f_code.co_filename.replace("\\", "/") for frame, _ in stack]
    return any(part in file for part in WAITING for file in files)


# Who is asked to stop


class StopRequested(Stopped):
    """All processes stop early, at the same step, for a `reason`: the name of a signal, or `TIME_LIMIT`."""

    def __init__(self, reason: str) -> None:
        self.reason, self.by_time_limit = reason, reason == TIME_LIMIT
        super().__init__(0 if self.by_time_limit else 128 + signal.Signals[reason])


def stop_signals() -> list[signal.Signals]:
    """Return the signals that stop a run: `STOP_SIGNALS`, without SIGHUP if it is ignored, as under nohup."""
    return [n for n in STOP_SIGNALS if n.name != "SIGHUP" or signal.getsignal(n) != signal.SIG_IGN]


class GracefulStop:
    """Receives signals in the `with`, and checks the time limit: `hours` from the start of this process, 0 for none.

    The first signal requests a stop at the end of a step; a second Ctrl-C, or any signal once the run is `finished`,
    ends the process at once. In a call from Python the time begins here, such a Ctrl-C raises KeyboardInterrupt, and
    outside the main thread no signal is received.
    """

    def __init__(self, hours: float = 0.0) -> None:
        started_at = time.time() if RESULT in os.environ else psutil.Process().create_time()
        self.deadline = started_at + hours * 3600 if hours else float("inf")
        self.signal, self.since, self.finished = "", 0.0, False
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> GracefulStop:
        # A thread reads the number of a signal from a socket. Python's own handlers would run in the main thread, which
        # may be waiting in C code for a long time.
        if threading.current_thread() is not threading.main_thread():
            return self
        self._receiver, self._sender = socket.socketpair()
        self._sender.setblocking(False)
        self._handlers = {number: signal.signal(number, lambda *_: None) for number in stop_signals()}
        self._wakeup = signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._listen, daemon=True).start()
        return self

    def __exit__(self, error_class: type[BaseException] | None, *error: object) -> None:
        if not self._handlers or ((error_class or self.finished) and world_size() > 1):
            return  # a process that is about to print an error and exit: the launcher's SIGTERM must not end it before
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._sender.close()

    def _listen(self) -> None:
        while received := self._receiver.recv(1):
            number, before = received[0], self.signal
            if number not in self._handlers:
                continue
            name, again = signal.Signals(number).name, time.monotonic() - self.since > SECOND_INTERRUPT_SECONDS
            is_last = self.finished or (before and again and number == signal.SIGINT)
            if is_last and number == signal.SIGINT and RESULT in os.environ and world_size() == 1:
                main = ctypes.c_ulong(threading.main_thread().ident or 0)  # a notebook's process goes on
                ctypes.pythonapi.PyThreadState_SetAsyncExc(main, ctypes.py_object(KeyboardInterrupt))
            elif is_last:
                reason = f"stopped by {name}; the run itself is finished" if self.finished else "interrupted"
                hard_exit("" if ranks().local_rank else reason, 128 + number)
            self.signal, self.since = name, time.monotonic()

    def stop_reason(self, step: int, lag: int = 0) -> str:
        """Return the reason for all processes to stop at the end of this optimizer step, '' to continue.

        The process that receives a signal writes a later step to the store. All processes read it before they end that
        step, because its gradients are reduced over all of them. This process has not waited for the end of the last
        `lag` steps.
        """
        reason = self.signal or (TIME_LIMIT if ranks().rank == 0 and time.time() > self.deadline else "")
        if (store := run_store()) is None:
            return reason
        if reason:
            store.write_once("stop", [step + 1 + lag, reason])
        last_step, reason = store.value("stop") or (step + 1, "")
        return reason if step >= last_step else ""

    def requested(self) -> str:
        """Return a signal that any process has received, '' if none: the others learn of this one's by this call."""
        if (store := run_store()) and self.signal:
            store.write_once("signal", self.signal)
        return self.signal or (store and store.value("signal")) or ""


# Loader processes


def init_worker(number: int) -> None:
    """Make a loader process ignore signals sent to the whole job, and end with its parent, or on its SIGTERM."""
    # W&B's import hooks call a thread that a forked process lacks; a user's function may import a package.
    sys.meta_path[:] = [finder for finder in sys.meta_path if not type(finder).__module__.startswith("wandb.")]
    keep_freed_memory(LOADER_MEMORY_BYTES)
    with suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # on Linux; elsewhere torch's loop looks for it
    signal.set_wakeup_fd(-1)
    for ignored in {*STOP_SIGNALS} - {signal.SIGTERM}:
        signal.signal(ignored, signal.SIG_IGN)
    if hasattr(signal, "sigtimedwait"):  # and sigwaitinfo
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_await_end, daemon=True).start()


def _await_end() -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)


def keep_freed_memory(max_bytes: int = -1) -> None:
    """Let this process keep freed memory, up to `max_bytes` at the end of the heap; -1 sets no limit.

    The system fills new pages with zeros: a tenth of a training step on the CPU, and most of an image's augmentation.
    """
    with suppress(OSError, AttributeError, TypeError):  # not glibc; on Windows
        library = ctypes.CDLL(None)
        library.mallopt(M_MMAP_MAX, 0)  # large blocks have mappings of their own, which are always returned
        library.mallopt(M_TRIM_THRESHOLD, max_bytes)
