"""Read the transaction log of a W&B run on disk."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

HEADER_BYTES = 7  # header of a .wandb file: ":W&B", a magic number, a version
LOG_BLOCK_BYTES = 2**15
RECORD_HEADER = struct.Struct("<IHB")  # checksum, length, kind
FULL, FIRST, LAST = 1, 2, 4  # kinds of a record's parts


@dataclass
class Logged:
    """The content of a .wandb file."""

    id: str = ""
    project: str = ""
    group: str = ""
    job: str = ""
    notes: str = ""
    program: str = ""
    commit: str = ""
    name: str = ""
    tags: list[str] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    axes: dict[str, str] = field(default_factory=dict)
    artifacts: list[Any] = field(default_factory=list)
    hidden: set[str] = field(default_factory=set)  # keys and patterns without charts
    code: int | None = None  # exit code, if the run was closed

    def column(self, key: str) -> list[Any]:
        return [row[key] for row in self.rows if key in row]


def read(file: Path) -> Logged:
    """Read a .wandb file."""
    logged = Logged()
    for record in records(file):
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run = record.run
            logged.id, logged.project, logged.group = run.run_id, run.project, run.run_group
            logged.name, logged.tags = run.display_name, list(run.tags)
            logged.job, logged.notes = run.job_type, run.notes
            _update(logged.config, run.config.update)
        elif kind == "config":
            _update(logged.config, record.config.update)
        elif kind == "history":
            row = {}
            _update(row, record.history.item)
            logged.rows.append(row)
        elif kind == "summary":
            _update(logged.summary, record.summary.update)
        elif kind == "metric":
            metric = record.metric
            key = metric.name.replace("\\.", ".") or metric.glob_name
            logged.axes[key] = metric.step_metric
            logged.hidden |= {key} if metric.options.hidden else set()
        elif kind == "environment" and record.environment.program:
            logged.program, logged.commit = record.environment.program, record.environment.git.commit
        elif kind == "artifact":
            logged.artifacts.append(record.artifact)
        elif kind == "exit":
            logged.code = record.exit.exit_code
    return logged


def records(file: Path) -> Iterator[Any]:
    """Yield the records of a .wandb file, in LevelDB's log format, as protobuf messages, up to a damaged end.

    https://github.com/google/leveldb/blob/main/doc/log_format.md
    """
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]

    content = file.read_bytes()
    position, parts = HEADER_BYTES, b""
    while position + RECORD_HEADER.size <= len(content):
        if (rest := LOG_BLOCK_BYTES - position % LOG_BLOCK_BYTES) < RECORD_HEADER.size:
            position += rest  # padding
            continue
        _, length, kind = RECORD_HEADER.unpack_from(content, position)
        start, position = position + RECORD_HEADER.size, position + RECORD_HEADER.size + length
        if position > len(content):  # the process that wrote the file was killed
            return
        parts = (b"" if kind in (FULL, FIRST) else parts) + content[start:position]
        if kind in (FULL, LAST):
            record = Record()
            record.ParseFromString(parts)
            yield record


def _update(values: dict[str, Any], items: Any) -> None:
    for item in items:
        values["/".join(item.nested_key) or item.key] = json.loads(item.value_json)


def runs(folder: Path) -> list[Path]:
    """Return the .wandb files of a run folder, the oldest first."""
    return sorted(folder.glob("wandb/*run-*/*.wandb"), key=lambda file: file.parent.name.removeprefix("offline-"))


def one_run(folder: Path) -> None:
    """Check that a run with W&B offline has made one W&B run, with the steps of results.csv, and its epochs from 1."""
    from tests.curves import rows  # here, for it imports the models

    pytest.importorskip("wandb")
    (file,) = runs(folder)
    logged = read(file)
    epochs = [row for row in logged.rows if "train/box_loss" in row]
    for row, expected in zip(epochs, rows(folder), strict=True):
        expected["epoch"] += 1  # from 1 in W&B
        assert {key: row[key] for key in expected} == pytest.approx(expected, rel=1e-8)
    steps = logged.column("step")
    assert steps == sorted(set(steps))
    assert logged.code == 0
