"""Rank and world size of this process, which the launcher or `utils.distributed.spawn` sets in the environment.

`ranks` and `is_local_main` are for utils/distributed/ and utils/run.py only; other modules may use the rest.
"""

from __future__ import annotations

import os
import re
import socket
from typing import NamedTuple

from utils.errors import UserError, shortened

SPAWNED = "LOCKSTEP_SPAWNED"  # environment variable of the processes that `spawn` starts
TRUE_VALUES = ("y", "yes", "t", "true", "on", "1")  # values that are true in Accelerate's environment variables
TRUTH_VALUES = (*TRUE_VALUES, "n", "no", "f", "false", "off", "0", "")
# Variables of Open MPI's mpirun and of srun that correspond to a launcher's RANK, WORLD_SIZE, LOCAL_RANK.
OPEN_MPI = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK")
SLURM = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
MPI_SIZES = ("PMI_SIZE", "MV2_COMM_WORLD_SIZE", OPEN_MPI[1])  # Accelerate reads them too
OWN_LAUNCH = ("RANK", "WORLD_SIZE", "WANDB_SWEEP_ID")  # if any is set, srun or mpirun has not started a single run
TOKEN = "LOCKSTEP_TOKEN"  # environment variable: a secret of the run's processes, see store.py


class Ranks(NamedTuple):
    """Rank of this process and number of processes, in the run and on this machine."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int

    def __str__(self) -> str:
        return f"process {self.rank} on {socket.gethostname()}"


def ranks() -> Ranks:
    """Read the ranks from the environment; without a launcher this is the only process."""
    rank, processes, local_rank = map(launch_number, ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    return Ranks(rank, max(processes, 1), local_rank, launch_number("LOCAL_WORLD_SIZE", 1))


def launch_number(name: str, default: int = 0, maximum: int = 2**31 - 1) -> int:
    """Return a number that a launcher sets in the environment. Raises `UserError` if the value is not a number."""
    text = os.environ.get(name) or str(default)
    if not text.isdecimal() or int(text) > maximum:
        raise UserError(
            f"the environment variable {name} is '{shortened(text)}' instead of a number from 0 to {maximum}; correct "
            "it, or unset it to start without a launcher"
        )
    return int(text)


def adopt_launch() -> None:
    """Join the processes that srun or Open MPI's mpirun has started into one run: set a launcher's variables.

    Does nothing if another launcher has set them, and for a trial of a W&B sweep, since each task may be an agent.
    MASTER_ADDR and MASTER_PORT of the environment take precedence. Raises `UserError` if mpirun has started processes
    on several machines without MASTER_ADDR, and for variables that are not numbers.
    """
    if any(os.environ.get(name) for name in OWN_LAUNCH):
        for name in MPI_SIZES if world_size() == 1 else ():
            os.environ.pop(name, None)
        return
    by_mpi = launch_number(OPEN_MPI[1], 1) > 1
    rank, processes, local_rank = map(launch_number, OPEN_MPI if by_mpi else SLURM)
    if processes < 2:
        return
    if by_mpi:
        local_processes, address, port = launch_number("OMPI_COMM_WORLD_LOCAL_SIZE", 1), "", "29500"
    else:
        per_node = _tasks_per_node(os.environ.get("SLURM_STEP_TASKS_PER_NODE", str(processes)))
        local_processes = per_node[min(launch_number("SLURM_NODEID"), len(per_node) - 1)]
        address = _first_host(os.environ.get("SLURM_STEP_NODELIST", ""))
        port = str(20000 + (launch_number("SLURM_JOB_ID") + 97 * launch_number("SLURM_STEP_ID")) % 20000)
    if local_processes == processes:
        address = "127.0.0.1"
    if not os.environ.get("MASTER_ADDR", address):
        raise UserError(
            f"mpirun has started {processes} processes on several machines; pass the address of the first one to all, "
            "with -x MASTER_ADDR=ADDRESS"
        )
    os.environ.setdefault("MASTER_ADDR", address)
    os.environ.setdefault("MASTER_PORT", port)
    values = {"RANK": rank, "WORLD_SIZE": processes, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": local_processes}
    os.environ.update({name: str(value) for name, value in values.items()})


def _tasks_per_node(text: str) -> list[int]:
    """Return the number of tasks on each node of a step, which SLURM writes as `4(x2),3`. Raises `UserError`."""
    groups = [re.fullmatch(r"(\d{1,6})(?:\(x(\d{1,6})\))?", word) for word in text.split(",")]
    if not all(groups):
        raise UserError(
            f"the environment variable SLURM_STEP_TASKS_PER_NODE is '{shortened(text)}' instead of numbers such as "
            "4(x2),3; correct it, or unset it"
        )
    return [int(group[1]) for group in groups if group for _ in range(int(group[2] or 1))]


def _first_host(nodes: str) -> str:
    """Return the first host of SLURM's list: node03 of `node[03-10,12],other`."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0] if first else "")


def check_launch() -> None:
    """Raise `UserError` if the ranks in the environment are wrong or incomplete."""
    here = ranks()
    for name, value in os.environ.items():
        if name.startswith("ACCELERATE_USE_") and value.lower() not in TRUTH_VALUES:
            raise UserError(f"the environment variable {name} is '{shortened(value)}'; give true or false, or unset it")
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() in TRUE_VALUES and not os.environ.get("RANK"):
        raise UserError(
            "the environment has ACCELERATE_USE_DEEPSPEED and no RANK; start with accelerate launch and a file "
            "of accelerate_configs, or unset it"
        )
    for name in ("WORLD_SIZE", *MPI_SIZES):
        if (size := launch_number(name, 1)) > 1 and not os.environ.get("RANK"):
            raise UserError(
                f"the environment has {name} {size} and no RANK; start the processes with accelerate launch or "
                f"torch.distributed.run, which set WORLD_SIZE and RANK, or unset {name}"
            )
    if here.rank >= here.world_size:
        raise UserError(
            f"the environment has RANK {here.rank} and WORLD_SIZE {here.world_size}; ranks are less than the world "
            "size: correct them, or unset both"
        )


def world_size() -> int:
    """Return the number of processes of the run."""
    return ranks().world_size


def local_world_size() -> int:
    """Return the number of processes of the run on this machine."""
    return ranks().local_world_size


def threads_per_process(processes: int) -> int:
    """Return the threads per process for `processes` on this machine, at most one per core, as more are slower."""
    return max((os.cpu_count() or 1) // processes, 1)


def launched() -> bool:
    """Return whether a launcher, not `spawn`, has started this process as one of several."""
    return world_size() > 1 and SPAWNED not in os.environ


def store_is_hosted() -> bool:
    """Return whether the launcher, or `spawn`, hosts the run's store; else the main process does."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def is_local_main() -> bool:
    """Return whether this process prints for its machine if the processes cannot communicate."""
    return ranks().local_rank == 0
