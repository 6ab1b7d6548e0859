"""How the preflight collects the processes' facts, and what it takes files for."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from torch import distributed

from tests.utils.distributed.test_preflight_report import A
from utils.config.options import TrainOptions
from utils.distributed import preflight
from utils.distributed.preflight import (
    CODE_FILES,
    MACHINE_FILES,
    MACHINE_FLAGS,
    PreflightSettings,
    fingerprint,
    hash_files,
)
from utils.distributed.preflight_report import ProcessFacts, compare, table
from utils.distributed.store import RunStore
from utils.files import ROOT


def test_ranks_that_say_nothing_and_ranks_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    store = RunStore(distributed.HashStore(), "doctor")
    store.write("facts", dataclasses.asdict(A))
    store.write("facts", dataclasses.asdict(A))
    facts = preflight._all_facts(store, 0.1)
    assert [one.host for one in facts] == ["a"]
    silent, twice = preflight._missing_processes(store, facts, 0.1)
    assert "no word from ranks 1 and 2 within 0.1 s" in silent.text
    assert "2 processes say that they are rank 0" in twice.text
    store.leave("facts")  # does not wait for those that never came


def test_facts_of_another_state_of_the_code() -> None:
    """They may have more or fewer keys; the table and the comparison, which says so, are printed all the same."""
    store = RunStore(distributed.HashStore(), "doctor")
    store.write("facts", {"host": "b", "rank": 0, "unheard": 1, "code": {"train.py": "2222"}})
    (facts,) = preflight._all_facts(store, 1.0)
    assert facts == ProcessFacts(host="b", rank=0, code={"train.py": "2222"})
    assert table([facts])
    assert "the code in train.py, utils/training/ema.py differs" in compare([A, facts])[0].text


def test_machine_flags_exist() -> None:
    assert set(MACHINE_FLAGS) <= {option.name for option in dataclasses.fields(TrainOptions)}
    assert {field.name for field in dataclasses.fields(PreflightSettings)} <= set(MACHINE_FLAGS)


# Hashes


def test_a_hash_of_files_knows_content_and_names(tmp_path: Path) -> None:
    for name in ("a.py", "data/b.py", "data/own.yaml", "data/hyps/c.yaml", "runs/d.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    hashes = hash_files(tmp_path, ["*.py", "data/**/*.py", "data/**/*.yaml"], excluded=["data/*.yaml"])
    assert list(hashes) == ["a.py", "data/b.py", "data/hyps/c.yaml"]
    (tmp_path / "data" / "b.py").write_text("changed")
    after = hash_files(tmp_path, ["*.py", "data/**/*.py"])
    assert after["a.py"] == hashes["a.py"]
    assert after["data/b.py"] != hashes["data/b.py"]


def test_the_whole_repository_is_hashed() -> None:
    names = set(hash_files(ROOT, CODE_FILES, MACHINE_FILES))
    assert {
        "train.py",
        "val.py",
        "utils/distributed/preflight.py",
        "models/tasks/detection/task.py",
        "models/yolov5n.yaml",
    } <= names
    assert {name.split("/")[0] for name in names} <= {"train.py", "val.py", "models", "data", "utils"}
    assert "data/coco128.yaml" in hash_files(ROOT, MACHINE_FILES)


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
