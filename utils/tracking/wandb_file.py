"""Read what an earlier process of a run has logged to Weights & Biases. Called by utils/tracking/wandb.py.

W&B's file of a run on disk is the only record of what will be uploaded: rows that it does not hold were lost when the
process was killed. The package wandb cannot read the file.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

HEADER_BYTES = 7  # header of a .wandb file: ":W&B", a magic number, a version
LOG_BLOCK_BYTES = 2**15
RECORD_HEADER = struct.Struct("<IHB")  # checksum, length, kind
FULL, FIRST, LAST = 1, 2, 4  # kinds of a record's parts


def last_logged(files: Iterable[Path]) -> dict[str, float]:
    """Return, for each key, the last epoch or step of the rows in a run's .wandb files that have the key."""
    last: dict[str, float] = {}
    for file in files:
        with suppress(Exception):  # as long as W&B's file has this format
            for values in history(file):
                position = values.get("epoch", values.get("step", 0))
                for key in values:
                    last[key] = max(last.get(key, position), values[key] if key in ("epoch", "step") else position)
    return last


def history(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a .wandb file as values by key; a picture or table keeps one of its several values."""
    for record in records(file):
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            yield {item.nested_key[0] if item.nested_key else item.key: json.loads(item.value_json) for item in items}


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
