"""From a data set YAML to lists of image files."""

from __future__ import annotations

import importlib
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from data.archives import archive_sources, fetch_dataset, is_filled
from data.converters import CONVERTERS
from data.images import IMAGE_SUFFIXES
from utils.config.parser import check_suggested_defaults
from utils.config.ranges import is_number
from utils.errors import UserError, nearest
from utils.files import read_yaml

SPLITS = ("train", "val", "test")
# The modules of the built-in data sets, by what `draw:` names.
DRAWINGS = {"shapes": "data.builtin.shapes", "shapes-cls": "data.builtin.shapes_cls"}
MOST_CLASSES = 4096  # that are counted by `nc` alone
KEYS = ("path", *SPLITS, "split", "split_seed", "names", "nc", "draw", "download", "convert", "defaults")


class Listing(NamedTuple):
    """The image files of a split, sorted, each once; and sentences about what was left out."""

    images: list[Path]
    problems: list[str]


@dataclass(frozen=True)
class DataSpec:
    """A data set YAML, read and checked. `entries` holds each split's folders and list files as the YAML has them.

    They are looked for when a split is asked for: one that nobody uses may be absent. Then, where the folder of the
    data set is missing too, what `download` says is fetched. `doubts`: sentences about what may not be meant.
    `defaults`: what the YAML suggests for flags of train.py.
    """

    file: Path
    names: dict[int, str]  # none where the YAML names none
    roots: tuple[Path, ...]  # the folders that entries may be relative to, best first
    entries: dict[str, tuple[str, ...]]
    doubts: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    split: float = 0.0  # the share of each class that is held out for validation, chosen by `split_seed`
    split_seed: int = 0
    own_folder: bool = False  # is there a `path:`?
    download: Any = None  # as the YAML has it: nothing in it is run
    convert: str = ""  # what is to be made of what was fetched, one of CONVERTERS
    # What was found below the folders of a split, by its name: a walk of a million images takes long.
    walked: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def images(self, split: str) -> list[Path]:
        """The image files of a split, sorted, each once. Raises `UserError` where the split is absent or empty."""
        return self.listing(split).images

    def listing(self, split: str) -> Listing:
        """The same, with what was left out."""
        places = self.places(split)
        problems: list[str] = []
        found = [image for place in places for image in _list_images(place, problems)]  # text: many Paths are slow
        if not found:
            looked = ", ".join(map(str, places))
            raise UserError(f"{self.file}: `{split}:` has no images in {looked}; put images there or mend the path")
        images = sorted(set(found), key=lambda image: image.replace(os.sep, "\0"))  # as Paths are: folder by folder
        if len(images) < len(found):
            again = next(image for image, count in Counter(found).items() if count > 1)
            problems.append(
                f"{self.file}: {len(found) - len(images)} images of `{split}:` are listed again, such as {again}; "
                "taken once"
            )
        return Listing(list(map(Path, images)), problems)

    def root(self) -> Path:
        """The folder that `path:` names. Raises `UserError` where it is not there and cannot be fetched."""
        why = "" if any(map(is_filled, self.roots)) else self._fetch()
        for root in self.roots:
            if os.path.isdir(root):
                return Path(os.path.normpath(root))
        tried = " or ".join(dict.fromkeys(os.path.normpath(root) for root in self.roots))
        raise UserError(f"{self.file}: `path:` does not exist; looked for {tried}{why}")

    def places(self, split: str) -> list[Path]:
        """The folders and list files of a split. Raises `UserError` where the YAML has none, or one is not there and
        cannot be fetched."""
        if split not in self.entries:
            raise UserError(f"{self.file} has no `{split}:`; add a folder of images or a .txt list of them")
        found = [_find(entry, self.roots) for entry in self.entries[split]]
        why = ""
        if None in found and self.download:
            why = self._fetch()
            found = [_find(entry, self.roots) for entry in self.entries[split]]
        for entry, place in zip(self.entries[split], found, strict=True):
            if place is None:
                tried = " or ".join(dict.fromkeys(map(str, _candidates(entry, self.roots))))
                raise UserError(f"{self.file}: `{split}: {entry}` does not exist; looked for {tried}{why}")
        return [place for place in found if place is not None]

    def _fetch(self) -> str:
        """Fetch the data set where `download` has addresses and its folder is not there; else, why not."""
        if not self.download:
            return ""
        sources = archive_sources(self.download)
        if not sources:
            return (
                f"; the `download:` of {self.file} is no address but a script, which is not run: run it yourself, "
                "or see docs/data.md for data sets by address and for converters"
            )
        if not self.own_folder:
            return f"; give {self.file} a `path:`, the folder that its `download:` is to be unpacked to"
        for root in self.roots:
            if is_filled(root):
                return f"; `download:` is followed only where {os.path.normpath(root)} is missing or empty"
        wanted = [entry for entries in self.entries.values() for entry in entries]
        root = Path(os.path.normpath(self.roots[0]))
        fetch_dataset(sources, root, wanted, self._convert)
        return f"; it is not in what was downloaded to {root}"

    def _convert(self, folder: Path) -> None:
        if self.convert:
            CONVERTERS[self.convert](folder, list(self.names.values()))


def overlap(train: Sequence[Path], val: Sequence[Path]) -> list[str]:
    """A sentence where images are in both, whatever way leads there."""
    both = _real(train) & _real(val)
    if not both:
        return []
    return [
        f"warning: {len(both)} of the {len(val)} validation images are training images too, such as {min(both)}; "
        "the metrics will look better than they are"
    ]


def _real(images: Sequence[Path]) -> set[str]:
    """Their paths without links among the folders: of these there are few."""
    places = [os.path.split(image) for image in images]
    folders = {folder: os.path.join(os.path.realpath(folder), "") for folder in {folder for folder, _ in places}}
    return {folders[folder] + name for folder, name in places}


def read_spec(file: Path) -> DataSpec:
    """Read a data set YAML. Relative paths resolve against `path`, that against the YAML's or the working folder."""
    content = read_yaml(file)
    for key in content:
        if key not in KEYS and (hint := nearest(str(key), KEYS, 0.7)):  # other keys are other programs' own
            raise UserError(f"{file}: unknown key '{key}'{hint}")
    roots = _roots(file, content.get("path"))
    if "draw" in content:
        _draw(file, content["draw"], roots[0])
    entries = {split: _entries(file, split, content[split]) for split in SPLITS if content.get(split)}
    names = _names(file, content)
    counts = Counter(names.values())
    doubts = [f"warning: {file}: {n} classes are named '{name}'" for name, n in counts.items() if n > 1]
    share, seed = content.get("split", 0.0), content.get("split_seed", 0)
    if not (is_number(share) and 0 <= share < 1):
        raise UserError(f"{file}: `split` must be the share that is held out for validation, 0 to 1, not {share!r}")
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
        doubts=tuple(doubts),
        defaults=defaults,
        split=share,
        split_seed=seed,
        own_folder=content.get("path") is not None,
        download=content.get("download"),
        convert=convert,
    )


def _is_seed(value: Any) -> bool:
    return type(value) is int and value >= 0


def _draw(file: Path, value: Any, folder: Path) -> None:
    """Make a built-in data set where it is missing. `value`: the seed of `shapes`, or a drawing's name and seed."""
    name, seed = next(iter(value.items())) if isinstance(value, dict) and len(value) == 1 else ("shapes", value)
    if name not in DRAWINGS or not _is_seed(seed):
        raise UserError(
            f"{file}: `draw` must be the seed of the built-in drawing, a whole number, or one of "
            f"{', '.join(DRAWINGS)} with its seed, not {value!r}"
        )
    # Imported here, for `python -m data.shapes` must not find itself imported.
    importlib.import_module(DRAWINGS[name]).draw_dataset(folder, seed=seed)


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
    # Unlike Path's, `exists` is false for a name that no file can have.
    return next((candidate for candidate in _candidates(entry, roots) if os.path.exists(candidate)), None)


def _candidates(entry: str, roots: Sequence[Path]) -> list[Path]:
    return [Path(os.path.normpath(root / os.path.expanduser(entry))) for root in roots]


def _names(file: Path, content: dict[str, Any]) -> dict[int, str]:
    names, count = content.get("names"), content.get("nc")
    if names is None and count is None:
        return {}
    if names is None and isinstance(count, int) and 0 < count <= MOST_CLASSES:
        return {number: str(number) for number in range(count)}
    if isinstance(names, list):
        names = dict(enumerate(names))
    if not isinstance(names, dict) or not names:
        raise UserError(f"{file}: `names` must list the classes, as `0: person` lines or as [person, ...]")
    if sorted(names, key=str) != sorted(range(len(names)), key=str):
        raise UserError(f"{file}: the numbers under `names` must be 0 to {len(names) - 1}, each once")
    if count is not None and count != len(names):
        raise UserError(f"{file}: `nc` is {count} but `names` has {len(names)} classes; mend either")
    for number, name in names.items():
        if name is None or isinstance(name, (list, dict)) or not str(name).strip():
            raise UserError(f"{file}: class {number} under `names` is {name!r}; give its name")
    return {number: str(names[number]) for number in range(len(names))}


def _list_images(entry: Path, problems: list[str]) -> Iterator[str]:
    return _read_list(entry, problems) if entry.is_file() else _names_below(entry)


def images_below(folder: Path) -> Iterator[Path]:
    """Every image below a folder, through links, each real folder once (links may form loops)."""
    return map(Path, _names_below(folder))


def _names_below(folder: Path) -> Iterator[str]:
    seen = set()
    for place, folders, files in os.walk(folder, followlinks=True, onerror=_refuse):
        real = os.path.realpath(place)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        folders.sort()
        start = os.path.join(place, "")
        yield from (start + name for name in sorted(filter(_is_image, files)))


def _is_image(path: str) -> bool:
    """Has it the suffix of an image? What does not plainly end with one Path is asked about, as for `a.jpg/.`."""
    return os.path.splitext(path)[1].lower() in IMAGE_SUFFIXES or Path(path).suffix.lower() in IMAGE_SUFFIXES


def _refuse(error: OSError) -> NoReturn:
    raise UserError(f"the folder {error.filename} cannot be read: {error.strerror}; mend its permissions") from None


def _read_list(file: Path, problems: list[str]) -> Iterator[str]:
    """The images that a text file lists, one a line, relative to its own folder or to the working folder."""
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
            problems.append(f"{file}, line {number}: '{line[:80]}' does not end like an image's name; left out")


def label_file(image: Path) -> Path:
    """Where an image's label rows are: the last folder `images` of the path read as `labels`, the suffix as .txt."""
    return Path(label_name(str(image)))


def label_name(image: str) -> str:
    """The same as text, which is much faster for many."""
    name = image.rfind(os.sep) + 1
    suffix = image.rfind(".", name + 1)  # a dot in front is none
    return f"{_label_folder(image[:name])}{image[name : suffix if suffix > 0 else None]}.txt"


@lru_cache(4096)
def _label_folder(folder: str) -> str:
    """Where the label files of a folder's images are. Both end with the separator, or are ''."""
    before, images, after = f"{os.sep}{folder}".rpartition(f"{os.sep}images{os.sep}")
    return f"{before}{os.sep}labels{os.sep}{after}"[len(os.sep) :] if images else folder
