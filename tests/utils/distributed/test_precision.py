"""The precision of autocast: the same rule for every way to launch, every launch file and every device."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import psutil
import pytest
import torch
import yaml
from accelerate.commands import launch

from tests.conftest import OnProcesses
from tests.making import without_launcher, write_yaml
from utils.distributed.precision import Precision, choose_precision
from utils.distributed.ranks import ranks
from utils.errors import UserError
from utils.files import ROOT

LAUNCH_FILES = sorted(file.name for file in (ROOT / "accelerate_configs").glob("*.yaml"))
DEFAULTS = {"cpu": "no", "mps": "no", "cuda": "bf16", "cuda without bf16": "fp16"}
VARIABLE = "ACCELERATE_MIXED_PRECISION"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    without_launcher(monkeypatch)
    monkeypatch.delenv(VARIABLE, raising=False)
    set_parents(monkeypatch, ["bash"])


def set_parents(monkeypatch: pytest.MonkeyPatch, *commands: list[str]) -> None:
    parents = [SimpleNamespace(cmdline=lambda command=command: command) for command in commands]
    monkeypatch.setattr(psutil, "Process", lambda: SimpleNamespace(parents=lambda: parents))


def set_device(monkeypatch: pytest.MonkeyPatch, device: str) -> str:
    """Stub what the device is fast at; return its kind."""
    kind, _, lacking = device.partition(" ")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: kind == "cuda")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: not lacking)
    return kind


def launched_by(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    """Set what `accelerate launch` exports for these words, by its own code, and the command of the parent process."""
    arguments = launch.launch_command_parser().parse_args([*words, "train.py"])
    exported = launch._validate_launch_command(arguments)[0].mixed_precision
    monkeypatch.setenv(VARIABLE, exported)
    set_parents(monkeypatch, ["bash", "-c", "x"], ["python", "/x/bin/accelerate", "launch", *words, "train.py"])


class Launch(NamedTuple):
    """A launch, and the precision that it names, '' for none."""

    words: tuple[str, ...]  # of accelerate launch; empty: python or torch.distributed.run
    named: str

    def set(self, monkeypatch: pytest.MonkeyPatch) -> None:
        if self.words:
            launched_by(monkeypatch, *self.words)


def launches() -> list[Launch]:
    ways = [Launch((), ""), Launch(("--num_processes", "1"), "")]
    for file in LAUNCH_FILES:
        path = str(ROOT / "accelerate_configs" / file)
        named = yaml.safe_load(Path(path).read_text()).get("mixed_precision", "")
        ways.append(Launch(("--config_file", path), named))
        ways += [Launch(("--config_file", path, "--mixed_precision", name), name) for name in ("no", "fp16")]
    return [*ways, Launch(("--num_processes=1", "--mixed-precision=no"), "no")]


@pytest.mark.parametrize("device", DEFAULTS)
@pytest.mark.parametrize("way", launches(), ids=lambda way: " ".join(Path(word).name for word in way.words) or "python")
def test_a_flag_then_what_the_launch_names_then_the_device(
    way: Launch, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = set_device(monkeypatch, device)
    way.set(monkeypatch)
    for requested in ("", "no", "bf16", "fp16"):
        expected = requested or way.named or DEFAULTS[device]
        if (kind, expected) == ("cpu", "fp16"):
            with pytest.raises(UserError, match=r"mixed precision fp16 .* is not supported on the CPU; use bf16 or no"):
                choose_precision(requested, kind, by_zero=False, timeout=1.0)
        else:
            assert choose_precision(requested, kind, by_zero=False, timeout=1.0).name == expected


def test_every_launch_file_is_in_the_table() -> None:
    """The files that name no precision train as `python train.py` does."""
    assert {Path(way.words[1]).name for way in launches() if "--config_file" in way.words} == set(LAUNCH_FILES)
    unnamed = {Path(way.words[1]).name for way in launches() if "--config_file" in way.words and not way.named}
    assert unnamed == {"2node.yaml", "cpu.yaml", "multi_gpu.yaml", "single_gpu.yaml"}


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--config_file", "my.yaml"), "named by my.yaml"),
        (("--config_file", "my.yaml", "--mixed_precision", "bf16"), "--mixed_precision of accelerate launch"),
        (("--num_processes", "1"), "the default on the CPU"),
    ],
)
def test_the_reason_names_its_source(
    words: tuple[str, ...], reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    write_yaml(Path("my.yaml"), {"distributed_type": "NO", "mixed_precision": "bf16"})
    launched_by(monkeypatch, *words)
    assert choose_precision("", "cpu", by_zero=False, timeout=1.0).reason == reason
    assert str(choose_precision("no", "cpu", by_zero=False, timeout=1.0)) == "mixed precision no (by a flag)"


@pytest.mark.parametrize(("exported", "expected"), [("no", "bf16"), ("fp16", "fp16")])
def test_no_is_unnamed_if_the_command_of_the_launcher_cannot_be_read(
    exported: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable() -> None:
        raise psutil.AccessDenied

    set_device(monkeypatch, "cuda")
    monkeypatch.setenv(VARIABLE, exported)
    monkeypatch.setattr(psutil, "Process", unreadable)
    assert choose_precision("", "cuda", by_zero=False, timeout=1.0).name == expected


def test_a_default_of_deepspeed_is_never_fp16(monkeypatch: pytest.MonkeyPatch) -> None:
    set_device(monkeypatch, "cuda without bf16")
    assert choose_precision("", "cuda", by_zero=True, timeout=1.0).name == "no"


@pytest.mark.parametrize(
    ("name", "by_zero", "message"),
    [
        ("fp8", False, r"fp8 \(ACCELERATE_MIXED_PRECISION\) is .*; use one of no, fp16"),
        ("fp16", True, "use bf16 or no"),
    ],
)
def test_other_precisions_are_refused(name: str, by_zero: bool, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, name)
    with pytest.raises(UserError, match=message):
        choose_precision("", "cuda", by_zero, timeout=1.0)


def chosen_by_two() -> Precision:
    """Return the precision of a process whose own launcher names another one than the main process's."""
    os.environ[VARIABLE] = ("bf16", "fp16")[ranks().rank]
    return choose_precision("", "cpu", by_zero=False, timeout=60.0)


def test_all_processes_take_the_choice_of_the_main_one(on_processes: OnProcesses) -> None:
    assert on_processes(2, chosen_by_two) == list(itertools.repeat(Precision("bf16", VARIABLE), 2))
