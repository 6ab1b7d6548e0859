"""What the preflight makes of its measurement of the network."""

from __future__ import annotations

import pytest

from tests.utils.distributed.test_preflight_report import A, B
from utils.distributed.preflight_network import Measured, judge_measurement


def test_a_measurement() -> None:
    lines, wrong = judge_measurement([A, B], {0: Measured(0.016, True, ""), 1: Measured(0.01, True, "")}, 10)
    assert lines == ["all-reduce of 16 MiB among 2 processes over gloo: 16.0 ms, 1049 MB/s"]
    assert not wrong


def test_closed_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    _, (wrong,) = judge_measurement([A, B], {0: Measured(0.0, False, "timed out")}, 10)
    assert wrong.serious
    assert "meet at 10.0.0.1 port 29500 but do not reach each other" in wrong.text
    assert "(host a rank 0: timed out; host b rank 1: no answer)" in wrong.text
    assert "GLOO_SOCKET_IFNAME" in wrong.text


def test_a_network_that_lets_only_small_messages_through() -> None:
    _, (wrong,) = judge_measurement([A, B], dict.fromkeys((0, 1), Measured(0.0, True, "no answer")), 10)
    assert wrong.serious
    assert "MTU" in wrong.text
