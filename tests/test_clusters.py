"""Files for clusters: engines' variables become flags; each file's own command trains on two "pods", evicted or not.

What the tests replace is in clusters/engines.py; schemas are tested in clusters/test_schemas.py.
"""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

import pytest
from accelerate.commands.launch import launch_command_parser
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from tests.clusters.engines import Container, IndexedJob, documents, kubeflow, kubernetes, skypilot
from tests.clusters.pods import NAMESPACES, Pod
from tests.conftest import RunScript, not_here
from tests.curves import identical, rows
from tests.machines import CONFIGS, left_behind
from utils.files import ROOT, read_yaml

START = CONFIGS / "start.sh"
ADDRESSES = ("10.77.0.1", "10.77.0.2")
GPUS = 4  # that the stand-in for Python counts


class Engine(NamedTuple):
    """A line of the table in start.sh: an engine, and the names of its variables."""

    name: str
    rank: str
    machines: str
    addresses: str
    port: str
    processes: str


ENGINES = [Engine(*line.split()) for line in START.read_text().split("table='\n")[1].partition("'\n")[0].splitlines()]
HOSTS = {"SkyPilot": "node03\nnode04\nnode05", "SLURM": "node[03-04,7],other"}  # others name the first one only


def variables_of(engine: Engine) -> dict[str, str]:
    """Return what an engine sets on the second of three machines."""
    hosts = HOSTS.get(engine.name, "node03")
    return {engine.rank: "1", engine.machines: "3", engine.addresses: hosts, engine.port: "1234", engine.processes: "2"}


class Start:
    """Runs start.sh with stand-ins for accelerate and Python, which print how they were called."""

    def __init__(self, folder: Path) -> None:
        for name in ("accelerate", "python"):
            file = folder / name
            words = f'$(printf "%s\\037" "$RANK" {name} "$@")'  # a line in one write: several are started at once
            file.write_text(f'#!/bin/sh\n[ "$1" != -c ] || exec echo {GPUS}\necho "{words}"\n')
            file.chmod(0o755)
        self.environment = {"PATH": f"{folder}:{os.environ['PATH']}"}

    def calls(self, variables: dict[str, str], *words: str) -> list[list[str]]:
        """Return the words of each program that was started, after its RANK."""
        result = subprocess.run(
            [START, *words], env={**self.environment, **variables}, capture_output=True, text=True, check=True
        )
        return sorted(line.split("\x1f")[:-1] for line in result.stdout.splitlines())

    def launch(self, variables: dict[str, str], *words: str) -> Namespace:
        """Return what accelerate launch reads from its flags."""
        ((_, program, command, *flags),) = self.calls(variables, *words)
        assert (program, command) == ("accelerate", "launch")
        return launch_command_parser().parse_args(flags)

    def refused(self, variables: dict[str, str], *words: str) -> str:
        """Return the sentence of a start that is refused."""
        environment = {**self.environment, **variables}
        result = subprocess.run([START, *words], env=environment, capture_output=True, text=True, check=False)
        assert (result.returncode, result.stdout) == (2, "")
        (line,) = result.stderr.splitlines()
        return line


@pytest.fixture
def script(tmp_path: Path) -> Start:
    return Start(tmp_path)


# The table


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.name)
def test_variables_become_flags(engine: Engine, script: Start) -> None:
    given = script.launch(variables_of(engine), "train.py", "--data", "my data.yaml")
    assert (given.num_machines, given.machine_rank, given.num_processes) == (3, 1, 6)
    assert (given.main_process_ip, given.main_process_port) == ("node03", 1234)
    assert Path(given.config_file).samefile(CONFIGS / "2node.yaml")
    assert (given.training_script, given.training_script_args) == ("train.py", ["--data", "my data.yaml"])


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.name)
def test_what_may_be_left_out(engine: Engine, script: Start) -> None:
    """The port, and the number of processes: as many as GPUs."""
    variables = variables_of(engine)
    del variables[engine.port], variables[engine.processes]
    variables["SLURM_JOB_ID"] = "20005"
    given = script.launch(variables, "train.py")
    assert given.main_process_port == (20005 if engine.name == "SLURM" else 29500)
    assert given.num_processes == 3 * GPUS
    for words in ("auto", "0"):
        assert script.launch({**variables, engine.processes: words}, "train.py").num_processes == 3 * GPUS
    more = {engine.processes: "7", "PROCESSES_PER_MACHINE": "5"}
    assert script.launch({**variables, **more}, "train.py").num_processes == 15


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.name)
def test_what_is_missing_or_wrong(engine: Engine, script: Start) -> None:
    variables = variables_of(engine)
    for name in (engine.machines, engine.addresses):
        rest = {other: value for other, value in variables.items() if other != name}
        assert f"{engine.rank} is set ({engine.name}), {name} is not; " in script.refused(rest, "train.py")
    for name, value in ((engine.rank, "x"), (engine.machines, "1:2"), (engine.port, "-1"), (engine.processes, "two")):
        message = f"{name} is '{value}' instead of a number from "
        assert message in script.refused({**variables, name: value}, "train.py")
    assert "ranks are from 0 to 2" in script.refused({**variables, engine.rank: "3"}, "train.py")
    assert "no script to start" in script.refused(variables, "--config_file", "my.yaml")
    assert "no engine has set the rank of this machine" in script.refused({}, "train.py")


def test_the_engine_that_started_it_counts(script: Start) -> None:
    """Kubeflow's pods are those of an Indexed Job; mpirun works within a SLURM job."""
    by_name = {engine.name: engine for engine in ENGINES}
    for inner, outer in (("Kubeflow", "Kubernetes"), ("OpenMPI", "SLURM")):
        variables = {**dict.fromkeys(by_name[outer], "0"), **variables_of(by_name[inner])}
        assert script.launch(variables, "train.py").machine_rank == 1


@pytest.mark.parametrize("name", ["SLURM_STEP_TASKS_PER_NODE", "OMPI_COMM_WORLD_LOCAL_SIZE"])
def test_several_tasks_on_a_machine(name: str, script: Start) -> None:
    engine = next(engine for engine in ENGINES if engine.rank.partition("_")[0] in name)
    assert script.launch({**variables_of(engine), name: "1"}, "train.py").machine_rank == 1
    assert "has started 4 tasks on a machine" in script.refused({**variables_of(engine), name: "4"}, "train.py")


def test_one_process_needs_no_launcher(script: Start) -> None:
    alone = {"JOB_COMPLETION_INDEX": "0", "MACHINES": "1", "PROCESSES_PER_MACHINE": "1"}
    assert script.calls(alone, "train.py", "--epochs", "2") == [["", "python", "train.py", "--epochs", "2"]]
    own = script.launch(alone, "--config_file", "zero.yaml", "train.py")
    assert (own.config_file, own.num_processes) == ("zero.yaml", 1)


def test_the_doctor_needs_no_launcher(script: Start) -> None:
    """A launcher waits for all machines before it starts anything."""
    started = script.calls(variables_of(ENGINES[0]), "train.py", "--doctor")
    assert started == [[rank, "python", "train.py", "--doctor"] for rank in ("2", "3")]


# Pods: whole runs


@pytest.fixture
def flags(small_data: Path, tmp_path: Path) -> list[str]:
    """Flags that follow those of a file: a small job on the CPU."""
    what = ["--data", str(small_data), "--weights", "", "--cfg", "yolov5n.yaml", "--imgsz", "64", "--batch-size", "4"]
    how = ["--epochs", "1", "--workers", "0", "--device", "cpu", "--logical-processes", "2", "--noplots"]
    return [*what, *how, "--project", str(tmp_path)]


@pytest.fixture
def start(hosts: tuple[str, str], tmp_path: Path) -> Iterator[Callable[[int, Container], Pod]]:
    """Start a container as the pod of a machine. No process may outlive the test."""
    if subprocess.run([*NAMESPACES, "true"], capture_output=True).returncode:
        not_here("namespaces of processes and host names")
    mark, pods = f"LOCKSTEP_TEST={uuid4()}", []
    own = dict([mark.split("=")], OMP_NUM_THREADS="1", XDG_CACHE_HOME=str(tmp_path / "cache"))

    def start(index: int, container: Container) -> Pod:
        environment = {**container.environment(), **own}
        log = tmp_path / f"pod{index}.log"
        pods.append(Pod(hosts[index], container.host, container.names, container.command, environment, ROOT, log))
        return pods[-1]

    yield start
    for pod in pods:
        pod.kill()
    assert not left_behind(mark)


def logs(tmp_path: Path) -> str:
    return "".join(log.read_text() for log in sorted(tmp_path.glob("*.log")))


def errors(pod: Pod) -> list[str]:
    return [line for line in pod.log.read_text().splitlines() if line.startswith("error: ")]


def one_process(run_script: RunScript, flags: Sequence[str], folder: Path) -> Path:
    """Return the run folder of the same job on one process."""
    run_script("train.py", *flags, "--project", str(folder), OMP_NUM_THREADS="1")
    return folder / "exp"


@pytest.mark.long
@pytest.mark.parametrize("engine", [kubernetes, kubeflow, skypilot])
def test_two_pods_train_as_one_process(
    engine: Callable[..., list[Container]],
    start: Callable[[int, Container], Pod],
    run_script: RunScript,
    flags: list[str],
    tmp_path: Path,
) -> None:
    pods = [start(index, container) for index, container in enumerate(engine(ADDRESSES, flags))]
    assert [pod.wait(300) for pod in pods] == [0, 0], logs(tmp_path)
    assert "2 processes" in pods[0].log.read_text()
    assert "epoch" not in pods[1].log.read_text()
    identical(tmp_path / "mine", one_process(run_script, flags, tmp_path / "alone"))


@pytest.mark.long
def test_two_pods_by_deepspeed(start: Callable[[int, Container], Pod], flags: list[str], tmp_path: Path) -> None:
    """Without ssh between the pods, DeepSpeed's own way to start machines."""
    words = [flag for flag in flags if flag not in ("--logical-processes", "2")]
    config = ["--config_file", str(CONFIGS / "deepspeed_zero1.yaml")]
    containers = [
        container._replace(command=[container.command[0], *config, *container.command[1:]])
        for container in kubernetes(ADDRESSES, words)
    ]
    pods = [start(index, container) for index, container in enumerate(containers)]
    assert [pod.wait(600) for pod in pods] == [0, 0], logs(tmp_path)
    assert "2 processes under DeepSpeed ZeRO-1" in pods[0].log.read_text()
    assert len(rows(tmp_path / "mine")) == 1


@pytest.mark.long
@pytest.mark.parametrize(
    ("index", "grace"),
    [
        pytest.param(1, None, id="one-pod"),
        pytest.param(0, None, id="the-main-pod"),
        pytest.param(1, 0.3, id="killed-while-it-saves"),
        pytest.param(0, 0.0, id="a-lost-machine"),
    ],
)
def test_an_evicted_pod(
    index: int,
    grace: float | None,
    start: Callable[[int, Container], Pod],
    run_script: RunScript,
    flags: list[str],
    tmp_path: Path,
) -> None:
    """Its pod is replaced without being counted, the other's counts once; the run ends with the same bytes."""
    flags = [*flags, "--epochs", "4", "--save-steps", "1"]
    containers = kubernetes(ADDRESSES, flags)
    job = IndexedJob(lambda index: start(index, containers[index]))
    job.begin()
    while not (tmp_path / "mine" / "results.csv").exists():
        assert all(pod.poll() is None for pod in job.pods.values()), logs(tmp_path)
        time.sleep(0.05)
    begun = time.monotonic()
    job.evict(index, containers[index].grace if grace is None else grace)
    assert time.monotonic() - begun < containers[index].grace / 2  # it need not be killed
    assert job.wait() == "Complete", logs(tmp_path)
    printed = logs(tmp_path)
    if grace is None:
        assert printed.count("stopped by SIGTERM") == 1, printed
    assert printed.count("resuming ") == 1, printed
    assert job.starts == {0: 2, 1: 2}, printed
    assert (job.ignored[index], job.failures[index]) == (1, 0), printed
    assert (job.ignored[1 - index], job.failures[1 - index]) == (0, 1), printed
    identical(tmp_path / "mine", one_process(run_script, flags, tmp_path / "alone"))


def test_a_job_with_a_missing_variable_is_not_tried_again(start: Callable[[int, Container], Pod]) -> None:
    containers = kubernetes(ADDRESSES, [])
    for container in containers:
        del container.variables["MACHINES"]
    job = IndexedJob(lambda index: start(index, containers[index]))
    job.begin()
    assert job.wait() == "Failed"
    assert job.starts == {0: 1, 1: 1}
    assert "MACHINES is not" in job.pods[0].log.read_text()


@pytest.mark.long
def test_errors_are_counted(start: Callable[[int, Container], Pod], flags: list[str], tmp_path: Path) -> None:
    containers = kubernetes(ADDRESSES, [*flags, "--data", "nowhere.yaml"])
    spec = {**documents("kubernetes.yaml")["Job"]["spec"], "backoffLimitPerIndex": 1}
    job = IndexedJob(lambda index: start(index, containers[index]), spec)
    job.begin()
    assert job.wait() == "Failed"
    assert max(job.failures.values()) == 2
    assert "data set 'nowhere.yaml' is not a file" in logs(tmp_path)


@pytest.mark.long
def test_the_doctor_names_a_pod_that_cannot_be_reached(
    start: Callable[[int, Container], Pod], flags: list[str]
) -> None:
    """Without the Service the main pod has no name for the other. If that does not come, the main one says so."""
    checks = [*flags, "--doctor", "--dist-timeout", "5"]
    containers = kubernetes(ADDRESSES, checks)
    nameless = [start(index, container._replace(names={})) for index, container in enumerate(containers)]
    assert [pod.wait(120) for pod in nameless] == [1, 1]
    (error,) = errors(nameless[1])
    assert error.startswith("error: the main process at lockstep-0.lockstep port 29500 cannot be reached within 5 s (")
    assert "name resolution" in error or "not known" in error
    nameless[0].log.unlink()
    alone = start(0, containers[0])
    assert alone.wait(120) == 1
    (error,) = errors(alone)
    assert "no answer from rank 1 within 5 s: start the same command there" in error


# The files


def test_the_grace_period_is_longer_than_the_launchers() -> None:
    """The launcher kills its processes after that time, and needs some for its own end."""
    launchers = inspect.signature(LocalElasticAgent).parameters["shutdown_timeout"].default
    for container in (*kubernetes(ADDRESSES, []), *kubeflow(ADDRESSES, [])):
        assert container.grace >= launchers + 15


def test_the_files_agree_with_the_image() -> None:
    """Runs are in the folder that train.py writes to, and SkyPilot changes to the folder of the image."""
    (folder,) = re.findall(r"^WORKDIR (.*)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert f"cd {folder}\n" in read_yaml(CONFIGS / "skypilot.yaml")["run"]
    for name in ("kubernetes.yaml", "kubeflow.yaml"):
        assert f"mountPath: {folder}/runs\n" in (CONFIGS / name).read_text()
    assert os.access(START, os.X_OK)
