"""The doctor's findings and table."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from utils.doctor.comparison import GIB, Finding, compare, format_hosts, table
from utils.doctor.process_facts import ProcessFacts

A = ProcessFacts(
    host="a",
    rank=0,
    device="cpu",
    memory=(8 * GIB, 16 * GIB),
    shm=8 * GIB,
    disk=50 * GIB,
    workers=2,
    compared={
        "code": {"train.py": "1111", "utils/training/ema.py": "91cc"},
        "machine files": {"accelerate_configs/2node.yaml": "aaaa"},
        "data": {"the data (train)": "28 files 3f2a91bc", "the data (val)": "8 files 00000000"},
        "settings": {"WORLD_SIZE": "2", "--epochs": "3"},
        "inputs": {"lr0": "0.01"},
        "versions": {"Python": "3.11.7", "torch": "2.9", "accelerate": "1.2", "deepspeed": "-"},
        "devices": {"the kind of device": "cpu"},
        "device types": {"the type of device": "AVX512"},
    },
)
B = dataclasses.replace(A, host="b", rank=1)


def findings_if(group: str, **changed: str) -> list[Finding]:
    """Return the findings if host b has other values in a group."""
    return compare([A, dataclasses.replace(B, compared={**A.compared, group: {**A.compared[group], **changed}})])


def test_equal_processes_have_no_findings() -> None:
    assert compare([A, B]) == compare([A]) == []


@pytest.mark.parametrize(
    ("group", "name", "value", "serious", "part"),
    [
        ("code", "utils/training/ema.py", "3f2a", True, "the code in utils/training/ema.py differs: host a rank 0 has"),
        ("code", "new.py", "3f2a", True, "the code in new.py differs"),
        ("machine files", "accelerate_configs/2node.yaml", "bbbb", False, "2node.yaml differs"),
        ("data", "the data (train)", "27 files 7", True, "host a rank 0 has 28 files 3f2a91bc, host b rank 1 has 27"),
        ("settings", "--epochs", "4", True, "host b rank 1 has 4; use the same"),
        ("inputs", "lr0", "0.1", True, "lr0 differs"),
        ("versions", "Python", "3.11.8", False, "Python differs"),
        ("versions", "torch", "2.8", True, "torch differs"),
        ("versions", "deepspeed", "0.19", False, "deepspeed differs"),
        ("devices", "the kind of device", "cuda", True, "kind of device differs"),
        ("device types", "the type of device", "AVX2", False, "type of device differs"),
    ],
)
def test_a_difference_is_a_finding(group: str, name: str, value: str, serious: bool, part: str) -> None:
    (finding,) = findings_if(group, **{name: value})
    assert finding.serious == serious
    assert part in finding.text


def test_deepspeed_must_be_the_same_if_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    (finding,) = findings_if("versions", deepspeed="0.19")
    assert finding.serious


def test_a_process_with_an_error_has_nothing_to_compare() -> None:
    failed = dataclasses.replace(B, errors=("x.yaml is not a file",), compared={**A.compared, "data": {}, "inputs": {}})
    assert [str(finding) for finding in compare([A, failed])] == ["error: on host b rank 1: x.yaml is not a file"]


@pytest.mark.parametrize(
    ("changed", "part"),
    [
        ({"shm": 2**26}, "--shm-size"),
        ({"shm": 2**26, "workers": 0}, ""),
        ({"disk": 2**20, "rank": 0}, "--project"),
        ({"disk": 2**20}, ""),  # only the main process writes
    ],
)
def test_shortages_are_warnings(changed: dict[str, Any], part: str) -> None:
    findings = compare([dataclasses.replace(B, **changed)])
    assert [finding.serious for finding in findings] == [False] * bool(part)
    assert all(part in finding.text for finding in findings)


def test_hosts_in_words() -> None:
    ranks = [dataclasses.replace(A, rank=rank) for rank in range(4)]
    assert format_hosts([*ranks, dataclasses.replace(B, rank=5), dataclasses.replace(B, rank=7)]) == (
        "host a ranks 0 to 3, host b ranks 5 and 7"
    )


def test_table() -> None:
    title, head, *rows = table([A, B])
    assert title == "2 processes: host a rank 0, host b rank 1"
    assert head.split()[:3] == ["host", "rank", "device"]
    assert [row.split()[:3] for row in rows] == [["a", "0", "cpu"], ["b", "1", "cpu"]]
    assert len({row.index("2.9") for row in rows} | {head.index("torch")}) == 1
