"""The layers that rows may name: those of torch.nn, and those of a user's file."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from models.heads.anchors import Detect
from models.yolo import LAYERS, LayerPlacement, Scaling, add_layers, build_model
from tests.making import tiny_detector
from utils.errors import UserError
from utils.files import ROOT


def model_with(*rows: list[Any]) -> nn.Module:
    """Build the tiny detector with these rows between its backbone and its head."""
    with torch.device("meta"):
        return build_model({**tiny_detector(), "head": [*rows, *tiny_detector()["head"]]})


@pytest.mark.parametrize(
    ("module", "args", "expected"),
    [
        ("nn.Identity", [], nn.Identity()),
        ("torch.nn.Identity", [], nn.Identity()),
        ("nn.Dropout2d", [0.3], nn.Dropout2d(0.3)),
        ("nn.ZeroPad2d", [[0, 1, 0, 1]], nn.ZeroPad2d((0, 1, 0, 1))),
        ("nn.MaxPool2d", [3, 1, 1], nn.MaxPool2d(3, 1, 1)),
        ("nn.MaxPool2d", [3, 1, 1, 1, "False", "False"], nn.MaxPool2d(3, 1, 1)),
        ("nn.BatchNorm2d", [], nn.BatchNorm2d(8, 1e-3, 0.03)),
        ("nn.BatchNorm2d", [1e-5], nn.BatchNorm2d(8)),
        ("nn.Conv2d", [16, 3, 1, 1], nn.Conv2d(8, 16, 3, 1, 1)),
        ("nn.ConvTranspose2d", [16, 4, 2, 1], nn.ConvTranspose2d(8, 16, 4, 2, 1)),
    ],
)
def test_layers_of_torch(module: str, args: list[Any], expected: nn.Module) -> None:
    layer = model_with([-1, 1, module, args]).model[3]
    assert (type(layer), repr(layer)) == (type(expected), repr(expected))


@pytest.mark.parametrize("name", ["Flatten", "Embedding", "GRU", "MultiheadAttention"])
@pytest.mark.parametrize("args", [[], [8], [8, 8]])
def test_layers_of_torch_that_return_no_map(name: str, args: list[Any]) -> None:
    with pytest.raises(UserError, match=r"row [34]: .* does not work"):
        model_with([-1, 1, f"nn.{name}", args], [-1, 1, "Conv", [8]])


# Layers of a user's file

USER_LAYERS = """
from dataclasses import dataclass

import torch
from torch import nn

import beside
from models.heads.anchors import Detect
from models.layers import Conv


@dataclass
class Settings:
    slope: "float" = 0.1


class Gate(nn.Module):
    def __init__(self, c1, c2, kernel=1):
        super().__init__()
        self.conv, self.act = Conv(c1, c2, kernel), nn.LeakyReLU(Settings().slope)

    def forward(self, x):
        return self.act(self.conv(x))


class Deep(nn.Module):
    def __init__(self, c1, c2, n, kernel=1):
        super().__init__()
        self.m = nn.Sequential(*(Gate(c1 if k == 0 else c2, c2, kernel) for k in range(n)))

    def forward(self, x):
        return self.m(x)


class Squeeze(nn.Module):
    def __init__(self, c1, part):
        super().__init__()
        self.down, self.up = nn.Linear(c1, c1 // part), nn.Linear(c1 // part, c1)

    def forward(self, x):
        return x * self.up(self.down(x.mean((2, 3)))).sigmoid()[..., None, None]


class Sum(nn.Module):
    def __init__(self, channels, factor=1):
        super().__init__()
        assert isinstance(channels, list)
        self.weight = nn.Parameter(torch.ones(len(channels)) * factor)

    def forward(self, maps):
        return sum(weight * x for weight, x in zip(self.weight, maps))


class Scale(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return x * self.factor


class Head(Detect):
    pass
"""


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    """A path for the user's file; its layers are removed after the test."""
    before = dict(LAYERS)
    (tmp_path / "beside.py").write_text("")
    yield tmp_path / "mine.py"
    LAYERS.clear()
    LAYERS.update(before)


def test_layers_are_called_as_their_parameters_are_named(file: Path) -> None:
    file.write_text(USER_LAYERS)
    before = list(sys.path)
    names = ["Gate", "Deep", "Squeeze", "Sum", "Scale", "Head"]
    assert add_layers(file) == add_layers(str(file)) == names
    assert sys.path == before
    assert sorted(path.name for path in file.parent.iterdir()) == ["beside.py", "mine.py"]  # no __pycache__
    description = {
        **tiny_detector(),
        "anchors": [[10, 13, 16, 30]],
        "width_multiple": 0.25,
        "backbone": [[-1, 1, "Conv", [64, 3, 2]], [-1, 2, "Gate", [128]], [-1, 3, "Deep", [128, 3]]],
        "head": [
            [-1, 1, "Squeeze", [4]],
            [[-1, 1], 1, "Sum", [2]],
            [-1, 1, "Scale", [3]],
            [[-1], 1, "Head", ["nc", "anchors"]],
        ],
    }
    model = copy.deepcopy(build_model(description))
    gates, deep, squeeze, weighted_sum, scale, head = model.model[1:]
    assert [(part.conv.conv.in_channels, part.conv.conv.out_channels) for part in gates] == [(16, 32), (32, 32)]
    assert [part.conv.conv.kernel_size for part in deep.m] == [(3, 3)] * 3
    assert (squeeze.down.in_features, squeeze.down.out_features) == (32, 8)
    assert (weighted_sum.weight.tolist(), scale.factor) == ([2, 2], 3)
    assert isinstance(head, Detect)
    assert model.head.stride.tolist() == [2]
    sum(m.sum() for m in model(torch.rand(2, 3, 16, 16))).backward()
    assert all(p.grad is not None for p in model.parameters())


def test_the_example_of_the_docs(file: Path) -> None:
    text = (ROOT / "docs" / "models.md").read_text()
    python, description = (text.split(f"```{kind}\n")[1].split("```")[0] for kind in ("python", "yaml"))
    file.write_text(python)
    assert add_layers(file) == ["Squeeze", "Stack", "Weighted"]
    model = build_model(yaml.safe_load(description))
    assert len(model.model[2].m) == 1 + 2
    assert [m.shape for m in model(torch.rand(1, 3, 32, 32))] == [(1, 3, 4, 4, 85)]


def test_an_error_names_the_row_of_a_users_layer(file: Path) -> None:
    file.write_text(
        "from torch import nn\n\n\nclass Mine(nn.Module):\n    def __init__(self, c1, c2): super().__init__()\n"
    )
    add_layers(file)
    with pytest.raises(UserError, match=r"row 3: Mine with the arguments \[64\].* does not work .*fix that row"):
        model_with([-1, 1, "Mine", [64]])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("class A:\n    x = = 1\n", "mine.py, line 2: invalid syntax; fix the Python there"),
        ("\n\nimport nothing_of_that_name\n", "mine.py, line 3: ModuleNotFoundError: No module named .*; fix it"),
        ("def f():\n    return 1 / 0\n\nf()\n", "mine.py, line 2: ZeroDivisionError: division by zero; fix it"),
        ("import sys\nsys.exit('no')\n", "mine.py, line 2: SystemExit: no; fix it"),
        ("x = 1\n", "mine.py defines no layer; write a class that extends torch.nn.Module"),
        ("from torch.nn import Conv2d\n", "mine.py defines no layer"),
        (
            "from torch import nn\n\n\nclass New(nn.Module): ...\n\n\nclass C3(nn.Module): ...\n",
            "mine.py defines a layer 'C3', but that name is taken; give it another name",
        ),
        ("\0\1", "mine.py.*null bytes"),
    ],
)
def test_files_that_define_no_layers(content: str, message: str, file: Path) -> None:
    file.write_text(content)
    modules, path, layers = set(sys.modules), list(sys.path), dict(LAYERS)
    for _ in range(2):
        with pytest.raises(UserError, match=message):
            add_layers(file)
    assert (set(sys.modules), sys.path, LAYERS) == (modules, path, layers)


def test_paths_of_no_python_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative path is one below the working folder, not below the repository."""
    monkeypatch.chdir(tmp_path)
    for name in ("mine.py", "models/layers.py"):
        message = rf"--layers {name} is not a file; give the path of a Python file .* \(looked for {tmp_path}/{name}\)$"
        with pytest.raises(UserError, match=message):
            add_layers(name)
    (tmp_path / "mine.txt").write_text("x = 1\n")
    with pytest.raises(UserError, match=r"mine.txt is not a Python file; --layers takes a file whose name ends with"):
        add_layers(tmp_path / "mine.txt")


# The inputs of a constructor


def test_scaling() -> None:
    scaling = Scaling(0.33, 0.25, 8, 21)
    assert [scaling.channels(count) for count in (64, 21, 33)] == [16, 21, 16]
    assert [scaling.repeats(number) for number in (1, 2, 3, 9)] == [1, 1, 1, 3]
    placement = LayerPlacement((4, 8), 1, (), scaling)
    with pytest.raises(ValueError, match="it takes one input, not 2: join them with Concat first"):
        _ = placement.c1
    with pytest.raises(ValueError, match="the number of output channels, is missing"):
        _ = placement.c2


def test_a_file_that_only_the_settings_of_a_run_name_is_not_run(file: Path) -> None:
    """A run folder may be somebody else's. A file that this user has named before is trusted while it is the same."""
    mark = file.with_name("mark")
    code = (
        f"from pathlib import Path\nfrom torch import nn\n\nclass {{}}(nn.Identity):\n    Path({str(mark)!r}).touch()\n"
    )
    file.write_text(code.format("First"))
    with pytest.raises(UserError, match=rf"names {file}, a Python file .* if you trust it add --layers {file}$"):
        add_layers(file, is_named=False)
    assert not mark.exists()
    assert add_layers(file) == ["First"]
    mark.unlink()

    copy = file.with_name("copy.py")
    copy.write_text(code.format("First"))
    file.write_text(code.format("Second"))
    for other in (file, copy):
        sys.modules.pop(f"layers of {other}", None)
        with pytest.raises(UserError, match="that you have not run before"):
            add_layers(other, is_named=False)
    assert not mark.exists()
    file.write_text(code.format("First"))
    LAYERS.pop("First")
    assert add_layers(file, is_named=False) == ["First"]
