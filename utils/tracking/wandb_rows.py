"""The newest rows of a W&B run, kept in its folder until W&B has them. Called by wandb_process.py.

W&B writes its file in blocks of 32 KiB, hours of a slow run. If all processes of a machine are killed, the rows of the
unfinished block are lost, and training does not log them again, because its state is newer.
"""

from __future__ import annotations

import itertools
import json
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

HEADER_BYTES = 7  # at the start of a .wandb file: ":W&B", a magic number, a version
LOG_BLOCK_BYTES = 2**15
RECORD_HEADER = struct.Struct("<IHB")  # checksum, length, kind
FULL, FIRST, LAST = 1, 2, 4  # kinds of a record's parts
KEPT_ROWS = LOG_BLOCK_BYTES // 32  # no row takes fewer bytes


class Row(NamedTuple):
    """Values by key, logged at an optimizer step. axis: the key of their x axis."""

    values: dict[str, Any]
    step: int
    axis: str


class RecentRows:
    """The newest rows of a run, at least `KEPT_ROWS`, as lines of JSON. run: its id; other runs' rows are ignored."""

    def __init__(self, file: Path, run: str) -> None:
        self.file, self.run = file, run
        self.rows: list[Row] = []
        with suppress(OSError):
            for line in file.read_text().splitlines():
                with suppress(ValueError, TypeError):  # partly written
                    name, *row = json.loads(line)
                    if name == run:
                        self.rows.append(Row(*row))

    def add(self, row: Row) -> None:
        """Store a row. What cannot be written is not kept."""
        self.rows.append(row)
        with suppress(OSError):
            if len(self.rows) > 2 * KEPT_ROWS:
                del self.rows[:-KEPT_ROWS]
                part = self.file.with_name(f"{self.file.name}.part")
                part.write_text("".join(map(self._line, self.rows)))
                part.replace(self.file)
            else:
                with self.file.open("a") as file:
                    file.write(self._line(row))

    def clear(self) -> None:
        """Forget all rows: W&B has them."""
        self.rows.clear()
        self.file.unlink(missing_ok=True)

    def missing(self, files: Iterable[Path]) -> list[Row]:
        """Return the rows that are in none of these .wandb files. Imports wandb."""
        axes = {row.axis for row in self.rows}
        found = set()
        for values in itertools.chain.from_iterable(map(history, files) if self.rows else ()):
            found |= {(axis, values[axis], key) for axis in axes & values.keys() for key in values}
        return [row for row in self.rows if not {(row.axis, row.values[row.axis], key) for key in row.values} <= found]

    def _line(self, row: Row) -> str:
        return f"\n{json.dumps([self.run, *row])}"  # the line break first: the line before may be incomplete


def history(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a .wandb file: values by key."""
    for record in records(file):
        if record.WhichOneof("record_type") == "history":
            yield {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}


def records(file: Path) -> Iterator[Any]:
    """Yield the records of a .wandb file, which has LevelDB's log format, as protobuf messages, up to its damaged end.

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
        if position > len(content):  # its writer was killed
            return
        parts = (b"" if kind in (FULL, FIRST) else parts) + content[start:position]
        if kind in (FULL, LAST):
            record = Record()
            record.ParseFromString(parts)
            yield record
