"""What the preflight makes of the processes' facts, and what it takes files for."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from torch import distributed

from utils.distributed import preflight as doctor
from utils.distributed.preflight import (
    GIB,
    MIB,
    OWN_FLAGS,
    Board,
    Facts,
    Finding,
    Measured,
    compare,
    fingerprint,
    hash_files,
    judge_measurement,
    places,
    table,
)

A = Facts(
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


def found(**changed: Any) -> list[Finding]:
    """What is found where host b differs from host a in this."""
    return compare([A, dataclasses.replace(B, **changed)])


def test_equal_processes() -> None:
    assert found() == compare([A]) == []


@pytest.mark.parametrize(
    ("changed", "serious", "said"),
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
            ["--epochs differs", "host b rank 1 has 4; give the same"],
        ),
        ({"versions": {**A.versions, "Python": "3.11.8"}}, False, ["Python differs", "host b rank 1 has 3.11.8"]),
        ({"versions": {**A.versions, "torch": "2.8"}}, True, ["torch differs", "host b rank 1 has 2.8; install"]),
        ({"versions": {**A.versions, "accelerate": "1.3"}}, True, ["accelerate differs"]),
        ({"versions": {**A.versions, "deepspeed": "0.19"}}, False, ["deepspeed differs"]),
        ({"versions": {**A.versions, "deepspeed": "0.19"}, "deepspeed": True}, True, ["deepspeed differs"]),
        ({"device": "cuda:0 X", "backend": "nccl"}, True, ["kind of device differs", "host b rank 1 has cuda;"]),
        ({"errors": ("x.yaml is not a file",), "data": {}}, True, ["on host b rank 1: x.yaml is not a file"]),
        ({"shm": 64 * MIB}, False, ["on host b /dev/shm has 64 MiB", "--shm-size", "--workers 0"]),
        ({"device": "cpu", "disk": MIB}, False, []),  # only the main process writes
        ({"shm": 64 * MIB, "workers": 0}, False, []),
    ],
)
def test_what_differs_is_named(changed: dict[str, Any], serious: bool, said: list[str]) -> None:
    findings = found(**changed)
    assert len(findings) == bool(said), findings
    for finding in findings:
        assert finding.serious == serious
        assert str(finding).startswith("error: " if serious else "warning: ")
        assert all(words in finding.text for words in said), finding.text


def test_a_full_disk_and_a_busy_gpu() -> None:
    (full,) = compare([dataclasses.replace(A, disk=10 * MIB)])
    assert "on host a, which writes the results, the disk has 10 MiB left" in full.text
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
    assert title == "1 process: a rank 0, b rank 1"  # the number is the launcher's, and this is none
    assert head.split()[:3] == ["host", "rank", "device"]
    assert [row.split()[:3] for row in rows] == [["a", "0", "cpu"], ["b", "1", "cpu"]]
    assert "8.0 of 16.0 GiB" in rows[0]
    assert "0.4 ms" in rows[0]
    assert len({row.index("3.11.7") for row in rows} | {head.index("Python")}) == 1


def test_ranks_that_say_nothing_and_ranks_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    board = Board(distributed.HashStore(), "doctor")
    board.put("facts", dataclasses.asdict(A))
    board.put("facts", dataclasses.asdict(A))
    facts = doctor._all_facts(board, 0.1)
    assert [one.host for one in facts] == ["a"]
    silent, twice = doctor._absent(board, facts, 0.1)
    assert "no word from ranks 1 and 2 within 0.1 s" in silent.text
    assert "2 processes say that they are rank 0" in twice.text
    board.leave("facts")  # does not wait for those that never came


def test_facts_of_another_state_of_the_code() -> None:
    """They may have more or fewer keys; the table and the comparison, which says so, are printed all the same."""
    board = Board(distributed.HashStore(), "doctor")
    board.put("facts", {"host": "b", "rank": 0, "unheard": 1, "code": {"train.py": "2222"}})
    (facts,) = doctor._all_facts(board, 1.0)
    assert facts == Facts(host="b", rank=0, code={"train.py": "2222"})
    assert table([facts])
    assert "the code in train.py, utils/training/ema.py differs" in compare([A, facts])[0].text


def test_own_flags_exist() -> None:
    assert set(OWN_FLAGS) <= {option.name for option in dataclasses.fields(doctor.TrainOptions)}


# Hashes


def test_a_hash_of_files_knows_content_and_names(tmp_path: Path) -> None:
    for name in ("a.py", "data/b.py", "data/own.yaml", "data/hyps/c.yaml", "runs/d.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    hashes = hash_files(tmp_path, ["*.py", "data/**/*.py", "data/**/*.yaml"], but=["data/*.yaml"])
    assert list(hashes) == ["a.py", "data/b.py", "data/hyps/c.yaml"]
    (tmp_path / "data" / "b.py").write_text("changed")
    after = hash_files(tmp_path, ["*.py", "data/**/*.py"])
    assert after["a.py"] == hashes["a.py"]
    assert after["data/b.py"] != hashes["data/b.py"]


def test_the_whole_repository_is_hashed() -> None:
    names = set(hash_files(doctor.ROOT, doctor.CODE, doctor.OWN_FILES))
    assert {
        "train.py",
        "val.py",
        "utils/distributed/preflight.py",
        "models/tasks/detection/task.py",
        "models/yolov5n.yaml",
    } <= names
    assert {name.split("/")[0] for name in names} <= {"train.py", "val.py", "models", "data", "utils"}
    assert "data/coco128.yaml" in hash_files(doctor.ROOT, doctor.OWN_FILES)


def test_a_fingerprint_does_not_depend_on_the_root(tmp_path: Path) -> None:
    prints = {}
    for root, names in {"one": "ab", "other": "ab", "less": "a", "named": "ac"}.items():
        files = [tmp_path / root / "deep" / f"{name}.jpg" for name in ("x/1", *(f"y/{name}" for name in names))]
        for file in files:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("12345")
        prints[root] = fingerprint(files)
    assert prints["one"] == prints["other"]
    assert prints["one"].startswith("3 files ")
    assert len({prints[root] for root in ("one", "less", "named")}) == 3
    files[0].write_text("1234")  # a copy that broke off
    assert fingerprint(files) != prints["named"]
    files[0].unlink()
    assert fingerprint(files) != prints["named"]


# The measurement


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
