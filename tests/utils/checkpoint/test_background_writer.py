"""Files written in the background: a failure is a warning; if the retry at the end fails too, it is an error."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from utils.checkpoint.background_writer import BackgroundWriter
from utils.errors import UserError

ADVICE = "start again"


@pytest.fixture
def warnings() -> list[str]:
    return []


@pytest.fixture
def writer(warnings: list[str]) -> BackgroundWriter:
    return BackgroundWriter(warnings.append)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """Return a folder that cannot be made until the file in its place is removed; root may write everywhere else."""
    (tmp_path / "weights").touch()
    return tmp_path / "weights"


def test_files_are_written(writer: BackgroundWriter, warnings: list[str], tmp_path: Path) -> None:
    files = [tmp_path / "weights" / name for name in ("last.pt", "best.pt")]
    writer.write(files, memoryview(b"first"))
    writer.write(files[:1], b"second")
    writer.wait()
    writer.finish(ADVICE)
    assert [file.read_bytes() for file in files] == [b"second", b"first"]
    assert warnings == []


def test_jobs_run_in_the_background_one_after_another(writer: BackgroundWriter) -> None:
    done: list[str] = []
    go = threading.Event()

    def slow() -> None:
        go.wait(60)
        done.append("slow")

    writer.submit({Path("a"): slow})
    assert done == []
    go.set()
    writer.submit({Path("b"): lambda: done.append("quick")})
    assert done[0] == "slow"
    writer.wait()
    writer.wait()
    assert done == ["slow", "quick"]


def test_a_repeated_failure_is_one_warning(writer: BackgroundWriter, warnings: list[str], weights: Path) -> None:
    for number in range(3):
        writer.write([weights / "last.pt", weights / "best.pt"], b"%d" % number)
        writer.write([weights.parent / "results.csv"], b"epoch")
    writer.wait()
    assert warnings == [
        f"warning: {weights}/{name}.pt cannot be written now: File exists; training continues"
        for name in ("last", "best")
    ]
    assert (weights.parent / "results.csv").read_bytes() == b"epoch"


def test_each_other_file_that_fails_is_a_warning(writer: BackgroundWriter, warnings: list[str], weights: Path) -> None:
    writer.write([weights / "last.pt"], b"1")
    writer.write([weights / "last.pt", weights / "best.pt"], b"2")
    writer.write([weights / "best.pt"], b"3")
    writer.wait()
    assert [line.partition(" cannot")[0] for line in warnings] == [
        f"warning: {weights}/last.pt",
        f"warning: {weights}/best.pt",
    ]


def test_a_full_disk_leaves_the_old_file(
    writer: BackgroundWriter, warnings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    writer.write([tmp_path / "last.pt"], b"old")
    writer.wait()
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        writer.write([tmp_path / "last.pt"], b"new")
        writer.wait()
        assert warnings == [
            f"warning: {tmp_path}/last.pt cannot be written now: No space left on device; training continues"
        ]
        assert (tmp_path / "last.pt").read_bytes() == b"old"
        writer.wait()
        with pytest.raises(UserError, match=r"last\.pt cannot be written: No space left on device; fix that"):
            writer.finish(ADVICE)
    writer.wait()
    writer.finish(ADVICE)  # there is space again
    assert (tmp_path / "last.pt").read_bytes() == b"new"
    assert [path.name for path in tmp_path.iterdir()] == ["last.pt"]


def test_a_file_that_cannot_be_written_at_the_end_is_an_error(writer: BackgroundWriter, weights: Path) -> None:
    writer.write([weights / "last.pt"], b"1")
    writer.wait()
    with pytest.raises(UserError) as caught:
        writer.finish(ADVICE)
    assert str(caught.value) == f"{weights}/last.pt cannot be written: File exists; fix that, and start again"


def test_a_later_success_ends_a_failure(writer: BackgroundWriter, warnings: list[str], weights: Path) -> None:
    writer.write([weights / "last.pt"], b"1")
    writer.wait()
    weights.unlink()
    writer.write([weights / "last.pt"], b"2")
    writer.wait()
    writer.finish(ADVICE)
    assert (weights / "last.pt").read_bytes() == b"2"
    assert len(warnings) == 1


def test_a_repeated_job_overwrites_nothing_newer(writer: BackgroundWriter, weights: Path) -> None:
    """best.pt and last.pt failed together; only last.pt was written since."""
    writer.write([weights / "last.pt", weights / "best.pt"], b"best")
    writer.wait()
    weights.unlink()
    writer.write([weights / "last.pt"], b"last")
    writer.wait()
    writer.finish(ADVICE)
    assert (weights / "best.pt").read_bytes() == b"best"
    assert (weights / "last.pt").read_bytes() == b"last"


def test_the_newest_failed_job_is_repeated(writer: BackgroundWriter, weights: Path) -> None:
    for number in range(3):
        writer.write([weights / "last.pt"], b"%d" % number)
    writer.wait()
    weights.unlink()
    writer.finish(ADVICE)
    assert (weights / "last.pt").read_bytes() == b"2"


def test_an_error_without_a_system_message(writer: BackgroundWriter, warnings: list[str]) -> None:
    def fail() -> None:
        raise OSError("the archive is too large")

    writer.submit({Path("a"): fail})
    writer.wait()
    with pytest.raises(UserError, match="a cannot be written: the archive is too large; fix"):
        writer.finish(ADVICE)
    assert warnings == ["warning: a cannot be written now: the archive is too large; training continues"]


def test_a_programming_error_is_raised(writer: BackgroundWriter, warnings: list[str]) -> None:
    writer.submit({Path("a"): lambda: [].pop()})
    with pytest.raises(IndexError):
        writer.wait()
    writer.finish(ADVICE)
    assert warnings == []
