"""How processes end together: one says why, once, and the others go with it."""

from __future__ import annotations

import ctypes
import multiprocessing
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
from typing import NoReturn, TypeVar

from torch import distributed

from utils.distributed.ranks import key, place, run_store, speaks
from utils.errors import UserError

T = TypeVar("T")
PATIENCE = 5.0  # seconds that a failing process leaves another one to say why
ANSWER = 3.0  # seconds to wait for the run's store when a process fails; it may be gone
PR_SET_PDEATHSIG = 1
EAR = 1.0  # seconds between two looks whether another process has failed
ROLL_CALL = 2.5  # seconds in which those that are left over say that they are


class Stopped(Exception):
    """The run ends early, as it was asked to: all is saved and said. `code` is the exit code."""

    def __init__(self, code: int) -> None:
        super().__init__(f"stopped, exit code {code}")
        self.code = code


def run_main(main: Callable[[], object]) -> None:
    """Call a script's `main`; a `UserError` becomes one line on stderr and exit code 1, Ctrl-C exit code 130.

    Of many processes one speaks. Losing another process is an error of this kind too. No process that this one has
    started outlives it, and it does not outlive the launcher that started it.
    """
    if not speaks():
        warnings.simplefilter("ignore")
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
        if told := loader_died(error):
            _end(f"error: {told}", 1)
        if place().processes == 1:
            raise
        traceback.print_exc()
        _end(f"error: {place()} failed: {type(error).__name__}: {str(error).partition(chr(10))[0]}", 1)
    finally:
        end_workers()
    by_zero = distributed.is_initialized() and "deepspeed" in sys.modules
    if distributed.is_initialized():
        distributed.destroy_process_group()
    if place().processes > 1 or by_zero:
        give_up("", 0)  # threads of DeepSpeed, or one that asks the store, may abort a process that goes in order


# What went wrong


def lost_contact(error: Exception) -> str:
    """A sentence for an error of torch's communication between processes; '' for any other error."""
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
    return f"the contact with the other processes broke ({text.splitlines()[0]}); what they printed says why"


def loader_died(error: Exception) -> str:
    """A sentence for a loader process that has ended by itself; '' for any other error."""
    text = str(error)
    if not isinstance(error, RuntimeError) or "DataLoader worker" not in text:
        return ""
    if "unable to allocate shared memory(shm)" in text or "killed by signal: Bus error" in text:
        return "a loader process ran out of shared memory: make /dev/shm larger (docker --shm-size), or lower --workers"
    if re.search(r"DataLoader worker \(pid.*(killed by signal|exited unexpectedly)", text):
        return "a loader process was ended; where nobody did that, the system was short of memory: lower --workers"
    return ""


# Ending


def _end(message: str, code: int) -> NoReturn:
    """Say why, once for all processes, and exit."""
    end_workers()
    if place().processes == 1:
        print(message, file=sys.stderr)
        sys.exit(code)
    alarm()
    if is_first("failed"):
        give_up(message, code)
    time.sleep(PATIENCE)  # an exit of this one may end the other one before it has spoken
    give_up("", code)


def _leave(code: int) -> NoReturn:
    """Exit with all the others, everything being said."""
    if place().processes == 1:
        sys.exit(code)
    give_up("", code)


def _end_as_survivor(message: str) -> NoReturn:
    """Another process is gone. It may have said why; else one of those that are left names it, and all exit."""
    end_workers()
    alarm()
    time.sleep(ROLL_CALL)
    if ask_store(lambda store: store.add(key("failed"), 0), 0):
        give_up("", 1)
    if is_first("failed"):
        gone = set(range(place().processes)) - set(told("there")) - {place().rank}
        lost = f"{names(sorted(gone))} ended without a word, or cannot be reached"
        give_up(f"error: {lost if gone else message}")
    time.sleep(PATIENCE)
    give_up("", 1)


def give_up(message: str, code: int = 1) -> NoReturn:
    """Exit at once, whatever the other processes and threads of this one do; its loader processes end too."""
    if message:
        print(message, file=sys.stderr, flush=True)
    end_workers()
    sys.stdout.flush()
    # Not by sys.exit: taking the process group down in order may wait for processes that are gone.
    os._exit(code)


def end_workers() -> None:
    """End what this process has started: loader processes, of which torch would complain if they were killed."""
    workers = multiprocessing.active_children()
    for worker in workers:
        worker.terminate()
    for worker in workers:
        worker.join(1)


# What failing processes tell each other at the run's store


_silent: list[distributed.Store] = []  # the run's store, once it has not answered in time


def ask_store(question: Callable[[distributed.Store], T], otherwise: T) -> T:
    """The run's store's answer, or `otherwise`: where there is no store, or none that answers in time."""
    store, answer = run_store(), [otherwise]
    if store is None or _silent:
        return otherwise

    def ask() -> None:
        with suppress(RuntimeError):
            answer.append(question(store))

    # In a thread of its own, for over a dead line the question would wait for many minutes.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(ANSWER)
    if thread.is_alive():
        _silent.append(store)
    return answer[-1]


def is_first(what: str) -> bool:
    """Is this the first process that asks so? The run's store counts; where it is gone, one per machine is."""
    count = ask_store(lambda store: store.add(key(what), 1), 0)
    return count == 1 if count else speaks() or _main_is_gone()


def _main_is_gone() -> bool:
    """The store does not answer: where the main process had it and ran on this machine, the next one speaks."""
    here = place()
    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return run_store() is not None and not hosted and here.rank == here.local_rank == 1


def tell(what: str, word: str) -> None:
    """Leave this process's word about something at the store."""
    ask_store(lambda store: store.set(key(f"{what}/{place().rank}"), word), None)


def told(what: str) -> dict[int, str]:
    """The words of all processes about something, by rank, of those that have left one."""

    def read(store: distributed.Store) -> dict[int, str]:
        keys = {rank: key(f"{what}/{rank}") for rank in range(place().processes)}
        return {rank: store.get(name).decode() for rank, name in keys.items() if store.check([name])}

    return ask_store(read, {})


def names(ranks: Iterable[int]) -> str:
    """What these processes are called, for people."""
    known = told("name")
    return " and ".join(known.get(rank, f"process {rank}") for rank in ranks)


def sign_in() -> None:
    """All processes have met: leave this one's name, and from now on answer when another one fails.

    A thread answers, for the main one may wait for the one that failed; then it ends this process.
    """
    if place().processes > 1:
        tell("name", str(place()))
        threading.Thread(target=_attend, daemon=True).start()


def alarm() -> None:
    """Tell all processes that this run is to end, and that they are to say whether they are still there."""
    ask_store(lambda store: store.set(key("alarm"), ""), None)


def _attend() -> None:
    store = run_store()
    with suppress(RuntimeError):
        while store is not None and not store.check([key("alarm")]):
            time.sleep(EAR)
        tell("there", "")
        time.sleep(ROLL_CALL + PATIENCE)
        give_up("", 1)


# Following those that started us


def follow_launcher() -> None:
    """End with the process that has started this one, where that is a launcher: it cannot say so when it is killed."""
    if "TORCHELASTIC_RUN_ID" in os.environ or "TORCHELASTIC_USE_AGENT_STORE" in os.environ:
        threading.Thread(target=_follow, args=(os.getppid(),), daemon=True).start()


def _follow(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    give_up("", 1)


def shield_worker(number: int) -> None:
    """At the start of a loader process: a signal to the whole job is for the process that it works for.

    It ends when that one says so or is gone.
    """
    parent = os.getppid()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # Linux: at once when that one dies
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    if hasattr(signal, "sigtimedwait"):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_obey, args=(parent,), daemon=True).start()


def _obey(parent: int) -> None:
    while os.getppid() == parent:
        told = signal.sigtimedwait({signal.SIGTERM}, 1.0)
        if told and told.si_pid == parent:
            break
    os._exit(0)
