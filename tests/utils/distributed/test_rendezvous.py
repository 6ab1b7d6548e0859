"""How the processes of a launch reach each other."""

from __future__ import annotations

import os
from types import SimpleNamespace

import psutil
import pytest

from utils.distributed.rendezvous import connect, prepare_for_gloo, refuse_uneven_launch
from utils.errors import UserError


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No launcher; what a test puts into the environment goes with it."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def launched(monkeypatch: pytest.MonkeyPatch, processes: int, here: int) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(here))
    monkeypatch.setenv("LOCAL_RANK", "0")


def parent(monkeypatch: pytest.MonkeyPatch, command: list[str]) -> None:
    monkeypatch.setattr(psutil, "Process", lambda _: SimpleNamespace(cmdline=lambda: command))


@pytest.mark.parametrize(
    "command",
    [
        ["python", "/x/bin/accelerate", "launch", "--num_processes", "3", "--num_machines", "2", "train.py"],
        ["python", "-m", "accelerate.commands.launch", "--num_processes", "3", "--num_machines=2", "t.py"],
        ["/x/accelerate", "launch", "--config_file", "accelerate_configs/2node.yaml", "--num_processes=5", "train.py"],
    ],
)
def test_accelerate_cannot_start_unequal_numbers(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    parent(monkeypatch, command)
    with pytest.raises(
        UserError, match=r"do not fit on 2 machines; take a multiple of 2, or .*torch\.distributed\.run"
    ):
        refuse_uneven_launch()


@pytest.mark.parametrize(
    "command",
    [
        ["/x/accelerate", "launch", "--config_file", "accelerate_configs/2node.yaml", "--num_processes=4", "train.py"],
        ["/x/accelerate", "launch", "--num_processes", "3", "train.py"],
        ["python", "-m", "torch.distributed.run", "--nproc_per_node", "3", "--nnodes", "2", "train.py"],
        ["python", "-m", "torch.distributed.launch", "--nproc_per_node", "3", "--nnodes", "2", "train.py"],
        ["bash"],
    ],
)
def test_other_launches_pass(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    parent(monkeypatch, command)
    refuse_uneven_launch()


def test_gloo_takes_the_interface_that_leads_to_the_main_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    launched(monkeypatch, 2, 2)
    prepare_for_gloo()
    assert "GLOO_SOCKET_IFNAME" not in os.environ  # one machine: nothing to choose
    launched(monkeypatch, 4, 2)
    prepare_for_gloo()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "mine")
    prepare_for_gloo()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "mine"


# Before there is an Accelerator


def test_one_process_has_a_store_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    store = connect(1.0, "doctor")
    store.write("facts", 1)
    assert store.values("facts") == {0: 1}
    assert connect(1.0, "doctor").values("facts") == {}
