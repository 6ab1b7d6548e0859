"""Facts about a process: hashes of code and data, and the columns of a GPU."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.making import launched
from tests.rehearsal.cuda_queries import GIB, CudaQueries
from utils.config.options import TrainOptions
from utils.doctor.doctor import run_doctor
from utils.doctor.process_facts import CODE_FILES, MACHINE_FILES, MACHINE_FLAGS, fingerprint, hash_files
from utils.files import ROOT


def test_machine_flags_exist() -> None:
    assert set(MACHINE_FLAGS) <= {option.name for option in dataclasses.fields(TrainOptions)}


def test_hashes_depend_on_content(tmp_path: Path) -> None:
    for name in ("a.py", "data/b.py", "data/own.yaml", "data/hyps/c.yaml", "runs/d.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    hashes = hash_files(tmp_path, ["*.py", "data/**/*.py", "data/**/*.yaml"], excluded=["data/*.yaml"])
    assert list(hashes) == ["a.py", "data/b.py", "data/hyps/c.yaml"]
    (tmp_path / "data" / "b.py").write_text("changed")
    after = hash_files(tmp_path, ["*.py", "data/**/*.py"])
    assert after["a.py"] == hashes["a.py"]
    assert after["data/b.py"] != hashes["data/b.py"]


def test_all_code_is_hashed() -> None:
    names = set(hash_files(ROOT, CODE_FILES, MACHINE_FILES))
    assert {"val.py", "utils/doctor/doctor.py", "models/tasks/__init__.py", "models/yolov5n.yaml"} <= names
    assert {name.split("/")[0] for name in names} <= {"train.py", "val.py", "models", "data", "utils"}
    assert "data/coco128.yaml" in hash_files(ROOT, MACHINE_FILES)


def test_a_fingerprint_depends_on_relative_names_and_sizes(tmp_path: Path) -> None:
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
    files[0].write_text("1234")
    assert fingerprint(files) != prints["named"]
    files[0].unlink()
    assert fingerprint(files) != prints["named"]


def test_the_columns_of_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    launched(monkeypatch, 1, 1)
    CudaQueries(name="NVIDIA H200", total=139 * GIB, free=20 * GIB).install(monkeypatch)
    flags = {"comm_hook": "", "device": "0", "dist_timeout": 10.0, "project": str(tmp_path), "workers": 0}
    run_doctor(flags, lambda: ({}, {}, ["train: 3 images"]))
    printed = capsys.readouterr().out
    assert "cuda:0 NVIDIA H200" in printed
    assert "20.0 of 139.0 GiB" in printed
    assert printed.startswith("train: 3 images\n")
