"""Messages about the preflight's measurement of the network."""

from __future__ import annotations

import pytest

from tests.utils.distributed.test_preflight_report import A, B
from utils.distributed.preflight_network import Measured, judge_measurement


def test_a_measurement_is_one_line() -> None:
    lines, findings = judge_measurement([A, B], {0: Measured(0.016, True, ""), 1: Measured(0.01, True, "")}, 10)
    assert lines == ["all-reduce of 16 MiB among 2 processes over gloo: 16.0 ms, 1049 MB/s"]
    assert not findings


def test_closed_ports_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    _, (finding,) = judge_measurement([A, B], {0: Measured(0.0, False, "timed out")}, 10)
    assert finding.serious
    assert "reach 10.0.0.1 port 29500, but not each other at other ports within 10 s" in finding.text
    assert "(host a rank 0: timed out; host b rank 1: no answer)" in finding.text
    assert "GLOO_SOCKET_IFNAME" in finding.text


def test_lost_large_messages_are_an_error() -> None:
    _, (finding,) = judge_measurement([A, B], dict.fromkeys((0, 1), Measured(0.0, True, "no answer")), 10)
    assert finding.serious
    assert "MTU" in finding.text
