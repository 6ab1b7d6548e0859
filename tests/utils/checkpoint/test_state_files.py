"""The files of states: there are two, and the newest intact one is read."""

from __future__ import annotations

import errno
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from utils.checkpoint.state_files import STATE_FORMAT, StateFiles
from utils.checkpoint.weight_files import serialised
from utils.errors import UserError


def state(number: int) -> memoryview:
    return serialised({"format": STATE_FORMAT, "number": number, "weights": torch.full((1000,), float(number))})


@pytest.fixture
def states(tmp_path: Path) -> StateFiles:
    """Return the files of a run after three states were written."""
    states = StateFiles(tmp_path / "checkpoint")
    for number in range(3):
        states.write(state(number))
    return states


def read(states: StateFiles) -> tuple[int, list[str]]:
    """Return the number of the state that another process reads, and the warnings."""
    warnings: list[str] = []
    content = StateFiles(states.folder).read(warnings.append)
    assert content is not None
    assert content["weights"].eq(content["number"]).all()
    return content["number"], warnings


def test_the_two_newest_states_remain(states: StateFiles) -> None:
    assert read(states) == (2, [])
    assert [file.name[:8] for file in states.files()] == ["00000003", "00000002"]


def test_a_final_state_replaces_all(states: StateFiles) -> None:
    states.write(state(3), final=True)
    assert [file.name[:8] for file in states.files()] == ["00000004"]
    assert read(states) == (3, [])


def cut(content: bytes) -> bytes:
    return content[:1000]


def flip(content: bytes) -> bytes:
    return content[:-500] + bytes([content[-500] ^ 1]) + content[-499:]


@pytest.mark.parametrize("damage", [cut, flip, lambda content: b"", lambda content: content + b"0"])
def test_a_damaged_state_is_recognised(states: StateFiles, damage: Callable[[bytes], bytes]) -> None:
    newest, before = states.files()
    newest.write_bytes(damage(newest.read_bytes()))
    number, warnings = read(states)
    assert number == 1
    assert warnings == [f"warning: {newest} is damaged (its checksum does not match); trying the one before"]
    before.write_bytes(damage(before.read_bytes()))
    with pytest.raises(UserError, match=rf"all states in .* are damaged \({newest.name}, {before.name}\), so"):
        read(states)


def test_a_damaged_state_is_removed_by_the_next_write(states: StateFiles) -> None:
    newest, before = states.files()
    newest.write_bytes(b"")
    again = StateFiles(states.folder)
    again.read(lambda warning: None)
    again.write(state(7))
    assert before in again.files()
    assert newest not in again.files()
    assert read(states) == (7, [])


def test_a_state_that_cannot_be_written_leaves_the_others(states: StateFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    files = states.files()

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        states.write(state(3))
    assert sorted(states.folder.iterdir(), reverse=True) == files
    assert read(states) == (2, [])


def test_states_of_another_version(states: StateFiles) -> None:
    states.write(serialised({"format": "lockstep-state-0"}))
    with pytest.raises(UserError, match="has the format lockstep-state-0 of another version"):
        read(states)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (pickle.dumps(errno.errorcode.get), "was refused, and nothing in it was run"),
        (b"PK\x03\x04 no archive", "was refused, and nothing in it was run"),
        (serialised([1, 2]), "has the format None of another version"),
    ],
)
def test_other_files(content: bytes, message: str, states: StateFiles) -> None:
    """Their checksums match."""
    states.write(memoryview(content))
    newest = states.files()[0]
    with pytest.raises(UserError, match=rf"^{newest} {message}") as caught:
        states.read(pytest.fail)
    assert "\n" not in str(caught.value)


def test_there_is_no_state(tmp_path: Path) -> None:
    assert StateFiles(tmp_path / "nothing").read(print) is None


@pytest.mark.parametrize("name", ["1abc-x.pt", "copy of 00000003-1.pt", "00000009-note.pt", "9999-ab.pt"])
def test_files_of_the_users_are_left_alone(states: StateFiles, name: str) -> None:
    mine = states.folder / name
    mine.write_text("mine")
    newest = read(states)
    states.write(state(7))
    assert mine.read_text() == "mine"
    assert read(states) == (7, [])
    assert newest[1] == []


@pytest.mark.parametrize("source", ["pipe", "/dev/zero"])
def test_a_state_that_has_no_end_is_an_error(states: StateFiles, source: str) -> None:
    path = states.folder / f"{99:08d}-{'0' * 16}.pt"
    os.mkfifo(path) if source == "pipe" else path.symlink_to(source)
    with pytest.raises(UserError, match=r"cannot be read: it is not a regular file"):
        states.read(print)
