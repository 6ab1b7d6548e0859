"""A stand-in for SLURM on one machine: sbatch, srun and scontrol for whole jobs, and what happens to them.

It behaves as sbatch(1), srun(1), scontrol(1), slurm.conf(5) and preempt.html of SLURM say, for the options in jobs.py:

- A batch file runs on the first node. srun in it starts a step of one task per node, which are not its children: they
  outlive it, as under slurmstepd. Nodes are loopback addresses of this machine.
- --signal goes to the tasks of all steps and not to the batch shell, with B: to the batch shell alone.
- At the time limit and at a preemption, tasks and batch shell get SIGCONT and SIGTERM, and what is left SIGKILL after
  KillWait. A preempted job with --requeue is queued again under its number, with SLURM_RESTART_COUNT.
- scontrol requeue queues a job again that is running or has ended.
- With `reaches="task"`, a signal reaches the process that srun started (proctrack/cgroup, SLURM's default), with "tree"
  its descendants too (proctrack/linuxproc). SIGKILL always reaches all.

It does not model other users, partitions, accounting, or the delay before a requeued job starts.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socketserver
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import psutil

from tests.slurm.jobs import ENDED, Job, Refused, expand, parse_batch, parse_time, srun_parser
from utils.files import ROOT

POLL_SECONDS = 0.05
COMMANDS = ("sbatch", "srun", "scontrol")
NODES = "127.0.0.[1-4]"


class Step:
    """The tasks of an srun, one per node."""

    def __init__(self, number: int, cpus_per_task: int) -> None:
        self.number, self.cpus_per_task = number, cpus_per_task
        self.tasks: list[subprocess.Popen[bytes]] = []

    def wait(self, kill_on_bad_exit: bool) -> int:
        """Return the highest exit code; a task that a signal has ended counts as 128 + signal.

        kill_on_bad_exit: after a task's exit code other than 0 all others are killed.
        """
        while running := [task for task in self.tasks if task.poll() is None]:
            if kill_on_bad_exit and any(task.poll() for task in self.tasks):
                for task in running:
                    _send(task.pid, signal.SIGKILL, whole_tree=True)
            time.sleep(POLL_SECONDS)
        return max(task.returncode if task.returncode >= 0 else 128 - task.returncode for task in self.tasks)


class Cluster:
    """A running SLURM. folder: for its files; kill_wait: seconds between SIGTERM and SIGKILL; reaches: see above."""

    def __init__(self, folder: Path, kill_wait: float = 30.0, reaches: str = "task") -> None:
        self.folder, self.kill_wait, self.reaches = folder, kill_wait, reaches
        self.jobs: dict[int, Job] = {}
        self.steps: dict[int, list[Step]] = {}  # by job, of all its starts
        self._batch_shells: dict[int, subprocess.Popen[bytes]] = {}
        self._changed = threading.Condition(threading.RLock())
        self._first_number = os.getpid() * 100  # so that ports made from it differ between clusters
        self._closing = False

    def __enter__(self) -> Cluster:
        commands = self.folder / "bin"
        commands.mkdir(parents=True)
        for name in COMMANDS:
            file = commands / name
            file.write_text(f'#!/bin/sh\nexec {sys.executable} {Path(__file__).with_name("command.py")} {name} "$@"\n')
            file.chmod(0o755)
        cluster, self.socket = self, Path(tempfile.mkdtemp(), "socket")  # the path of a socket must be short

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                answer = cluster.answer(json.loads(self.rfile.readline()))
                with suppress(BrokenPipeError):  # the command has been killed
                    self.wfile.write(json.dumps(answer).encode() + b"\n")

        self._server = socketserver.ThreadingUnixStreamServer(str(self.socket), Handler)
        self._server.daemon_threads = True
        for work in (self._server.serve_forever, self._schedule):
            threading.Thread(target=work, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._closing = True
        self._server.shutdown()
        self._server.server_close()
        for number in self.jobs:
            self._kill_all(number)
        shutil.rmtree(self.socket.parent)

    # What a user does

    def command(self, *words: str, **variables: str) -> str:
        """Run a command of SLURM as a user does, in the repository's folder; return what it printed."""
        path = f"{self.folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path, "SLURM_STAND_IN": str(self.socket), **variables}
        return subprocess.run(words, env=environment, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout

    def submit(self, *words: str, **variables: str) -> int:
        """Submit a batch file with options before it and arguments after it; return the job's number."""
        return int(self.command("sbatch", *words, **variables).split()[-1])

    def wait(self, number: int, *states: str, seconds: float = 300.0) -> Job:
        """Wait until a job is in one of `states`, by default until it has ended."""
        job = self.jobs[number]
        with self._changed:
            assert self._changed.wait_for(lambda: job.state in (states or ENDED), seconds), job.log.read_text()
        return job

    # What happens to a job

    def let_time_pass(self, number: int, left: float) -> None:
        """Let a running job have only `left` seconds until its time limit."""
        self.jobs[number].ends = time.monotonic() + left

    def preempt(self, number: int) -> None:
        """Let a job of higher priority take the nodes."""
        self.jobs[number].end_because = "PREEMPTED"

    # The commands

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Carry out a command; return its exit code and output."""
        try:
            command = {"sbatch": self._sbatch, "srun": self._srun, "scontrol": self._scontrol}[request["command"]]
            code, text = command(request["arguments"], request["environment"], request["folder"])
        except Refused as error:
            return {"code": 1, "text": "", "error": f"{request['command']}: error: {error}\n"}
        return {"code": code, "text": text, "error": ""}

    def _sbatch(self, arguments: Sequence[str], environment: dict[str, str], folder: str) -> tuple[int, str]:
        options, text = parse_batch(arguments, folder)
        if options.nodes > len(expand(NODES)):
            raise Refused("Batch job submission failed: Node count specification invalid")
        with self._changed:
            number = self._first_number + len(self.jobs)
            script = self.folder / f"job{number}"
            script.write_text(text)
            script.chmod(0o755)
            job = Job(number, options, script, options.arguments, environment, folder, seconds=parse_time(options.time))
            job.awaits(self.jobs)  # refuses what it does not know
            self.jobs[number], self.steps[number] = job, []
        return 0, f"{number}\n" if options.parsable else f"Submitted batch job {number}\n"

    def _scontrol(self, arguments: Sequence[str], environment: dict[str, str], folder: str) -> tuple[int, str]:
        match arguments:
            case ["requeue", numbers]:
                for number in numbers.split(","):
                    self._requeue(int(number))
                return 0, ""
        raise Refused(f"invalid keyword: {' '.join(arguments)}")

    def _requeue(self, number: int) -> None:
        job = self.jobs.get(number)
        if job is None:
            raise Refused(f"Invalid job id specified for job {number}")
        if not job.options.requeue:
            raise Refused(f"Requested operation is presently disabled for job {number}")
        with self._changed:
            if job.state == "RUNNING":
                job.end_because = "REQUEUED"
            elif job.state in ENDED:
                self._queue_again(job)
            else:
                raise Refused(f"Job is pending execution for job {number}")

    def _srun(self, arguments: Sequence[str], environment: dict[str, str], folder: str) -> tuple[int, str]:
        options = srun_parser().parse_args(list(arguments))
        number, nodes = int(environment["SLURM_JOB_ID"]), expand(environment["SLURM_JOB_NODELIST"])
        step = Step(len(self.steps[number]), options.cpus_per_task)
        of_step = {
            "SLURM_STEP_ID": str(step.number),
            "SLURM_STEP_NODELIST": environment["SLURM_JOB_NODELIST"],
            "SLURM_STEP_NUM_NODES": str(len(nodes)),
            "SLURM_STEP_NUM_TASKS": str(len(nodes)),
            "SLURM_STEP_TASKS_PER_NODE": f"1(x{len(nodes)})" if len(nodes) > 1 else "1",
            "SLURM_NTASKS": str(len(nodes)),
        }
        with self.jobs[number].log.open("ab") as log, self._changed:
            self.steps[number].append(step)
            for rank, node in enumerate(nodes):
                of_task = {"SLURM_NODEID": str(rank), "SLURM_PROCID": str(rank), "SLURM_LOCALID": "0"}
                variables = {**environment, **of_step, **of_task, "SLURMD_NODENAME": node}
                if not options.cpus_per_task:  # since SLURM 22.05 a step does not take over sbatch's
                    variables.pop("SLURM_CPUS_PER_TASK", None)
                step.tasks.append(_start(options.command, variables, folder, log))

        return step.wait(options.kill_on_bad_exit > 0), ""

    # Jobs

    def _schedule(self) -> None:
        """Run one job after another, as if each needed all nodes."""
        while not self._closing:
            with self._changed:
                waiting = [job for job in self.jobs.values() if job.state == "PENDING" and not job.awaits(self.jobs)]
            if waiting:
                self._run(waiting[0])
            time.sleep(POLL_SECONDS)

    def _run(self, job: Job) -> None:
        """Run a job once: until its batch file ends, its time is over, or it must give way."""
        job.ends, job.end_because = time.monotonic() + job.seconds, ""
        mode = "ab" if job.options.open_mode == "append" else "wb"
        with job.log.open(mode) as log:
            environment = {**job.environment, **self._variables(job)}
            shell = _start([str(job.script), *job.arguments], environment, job.folder, log)
        self._batch_shells[job.number] = shell
        self._set(job, "RUNNING")
        signalled = False
        while shell.poll() is None and not job.end_because and not self._closing:
            left = job.ends - time.monotonic()
            requested = job.stop_signal()
            if requested and not signalled and left <= requested[2]:
                signalled = True
                self._signal(job.number, requested[1], requested[0])
            if left <= 0:
                job.end_because = "TIMEOUT"
            time.sleep(POLL_SECONDS)
        self._end_what_is_left(job.number)
        code = shell.wait()
        job.codes.append(code)
        because = job.end_because or ("FAILED" if code else "COMPLETED")
        if because == "REQUEUED" or (because == "PREEMPTED" and job.options.requeue):
            self._queue_again(job)
        else:
            self._set(job, because)

    def _variables(self, job: Job) -> dict[str, str]:
        options, hosts = job.options, expand(NODES)[: job.options.nodes]
        prefix, first = hosts[0].rpartition(".")[::2]
        nodes = hosts[0] if len(hosts) == 1 else f"{prefix}.[{first}-{hosts[-1].rpartition('.')[2]}]"
        variables = {
            **{"SLURM_JOB_ID": str(job.number), "SLURM_JOBID": str(job.number), "SLURM_JOB_NAME": job.name},
            **{"SLURM_JOB_NODELIST": nodes, "SLURM_NODELIST": nodes, "SLURMD_NODENAME": hosts[0]},
            **{"SLURM_NNODES": str(len(hosts)), "SLURM_JOB_NUM_NODES": str(len(hosts)), "SLURM_SUBMIT_DIR": job.folder},
            **{"SLURM_NODEID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
            "SLURM_NTASKS_PER_NODE": str(options.ntasks_per_node),
        }
        if options.cpus_per_task:
            variables["SLURM_CPUS_PER_TASK"] = str(options.cpus_per_task)
        if options.gpus_per_node:
            variables["SLURM_GPUS_ON_NODE"] = variables["SLURM_GPUS_PER_NODE"] = str(options.gpus_per_node)
        if job.restarts:
            variables["SLURM_RESTART_COUNT"] = str(job.restarts)
        return variables

    def _queue_again(self, job: Job) -> None:
        job.restarts += 1
        self._set(job, "PENDING")

    def _set(self, job: Job, state: str) -> None:
        with self._changed:
            job.state = state
            self._changed.notify_all()

    # Signals

    def _running_tasks(self, number: int) -> list[subprocess.Popen[bytes]]:
        return [task for step in self.steps[number] for task in step.tasks if task.poll() is None]

    def _signal(self, number: int, what: signal.Signals, letters: str = "") -> None:
        """Signal the tasks of all steps, with the letter B the batch shell alone."""
        shell = self._batch_shells[number]
        for process in [shell] if "B" in letters else self._running_tasks(number):
            _send(process.pid, what, whole_tree=self.reaches == "tree" and process is not shell)

    def _end_what_is_left(self, number: int) -> None:
        """Send SIGCONT and SIGTERM to tasks and batch shell, and SIGKILL to all of the job after KillWait."""
        shell = self._batch_shells[number]
        for what in (signal.SIGCONT, signal.SIGTERM):
            self._signal(number, what)
            if shell.poll() is None:
                _send(shell.pid, what, whole_tree=False)
        end = time.monotonic() + self.kill_wait
        while (self._running_tasks(number) or shell.poll() is None) and time.monotonic() < end:
            time.sleep(POLL_SECONDS)
        self._kill_all(number)

    def _kill_all(self, number: int) -> None:
        for process in _members(number):
            with suppress(psutil.Error):
                process.kill()


def _start(command: Sequence[str], environment: dict[str, str], folder: str, log: IO[bytes]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        env=environment,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def _send(pid: int, what: signal.Signals, whole_tree: bool) -> None:
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        for each in [process, *(process.children(recursive=True) if whole_tree else ())]:
            with suppress(psutil.Error):
                each.send_signal(what)


def _members(number: int) -> Iterator[psutil.Process]:
    """Yield all processes of a job, wherever they are in the tree: those with its number in their environment."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("SLURM_JOB_ID") == str(number):
                yield process
