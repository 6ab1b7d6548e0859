"""Read a data YAML, or a folder without one, and list its splits' images: `read_data` returns a `DataSpec`."""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from data import formats
from data.builtin import DRAWN_SETS
from data.images import NPY_SUFFIX, images_below, read_image_list, read_pixels
from data.labels import RowRules, label_name
from data.tiles import Tiles
from utils import user_code
from utils.batch import MAX_CHANNELS, PHOTOS, PathArray, PixelFormat, path_texts
from utils.config.flags import SHARE, Range, is_number
from utils.config.hyperparameters import suggested_defaults
from utils.console import log
from utils.errors import UserError, nearest, plural, public, quoted
from utils.files import IS_INSTALLED, ROOT, find_file, read_yaml

REMOTE = re.compile(r"[a-z][a-z0-9+.-]+://")  # `path:` of an object store or web server
NOT_IN_PATHS = re.compile("[\0\r\n\ud800-\udc7f\udd00-\udfff]")  # half a character cannot be encoded
SPLITS = ("train", "val", "test")
MAX_CLASSES = 4096  # classes of a model, at most
HELD_OUT_SHARE = 0.2  # share of the images, or of each class, to hold out of a folder without validation images
DATA_KEYS = (
    *("path", *SPLITS, "images", "split", "split_seed", "names", "nc", "kpt_shape"),
    *("draw", "download", "defaults", "tiles", "channels", "range"),
)
TILE_RANGES = {"size": Range(32), "overlap": Range(0, 0.9), "background": SHARE}
TILES = "{size: 1024}, from 32 pixels, maybe with overlap (0 to 0.9) and background (0 to 1)"
SET_KEYS = ("path", "name", "share", "weight", "rename")  # keys of each data set in a list of several
# Parts of a path that name no data set.
COMMON_NAMES = {"images", "annotations", "data", "dataset", "..", os.sep, *chain(*formats.SPLIT_FOLDERS.values())}
# Keys that YOLOv5's users, Roboflow and ultralytics write, which have no meaning here.
OTHER_KEYS = (
    *("roboflow", "license", "description", "version", "date", "author", "url", "yaml_file"),
    *("kpt_names", "flip_idx"),
)


class Listing(NamedTuple):
    """The image files of a split."""

    images: PathArray  # sorted, each once, of each data set
    problems: list[str]  # messages about omitted lines and files
    annotated: tuple[formats.AnnotatedImages, ...] = ()  # of images that annotations describe; others have label files

    def label_files(self) -> list[Path]:
        """Return the files that the labels are read from; label files may not exist."""
        described = {path for split in self.annotated for path in split.images}
        names = [image for image in path_texts(self.images) if image not in described]
        return [*(file for split in self.annotated for file in split.files), *map(Path, map(label_name, names))]


@dataclass(frozen=True)
class DataSpec:
    """The checked content of a data YAML. Its files are searched for, or downloaded, only when a split is read."""

    file: Path
    names: dict[int, str]  # class names by number; empty if the YAML has none
    roots: tuple[Path, ...]  # folders that entries may be relative to, by precedence
    entries: dict[str, tuple[str, ...]]  # folders, list and annotation files of each split, as the YAML names them
    image_folders: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # for annotation files, by split
    warnings: tuple[str, ...] = ()  # lines for the console
    defaults: Mapping[str, Any] = field(default_factory=dict)  # defaults for flags of train.py
    split: float = 0.0  # the share of the training images to hold out for validation, chosen by `split_seed`
    split_seed: int = 0
    download: Any = None  # as in the YAML; never executed
    kpt_shape: tuple[int, ...] = ()  # number of key points in a label row, and numbers for each; () for none
    tiles: Tiles | None = None  # how images are cut into windows
    pixels: PixelFormat = PHOTOS
    sets: Mapping[str, tuple[DataSpec, ...]] = field(default_factory=dict)  # by split that lists several
    name: str = ""  # of one of several data sets
    weight: float = 0.0  # its relative number of samples per epoch; 0 for its number of images
    classes: tuple[int, ...] = ()  # number in the whole set's `names` of each class; () if they are the same
    walked: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)  # splits that have been listed

    @property
    def holds_out(self) -> bool:
        """Whether a share of the training images serves for validation: `split:` without `val:`."""
        return self.split > 0 and "val" not in self.entries

    def row_rules(self, rules: RowRules) -> RowRules:
        """Return the rules for the data set's files: `rules`, its pixels, and key points if there are any."""
        count = math.prod(self.kpt_shape)
        forms = f"5 (box) or {5 + count} (box and key points, by `kpt_shape`)"
        rules = replace(rules, pixels=self.pixels)
        return replace(rules, keypoints=count, forms=forms) if self.kpt_shape else rules

    def images(self, split: str) -> list[Path]:
        """Return the image files of a split, sorted, each once. Raises `UserError` if it is absent or empty."""
        return list(self.listing(split).images)

    def listing(self, split: str) -> Listing:
        """Return the image files of a split as `images` does, and messages about omitted lines and files."""
        if split in self.sets:
            paths, problems, annotated = zip(*(part.listing(split) for part in self.sets[split]), strict=True)
            return Listing(PathArray.concatenate(paths), [*chain(*problems)], (*chain(*annotated),))
        if split == "test" or not self.holds_out:
            return self._whole_listing(split)
        if "listing" not in self.walked:
            self.walked["listing"] = self._whole_listing("train")
        whole: Listing = self.walked["listing"]
        held_images = hold_out(whole.images, self.split, self.split_seed)
        if not held_images:
            raise UserError(f"{self.file}: `train:` has one image, so `split:` leaves none to hold out; add images")
        images = PathArray(image for image in whole.images if (image in held_images) == (split == "val"))
        return Listing(images, [] if split == "val" else whole.problems, whole.annotated)  # `train:` reports them

    def _whole_listing(self, split: str) -> Listing:
        """Return the image files that `split` names in the YAML."""
        folders = [root / folder for root in self.roots for folder in self.image_folders.get(split, ())]
        locations, suffixes = self.locations(split), (NPY_SUFFIX,) * (self.pixels != PHOTOS)
        problems: list[str] = []
        listed: list[str] = []  # as text, because many Paths are slow
        annotated: list[formats.AnnotatedImages] = []
        for location in locations:
            if described := formats.find_annotated(location, folders, list(self.names.values()), split):
                annotated.append(described)
                listed += described.images
                problems += described.problems
            else:
                is_list = location.is_file()
                paths, note = read_image_list(location) if is_list else (images_below(location, problems, suffixes), "")
                listed += paths
                log("" if note in self.walked else note)  # once
                self.walked[note] = note
        if not listed:
            searched = "; ".join([", ".join(dict.fromkeys(map(str, locations))), *problems])
            raise UserError(f"{self.file}: `{split}:` has no images in {searched}; put images there or fix the path")
        images = sorted(set(listed), key=lambda image: image.replace(os.sep, "\0"))  # as Paths, folder by folder
        return Listing(PathArray(images), problems, tuple(annotated))

    def annotation_file(self, split: str, images: Sequence[Path]) -> Path | None:
        """Return the COCO file that a split consists of, or is held out of, else instances_<folder of `images`>.json.

        The latter is in the folder `annotations` of the data set. If neither exists, this is logged.
        """
        locations = self.locations("train" if split == "val" and self.holds_out else split)
        if len(locations) == 1 and formats.is_coco(locations[0]):
            return locations[0]
        files = [root / "annotations" / f"instances_{images[0].parent.name}.json" for root in self.roots]
        file = next(filter(Path.is_file, files), None)
        log("" if file else f"no {files[0]}; give a file with --annotations")
        return file

    def locations(self, split: str) -> list[Path]:
        """Return the folders and files that a split names, downloaded if one is absent. Raises `UserError`."""
        if split not in self.entries:
            advice = ", or `split: 0.2` to hold out a share of `train:`" if split == "val" else ""
            raise UserError(
                f"{self.file} has no `{split}:`; add a folder of images, a .txt list of them, or a COCO .json{advice}"
            )
        return [self.locate(entry, f"{split}: {entry}") for entry in self.entries[split]]

    def locate(self, entry: str, title: str) -> Path:
        """Return the path of an entry, after a download if the data set has no files. Raises `UserError`."""
        if self.download:
            from data.download import archive_sources, fetch_dataset, has_content  # most data sets are there

            sources = archive_sources(self.download)
            if sources and not any(map(has_content, self.roots)):
                fetch_dataset(sources, self.roots[0], [entry for entries in self.entries.values() for entry in entries])
        paths = _candidates(entry, self.roots)
        if path := next(filter(os.path.exists, paths), None):
            return path
        rule = "; `download:` is used only if it is an address, and the folder of `path:` is missing or empty"
        tried = " or ".join(dict.fromkeys(map(str, paths)))
        raise UserError(f"{self.file}: `{title}` does not exist; looked for {tried}{rule if self.download else ''}")


def hold_out(images: Sequence[Path], share: float, seed: int) -> set[Path]:
    """Return the images to validate with, one at least, never all: a hash of each name decides, so that few change."""
    names = {path: os.fsencode(f"{seed}/{path.parent.name}/{path.name}") for path in images}
    count = min(max(round(len(images) * share), 1), len(images) - 1)
    return set(sorted(names, key=lambda path: (hashlib.sha256(names[path]).digest(), path))[:count])


# The YAML


def read_data(data: str) -> DataSpec:
    """Read the YAML, the folder, the list or the annotation file that --data names. Raises `UserError`."""
    path = Path(data)
    if not os.path.isdir(data):  # Path.is_dir raises an error for a name that is too long
        if not os.path.isfile(data) or path.suffix.lower() not in formats.OTHER_FILES:
            spec = read_spec(find_file(data, "data set", ["data"], kind="a file or a folder"))
            if spec.split or {"train", "val"}.intersection(spec.entries) != {"train"}:
                return spec
            note = f"{spec.file} has no `val:`, so it is as if it had `split: {HELD_OUT_SHARE}`, a share of `train:`"
            return replace(spec, split=HELD_OUT_SHARE, warnings=(*spec.warnings, note))
    elif inner := formats.data_yaml(path):
        return read_data(str(inner))
    title, content = formats.recognise(path)
    if isinstance(content, Path):
        spec = read_data(str(content))
        return replace(spec, warnings=(f"{path}: {title}", *spec.warnings))
    folder = path if path.is_dir() else path.parent
    if "val" not in content:
        content["split"] = HELD_OUT_SHARE
    entries = ", ".join(f"{key}: {value}" for key, value in content.items() if key != "names")
    messages = [f"{path}: {title} ({entries})"]
    if content.get("val") and content["val"] == content.get("test"):
        messages.append(f"warning: {folder} has no images for validation, so the test split chooses best.pt")
    if "nc" in content:
        messages.append(f"warning: {folder} has no classes.txt that names the classes; they are numbered from 0")
    return check_spec(path, {**content, "path": os.path.abspath(folder)}, messages)


def read_spec(file: Path) -> DataSpec:
    """Read a data YAML. Raises `UserError`."""
    return check_spec(file, read_yaml(file))


def check_spec(file: Path, content: Mapping[str, Any], messages: Sequence[str] = ()) -> DataSpec:
    """Return the data set that the content of a YAML, or what was found in a folder, describes. Raises `UserError`."""

    def check(key: str, is_valid: bool, expected: str) -> None:
        if not is_valid:
            raise UserError(f"{file}: `{key}` must be {expected}, not {quoted(content.get(key))}")

    unknown = [str(key) for key in content if key not in DATA_KEYS and key not in OTHER_KEYS]
    for key in unknown:
        if hint := nearest(key, DATA_KEYS, 0.7):
            raise UserError(f"{file}: unknown key {quoted(key)}{hint}")
    path, folders, shape = content.get("path"), content.get("images"), content.get("kpt_shape")
    share, seed = content.get("split", 0.0), content.get("split_seed", 0)
    entries = {split: _paths(content.get(split)) for split in SPLITS}
    for split in SPLITS:
        check(split, entries[split] is not None, "a path or a list of paths, or of data sets, as {path: DIR}")
    listed_sets = {split: value for split in SPLITS if _lists_sets(value := content.get(split))}
    check("val", "train" not in listed_sets or bool(entries["val"]), "given, because `train:` lists data sets")
    by_split = folders if isinstance(folders, dict) else dict.fromkeys(SPLITS, folders)
    image_folders = {split: _paths(value) for split, value in by_split.items()}
    are_folders = {*image_folders} <= {*SPLITS} and None not in image_folders.values()
    check("images", are_folders, f"a folder, or a folder for each of {', '.join(SPLITS)}")
    check("path", path is None or _is_path(path), "a folder's name")
    check("split", is_number(share) and 0 <= share < 1, "the share to hold out for validation, 0 to 1")
    check("split_seed", type(seed) is int and seed >= 0, "a whole number from 0")
    is_shape = isinstance(shape, list) and [*map(type, shape)] == [int, int] and shape[0] > 0 and shape[1] in (2, 3)
    check("kpt_shape", shape is None or is_shape, "[K, D], K key points of 2 or 3 numbers")
    check("tiles", "tiles" not in content or _are_tiles(content["tiles"]), TILES)
    names, defaults = _names(file, content), suggested_defaults(content.get("defaults") or {}, file)
    roots, named_entries = _roots(file, path), {split: paths for split, paths in entries.items() if paths}
    if "draw" in content:
        check("draw", _draw(content["draw"], roots[0]), "a drawn set and its seed, such as {data.builtin.shapes: 0}")
    messages = list(messages)
    if unknown:
        messages.append(f"warning: {file}: {quoted(unknown)}: unknown, and not used")
    if shape:
        messages.append(f"{file}: `kpt_shape: {shape}`: label rows are read as boxes, without their key points")
    if share and "val" in named_entries:
        messages.append(f"warning: {file}: `split: {share:g}` is not used, because there is a `val:`")
    if path and REMOTE.match(path):
        messages.append(f"{public(path)}: copied to {roots[0]}; delete this folder to copy it again")
    if not names:
        listed = [entry for paths in named_entries.values() for entry in paths]
        names = formats.annotated_names([path for entry in listed for path in _candidates(entry, roots)])
    spec = DataSpec(
        file,
        names,
        roots,
        named_entries,
        image_folders={split: paths for split, paths in image_folders.items() if paths},
        warnings=tuple(messages),
        defaults=defaults,
        split=share,
        split_seed=seed,
        download=content.get("download"),
        kpt_shape=tuple(shape or ()),
        tiles=Tiles(**content["tiles"]) if "tiles" in content else None,
        pixels=_pixels(content, check),
    )
    if spec.pixels.folders:
        first = spec.images(min(named_entries, key=SPLITS.index))[0]
        spec = replace(spec, pixels=replace(spec.pixels, channels=read_pixels(first, spec.pixels).shape[2]))
    sets = {split: _read_sets(spec, split, listed) for split, listed in listed_sets.items()}
    warnings = chain(spec.warnings, *(part.warnings for part in chain(*sets.values())))
    return replace(spec, sets=sets, warnings=tuple(dict.fromkeys(warnings)))


def _pixels(content: Mapping[str, Any], check: Callable[[str, bool, str], None]) -> PixelFormat:
    """Return the format of the images, with 0 channels if folders are stacked. `check` raises `UserError`."""
    channels, limits = content.get("channels", 3), content.get("range")
    are_folders = isinstance(channels, list) and len({*map(str, channels)}) > 1 and all(map(_is_path, channels))
    is_count = type(channels) is int and 1 <= channels <= MAX_CHANNELS
    check("channels", is_count or are_folders, f"1 to {MAX_CHANNELS}, or a list of folders whose images are stacked")
    are_limits = isinstance(limits, list) and len(limits) == 2 and all(map(is_number, limits)) and limits[0] < limits[1]
    check("range", limits is None or are_limits, "[low, high], the values that become 0 and 1")
    return PixelFormat(channels if is_count else 0, tuple(limits or ()) or None, () if is_count else tuple(channels))


def _are_tiles(tiles: Any) -> bool:
    are_known = isinstance(tiles, dict) and type(tiles.get("size")) is int and {*tiles} <= {*TILE_RANGES}
    return are_known and all(is_number(value) and value in TILE_RANGES[key] for key, value in tiles.items())


def _lists_sets(value: Any) -> bool:
    return any(isinstance(item, dict) for item in (value if isinstance(value, list) else [value]))


def _read_sets(spec: DataSpec, split: str, listed: Any) -> tuple[DataSpec, ...]:
    """Return the data sets that a split of `spec` lists, read if they are data YAMLs. Raises `UserError`."""

    def check(is_valid: bool, fault: str) -> None:
        if not is_valid:
            raise UserError(f"{spec.file}: `{split}:` {fault}")

    entries = listed if isinstance(listed, list) else [listed]
    are_sets = all(isinstance(entry, dict) and {*entry} <= {*SET_KEYS} for entry in entries)
    check(are_sets, f"must list only paths or only data sets, with no keys but {', '.join(SET_KEYS)}")
    keys = [key for key in ("share", "weight") if any(key in entry for entry in entries)]
    weights = [entry.get(key, 0) for key in keys for entry in entries]
    are_positive = all(is_number(weight) and weight > 0 for weight in weights)
    fault = "needs a positive `share` or `weight` for each data set if `train:` has one, and none otherwise"
    check(len(keys) <= (split == "train") and are_positive, fault)
    fault = f"has shares that add up to {sum(weights):g} instead of 1; correct them, or call them `weight`"
    check(keys != ["share"] or round(sum(weights), 1) == 1, fault)
    numbers = {name: number for number, name in reversed(spec.names.items())}
    sets: dict[str, DataSpec] = {}
    for entry, weight in zip(entries, weights or [0.0] * len(entries), strict=True):
        path, rename = entry["path"], entry.get("rename", {})
        words = [word for word in Path(os.path.splitext(path)[0]).parts if word not in COMMON_NAMES]
        name = entry.get("name", (words or [Path(path).stem])[-1])
        fault = f"names a data set {quoted(name)}; give each a `name` of its own, of letters, digits, spaces, . _ and -"
        check(isinstance(name, str) and bool(re.fullmatch(r"[\w .-]+", name)) and name not in sets, fault)
        part = replace(spec, entries={**spec.entries, split: (path,)}, split=0.0, warnings=(), walked={})
        if Path(path).suffix.lower() in (".yaml", ".yml"):
            file = replace(spec, roots=(*spec.roots, spec.file.resolve().parent)).locate(path, f"{split}: {path}")
            content = read_yaml(file)
            fault = f"names {file}, which lists data sets itself; list them here"
            check(not any(_lists_sets(content.get(key)) for key in SPLITS), fault)
            part = check_spec(file, {"names": spec.names or None, **content})
            fault = f"names {file}, whose `channels`, `range` or `tiles` are others; write them here, for all data sets"
            check(part.pixels in (spec.pixels, PHOTOS) and part.tiles in (spec.tiles, None), fault)
        fault = f"has `rename: {quoted(rename)}` for {name}; give pairs of a class of it and one of `names`"
        check(isinstance(rename, dict) and {*rename} <= {*part.names.values()}, fault)
        classes = [rename.get(label, label) for label in part.names.values()]
        unknown = [str(label) for label in classes if label not in [*numbers]]
        fault = f"has the class {', '.join(unknown[:1])} in {name}, which `names` lacks"
        check(not unknown, f"{fault}; add it there, or give {name} a `rename:` with its name in `names`")
        ids = tuple(numbers[label] for label in classes)
        sets[name] = replace(part, name=name, weight=float(weight), classes=ids)
    return tuple(sets.values())


def _roots(file: Path, path: str | None) -> tuple[Path, ...]:
    """Return the folders that `path:` of a data YAML may mean, by precedence."""
    beside = file.resolve().parent
    if path and REMOTE.match(path):
        from data.download import copy_remote

        return (copy_remote(path),)
    bases = [beside, Path.cwd()]
    if path and IS_INSTALLED and beside.is_relative_to(ROOT):  # a shipped file: as if the repository were here
        bases = [Path.cwd() / beside.relative_to(ROOT)]
    name = os.path.expanduser(os.path.expandvars(path or ""))
    return tuple(Path(os.path.normpath(base / name)) for base in bases)


def _draw(value: Any, folder: Path) -> bool:
    """Draw a data set by a module and its seed, if it is absent; return whether that is valid.

    A YAML may come from somebody else, so it can name only built-in sets, and modules of a task that the user runs.
    """
    name, seed = next(iter(value.items())) if isinstance(value, dict) and len(value) == 1 else ("", -1)
    drawn: Any = user_code.load(str(name)) or DRAWN_SETS.get(name)
    if type(seed) is not int or seed < 0 or not hasattr(drawn, "draw_dataset"):
        return False
    drawn.draw_dataset(folder, seed=seed)
    return True


def _is_path(value: Any) -> bool:
    return isinstance(value, str) and not NOT_IN_PATHS.search(value)


def _paths(value: Any) -> tuple[str, ...] | None:
    """Return a path or a list of paths as a tuple, () for nothing, None for anything else."""
    values = value if isinstance(value, list) else [value] if value else []
    values = [item.get("path") if isinstance(item, dict) else item for item in values]  # of a data set
    return tuple(values) if all(map(_is_path, values)) else None


def _candidates(entry: str, roots: Sequence[Path]) -> list[Path]:
    """Return the paths that an entry may mean, by precedence.

    Roboflow writes `../train/images` into a data.yaml that is beside `train`; as in YOLOv5, the `../` may be dropped.
    """
    names = dict.fromkeys((os.path.expanduser(os.path.expandvars(entry)), entry.removeprefix("../")))
    return [Path(os.path.normpath(root / name)) for root in roots for name in names]


def _names(file: Path, content: Mapping[str, Any]) -> dict[int, str]:
    """Return the classes of `names:`, or numbers as names for `nc:` alone; {} without both. Raises `UserError`."""
    listed, count = content.get("names"), content.get("nc")
    if listed is None and count is None:
        return {}
    count = int(count) if isinstance(count, str) and count.isdecimal() else count
    if listed is None and type(count) is int:
        listed = list(map(str, range(min(count, MAX_CLASSES + 1))))
    pairs: Any = enumerate(listed) if isinstance(listed, list) else listed.items() if isinstance(listed, dict) else ()
    names = {re.sub("^0+(?=.)", "", str(key)): name for key, name in pairs}
    is_valid = 0 < len(names) <= MAX_CLASSES and {*names} == {*map(str, range(len(listed or ())))}
    if not is_valid or not all(isinstance(name, str) and name.strip() for name in names.values()):
        form = f"list 1 to {MAX_CLASSES} classes, as [person, car, ...] or by number from 0, each once"
        raise UserError(f"{file}: `names` must {form}, not {quoted(listed)}")
    if count not in (None, len(names)):
        raise UserError(f"{file}: `nc` is {quoted(count)} but `names` has {plural(len(names), 'class')}; fix either")
    return {number: names[str(number)] for number in range(len(names))}
