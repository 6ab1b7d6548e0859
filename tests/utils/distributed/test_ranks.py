"""Ranks and world sizes from the environment variables of a launcher."""

from __future__ import annotations

import os

import pytest

from tests.making import without_launcher
from utils.distributed.ranks import (
    SPAWNED,
    Ranks,
    adopt_launch,
    check_launch,
    is_local_main,
    launch_number,
    launched,
    local_world_size,
    ranks,
    world_size,
)
from utils.errors import UserError


def test_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    without_launcher(monkeypatch)
    assert ranks() == Ranks(0, 1, 0, 1)
    assert (world_size(), local_world_size()) == (1, 1)
    assert is_local_main()
    assert not launched()
    for name, value in {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    assert ranks() == Ranks(5, 8, 1, 4)
    assert (world_size(), local_world_size()) == (8, 4)
    assert not is_local_main()
    assert launched()
    monkeypatch.setenv(SPAWNED, "1")
    assert not launched()


@pytest.mark.parametrize("text", ["two", "-1", "1.5", "99999999999"])
@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"])
def test_a_variable_that_is_no_number(name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    without_launcher(monkeypatch)
    monkeypatch.setenv(name, text)
    with pytest.raises(UserError, match=rf"^the environment variable {name} is '{text}' instead of a number from 0"):
        check_launch()


def test_a_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_PORT", raising=False)
    assert launch_number("MASTER_PORT", 29500, 65535) == 29500
    monkeypatch.setenv("MASTER_PORT", "99999")
    with pytest.raises(UserError, match="MASTER_PORT is '99999' instead of a number from 0 to 65535"):
        launch_number("MASTER_PORT", 29500, 65535)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"WORLD_SIZE": "2"}, "has WORLD_SIZE 2 and no RANK; start the processes with accelerate launch"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "has RANK 2 and WORLD_SIZE 2; ranks are less than the world size"),
        ({"RANK": "1"}, "has RANK 1 and WORLD_SIZE 1"),
        ({"PMI_SIZE": "2"}, "has PMI_SIZE 2 and no RANK"),  # MPICH and Intel MPI
        ({"MV2_COMM_WORLD_SIZE": "two"}, "variable MV2_COMM_WORLD_SIZE is 'two' instead of a number"),
        ({"ACCELERATE_USE_CPU": "maybe"}, "variable ACCELERATE_USE_CPU is 'maybe'; give true or false, or unset it"),
        (
            {"ACCELERATE_USE_DEEPSPEED": "true"},
            "has ACCELERATE_USE_DEEPSPEED and no RANK; start with",
        ),
    ],
)
def test_an_incomplete_launch(variables: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    without_launcher(monkeypatch)
    check_launch()
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=f"^the environment {message}"):
        check_launch()


# Launchers that set variables of their own

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_STEP_TASKS_PER_NODE": "3,1,2",
    "SLURM_STEP_NODELIST": "gpu-[07-08,12]",
    "SLURM_JOB_ID": "40123",
    "SLURM_STEP_ID": "1",
}


def adopted(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> tuple[Ranks, str, str]:
    """Return the ranks, the main address and the port of a process with these variables."""
    without_launcher(monkeypatch)
    for name in (*OPEN_MPI, *SRUN, "WANDB_SWEEP_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    adopt_launch()
    check_launch()
    return ranks(), os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, (Ranks(0, 1, 0, 1), "", "")),
        (SRUN, (Ranks(5, 6, 1, 2), "gpu-07", "20220")),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "2(x3)"}, (Ranks(5, 6, 1, 2), "gpu-07", "20220")),
        ({**SRUN, "SLURM_STEP_NODELIST": "a[1-2]b[03,9],c"}, (Ranks(5, 6, 1, 2), "a1b03", "20220")),
        ({**SRUN, "SLURM_STEP_NODELIST": "left,right"}, (Ranks(5, 6, 1, 2), "left", "20220")),
        ({**SRUN, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "5000"}, (Ranks(5, 6, 1, 2), "10.0.0.1", "5000")),
        (
            {**SRUN, "SLURM_STEP_TASKS_PER_NODE": "6", "SLURM_NODEID": "0", "SLURM_LOCALID": "5"},
            (Ranks(5, 6, 5, 6), "127.0.0.1", "20220"),
        ),
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "1"}, (Ranks(0, 1, 0, 1), "", "")),
        (
            {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "4"},
            (Ranks(0, 1, 0, 1), "", ""),
        ),  # in a batch file
        ({**SRUN, "WANDB_SWEEP_ID": "s"}, (Ranks(0, 1, 0, 1), "", "")),
        ({**SRUN, "WORLD_SIZE": "1"}, (Ranks(0, 1, 0, 1), "", "")),
        ({**SRUN, "RANK": "1", "WORLD_SIZE": "2"}, (Ranks(1, 2, 0, 1), "", "")),  # accelerate launch, started by srun
        ({**OPEN_MPI, "MASTER_ADDR": "first"}, (Ranks(3, 4, 1, 2), "first", "29500")),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, (Ranks(3, 4, 1, 4), "127.0.0.1", "29500")),
        ({**SRUN, **OPEN_MPI, "MASTER_ADDR": "first"}, (Ranks(3, 4, 1, 2), "first", "29500")),  # mpirun in a SLURM job
    ],
)
def test_srun_and_mpirun(
    variables: dict[str, str], expected: tuple[Ranks, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert adopted(monkeypatch, variables) == expected


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (OPEN_MPI, r"mpirun has started 4 processes on several machines; .* -x MASTER_ADDR=ADDRESS$"),
        ({**SRUN, "SLURM_PROCID": "first"}, "SLURM_PROCID is 'first' instead of a number"),
        (
            {**SRUN, "SLURM_STEP_TASKS_PER_NODE": "2*3"},
            r"SLURM_STEP_TASKS_PER_NODE is '2\*3' instead of numbers such as",
        ),
    ],
)
def test_a_launch_that_cannot_be_adopted(
    variables: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=message):
        adopted(monkeypatch, variables)
