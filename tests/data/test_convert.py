"""Tests of the command line of the converters."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from data.convert import main, names_text
from data.sources import read_spec
from tests.data.test_converters import coco, rows_below, visdrone, voc_xml
from utils.errors import UserError


def command(monkeypatch: pytest.MonkeyPatch, *words: object) -> None:
    monkeypatch.setattr(sys, "argv", ["convert", *map(str, words)])
    main()


def test_the_command_line_converts_each_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.xml").write_text(voc_xml(("cat", (0, 0, 200, 100))))
    command(monkeypatch, "voc", tmp_path, "--labels", tmp_path / "v", "--names", "dog, cat")
    assert capsys.readouterr().out == f"1 label file with 1 box in {tmp_path / 'v'}\nclasses: 0 dog, 1 cat\n"
    (tmp_path / "names.yaml").write_text("names: [a, cat]\n")
    command(monkeypatch, "voc", tmp_path, "--labels", tmp_path / "w", "--names", tmp_path / "names.yaml")
    assert rows_below(tmp_path / "w") == {"a.txt": ["1 0.5 0.5 1 1"]}
    names = tmp_path / "new.yaml"
    command(monkeypatch, "coco", coco(tmp_path), "--labels", tmp_path / "c", "--names-to", names)
    assert list(read_spec(names).names.values()) == ["cat", "dog"]
    with pytest.raises(UserError, match=r"new\.yaml exists already; add --exist-ok"):
        command(monkeypatch, "coco", coco(tmp_path), "--labels", tmp_path / "d", "--names-to", names)
    visdrone(tmp_path / "drone")
    command(monkeypatch, "visdrone", tmp_path / "drone")
    assert "2 boxes" in capsys.readouterr().out
    with pytest.raises(UserError, match="--names a,a repeats a class"):
        command(monkeypatch, "voc", tmp_path, "--labels", tmp_path / "x", "--names", "a,a")
    for wrong in ((), ("xml",), ("voc", tmp_path), ("coco", "a.json", "--labels", "b", "--difficult")):
        with pytest.raises(SystemExit) as caught:
            command(monkeypatch, *wrong)
        assert caught.value.code == 2


def test_names_are_yaml(tmp_path: Path) -> None:
    names = ["no", "7", "a: b", "Größe", "'"]
    (tmp_path / "a.yaml").write_text(names_text(names), encoding="utf-8")
    assert list(read_spec(tmp_path / "a.yaml").names.values()) == names
