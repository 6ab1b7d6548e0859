"""Run scripts, and functions on several processes.

To import torch takes longer than most of the runs here, so scripts, the processes that they start by --processes, and
those of `on_processes` are forked from a server that has imported what they need: not on a machine with a GPU, and not
with another number of threads than the server's.
"""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import forkserver, resource_tracker, util
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.multiprocessing.spawn import start_processes

import detect  # noqa: F401
import export  # noqa: F401
import train  # noqa: F401
import val  # noqa: F401
from tests.faults.fault_points import plant
from tests.machines import left_behind
from utils.distributed import launch
from utils.files import ROOT

MARK = "LOCKSTEP_TEST"  # launchers start sessions and groups of their own, but keep the environment
RUN_SECONDS = 900
FORKED = multiprocessing.get_context("forkserver")
# What most trainings import after their start
LATER = ["torch._dynamo", "torch.distributed.fsdp", "torchvision", "models.tasks.detect", "data.detection"]
FORKED.set_forkserver_preload([*LATER, __name__])
AT_IMPORT = {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA")}


def can_fork(variables: Mapping[str, str]) -> bool:
    """Return whether a forked process is what a new one with these environment variables would be."""
    same = all(variables.get(name) == value for name, value in AT_IMPORT.items())
    return sys.platform == "linux" and same and not torch.cuda.is_available()


def stop_server() -> None:
    """End the server and wait for it, so that its time counts as that of this process."""
    for loader in multiprocessing.active_children():  # of a `call_main`; the server would wait for them
        loader.terminate()
    forkserver._forkserver._stop()  # type: ignore[attr-defined]


def run_script(
    script: str, flags: Sequence[str], launcher: Sequence[str], variables: Mapping[str, str], folder: Path
) -> tuple[int | None, str, list[psutil.Process]]:
    """Run a script to its end; return its exit code, what it printed, and the processes that it has left behind.

    launcher: () is python, but a script outside of the repository is forked too, so that it has nothing to import.
    folder: for what it prints; its name marks the processes.
    """
    words, variables = [str(ROOT / script), *map(str, flags)], {**variables, MARK: str(folder)}
    outputs = [folder / "stdout", folder / "stderr"]
    is_ours, launcher = ROOT in (ROOT / script).parents or not launcher, tuple(launcher) or (sys.executable,)
    if launcher == (sys.executable,) and is_ours and can_fork(variables):
        process = FORKED.Process(target=_become_script, args=(words, variables, outputs))
        process.start()
        process.join(RUN_SECONDS)
        session, code = process.pid or 0, process.exitcode
    else:
        with ExitStack() as files:
            stdout, stderr = (files.enter_context(file.open("w")) for file in outputs)
            command = ["env", "--default-signal=HUP,INT", *launcher, *words]
            started = subprocess.Popen(command, env=variables, cwd=ROOT, stdout=stdout, stderr=stderr)
        with suppress(subprocess.TimeoutExpired):
            started.wait(RUN_SECONDS)
        session, code = 0, started.returncode
    left = left_behind(f"{MARK}={folder}", session=session)
    for other in left:
        other.kill()
    return code, "".join(file.read_text(errors="replace") for file in outputs), left


def _become_script(words: Sequence[str], variables: Mapping[str, str], outputs: Sequence[Path]) -> None:
    os.setsid()
    multiprocessing.set_start_method(None, force=True)  # it is the server's
    for number, file in enumerate(outputs, 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _replace_environment(variables)
    os.chdir(ROOT)
    sys.path.insert(0, str(Path(words[0]).parent))
    sys.argv = list(words)
    if fault := variables.get("FAULT"):
        plant(fault)
    try:
        with _forking_too():
            runpy.run_path(words[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()


@contextmanager
def _forking_too() -> Iterator[None]:
    """Let a script fork the processes that it starts, from a server in its session, which it forks before it begins."""
    server = forkserver.ForkServer()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(util, "spawnv_passfds", _fork_server)
        server.ensure_running()
        patch.setattr(forkserver, "connect_to_new_process", server.connect_to_new_process)
        try:
            with forking():
                yield
        finally:
            os.kill(server._forkserver_pid, signal.SIGKILL)  # type: ignore[attr-defined]
            os.waitpid(server._forkserver_pid, 0)  # type: ignore[attr-defined]


def _fork_server(executable: str, words: Sequence[str], passed: Sequence[int]) -> int:
    """Become what a new Python with these words would be, in a forked process; return its number."""
    if process := os.fork():
        return process
    for number in {*map(int, os.listdir("/proc/self/fd"))} - {0, 1, 2, resource_tracker.getfd(), *passed}:
        with suppress(OSError):
            os.close(number)
    try:
        exec(words[-1])
    finally:
        os._exit(0)


def run_function(function: Callable[[], object], count: int) -> None:
    """Call a function of a test module on `count` connected processes."""
    with forking() as (method, variables):
        if not launch.spawn(function, count):
            start_processes(_alone, (function, variables), nprocs=1, start_method=method)


@contextmanager
def forking(printing: bool = False) -> Iterator[tuple[str, Mapping[str, str]]]:
    """Let `launch.spawn` fork its processes. Yields the method, and the variables that they get.

    printing: to where this process prints, not to where the server does.
    """
    method = "forkserver" if can_fork(os.environ) else "spawn"
    variables = _Environment()
    outputs = [f"/proc/{os.getpid()}/fd/{number}" for number in (1, 2) if printing and method == "forkserver"]
    context = multiprocessing.get_context
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multiprocessing, "get_context", lambda name=None: context(method if name == "spawn" else name))
        patch.setattr(launch, "_enter", functools.partial(_enter, variables, outputs))
        yield method, variables


class _Environment(dict[str, str]):
    """The variables that this process has when it starts another one."""

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(os.environ),)


def _enter(variables: Mapping[str, str], outputs: Sequence[str], *arguments: Any) -> None:
    for number, file in enumerate(outputs, 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND), number)
    os.getppid = _parent  # not the server
    _replace_environment(variables)
    launch._enter(*arguments)  # not patched here


def _replace_environment(variables: Mapping[str, str]) -> None:
    os.environ.clear()  # the server's, which may have been started within a call
    os.environ.update(variables)


def _parent() -> int:
    """Return the number of the process that has started this one, or 1 if it has ended."""
    parent = multiprocessing.parent_process()
    return parent.pid or 0 if parent and parent.is_alive() else 1


def _alone(rank: int, function: Callable[[], object], variables: Mapping[str, str]) -> None:
    _replace_environment(variables)
    multiprocessing.set_start_method(None, force=True)
    function()
