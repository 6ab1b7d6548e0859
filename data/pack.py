"""`python -m data.pack my.yaml --out DIR_OR_URL`: pack a data set into tar files, which data/shards.py reads.

Object stores and network disks read large files fast, but a million small ones slowly. The order of the images does not
change, so that training on a pack equals training on the loose files to the byte. An interrupted packing continues
where it ended if it is started again.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import tarfile
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tqdm import tqdm

from data import remote, shards, storage
from data.coco_json import AnnotatedRows
from data.data_yaml import SPLITS, names_text
from data.dataset import DataSource, data_source
from data.images import image_size
from data.label_rows import label_name
from data.shards import INDEX_FILE, LIST_SUFFIX, SHARD_SUFFIX, PackedImage, Summary
from models.tasks import TASKS, add_tasks
from utils.distributed.failure import run_main
from utils.errors import UserError, plural
from utils.files import PART_SUFFIX, cache_folder, replacing

YAML_FILE = "data.yaml"
UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
TAR_BLOCK_BYTES = 512  # a file takes whole blocks, and one for its header


@dataclass(frozen=True)
class LooseImage:
    """An image to pack."""

    path: Path
    size: int  # bytes
    group: str = ""  # class name, if the image belongs to one class as a whole
    boxes: str | None = None  # the rows of an image that an annotation file describes
    outlines: str | None = None


def size_in_bytes(text: str) -> int:
    """Return the number of bytes of a size such as 512M. Raises `UserError`."""
    match = re.fullmatch(r"(\d+)([KMG]?)B?", text.strip().upper())
    if not match or int(match[1]) < 1:
        raise UserError(f"--shard-size {text} is not a size; give one such as 512M or 2G")
    return int(match[1]) * UNITS[match[2]]


def loose_images(source: DataSource, split: str) -> tuple[list[LooseImage], list[str]]:
    """Return the images of a split, in the order in which training lists them, and messages. Raises `UserError`."""
    spec, groups = source.spec, source.kind.groups(source.spec, split)
    boxes: dict[str, str] = {}
    outlines: dict[str, str] = {}
    if groups:
        paths, messages = list(groups), spec.unread_images(split)
    else:
        listing = spec.listing(split)
        paths, messages = listing.images, listing.problems
        for annotated in listing.annotated:
            rows = annotated.rows(polygons=False)
            boxes = {**_texts(rows), **boxes}
            outlines = {**_texts(annotated.rows(polygons=True)), **outlines}
            messages += rows.problems
    if paths and shards.place_of(str(paths[0])):
        raise UserError(f"{spec.file} is packed already; name the data YAML of the loose files")
    images = []
    for path in paths:
        size, _ = storage.stamp(path)
        if size < 0:
            messages.append(f"{remote.shown_path(path)} does not exist; left out")
        else:
            name = str(path)
            images.append(LooseImage(path, size, groups.get(path, ""), boxes.get(name), outlines.get(name)))
    if not images:
        raise UserError(f"{spec.file}: `{split}:` has no image that can be read")
    return images, messages


def _texts(rows: AnnotatedRows) -> dict[str, str]:
    return {path: each.text for path, each in rows.images.items()}


def planned_shards(images: Sequence[LooseImage], shard_bytes: int) -> list[list[LooseImage]]:
    """Return the images of each shard. A shard is larger than `shard_bytes` only if its single image is."""
    plan: list[list[LooseImage]] = []
    room = 0
    for image in images:
        size = (image.size // TAR_BLOCK_BYTES + 2) * TAR_BLOCK_BYTES
        if size > room:
            plan.append([])
            room = shard_bytes
        plan[-1].append(image)
        room -= size
    return plan


class Packer:
    """A writer of shards to a folder or an address.

    Args:
        out: folder or address of the pack
        root: folder that the names in the shards are relative to
    """

    def __init__(self, out: str, root: str) -> None:
        self.out, self.root = out, root

    def pack(self, name: str, images: Sequence[LooseImage], bar: tqdm) -> Summary:
        """Write a shard and its list, unless they are there, and return its summary. Raises `UserError`."""
        names = [os.path.relpath(image.path, self.root) for image in images]
        shard = os.path.join(self.out, name + SHARD_SUFFIX)
        if summary := self._finished(shard, names, images):
            bar.update(sum(image.size for image in images))
            return summary
        with self._writing(name + SHARD_SUFFIX) as file:
            with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
                labels: set[str] = set()
                packed = [_add(tar, name, image, labels, bar) for name, image in zip(names, images, strict=True)]
            summary = Summary(name, len(images), file.tell())
        self.write(name + LIST_SUFFIX, shards.list_text(summary, packed))
        return summary

    def _finished(self, shard: str, names: Sequence[str], images: Sequence[LooseImage]) -> Summary | None:
        """Return the summary of an existing shard, else None. Raises `UserError` if it has other content."""
        if not storage.exists(Path(shards.list_of(shard))):
            return None
        with suppress(OSError, ValueError, KeyError, TypeError, UserError):
            summary = shards.read_summary(shard)
            expected = [(name, image.size) for name, image in zip(names, images, strict=True)]
            if [(image.name, image.size) for image in shards.read_list(shard)] == expected:
                return summary if storage.stamp(Path(shard))[0] == summary.bytes else None
        raise UserError(
            f"{remote.shown_path(self.out)} has shards of another data set, of other files, or of another "
            "--shard-size; name another folder, or delete them"
        )

    def write(self, name: str, text: str) -> None:
        """Write a small file."""
        with self._writing(name) as file:
            file.write(text.encode())

    def remove_leftovers(self) -> None:
        """Remove the temporary files of attempts that were killed, from a finished pack on a disk."""
        if not remote.is_remote(self.out):
            for part in Path(self.out).glob(f".*{PART_SUFFIX}"):
                part.unlink(missing_ok=True)

    @contextmanager
    def _writing(self, name: str) -> Iterator[IO[bytes]]:
        """Open a file that appears under its name once it is complete. Raises `UserError`."""
        target = os.path.join(self.out, name)
        try:
            if not remote.is_remote(target):
                with replacing(Path(target)) as file:
                    yield file
                return
            cache_folder().mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=cache_folder(), prefix="packing-") as file:
                yield file
                file.flush()
                remote.upload(Path(file.name), target)
        except OSError as error:
            raise UserError(
                f"{remote.shown_path(target)} cannot be written ({error.strerror or error}); free disk space, fix "
                "the permissions, or name another folder, and start again: finished shards stay"
            ) from None


def _add(tar: tarfile.TarFile, name: str, image: LooseImage, labels: set[str], bar: tqdm) -> PackedImage:
    """Add an image to a shard, and its label file unless `labels` has it already. Raises `UserError`."""
    try:
        data = storage.read_bytes(image.path)
    except OSError as error:
        raise UserError(f"{remote.shown_path(image.path)} cannot be read: {error.strerror}") from None
    if len(data) != image.size:
        raise UserError(f"{remote.shown_path(image.path)} has changed since the packing began; start it again")
    label = image.boxes if image.boxes is not None or image.group else _label_text(image.path)
    offset = _add_file(tar, name, data)
    if label is not None and (text_name := label_name(name)) not in labels:
        labels.add(text_name)
        _add_file(tar, text_name, (image.outlines or label).encode(errors="surrogateescape"))
    try:
        width, height = image_size(image.path)
    except Exception:  # Pillow raises many kinds; training reports which
        width, height = 0, 0
    bar.update(len(data))
    return PackedImage(
        name,
        offset=offset,
        size=len(data),
        checksum=zlib.crc32(data),
        width=width,
        height=height,
        label=label,
        group=image.group,
        outlines=image.outlines,
    )


def _label_text(image: Path) -> str | None:
    """Return the content of an image's label file, None if there is none. Raises `UserError`."""
    name = storage.label_name(str(image))
    try:
        storage.require_regular_file(name)
        return storage.read_bytes(name).decode(errors="surrogateescape")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"{name} cannot be read ({error.strerror or error}); fix its permissions") from None


def _add_file(tar: tarfile.TarFile, name: str, data: bytes) -> int:
    """Add a file and return the offset of its bytes."""
    info = tarfile.TarInfo(name)
    info.size = len(data)
    offset = tar.offset + len(info.tobuf(tar.format, tar.encoding or "utf-8", tar.errors))
    tar.addfile(info, io.BytesIO(data))
    return int(offset)


def common_folder(images: Sequence[LooseImage]) -> str:
    """Return the deepest folder that contains all images and their label files."""
    folders = {os.path.dirname(image.path) for image in images}
    folders |= {os.path.dirname(label_name(str(image.path))) for image in images if not image.group}
    return os.path.commonpath(folders)


def yaml_text(names: Mapping[int, str], splits: Sequence[str], kpt_shape: Sequence[int]) -> str:
    """Return the data YAML of a pack, for the folder of the pack."""
    keys = [f"{split}: {split}\n" for split in splits] + [f"kpt_shape: {list(kpt_shape)}\n"] * bool(kpt_shape)
    return "".join(["path: .\n", *keys, names_text(list(names.values()))])


def pack(data: str, out: str, shard_size: str = "512M", task: str = "detect") -> list[str]:
    """Pack the data set that `data` names, and return lines for the console. Raises `UserError`.

    Args:
        data: a data YAML, or a folder, as for train.py --data
        out: folder or address of the pack
        shard_size: size of a shard, such as 512M
        task: task that the labels are for: its name, or the Python file or package of one of your own
    """
    shard_bytes = size_in_bytes(shard_size)
    if task not in TASKS:
        if not os.path.exists(task):
            raise UserError(
                f"--task {task} is neither {', '.join(TASKS)}, nor the path of a Python file or package; fix it"
            )
        task = add_tasks(task)[0]
    source = data_source(data, TASKS[task].data)
    spec = source.spec
    held_out = ["train", "val"] if spec.split else []
    splits = [split for split in SPLITS if split in spec.entries or split in held_out]
    listed = {split: loose_images(source, split) for split in splits}
    groups = dict.fromkeys(image.group for image in listed["train"][0] if image.group) if "train" in listed else {}
    names = spec.names or dict(enumerate(groups))
    if not names:
        raise UserError(f"{spec.file}: `names` must list the classes; for folders of classes add --task classify")
    out = str(Path(out)) if remote.is_remote(out) else os.path.abspath(out)
    packed = [image for images, _ in listed.values() for image in images]
    packer = Packer(out, common_folder(packed))
    described = all(image.boxes is not None for image in packed)  # by annotation files: rows without key points
    yaml = yaml_text(names, splits, () if described else spec.kpt_shape)
    existing = Path(out, YAML_FILE)
    if storage.exists(existing) and storage.read_bytes(existing).decode(errors="replace") != yaml:
        raise UserError(
            f"{remote.shown_path(existing)} exists and belongs to another data set; name another --out folder"
        )
    summaries: dict[str, list[Summary]] = {}
    for split, (images, _) in listed.items():
        total = sum(image.size for image in images)
        with tqdm(total=total, desc=f"packing {split}", unit="B", unit_scale=True, disable=None, leave=False) as bar:
            summaries[split] = [
                packer.pack(f"{split}-{number:06}", part, bar)
                for number, part in enumerate(planned_shards(images, shard_bytes))
            ]
    packer.write(YAML_FILE, yaml)
    packer.write(INDEX_FILE, shards.index_text(names, task, summaries))
    packer.remove_leftovers()
    counts = [
        f"{split}: {plural(sum(each.images for each in parts), 'image')} in {plural(len(parts), 'shard')}, "
        f"{sum(each.bytes for each in parts) / 2**20:.1f} MiB"
        for split, parts in summaries.items()
    ]
    return [*(message for _, messages in listed.values() for message in messages), *counts, _usage(out, splits)]


def _usage(out: str, splits: Sequence[str]) -> str:
    if not remote.is_remote(out):
        return f"train with --data {os.path.join(out, YAML_FILE)}"
    entries = ", ".join(f"`{split}: {split}`" for split in splits)
    return f"train with a data YAML that has `path: {remote.shown_path(out)}`, {entries}"


def main() -> None:
    """Pack the data set that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m data.pack", description="Pack a data set into tar files.")
    parser.add_argument("data", help="a data YAML, or a folder, as for train.py --data")
    parser.add_argument("--out", required=True, help="folder or address, such as s3://bucket/my-data, of the pack")
    parser.add_argument("--shard-size", default="512M", help="size of a tar file, such as 512M or 2G; default: 512M")
    parser.add_argument(
        "--task",
        default="detect",
        help=f"what the labels are for: {', '.join(TASKS)}, or the Python file or package of a task; default: detect",
    )
    given = parser.parse_args()
    print(*pack(given.data, given.out, given.shard_size, given.task), sep="\n")


if __name__ == "__main__":
    run_main(main)
