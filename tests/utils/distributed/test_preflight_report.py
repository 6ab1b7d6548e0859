"""Findings and table of the preflight."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from utils.distributed.preflight_report import GIB, MIB, Finding, ProcessFacts, compare, places, table, verdict

A = ProcessFacts(
    host="a",
    rank=0,
    device="cpu",
    backend="gloo",
    memory=(8 * GIB, 16 * GIB),
    reached=0.4,
    versions={"Python": "3.11.7", "torch": "2.9", "accelerate": "1.2", "deepspeed": "-", "NCCL": "-"},
    code={"train.py": "1111", "utils/training/ema.py": "91cc"},
    own_files={"accelerate_configs/2node.yaml": "aaaa"},
    data={"train": "28 files 3f2a91bc", "val": "8 files 00000000"},
    settings={"WORLD_SIZE": "2", "--epochs": "3"},
    shm=8 * GIB,
    disk=50 * GIB,
    workers=2,
)
B = dataclasses.replace(A, host="b", rank=1)


def findings_if(**changed: Any) -> list[Finding]:
    """Return the findings if host b differs from host a in these facts."""
    return compare([A, dataclasses.replace(B, **changed)])


def test_equal_processes_have_no_findings() -> None:
    assert findings_if() == compare([A]) == []


@pytest.mark.parametrize(
    ("changed", "serious", "parts"),
    [
        (
            {"code": {**A.code, "utils/training/ema.py": "3f2a"}},
            True,
            [
                "the code in utils/training/ema.py differs: host a rank 0 has ",
                ", host b rank 1 has ",
                "check out the same commit",
            ],
        ),
        ({"code": {"train.py": "1111"}}, True, ["the code in utils/training/ema.py differs"]),
        ({"own_files": {}}, False, ["accelerate_configs/2node.yaml differs", "host b rank 1 has none"]),
        (
            {"data": {**A.data, "train": "27 files 77777777"}},
            True,
            ["data (train) differs: host a rank 0 has 28 files 3f2a91bc, host b rank 1 has 27 files 77777777; copy"],
        ),
        (
            {"settings": {**A.settings, "--epochs": "4"}},
            True,
            ["--epochs differs", "host b rank 1 has 4; use the same"],
        ),
        ({"versions": {**A.versions, "Python": "3.11.8"}}, False, ["Python differs", "host b rank 1 has 3.11.8"]),
        ({"versions": {**A.versions, "torch": "2.8"}}, True, ["torch differs", "host b rank 1 has 2.8; install"]),
        ({"versions": {**A.versions, "accelerate": "1.3"}}, True, ["accelerate differs"]),
        ({"versions": {**A.versions, "deepspeed": "0.19"}}, False, ["deepspeed differs"]),
        ({"versions": {**A.versions, "deepspeed": "0.19"}, "deepspeed": True}, True, ["deepspeed differs"]),
        ({"device": "cuda:0 X", "backend": "nccl"}, True, ["kind of device differs", "host b rank 1 has cuda;"]),
        ({"errors": ("x.yaml is not a file",), "data": {}}, True, ["on host b rank 1: x.yaml is not a file"]),
        ({"shm": 64 * MIB}, False, ["on host b /dev/shm", "has 64 MiB", "--shm-size", "--workers 0"]),
        ({"device": "cpu", "disk": MIB}, False, []),  # only the main process writes
        ({"shm": 64 * MIB, "workers": 0}, False, []),
    ],
)
def test_differences_are_findings(changed: dict[str, Any], serious: bool, parts: list[str]) -> None:
    findings = findings_if(**changed)
    assert len(findings) == bool(parts), findings
    for finding in findings:
        assert finding.serious == serious
        assert str(finding).startswith("error: " if serious else "warning: ")
        assert all(part in finding.text for part in parts), finding.text


def test_a_full_disk_and_a_busy_gpu_are_warnings() -> None:
    (full,) = compare([dataclasses.replace(A, disk=10 * MIB)])
    assert "on host a, which writes the results, the disk has 10 MiB free" in full.text
    (busy,) = compare([dataclasses.replace(A, device="cuda:0 X", backend="nccl", memory=(GIB, 8 * GIB))])
    assert "only 1.0 of 8.0 GiB of cuda:0 X are free" in busy.text
    assert not full.serious
    assert not busy.serious


def test_places() -> None:
    ranks = [dataclasses.replace(A, rank=rank) for rank in range(4)]
    assert places([*ranks, dataclasses.replace(B, rank=5), dataclasses.replace(B, rank=7)]) == (
        "host a ranks 0 to 3, host b ranks 5 and 7"
    )


def test_table() -> None:
    title, head, *rows = table([A, B])
    assert title == "1 process: host a rank 0, host b rank 1"  # 1: the launcher's number, without a launcher
    assert head.split()[:3] == ["host", "rank", "device"]
    assert [row.split()[:3] for row in rows] == [["a", "0", "cpu"], ["b", "1", "cpu"]]
    assert "8.0 of 16.0 GiB" in rows[0]
    assert "0.4 ms" in rows[0]
    assert len({row.index("3.11.7") for row in rows} | {head.index("Python")}) == 1


def test_verdict() -> None:
    assert verdict(0) == "the job can start"
    assert verdict(1) == "the job would fail: 1 error to fix first"
    assert verdict(2) == "the job would fail: 2 errors to fix first"
