"""Checks and settings before the processes of a launch connect."""

from __future__ import annotations

import os
import socket
from types import SimpleNamespace

import psutil
import pytest

from tests.making import launched, without_launcher
from utils.distributed.rendezvous import (
    connect,
    prepare_for_gloo,
    refuse_uneven_launch,
    rendezvous_errors,
    wait_for_main_address,
)
from utils.errors import UserError


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    without_launcher(monkeypatch)


def set_parent(monkeypatch: pytest.MonkeyPatch, command: list[str]) -> None:
    monkeypatch.setattr(psutil, "Process", lambda _: SimpleNamespace(cmdline=lambda: command))


@pytest.mark.parametrize(
    "command",
    [
        ["python", "/x/bin/accelerate", "launch", "--num_processes", "3", "--num_machines", "2", "train.py"],
        ["python", "-m", "accelerate.commands.launch", "--num_processes", "3", "--num_machines=2", "t.py"],
        ["/x/accelerate", "launch", "--config_file", "accelerate_configs/2node.yaml", "--num_processes=5", "train.py"],
    ],
)
def test_accelerate_launch_must_divide_the_processes_evenly(
    command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_parent(monkeypatch, command)
    with pytest.raises(UserError, match=r"cannot be divided among 2 machines: use a multiple of 2, or torch\.distrib"):
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
def test_other_launches_are_accepted(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    set_parent(monkeypatch, command)
    refuse_uneven_launch()


def test_gloo_uses_the_interface_with_a_route_to_the_main_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    launched(monkeypatch, 2, 2)
    prepare_for_gloo()
    assert "GLOO_SOCKET_IFNAME" not in os.environ  # not needed on one machine
    launched(monkeypatch, 4, 2)
    prepare_for_gloo()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "mine")
    prepare_for_gloo()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "mine"


def test_an_unreachable_main_process_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    launched(monkeypatch, 2, 1)
    monkeypatch.setenv("RANK", "1")
    with socket.socket() as closed:  # bound, but not listening
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(port))
        with pytest.raises(UserError) as raised:
            wait_for_main_address(0.1)
    assert str(raised.value) == (
        f"the main process at 127.0.0.1 port {port} cannot be reached within 0.1 s (connection refused): start it, "
        "open the port, check the address, or raise --dist-timeout"
    )


@pytest.mark.parametrize(
    ("error", "message"),
    [
        ("EADDRINUSE: address already in use", "10.0.0.1 port 29501 is in use on this machine; give all processes"),
        ("Timed out. 1/2 clients joined.", "only 1 of 2 processes connected to 10.0.0.1 port 29501 within 5 s: start"),
        ("no route\nmore", "the processes cannot reach each other within 5 s (no route); if a machine has several"),
    ],
)
def test_errors_of_the_rendezvous(error: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launched(monkeypatch, 2, 1)
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29501")
    with pytest.raises(UserError) as raised, rendezvous_errors(5.0):
        raise RuntimeError(error)
    assert str(raised.value).startswith(message)


def test_one_process_gets_a_new_store_in_memory() -> None:
    store = connect(1.0, "doctor")
    store.write("facts", 1)
    assert store.values("facts") == {0: 1}
    assert connect(1.0, "doctor").values("facts") == {}
