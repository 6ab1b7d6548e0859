"""Read a data set YAML, and list the image files of its splits: `read_spec` returns a `DataSpec`.

Called by data/dataset.py, by the data sets, and for label files and the images below a folder.
"""

from __future__ import annotations

import importlib
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from data.archives import archive_sources, fetch_dataset, has_content
from data.converters import CONVERTERS
from data.images import IMAGE_SUFFIXES
from utils.config.parser import check_suggested_defaults
from utils.config.ranges import is_number
from utils.errors import UserError, nearest
from utils.files import read_yaml

SPLITS = ("train", "val", "test")
# The modules of the built-in data sets, by their names in `draw:`.
DRAWING_MODULES = {
    "shapes": "data.builtin.shapes",
    "shapes-cls": "data.builtin.shapes_cls",
    "shapes-seg": "data.builtin.shapes_seg",
}
MAX_UNNAMED_CLASSES = 4096  # in a YAML with `nc` but without `names`
DATA_KEYS = ("path", *SPLITS, "split", "split_seed", "names", "nc", "draw", "download", "convert", "defaults")


class Listing(NamedTuple):
    """The image files of a split, sorted, each once, and messages about omitted lines and files."""

    images: list[Path]
    problems: list[str]


@dataclass(frozen=True)
class DataSpec:
    """The checked content of a data set YAML.

    Files are searched for when a split is read, so a split that is not used may be absent. A missing folder of the data
    set is downloaded then, if the YAML has `download:`.
    """

    file: Path
    names: dict[int, str]  # of the classes; empty if the YAML has none
    roots: tuple[Path, ...]  # folders that entries may be relative to, by precedence
    entries: dict[str, tuple[str, ...]]  # folders and list files of each split, as the YAML names them
    warnings: tuple[str, ...] = ()  # about possible mistakes
    defaults: Mapping[str, Any] = field(default_factory=dict)  # for flags of train.py
    split: float = 0.0  # the share of each class to hold out for validation, chosen by `split_seed`
    split_seed: int = 0
    has_path: bool = False  # whether the YAML has `path:`
    download: Any = None  # as in the YAML; never executed
    convert: str = ""  # the converter for the download, one of CONVERTERS
    # Images below the folders of each split: to walk through a million images takes long.
    walked: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def images(self, split: str) -> list[Path]:
        """Return the image files of a split, sorted, each once. Raises `UserError` if it is absent or empty."""
        return self.listing(split).images

    def listing(self, split: str) -> Listing:
        """Return the image files of a split as `images` does, and messages about omitted lines and files."""
        locations = self.locations(split)
        problems: list[str] = []
        listed: list[str] = []  # text: many Paths are slow
        for location in locations:
            listed += _read_list(location, problems) if location.is_file() else _names_below(location)
        if not listed:
            searched = ", ".join(map(str, locations))
            raise UserError(f"{self.file}: `{split}:` has no images in {searched}; put images there or fix the path")
        # In the order of Paths: folder by folder.
        images = sorted(set(listed), key=lambda image: image.replace(os.sep, "\0"))
        if len(images) < len(listed):
            repeated = next(image for image, count in Counter(listed).items() if count > 1)
            problems.append(
                f"{self.file}: {len(listed) - len(images)} images of `{split}:` are listed again, such as "
                f"{repeated}; each is used once"
            )
        return Listing(list(map(Path, images)), problems)

    def root(self) -> Path:
        """Return the folder that `path:` names. Raises `UserError` if it is absent and cannot be downloaded."""
        reason = "" if any(map(has_content, self.roots)) else self._fetch()
        for root in self.roots:
            if os.path.isdir(root):
                return Path(os.path.normpath(root))
        tried = " or ".join(dict.fromkeys(os.path.normpath(root) for root in self.roots))
        raise UserError(f"{self.file}: `path:` does not exist; looked for {tried}{reason}")

    def locations(self, split: str) -> list[Path]:
        """Return the folders and list files of a split.

        Raises `UserError` if the YAML has none, or if one is absent and cannot be downloaded.
        """
        if split not in self.entries:
            raise UserError(f"{self.file} has no `{split}:`; add a folder of images or a .txt list of them")
        missing = any(_find(entry, self.roots) is None for entry in self.entries[split])
        reason = self._fetch() if missing else ""
        locations = []
        for entry in self.entries[split]:
            location = _find(entry, self.roots)
            if location is None:
                tried = " or ".join(dict.fromkeys(map(str, _candidates(entry, self.roots))))
                raise UserError(f"{self.file}: `{split}: {entry}` does not exist; looked for {tried}{reason}")
            locations.append(location)
        return locations

    def _fetch(self) -> str:
        """Download the data set if `download` has addresses and the data set's folder is absent or empty.

        Return the reason why a file may still be absent, as the end of an error message.
        """
        if not self.download:
            return ""
        sources = archive_sources(self.download)
        if not sources:
            return (
                f"; the `download:` of {self.file} is a script, not an address, and is never run: run it yourself, or "
                "see docs/data.md for addresses and converters"
            )
        if not self.has_path:
            return f"; add `path:` to {self.file}, the folder to unpack its `download:` into"
        for root in self.roots:
            if has_content(root):
                return f"; `download:` is used only if {os.path.normpath(root)} is missing or empty"
        expected = [entry for entries in self.entries.values() for entry in entries]
        root = Path(os.path.normpath(self.roots[0]))
        fetch_dataset(sources, root, expected, self._convert)
        return f"; it is not in the download at {root}"

    def _convert(self, folder: Path) -> None:
        if self.convert:
            CONVERTERS[self.convert](folder, list(self.names.values()))


def overlap(train: Sequence[Path], val: Sequence[Path]) -> list[str]:
    """Return a warning if the splits share images, whatever their paths, else an empty list."""
    both = _real_paths(train) & _real_paths(val)
    if not both:
        return []
    return [
        f"warning: {len(both)} of the {len(val)} validation images are training images too, such as {min(both)}; "
        "the metrics will look better than they are"
    ]


def _real_paths(images: Sequence[Path]) -> set[str]:
    """Return the paths of images with resolved folders. Each folder is resolved once, which is fast."""
    paths = [os.path.split(image) for image in images]
    folders = {folder: os.path.join(os.path.realpath(folder), "") for folder in {folder for folder, _ in paths}}
    return {folders[folder] + name for folder, name in paths}


def read_spec(file: Path) -> DataSpec:
    """Read a data set YAML. Raises `UserError`.

    Relative paths resolve against `path:`, and that against the YAML's folder or the working folder.
    """
    content = read_yaml(file)
    for key in content:
        # Keys that are not similar may belong to other programs.
        if key not in DATA_KEYS and (hint := nearest(str(key), DATA_KEYS, 0.7)):
            raise UserError(f"{file}: unknown key '{key}'{hint}")
    roots = _roots(file, content.get("path"))
    if "draw" in content:
        _draw(file, content["draw"], roots[0])
    entries = {split: _entries(file, split, content[split]) for split in SPLITS if content.get(split)}
    names = _names(file, content)
    counts = Counter(names.values())
    warnings = [f"warning: {file}: {n} classes are named '{name}'" for name, n in counts.items() if n > 1]
    share, seed = content.get("split", 0.0), content.get("split_seed", 0)
    if not (is_number(share) and 0 <= share < 1):
        raise UserError(f"{file}: `split` must be the share to hold out for validation, 0 to 1, not {share!r}")
    if not _is_seed(seed):
        raise UserError(f"{file}: `split_seed` must be a whole number from 0, not {seed!r}")
    defaults = check_suggested_defaults(content.get("defaults") or {}, file)
    convert = content.get("convert") or ""
    if convert not in ("", *CONVERTERS):
        raise UserError(f"{file}: `convert` must be one of {', '.join(CONVERTERS)}, not {convert!r}")
    return DataSpec(
        file,
        names,
        roots,
        entries,
        warnings=tuple(warnings),
        defaults=defaults,
        split=share,
        split_seed=seed,
        has_path=content.get("path") is not None,
        download=content.get("download"),
        convert=convert,
    )


def _is_seed(value: Any) -> bool:
    return type(value) is int and value >= 0


def _draw(file: Path, value: Any, folder: Path) -> None:
    """Draw a built-in data set if it is absent. value: the seed of `shapes`, or a mapping of a name to its seed."""
    name, seed = next(iter(value.items())) if isinstance(value, dict) and len(value) == 1 else ("shapes", value)
    if name not in DRAWING_MODULES or not _is_seed(seed):
        raise UserError(
            f"{file}: `draw` must be the seed of the built-in data set, a whole number, or one of "
            f"{', '.join(DRAWING_MODULES)} with its seed, not {value!r}"
        )
    importlib.import_module(DRAWING_MODULES[name]).draw_dataset(folder, seed=seed)


def _roots(file: Path, path: Any) -> tuple[Path, ...]:
    bases = (file.resolve().parent, Path.cwd())
    if path is None:
        return bases
    if not isinstance(path, str):
        raise UserError(f"{file}: `path` must be a folder's name, not {path!r}")
    return tuple(base / os.path.expanduser(path) for base in bases)


def _entries(file: Path, split: str, value: Any) -> tuple[str, ...]:
    entries = tuple(value) if isinstance(value, list) else (value,)
    for entry in entries:
        if not isinstance(entry, str):
            raise UserError(f"{file}: `{split}` must be a path or a list of paths, not {entry!r}")
    return entries


def _find(entry: str, roots: Sequence[Path]) -> Path | None:
    # Unlike Path.exists, os.path.exists returns False for an invalid name.
    return next((candidate for candidate in _candidates(entry, roots) if os.path.exists(candidate)), None)


def _candidates(entry: str, roots: Sequence[Path]) -> list[Path]:
    return [Path(os.path.normpath(root / os.path.expanduser(entry))) for root in roots]


def _names(file: Path, content: dict[str, Any]) -> dict[int, str]:
    names, count = content.get("names"), content.get("nc")
    if names is None and count is None:
        return {}
    if names is None and isinstance(count, int) and 0 < count <= MAX_UNNAMED_CLASSES:
        return {number: str(number) for number in range(count)}
    if isinstance(names, list):
        names = dict(enumerate(names))
    if not isinstance(names, dict) or not names:
        raise UserError(f"{file}: `names` must list the classes, as `0: person` lines or as [person, ...]")
    if sorted(names, key=str) != sorted(range(len(names)), key=str):
        raise UserError(f"{file}: the numbers under `names` must be 0 to {len(names) - 1}, each once")
    if count is not None and count != len(names):
        raise UserError(f"{file}: `nc` is {count} but `names` has {len(names)} classes; fix either")
    for number, name in names.items():
        if name is None or isinstance(name, (list, dict)) or not str(name).strip():
            raise UserError(f"{file}: class {number} under `names` is {name!r}; give its name")
    return {number: str(names[number]) for number in range(len(names))}


def images_below(folder: Path) -> Iterator[Path]:
    """Return every image below a folder. Links are followed; a folder with several paths is read once."""
    return map(Path, _names_below(folder))


def _names_below(folder: Path) -> Iterator[str]:
    visited = set()
    for path, folders, files in os.walk(folder, followlinks=True, onerror=_refuse):
        real = os.path.realpath(path)
        if real in visited:
            folders.clear()
            continue
        visited.add(real)
        folders.sort()
        start = os.path.join(path, "")
        yield from (start + name for name in sorted(filter(_is_image, files)))


def _is_image(path: str) -> bool:
    """Return whether a path has the suffix of an image. Path, which is slow, handles forms such as `a.jpg/.`."""
    return os.path.splitext(path)[1].lower() in IMAGE_SUFFIXES or Path(path).suffix.lower() in IMAGE_SUFFIXES


def _refuse(error: OSError) -> NoReturn:
    raise UserError(f"the folder {error.filename} cannot be read: {error.strerror}; fix its permissions") from None


def _read_list(file: Path, problems: list[str]) -> Iterator[str]:
    """Yield the images that a text file lists, one per line, relative to its folder or to the working folder."""
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError):
        raise UserError(f"{file} is neither a folder nor a readable text list of images") from None
    folder = str(file.parent)
    for number, line in enumerate(map(str.strip, lines), 1):
        if _is_image(line):
            beside = os.path.normpath(os.path.join(folder, line))
            yield beside if os.path.exists(beside) else os.path.abspath(line)
        elif line:
            problems.append(f"{file}, line {number}: '{line[:80]}' does not end like an image's name; skipped")


def label_file(image: Path) -> Path:
    """Return the label file of an image: the last folder `images` of its path becomes `labels`, the suffix .txt."""
    return Path(label_name(str(image)))


def label_name(image: str) -> str:
    """Return the label file of an image as `label_file` does, but as text, which is much faster for many images."""
    name = image.rfind(os.sep) + 1
    suffix = image.rfind(".", name + 1)  # a leading dot starts no suffix
    return f"{_label_folder(image[:name])}{image[name : suffix if suffix > 0 else None]}.txt"


@lru_cache(4096)
def _label_folder(folder: str) -> str:
    """Return the folder of the labels for a folder of images. Both end with a separator, or are empty."""
    before, images, after = f"{os.sep}{folder}".rpartition(f"{os.sep}images{os.sep}")
    return f"{before}{os.sep}labels{os.sep}{after}"[len(os.sep) :] if images else folder
