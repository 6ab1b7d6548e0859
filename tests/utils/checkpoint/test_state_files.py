"""The files of states: there are two, and the newest intact one is read."""

from __future__ import annotations

import errno
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from utils.checkpoint import STATE_FORMAT, StateFiles, serialised
from utils.errors import UserError


def state(number: int) -> memoryview:
    return serialised({"format": STATE_FORMAT, "number": number, "weights": torch.full((1000,), float(number))})


@pytest.fixture
def states(tmp_path: Path) -> StateFiles:
    """The files of a run after three states were written."""
    states = StateFiles(tmp_path / "checkpoint")
    for number in range(3):
        states.write(state(number))
    return states


def read(states: StateFiles) -> int:
    """Return the number of the state that another process reads."""
    content = StateFiles(states.folder).read()
    assert content is not None
    assert content["weights"].eq(content["number"]).all()
    return int(content["number"])


def test_the_two_newest_states_remain_or_a_final_one(states: StateFiles) -> None:
    assert read(states) == 2
    assert [file.name[:8] for file in states.files()] == ["00000003", "00000002"]
    states.write(state(3), final=True)
    assert [file.name[:8] for file in states.files()] == ["00000004"]
    assert read(states) == 3


def flip(content: bytes) -> bytes:
    return content[:-500] + bytes([content[-500] ^ 1]) + content[-499:]


@pytest.mark.parametrize(
    "damage", [lambda content: content[:1000], flip, lambda content: b"", lambda content: content + b"0"]
)
def test_a_damaged_state_is_named_and_then_removed(
    states: StateFiles, damage: Callable[[bytes], bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    newest, before = states.files()
    newest.write_bytes(damage(newest.read_bytes()))
    assert read(states) == 1
    (warning,) = capsys.readouterr().out.splitlines()
    assert warning.startswith(f"warning: {newest} ")
    again = StateFiles(states.folder)
    again.read(warns=False)
    again.write(state(7))
    assert read(states) == 7
    assert capsys.readouterr().out == ""
    assert before in again.files()
    assert newest not in again.files()
    for file in again.files():
        file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(UserError, match=before.name):
        read(states)


def test_a_state_that_cannot_be_written_leaves_the_others(states: StateFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    files = states.files()

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        states.write(state(3))
    assert sorted(states.folder.iterdir(), reverse=True) == files
    assert read(states) == 2


@pytest.mark.parametrize(
    "content",
    [
        pickle.dumps(errno.errorcode.get),
        b"PK\x03\x04 no archive",
        serialised([1, 2]),
        serialised({"format": "lockstep-state-0"}),
    ],
)
def test_other_files_are_refused(content: bytes, states: StateFiles) -> None:
    """Their checksums match."""
    states.write(memoryview(content))
    with pytest.raises(UserError, match=rf"^{states.files()[0]} ") as caught:
        states.read()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["1abc-x.pt", "copy of 00000003-1.pt", "00000009-note.pt", "9999-ab.pt"])
def test_files_of_the_users_are_left_alone(states: StateFiles, name: str) -> None:
    mine = states.folder / name
    mine.write_text("mine")
    assert read(states) == 2
    states.write(state(7))
    assert (mine.read_text(), read(states)) == ("mine", 7)
    assert StateFiles(states.folder / "nothing").read() is None


@pytest.mark.parametrize("source", ["pipe", "/dev/zero"])
def test_a_state_that_has_no_end_is_an_error(states: StateFiles, source: str) -> None:
    path = states.folder / f"{99:08d}-{'0' * 16}.pt"
    os.mkfifo(path) if source == "pipe" else path.symlink_to(source)
    with pytest.raises(UserError, match=path.name):
        states.read()
