"""accelerate_configs/start.sh: engines' variables become flags of accelerate launch, and train on two machines."""

from __future__ import annotations

import os
import subprocess
from argparse import Namespace
from pathlib import Path
from typing import NamedTuple

import pytest
from accelerate.commands.launch import launch_command_parser

from tests.machines import CONFIGS

START = CONFIGS / "start.sh"
GPUS = 4  # that the stand-in for Python counts


class Engine(NamedTuple):
    """A line of the table in start.sh: an engine, and the names of its variables."""

    name: str
    rank: str
    machines: str
    addresses: str
    port: str
    processes: str

    def variables(self) -> dict[str, str]:
        """Return what the engine sets on the second of three machines."""
        hosts = {"SkyPilot": "node03\nnode04\nnode05", "SLURM": "node[03-04,7],other"}.get(self.name, "node03")
        return {self.rank: "1", self.machines: "3", self.addresses: hosts, self.port: "1234", self.processes: "2"}


ENGINES = [Engine(*line.split()) for line in START.read_text().split("table='\n")[1].partition("'\n")[0].splitlines()]
BY_NAME = {engine.name: engine for engine in ENGINES}
each_engine = pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.name)


class Start:
    """Runs start.sh with stand-ins for accelerate and Python, which print their RANK and how they were called."""

    def __init__(self, folder: Path) -> None:
        for name in ("accelerate", "python"):
            words = f'$(printf "%s\\037" "$RANK" {name} "$@")'  # a line in one write: several are started at once
            (folder / name).write_text(f'#!/bin/sh\n[ "$1" != -c ] || exec echo {GPUS}\necho "{words}"\n')
            (folder / name).chmod(0o755)
        self.path = f"{folder}:{os.environ['PATH']}"

    def run(self, variables: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([START, *words], env={"PATH": self.path, **variables}, capture_output=True, text=True)

    def calls(self, variables: dict[str, str], *words: str) -> list[list[str]]:
        """Return the rank and the words of each program that was started."""
        return sorted(line.split("\x1f")[:-1] for line in self.run(variables, *words).stdout.splitlines())

    def launch(self, variables: dict[str, str], *words: str) -> Namespace:
        """Return what accelerate launch reads from its flags."""
        ((_, program, command, *flags),) = self.calls(variables, *words)
        assert (program, command) == ("accelerate", "launch")
        return launch_command_parser().parse_args(flags)

    def refuses(self, name: str, variables: dict[str, str], *words: str) -> bool:
        """Return whether a start ends with one sentence that contains `name`."""
        result = self.run(variables, *words)
        return result.returncode == 2 and result.stderr.count("\n") == 1 and name in result.stderr


@pytest.fixture
def script(tmp_path: Path) -> Start:
    return Start(tmp_path)


@each_engine
def test_variables_become_flags(engine: Engine, script: Start) -> None:
    variables = engine.variables()
    given = script.launch(variables, "train.py", "--data", "my data.yaml")
    assert (given.num_machines, given.machine_rank, given.num_processes) == (3, 1, 6)
    assert (given.main_process_ip, given.main_process_port) == ("node03", 1234)
    assert Path(given.config_file).samefile(CONFIGS / "2node.yaml")
    assert (given.training_script, given.training_script_args) == ("train.py", ["--data", "my data.yaml"])
    del variables[engine.port], variables[engine.processes]  # then as many processes as GPUs
    variables["SLURM_JOB_ID"] = "20005"
    given = script.launch(variables, "train.py")
    assert given.main_process_port == (20005 if engine.name == "SLURM" else 29500)
    assert given.num_processes == 3 * GPUS
    for words in ("auto", "0"):
        assert script.launch({**variables, engine.processes: words}, "train.py").num_processes == 3 * GPUS
    more = {engine.processes: "7", "PROCESSES_PER_MACHINE": "5"}
    assert script.launch({**variables, **more}, "train.py").num_processes == 15


@each_engine
def test_what_is_missing_or_wrong(engine: Engine, script: Start) -> None:
    variables = engine.variables()
    for name in (engine.machines, engine.addresses):
        assert script.refuses(name, {other: variables[other] for other in variables if other != name}, "train.py")
    wrong = {engine.machines: "1:2", engine.port: "-1", engine.processes: "two"}
    for name, value in [(engine.rank, "x"), (engine.rank, "3"), *wrong.items()]:
        assert script.refuses(name, {**variables, name: value}, "train.py")
    assert script.refuses("train.py", variables, "--config_file", "my.yaml")  # no script
    assert script.refuses("python train.py", {}, "train.py")  # no engine


def test_the_engine_that_started_it_counts(script: Start) -> None:
    """Kubeflow's pods are those of an Indexed Job; mpirun works within a SLURM job, which may start several tasks."""
    for inner, outer in (("Kubeflow", "Kubernetes"), ("OpenMPI", "SLURM")):
        variables = {**dict.fromkeys(BY_NAME[outer], "0"), **BY_NAME[inner].variables()}
        assert script.launch(variables, "train.py").machine_rank == 1
    for name, tasks in (("SLURM", "SLURM_STEP_TASKS_PER_NODE"), ("OpenMPI", "OMPI_COMM_WORLD_LOCAL_SIZE")):
        assert script.refuses(" 4 tasks", {**BY_NAME[name].variables(), tasks: "4"}, "train.py")


def test_without_a_launcher(script: Start) -> None:
    """One process needs none; for the doctor a launcher would wait for all machines before it starts anything."""
    alone = {"JOB_COMPLETION_INDEX": "0", "MACHINES": "1", "PROCESSES_PER_MACHINE": "1"}
    assert script.calls(alone, "train.py", "--epochs", "2") == [["", "python", "train.py", "--epochs", "2"]]
    started = script.calls(ENGINES[0].variables(), "train.py", "--doctor")
    assert started == [[rank, "python", "train.py", "--doctor"] for rank in ("2", "3")]
