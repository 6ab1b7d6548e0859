"""Checks and settings before the processes of a launch connect."""

from __future__ import annotations

import os
import socket

import pytest

from tests.making import launched, without_launcher
from utils.distributed import rendezvous
from utils.distributed.rendezvous import (
    prepare_for_gloo,
    rendezvous_errors,
    wait_for_main_address,
)
from utils.errors import UserError


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    without_launcher(monkeypatch)


def test_gloo_uses_the_interface_with_a_route_to_the_main_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    prepare_for_gloo()
    assert "GLOO_SOCKET_IFNAME" not in os.environ  # not needed by one process
    for processes in (2, 4):  # on one machine, and on two
        monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
        launched(monkeypatch, processes, 2)
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


def test_a_process_that_waits_says_so_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    launched(monkeypatch, 2, 1)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("MASTER_ADDR", "no.such.host.invalid")
    monkeypatch.setattr(rendezvous, "NOTICE_SECONDS", 0.0)
    with pytest.raises(UserError, match=r"cannot be reached within 1 s"):
        wait_for_main_address(1)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("waiting for the main process at no.such.host.invalid port ")
    assert lines[0].endswith("), at most 1 s (--dist-timeout)")


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
