"""The command of `accelerate launch`, and the launches that are refused."""

from __future__ import annotations

from types import SimpleNamespace

import psutil
import pytest
import torch

from tests.making import without_launcher
from utils.distributed.launcher import launch_command, refuse_uneven_launch, refuse_unsupported_launch
from utils.errors import UserError

TWO_NODES = "accelerate_configs/2node.yaml"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    without_launcher(monkeypatch)
    set_parents(monkeypatch, ["bash"])


def set_parents(monkeypatch: pytest.MonkeyPatch, *commands: list[str]) -> None:
    parents = [SimpleNamespace(cmdline=lambda command=command: command) for command in commands]
    monkeypatch.setattr(psutil, "Process", lambda: SimpleNamespace(parents=lambda: parents))


@pytest.mark.parametrize(
    "command",
    [
        ["python", "/x/bin/accelerate", "launch", "--num_processes", "4", "train.py", "--epochs", "3"],
        ["python", "-m", "accelerate.commands.launch", "--num_processes", "4", "train.py"],
        ["/x/bin/accelerate-launch", "--num-processes=4", "train.py"],
    ],
)
def test_the_command_may_be_that_of_any_parent(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    set_parents(monkeypatch, ["numactl", "x"], command, ["bash", "accelerate me", "launch"])
    launched = launch_command()
    assert launched is not None
    assert (launched.value("num_processes"), launched.value("num_machines"), launched.file) == (4, None, "")


@pytest.mark.parametrize(
    "command",
    [
        ["python", "-m", "torch.distributed.run", "--nproc_per_node", "3", "train.py"],
        ["python", "-m", "torch.distributed.launch", "train.py"],
        ["bash", "-c", "cd accelerate; ./launch"],
        ["python", "train.py"],
    ],
)
def test_other_commands_are_none(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    set_parents(monkeypatch, command)
    assert launch_command() is None


# Processes that cannot be divided among the machines


@pytest.mark.parametrize(
    "command",
    [
        ["python", "/x/bin/accelerate", "launch", "--num_processes", "3", "--num_machines", "2", "train.py"],
        ["python", "-m", "accelerate.commands.launch", "--num_processes", "3", "--num_machines=2", "t.py"],
        ["/x/accelerate", "launch", "--config_file", TWO_NODES, "--num_processes=5", "train.py"],
    ],
)
def test_accelerate_launch_must_divide_the_processes_evenly(
    command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_parents(monkeypatch, command)
    with pytest.raises(UserError, match=r"cannot be divided among 2 machines: use a multiple of 2, or torch\.distrib"):
        refuse_uneven_launch()


@pytest.mark.parametrize(
    "command",
    [
        ["/x/accelerate", "launch", "--config_file", TWO_NODES, "--num_processes=4", "train.py"],
        ["/x/accelerate", "launch", "--num_processes", "3", "train.py"],
        ["python", "-m", "torch.distributed.run", "--nproc_per_node", "3", "--nnodes", "2", "train.py"],
        ["bash"],
    ],
)
def test_other_launches_are_accepted(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    set_parents(monkeypatch, command)
    refuse_uneven_launch()
    refuse_unsupported_launch("")


# What would train on the CPU without a word


@pytest.mark.parametrize("kind", ["MULTI_XPU", "MULTI_NPU", "XLA", "TPU", "FSDP"])
def test_a_launch_file_of_another_type_is_refused(
    kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.mktemp("launch") / "my.yaml"
    file.write_text(f"distributed_type: {kind}\n")
    set_parents(monkeypatch, ["accelerate", "launch", "--config_file", str(file), "train.py"])
    with pytest.raises(UserError, match=rf"accelerate launch requests {kind}, which is not supported; use a file of"):
        refuse_unsupported_launch("")


@pytest.mark.parametrize(("flag", "kind"), [("--tpu", "TPU"), ("--use_fsdp", "FSDP")])
def test_a_flag_of_accelerate_launch_is_refused(flag: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    set_parents(monkeypatch, ["accelerate", "launch", flag, "train.py"])
    with pytest.raises(UserError, match=f"accelerate launch requests {kind}, which is not supported"):
        refuse_unsupported_launch("")


def test_fsdp_is_refused_on_the_cpu_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(UserError, match="accelerate launch requests FSDP"):
        refuse_unsupported_launch("cpu")


@pytest.mark.parametrize("name", ["xpu", "npu"])
def test_another_accelerator_needs_a_decision(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, name, SimpleNamespace(is_available=lambda: True), raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match=r"an accelerator that is not supported: .+; add --device cpu"):
        refuse_unsupported_launch("")
    refuse_unsupported_launch("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    refuse_unsupported_launch("")


def test_a_tpu_needs_a_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PJRT_DEVICE", "TPU")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="not supported: TPU; add --device cpu"):
        refuse_unsupported_launch("")
