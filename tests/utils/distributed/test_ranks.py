"""Ranks and world sizes from the environment variables of a launcher."""

from __future__ import annotations

import pytest

from tests.making import without_launcher
from utils.distributed.ranks import (
    SPAWNED,
    Ranks,
    check_launch,
    is_local_main,
    launch_number,
    launched,
    local_world_size,
    ranks,
    world_size,
)
from utils.errors import UserError


def test_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    without_launcher(monkeypatch)
    assert ranks() == Ranks(0, 1, 0, 1)
    assert (world_size(), local_world_size()) == (1, 1)
    assert is_local_main()
    assert not launched()
    for name, value in {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    assert ranks() == Ranks(5, 8, 1, 4)
    assert (world_size(), local_world_size()) == (8, 4)
    assert not is_local_main()
    assert launched()
    monkeypatch.setenv(SPAWNED, "1")
    assert not launched()


@pytest.mark.parametrize("text", ["two", "-1", "1.5", "99999999999"])
@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"])
def test_a_variable_that_is_no_number(name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    without_launcher(monkeypatch)
    monkeypatch.setenv(name, text)
    with pytest.raises(UserError, match=rf"^the environment variable {name} is '{text}' instead of a number from 0"):
        check_launch()


def test_a_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_PORT", raising=False)
    assert launch_number("MASTER_PORT", 29500, 65535) == 29500
    monkeypatch.setenv("MASTER_PORT", "99999")
    with pytest.raises(UserError, match="MASTER_PORT is '99999' instead of a number from 0 to 65535"):
        launch_number("MASTER_PORT", 29500, 65535)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"WORLD_SIZE": "2"}, "has WORLD_SIZE 2 and no RANK; start the processes with accelerate launch"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "has RANK 2 and WORLD_SIZE 2; ranks are less than the world size"),
        ({"RANK": "1"}, "has RANK 1 and WORLD_SIZE 1"),
        ({"ACCELERATE_USE_CPU": "maybe"}, "variable ACCELERATE_USE_CPU is 'maybe'; give true or false, or unset it"),
        (
            {"ACCELERATE_USE_DEEPSPEED": "true"},
            "has ACCELERATE_USE_DEEPSPEED and no RANK; start with",
        ),
    ],
)
def test_an_incomplete_launch(variables: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    without_launcher(monkeypatch)
    check_launch()
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=f"^the environment {message}"):
        check_launch()
