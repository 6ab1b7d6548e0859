"""Read a data set YAML, and list the image files of its splits: `read_spec` returns a `DataSpec`.

Called by data/dataset.py and the data sets, and by whatever lists label files or the images below a folder.
"""

from __future__ import annotations

import codecs
import hashlib
import importlib
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeGuard

from data import remote, storage, voc
from data.archives import archive_sources, fetch_dataset, has_content
from data.coco_json import AnnotatedImages, find_images, read_contents, usual_image_folders
from data.images import IMAGE_SUFFIXES
from data.label_rows import RowRules
from data.shards import Pack, find_pack
from data.voc import has_annotations, is_voc_list
from utils import user_code
from utils.config.parser import suggested_defaults
from utils.config.values import is_number
from utils.errors import UserError, nearest, plural, shortened, shown
from utils.files import IS_INSTALLED, ROOT, file_name, read_yaml

SPLITS = ("train", "val", "test")
MAX_CLASSES = 4096  # classes of a model, at most
PRINTED_KEYS = 5  # unknown keys in a message, at most
# Suffixes of images that are not read; `IMAGE_SUFFIXES` has the others.
OTHER_IMAGE_SUFFIXES = frozenset([".avif", ".gif", ".heic", ".heif", ".jfif", ".jp2", ".jxl"])
CONVERTED_FORMATS = ("voc", "visdrone")  # values of `convert:`
ANNOTATIONS_SUFFIX = ".json"  # suffix of a COCO annotation file
DATA_KEYS = (
    *("path", *SPLITS, "images", "lists", "split", "split_seed", "names", "nc", "kpt_shape"),
    *("draw", "download", "convert", "defaults"),
)
# Keys that YOLOv5's users, Roboflow and ultralytics write, which have no meaning here.
OTHER_KEYS = (
    *("roboflow", "license", "description", "version", "date", "author", "url", "yaml_file", "channels"),
    *("kpt_names", "flip_idx"),
)


class Listing(NamedTuple):
    """The image files of a split.

    Attributes:
        images: image files, sorted, each once
        problems: messages about omitted lines and files
        annotated: images that annotation files describe; all others have label files
    """

    images: list[Path]
    problems: list[str]
    annotated: tuple[AnnotatedImages, ...] = ()

    def only(self, images: list[Path]) -> Listing:
        """Return the listing of some of the images."""
        names = set(map(str, images))
        annotated = [
            replace(each, images={path: name for path, name in each.images.items() if path in names})
            for each in self.annotated
        ]
        return Listing(images, self.problems, tuple(annotated))

    def label_files(self) -> list[Path]:
        """Return the files that the labels are read from; label files may not exist."""
        described = {path for each in self.annotated for path in each.images}
        label_files = (Path(storage.label_name(str(image))) for image in self.images if str(image) not in described)
        return [*(file for each in self.annotated for file in each.files()), *label_files]

    def expected_labels(self) -> str:
        """Describe where labels are expected, for an error message."""
        if self.annotated:
            return f"{self.annotated[0].file} has no box of a class under `names`"
        return f"the label file of {self.images[0]} is expected at {storage.label_name(str(self.images[0]))}"


@dataclass(frozen=True)
class DataSpec:
    """The checked content of a data set YAML.

    Files are searched for when a split is read, so the files of an unused split may be absent. A missing folder of the
    data set is downloaded then, if the YAML has `download:`.
    """

    file: Path
    names: dict[int, str]  # class names by number; empty if the YAML has none
    roots: tuple[Path, ...]  # folders that entries may be relative to, by precedence
    entries: dict[str, tuple[str, ...]]  # folders, list and annotation files of each split, as the YAML names them
    image_folders: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # for annotation files, by split
    lists: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # text files that select a split's images
    warnings: tuple[str, ...] = ()  # lines for the console
    defaults: Mapping[str, Any] = field(default_factory=dict)  # defaults for flags of train.py
    split: float = 0.0  # the share of the training images to hold out for validation, chosen by `split_seed`
    split_seed: int = 0
    has_path: bool = False  # whether the YAML has `path:`
    download: Any = None  # as in the YAML; never executed
    convert: str = ""  # the converter for the download, one of CONVERTED_FORMATS
    kpt_shape: tuple[int, ...] = ()  # number of key points in a label row, and numbers for each; () for none
    # Images below the folders of each split, kept because walking through a million images takes long.
    walked: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
    unread: dict[str, list[str]] = field(default_factory=dict, compare=False, repr=False)  # see `unread_images`

    @property
    def is_remote(self) -> bool:
        """Whether `path:` is an address."""
        return any(map(remote.is_remote, self.roots))

    @property
    def holds_out(self) -> bool:
        """Whether a share of the training images serves for validation: `split:` without `val:`."""
        return self.split > 0 and "val" not in self.entries

    def row_rules(self, rules: RowRules) -> RowRules:
        """Return the rules for the data set's label files: `rules`, and key points after each box if there are any."""
        count = math.prod(self.kpt_shape)
        forms = f"5 (box) or {5 + count} (box and key points, by `kpt_shape`)"
        return replace(rules, keypoints=count, forms=forms) if self.kpt_shape else rules

    def images(self, split: str) -> list[Path]:
        """Return the image files of a split, sorted, each once. Raises `UserError` if it is absent or empty."""
        return self.listing(split).images

    def listing(self, split: str) -> Listing:
        """Return the image files of a split as `images` does, and messages about omitted lines and files."""
        if split == "test" or not self.holds_out:
            return self._whole_listing(split)
        if "listing" not in self.walked:
            self.walked["listing"] = self._whole_listing("train")
        whole: Listing = self.walked["listing"]
        chosen = held_out(whole.images, self.split, self.split_seed)
        if not chosen:
            raise UserError(
                f"{self.file}: `train:` has one image, so `split: {self.split:g}` leaves none to hold out; add images"
            )
        part = whole.only([image for image in whole.images if (image in chosen) == (split == "val")])
        return part._replace(problems=[]) if split == "val" else part  # `train:` reports the problems

    def _whole_listing(self, split: str) -> Listing:
        """Return the image files that `split` names in the YAML."""
        locations = self.locations(split)
        problems: list[str] = []
        listed: list[str] = []  # as text, because many Paths are slow
        unread = self.unread[split] = []
        packed: list[str] = []
        annotated: list[tuple[AnnotatedImages, list[str]]] = []
        for location in locations:
            folders = [root / folder for root in self.roots for folder in self.image_folders.get(split, ())]
            if pack := _pack_of(location):
                packed += pack.images(location.name)
            elif _is_voc(location):
                annotated.append(voc.find_images(location, folders, list(self.names.values())))
            elif is_annotation_file(location):
                folders += [root / f"images/{split}2017" for root in self.roots]
                folders += usual_image_folders(location, split)
                annotated.append(find_images(location, folders, list(self.names.values())))
            else:
                is_list = storage.is_file(location)
                listed += _read_list(location, problems) if is_list else _names_below(location, unread)
        for described, missing in annotated:
            listed += described.images
            problems += missing
        problems += self.unread_images(split)
        if not listed and not packed:
            searched = "; ".join([", ".join(map(remote.shown_path, locations)), *self.unread_images(split)])
            raise UserError(f"{self.file}: `{split}:` has no images in {searched}; put images there or fix the path")
        # In the order of Paths, folder by folder, except for those in shards: they were packed in that order.
        images = [*dict.fromkeys(packed), *sorted(set(listed), key=lambda image: image.replace(os.sep, "\0"))]
        listed = packed + listed
        if len(images) < len(listed):
            repeated = next(image for image, count in Counter(listed).items() if count > 1)
            problems.append(
                f"{self.file}: `{split}:` lists {plural(len(listed) - len(images), 'image')} again, such as "
                f"{repeated}; each is used once"
            )
        listing = Listing(list(map(Path, images)), problems, tuple(described for described, _ in annotated))
        return listing.only(self._listed(split, images, problems)) if split in self.lists else listing

    def _listed(self, split: str, images: Sequence[str], problems: list[str]) -> list[Path]:
        """Return the images that the text files in `lists:` name. Raises `UserError` if there are none."""
        names = self.lists[split]
        found = [_find(name, self.roots) for name in names]
        if None in found:
            raise UserError(f"{self.file}: `lists: {split}: {names[found.index(None)]}` does not exist; fix the path")
        wanted = {image for file in found if file for image in _read_list(file, problems)}
        chosen = [image for image in images if image in wanted]
        if not chosen:
            raise UserError(f"{self.file}: `{split}:` has none of the {len(wanted)} images of `lists:`; fix the paths")
        if missing := wanted - set(chosen):
            problems.append(
                f"{self.file}: `{split}:` lacks {plural(len(missing), 'image')} of `lists:`, such as {min(missing)}"
            )
        return list(map(Path, chosen))

    def annotation_file(self, split: str) -> Path | None:
        """Return the annotation file that a split consists of, or is held out of; None if it has other sources."""
        split = "train" if split == "val" and self.holds_out else split
        locations = self.locations(split)
        return locations[0] if len(locations) == 1 and is_annotation_file(locations[0]) else None

    def unread_images(self, split: str) -> list[str]:
        """Return a message about images in formats that are not read, if the search for a split found any."""
        files = self.unread.get(split)
        if not files:
            return []
        suffixes = ", ".join(sorted({os.path.splitext(file)[1].lower() for file in files}))
        count = f"`{split}:` has {plural(len(files), 'image')} in formats that are not read ({suffixes})"
        return [f"{self.file}: {count}, such as {min(files)}: convert them to .jpg or .png; left out"]

    def find(self, entry: str) -> Path | None:
        """Return the path that an entry means; None if it does not exist."""
        return _find(entry, self.roots)

    def root(self) -> Path:
        """Return the folder that `path:` names. Raises `UserError` if it is absent and cannot be downloaded."""
        reason = "" if any(map(has_content, self.roots)) else self._fetch()
        for root in self.roots:
            if remote.is_remote(root) or os.path.isdir(root):
                return Path(os.path.normpath(root))
        tried = " or ".join(dict.fromkeys(remote.shown_path(Path(os.path.normpath(root))) for root in self.roots))
        raise UserError(f"{self.file}: `path:` does not exist; looked for {tried}{reason}")

    def locations(self, split: str) -> list[Path]:
        """Return the folders and list files of a split.

        Raises `UserError` if the YAML has none, or if one is absent and cannot be downloaded.
        """
        if split not in self.entries:
            share = ", or `split: 0.2` to hold out a share of `train:`" if split == "val" else ""
            raise UserError(
                f"{self.file} has no `{split}:`; add a folder of images, a .txt list of them, or a COCO .json{share}"
            )
        missing = any(_find(entry, self.roots) is None for entry in self.entries[split])
        reason = self._fetch() if missing else ""
        locations = []
        for entry in self.entries[split]:
            location = _find(entry, self.roots)
            if location is None:
                tried = " or ".join(dict.fromkeys(map(remote.shown_path, _candidates(entry, self.roots))))
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
            converters = importlib.import_module("data.convert")  # not imported above, because it imports this module
            converters.convert_downloaded(self.convert, folder, list(self.names.values()))


def held_out(images: Sequence[Path], share: float, seed: int) -> set[Path]:
    """Return the images that are held out for validation: at least one, but never all.

    A hash of folder name, file name and seed decides, so new images hardly change the choice and moving the folder does
    not change it.
    """

    def order(path: Path) -> tuple[bytes, Path]:
        return hashlib.sha256(os.fsencode(f"{seed}/{path.parent.name}/{path.name}")).digest(), path

    count = min(max(round(len(images) * share), 1), len(images) - 1)
    return set(sorted(images, key=order)[:count])


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
    paths = [os.path.split(storage.unpacked_name(image)) for image in images]
    folders = {folder: os.path.join(_real_path(folder), "") for folder in {folder for folder, _ in paths}}
    return {folders[folder] + name for folder, name in paths}


def _real_path(folder: str) -> str:
    return remote.shown_path(folder) if remote.is_remote(folder) else os.path.realpath(folder)


def read_spec(file: Path) -> DataSpec:
    """Read a data set YAML. Raises `UserError`.

    Relative paths resolve against `path:`, which resolves against the YAML's folder or the working folder.
    """
    return checked_spec(file, read_yaml(file))


def checked_spec(file: Path, content: Mapping[str, Any], messages: Sequence[str] = ()) -> DataSpec:
    """Return the data set that the content of a YAML describes. Raises `UserError`.

    Args:
        file: the YAML, or the folder for which `content` was made
        messages: lines for the console
    """
    unknown = [str(key) for key in content if key not in DATA_KEYS and key not in OTHER_KEYS]
    for key in unknown:
        if hint := nearest(key, DATA_KEYS, 0.7):
            raise UserError(f"{file}: unknown key '{shortened(key)}'{hint}")
    if unknown:
        quoted = ", ".join(f"'{shortened(key, 40)}'" for key in unknown[:PRINTED_KEYS])
        more = f" and {len(unknown) - PRINTED_KEYS} more" if len(unknown) > PRINTED_KEYS else ""
        messages = (*messages, f"warning: {file}: {quoted}{more}: unknown, and not used")
    roots = _roots(file, content.get("path"))
    if "draw" in content:
        _draw(file, content["draw"], roots[0])
    entries = {split: _entries(file, split, content[split]) for split in SPLITS if content.get(split)}
    if _is_absent(content, roots) and _are_in(file.resolve().parent, entries.get("train", ())):
        roots = (file.resolve().parent,)
        messages = (
            *messages,
            f"{file}: `path: {content['path']}` does not exist, so the YAML's own folder is used, {roots[0]}",
        )
    names = _names(file, content)
    if not names:
        names, omitted = _annotated_names(entries, roots)
        messages = (*messages, *omitted)
    if remote.is_remote(roots[0]):
        kept = f"files are kept in {remote.cache_path()} {remote.CACHE_RULE}"
        messages = (*messages, f"{remote.shown_path(roots[0])}: {kept}")
    counts = Counter(names.values())
    repeated = [f"warning: {file}: {n} classes are named '{shortened(name)}'" for name, n in counts.items() if n > 1]
    share, seed = content.get("split", 0.0), content.get("split_seed", 0)
    if not (is_number(share) and 0 <= share < 1):
        raise UserError(f"{file}: `split` must be the share to hold out for validation, 0 to 1, not {shown(share)}")
    if share and "val" in entries:
        messages = (*messages, f"warning: {file}: `split: {share:g}` is not used, because there is a `val:`")
    if not _is_seed(seed):
        raise UserError(f"{file}: `split_seed` must be a whole number from 0, not {shown(seed)}")
    defaults = suggested_defaults(content.get("defaults") or {}, file)
    convert = content.get("convert") or ""
    if not isinstance(convert, str) or convert not in ("", *CONVERTED_FORMATS):
        raise UserError(f"{file}: `convert` must be one of {', '.join(CONVERTED_FORMATS)}, not {shown(convert)}")
    if (shape := content.get("kpt_shape")) is not None:
        if not (isinstance(shape, list) and [*map(type, shape)] == [int, int] and shape[0] > 0 and shape[1] in (2, 3)):
            raise UserError(f"{file}: `kpt_shape` must be [K, D], K key points of 2 or 3 numbers, not {shown(shape)}")
        messages = (*messages, f"{file}: `kpt_shape: {shape}`: label rows are read as boxes, without their key points")
    return DataSpec(
        file,
        names,
        roots,
        entries,
        image_folders=_by_split(file, "images", content.get("images"), "a folder"),
        lists=_by_split(file, "lists", content.get("lists"), "a text file"),
        warnings=(*messages, *repeated),
        defaults=defaults,
        split=share,
        split_seed=seed,
        has_path=content.get("path") is not None,
        download=content.get("download"),
        convert=convert,
        kpt_shape=tuple(shape or ()),
    )


def _is_seed(value: Any) -> bool:
    return type(value) is int and value >= 0


def _draw(file: Path, value: Any, folder: Path) -> None:
    """Draw a data set if it is absent.

    Args:
        value: seed of `shapes`, or a mapping from one module that draws to its seed
        folder: folder of the data set
    """
    name, seed = next(iter(value.items())) if isinstance(value, dict) and len(value) == 1 else ("shapes", value)
    draw_dataset = _drawing(name) if _is_seed(seed) else None
    if draw_dataset is None:
        raise UserError(
            f"{file}: `draw` must be a seed of the built-in data set (a whole number), or a module with "
            f"`draw_dataset` and its seed, such as {{data.builtin.shapes_cls: 0}}, not {shown(value)}; only modules "
            "of data/ and of the task that --task-file names are imported"
        )
    draw_dataset(folder, seed=seed)


def _drawing(name: Any) -> Callable[..., object] | None:
    """Return the `draw_dataset` of a module, None if it has none or may not be imported.

    A YAML may come from somebody else, so it can name only modules in data/ and modules of a task that the user runs.

    Args:
        name: module name; a name without a dot, such as `shapes-cls`, is a module of data/builtin
    """
    name = str(name)
    if "." not in name and not user_code.is_users(name):
        name = f"data.builtin.{name.replace('-', '_')}"
    if not all(part.isidentifier() for part in name.split(".")):
        return None
    if user_code.is_users(name):
        return getattr(user_code.load(name), "draw_dataset", None)
    file = ROOT.joinpath(*name.split(".")).with_suffix(".py")
    if not name.startswith("data.") or not file.is_file():
        return None
    return getattr(importlib.import_module(name), "draw_dataset", None)


def _roots(file: Path, path: Any) -> tuple[Path, ...]:
    """Return the folders that `path:` of a data YAML may mean, by precedence."""
    bases = (file.resolve().parent, Path.cwd())
    if path is None:
        return bases
    if not _is_path(path):
        raise UserError(f"{file}: `path` must be a folder's name, not {shown(path)}")
    if remote.is_remote(path):
        return (Path(file_name(path)),)
    if IS_INSTALLED and bases[0].is_relative_to(ROOT):  # a shipped file: as if the working folder were the repository
        return (Path(os.path.normpath(Path.cwd() / bases[0].relative_to(ROOT) / file_name(path))),)
    return tuple(base / os.path.expanduser(file_name(path)) for base in bases)


def _is_absent(content: Mapping[str, Any], roots: Sequence[Path]) -> bool:
    """Return whether the folder that `path:` names does not exist and will not be downloaded."""
    if content.get("path") is None or remote.is_remote(roots[0]) or archive_sources(content.get("download")):
        return False
    return not any(map(os.path.isdir, roots))


def _are_in(folder: Path, entries: Sequence[str]) -> bool:
    """Return whether a split names at least one path, and all of them are below a folder."""
    return bool(entries) and all(not os.path.isabs(entry) and _find(entry, [folder]) for entry in entries)


def _entries(file: Path, split: str, value: Any) -> tuple[str, ...]:
    entries = tuple(value) if isinstance(value, list) else (value,)
    for entry in entries:
        if not _is_path(entry):
            raise UserError(f"{file}: `{split}` must be a path or a list of paths, not {shown(entry)}")
    return tuple(map(file_name, entries))


def _is_path(value: Any) -> TypeGuard[str]:
    return isinstance(value, str) and not set(value) & set("\0\r\n")


def _by_split(file: Path, key: str, value: Any, what: str) -> dict[str, tuple[str, ...]]:
    """Return the paths that a key of a YAML gives for each split.

    Args:
        value: a path or a list of paths for all splits, or a mapping from splits to either
        what: kind of path, for the error message
    """
    by_split = value if isinstance(value, dict) else {split: value for split in SPLITS if value is not None}
    paths = {split: tuple(given) if isinstance(given, list) else (given,) for split, given in by_split.items()}
    for split, given in paths.items():
        if split not in SPLITS or not all(map(_is_path, given)):
            raise UserError(
                f"{file}: `{key}` must be {what}, or {what} for each of {', '.join(SPLITS)}, not {shown(value)}"
            )
    return {split: tuple(map(file_name, given)) for split, given in paths.items()}


def _annotated_names(
    entries: Mapping[str, Sequence[str]], roots: Sequence[Path]
) -> tuple[dict[int, str], tuple[str, ...]]:
    """Return the classes of the first pack or annotation file that a split names, and messages."""
    files = (_find(entry, roots) for split in SPLITS for entry in entries.get(split, ()))
    named = [file for file in files if file and (_pack_of(file) or is_annotation_file(file) or _is_voc(file))]
    if not named:
        return {}, ()
    file = named[0]
    if _is_voc(file):
        return dict(enumerate(sorted({name for each in named if _is_voc(each) for name in voc.class_names(each)}))), ()
    if pack := _pack_of(file):
        return pack.names, ()
    contents = read_contents(file)
    return dict(enumerate(contents.classes)), tuple(contents.group_messages(file))


def is_annotation_file(location: Path) -> bool:
    """Return whether a path names a COCO annotation file."""
    return location.suffix.lower() == ANNOTATIONS_SUFFIX and storage.is_file(location)


def _is_voc(location: Path) -> bool:
    """Return whether a split's entry is an image list in VOC's layout, or a folder of XML files."""
    return is_voc_list(location) or has_annotations(location)


def _pack_of(location: Path) -> Pack | None:
    """Return the pack of a split's entry such as `PACK/train`; None if the entry does not name a packed split."""
    pack = find_pack(str(location.parent))
    return pack if pack and location.name in pack.shards else None


def packed_groups(location: Path) -> list[tuple[str, str]]:
    """Return path and class name of each image of a classification pack's split; [] for another location."""
    pack = _pack_of(location)
    return pack.grouped_images(location.name) if pack else []


def _find(entry: str, roots: Sequence[Path]) -> Path | None:
    candidates = _candidates(entry, roots)
    return next((path for path in candidates if storage.exists(path) or _pack_of(path)), None)


def _candidates(entry: str, roots: Sequence[Path]) -> list[Path]:
    """Return the paths that an entry may mean, by precedence.

    Roboflow writes `../train/images` into a data.yaml that is beside `train`; as in YOLOv5, the `../` may be dropped.
    """
    if remote.is_remote(entry):
        return [Path(entry)]
    entries = [os.path.expanduser(entry), *([entry.removeprefix("../")] if entry.startswith("../") else [])]
    return [Path(os.path.normpath(root / name)) for root in roots for name in entries]


def _names(file: Path, content: Mapping[str, Any]) -> dict[int, str]:
    names, count = content.get("names"), content.get("nc")
    if names is None and count is None:
        return {}
    if names is None and type(count) is int and 0 < count <= MAX_CLASSES:
        return {number: str(number) for number in range(count)}
    if isinstance(names, list):
        names = dict(enumerate(names))
    if not isinstance(names, dict) or not names:
        raise UserError(f"{file}: `names` must list the classes, as `0: person` lines or as [person, ...]")
    if len(names) > MAX_CLASSES:
        raise UserError(f"{file}: `names` lists {len(names)} classes; a model has at most {MAX_CLASSES}, so list fewer")
    if sorted(names, key=str) != sorted(range(len(names)), key=str):
        raise UserError(f"{file}: the numbers under `names` must be 0 to {len(names) - 1}, each once")
    if count is not None and count != len(names):
        raise UserError(f"{file}: `nc` is {shown(count)} but `names` has {plural(len(names), 'class')}; fix either")
    for number, name in names.items():
        if name is None or isinstance(name, (list, dict)) or not str(name).strip():
            raise UserError(f"{file}: class {number} under `names` is {shown(name)}; give its name")
    return {number: str(names[number]) for number in range(len(names))}


def images_below(folder: Path, unread: list[str]) -> Iterator[Path]:
    """Yield every image below a folder. Links are followed; a folder with several paths is read once.

    Args:
        unread: list to which images in formats that are not read are appended
    """
    return map(Path, _names_below(folder, unread))


def _names_below(folder: Path, unread: list[str]) -> Iterator[str]:
    if remote.is_remote(folder):
        names = remote.files_below(str(folder))
        yield from filter(_is_image, names)
        unread += filter(_is_unread, names)
        return
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
        unread += [start + name for name in filter(_is_unread, files)]


def _is_image(path: str) -> bool:
    """Return whether a path has the suffix of an image. The slow `Path` handles forms such as `a.jpg/.`."""
    return os.path.splitext(path)[1].lower() in IMAGE_SUFFIXES or Path(path).suffix.lower() in IMAGE_SUFFIXES


def _is_unread(path: str) -> bool:
    """Return whether a path has the suffix of an image in a format that is not read."""
    return os.path.splitext(path)[1].lower() in OTHER_IMAGE_SUFFIXES


def _refuse(error: OSError) -> NoReturn:
    raise UserError(f"the folder {error.filename} cannot be read: {error.strerror}; fix its permissions") from None


def _read_list(file: Path, problems: list[str]) -> Iterator[str]:
    """Yield the images that a text file lists, one per line, relative to its folder or to the working folder."""
    try:
        content = storage.read_bytes(file)
    except OSError:
        content = b"\0"
    if b"\0" in content:  # as in an image, or in UTF-16
        raise UserError(f"{file} is neither a folder nor a readable text list of images")
    folder = str(file.parent)
    lines = content.removeprefix(codecs.BOM_UTF8).splitlines()  # names may be any bytes
    for number, line in enumerate((os.fsdecode(line.strip()) for line in lines), 1):
        if _is_image(line):
            beside = os.path.normpath(line if remote.is_remote(line) else os.path.join(folder, line))
            yield beside if remote.is_remote(beside) or os.path.exists(beside) else os.path.abspath(line)
        elif line:
            problems.append(f"{file}, line {number}: '{line[:80]}' does not end like an image's name; skipped")


def names_text(names: Sequence[str]) -> str:
    """Return `names:` of a data YAML, with a line for each class."""
    lines = (f"  {number}: {json.dumps(name, ensure_ascii=False)}\n" for number, name in enumerate(names))
    return "names:\n" + "".join(lines)
