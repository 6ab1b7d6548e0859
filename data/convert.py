"""Label files out of other formats: `python -m data.convert voc|coco|visdrone`. What is read is never changed."""

from __future__ import annotations

import argparse
import json
import math
import os
import secrets
import shutil
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple

from PIL import Image
from tqdm import tqdm

from data.sources import IMAGE_SUFFIXES, read_spec
from utils.distributed.exit import run_main
from utils.errors import UserError, nearest
from utils.files import replacing

SETS = ("train", "val", "test")  # of VOC's ImageSets/Main; trainval is the first two
VISDRONE_CLASSES = 10  # its categories 1 to 10; 0 are regions to be ignored, 11 is anything else
CUT = "cut at the edge of their image"

Box = tuple[float, float, float, float]  # left, top, width, height, in pixels
Points = list[tuple[float, float]]


class Tally(Counter[str]):
    """What was done, and what was left out and why."""

    def lines(self, place: Path) -> list[str]:
        """Sentences for people."""
        rest = {why: count for why, count in self.items() if count and why not in ("files", "boxes", CUT)}
        out = ", ".join(f"{count} {why}" for why, count in sorted(rest.items()))
        return [
            f"{self['files']} label files with {self['boxes']} boxes in {place}"
            + (f", {self[CUT]} of them {CUT}" if self[CUT] else ""),
            *([f"left out: {out}"] if out else []),
        ]


def box_row(label: int, box: Box, size: tuple[int, int], tally: Tally) -> str:
    """A label row, `class x y width height` as shares of the image, 6 digits as in the published labels of COCO; ''
    where nothing of the box is in the image. size: its width and height."""
    if not all(map(math.isfinite, box)):
        tally["boxes that are not finite"] += 1
        return ""
    x, y, width, height = box
    inner = x >= 0 and y >= 0 and x + width <= size[0] and y + height <= size[1]
    if not inner and width > 0 and height > 0:
        right, bottom = min(x + width, size[0]), min(y + height, size[1])
        x, y = max(x, 0.0), max(y, 0.0)
        width, height = right - x, bottom - y
        if width <= 0 or height <= 0:
            tally["boxes outside of their image"] += 1
            return ""
    if width <= 0 or height <= 0:
        tally["boxes without an area"] += 1
        return ""
    tally["boxes"] += 1
    tally[CUT] += not inner
    shares = ((x + width / 2) / size[0], (y + height / 2) / size[1], width / size[0], height / size[1])
    return f"{label} {' '.join(f'{share:.6g}' for share in shares)}\n"


class LabelFolder:
    """Where label files are written to, before they are seen."""

    def __init__(self, folder: Path, tally: Tally) -> None:
        self.folder, self.tally = folder, tally

    def write(self, name: str, rows: Iterable[str]) -> None:
        """A label file by its name below the folder."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(rows), encoding="utf-8")
        self.tally["files"] += 1


@contextmanager
def label_folder(folder: Path, exist_ok: bool, tally: Tally) -> Iterator[LabelFolder]:
    """Label files for `folder`: made beside it, and put there when all are whole.

    Raises `UserError` where it is not empty, unless it may be (`exist_ok`): then files of the same name are replaced
    one by one and others stay.
    """
    part = folder.with_name(f".{folder.name}-{os.getpid()}-{secrets.token_hex(4)}")
    try:
        if not exist_ok and folder.exists() and any(folder.iterdir()):
            raise UserError(f"{folder} is not empty; name another folder, or give --exist-ok to replace label files")
        part.mkdir(parents=True)
        yield LabelFolder(part, tally)
        try:
            os.rename(part, folder)  # over an empty folder too
        except OSError:
            for file in [path for path in part.rglob("*") if path.is_file()]:
                target = folder / file.relative_to(part)
                target.parent.mkdir(parents=True, exist_ok=True)
                os.replace(file, target)
    except OSError as error:
        raise UserError(
            f"label files cannot be written to {folder} ({error.strerror}: {error.filename}); free the space or the "
            "permission that it needs, or name another folder"
        ) from None
    finally:
        shutil.rmtree(part, ignore_errors=True)  # after a rename there is nothing left to remove


def shown(items: Sequence[Any], title: str) -> tqdm:
    """A progress bar over them, on a terminal."""
    return tqdm(items, desc=title, unit=" files", disable=None, leave=False, dynamic_ncols=True)


# Pascal VOC


class VocObject(NamedTuple):
    """An object of an XML file."""

    name: str
    box: Box
    difficult: bool


def read_voc(file: Path, one_based: bool = False) -> tuple[tuple[int, int], list[VocObject]]:
    """Size of the image, (width, height), and its objects. `one_based`: the first pixel is 1 and the last one within,
    as in the VOC challenge itself; most programs write edges from 0.

    Raises `UserError`.
    """
    try:
        root = ET.parse(file).getroot()
        size = int(float(_text(root, "size/width"))), int(float(_text(root, "size/height")))
        if min(size) < 1:
            raise ValueError("its <size> is not that of an image")
        found = []
        for item in root.findall("object"):
            left, top, right, bottom = (float(_text(item, f"bndbox/{n}")) for n in ("xmin", "ymin", "xmax", "ymax"))
            left, top = left - one_based, top - one_based
            box = (left, top, right - left, bottom - top)
            found.append(VocObject(_text(item, "name"), box, (item.findtext("difficult") or "0").strip() == "1"))
    except (ET.ParseError, ValueError, OverflowError) as error:
        raise UserError(f"{file} is no VOC annotation ({error}); mend it, or move it away") from None
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from None
    return size, found


def _text(item: ET.Element, path: str) -> str:
    text = (item.findtext(path) or "").strip()
    if not text:
        raise ValueError(f"<{item.tag}> has no <{path}>")
    return text


class VocSet(NamedTuple):
    """Some annotations. `name`: of the folder for their labels, '' for the one that is named; `images`: the folder of
    their images, where it is known."""

    name: str
    files: list[Path]
    images: Path | None


def voc_sets(source: Path) -> list[VocSet]:
    """The sets of a VOCdevkit or of one year of it, by their lists of images; else the folder's XML files as one.

    Raises `UserError` where there are none.
    """
    years = [y for y in (source, *sorted(source.glob("*"))) if (y / "Annotations").is_dir() and _lists(y)]
    if years:
        return [
            VocSet(
                f"{file.stem}{year.name.removeprefix('VOC')}" if len(years) > 1 or year != source else file.stem,
                [year / "Annotations" / f"{line.split()[0]}.xml" for line in _lines(file) if line.strip()],
                year / "JPEGImages",
            )
            for year in years
            for file in _lists(year)
        ]
    files = sorted(source.glob("*.xml")) or sorted((source / "Annotations").glob("*.xml"))
    if not files:
        raise UserError(f"{source} has neither .xml files nor Annotations and ImageSets/Main; give a folder that does")
    return [VocSet("", files, None)]


def _lists(year: Path) -> list[Path]:
    folder = year / "ImageSets" / "Main"
    found = [folder / f"{name}.txt" for name in SETS if (folder / f"{name}.txt").is_file()]
    whole = folder / "trainval.txt"
    return [whole, *found] if whole.is_file() and not any(f.stem in ("train", "val") for f in found) else found


def _lines(file: Path) -> list[str]:
    return file.read_text(encoding="utf-8-sig", errors="replace").splitlines()


def convert_voc(
    source: Path,
    labels: Path,
    images: Path | None = None,
    names: Sequence[str] = (),
    difficult: bool = False,
    one_based: bool = False,
    exist_ok: bool = False,
) -> tuple[Tally, list[str]]:
    """Label files below `labels`, a folder for each set of a VOCdevkit; the same below `images`, of links to its images
    (copies where links cannot be). `names`: the classes in their order, else those that occur, by alphabet.
    `difficult`: with objects that are marked so, which the VOC challenge does not count.

    Returns what was done, and the names. Raises `UserError`.
    """
    tally, sets = Tally(), voc_sets(source)
    if images and not any(one.images for one in sets):
        raise UserError(f"{source} does not say where its images are, so none can be put into {images}")
    read = {}
    for file in shown(sorted({file for one in sets for file in one.files}), "reading"):
        if file.exists():  # the challenge's lists name images of which no annotation was published
            read[file] = read_voc(file, one_based)
    found = sorted({item.name for _, items in read.values() for item in items})
    names = list(names) or found
    for name in found:
        if name not in names:
            file = next(file for file, (_, items) in read.items() if any(item.name == name for item in items))
            raise UserError(f"{file} has the class '{name}', which --names does not have{nearest(name, names)}; add it")
    numbers = {name: number for number, name in enumerate(names)}
    with label_folder(labels, exist_ok, tally) as folder:
        for one in sets:
            for file in shown([file for file in one.files if file in read], f"writing {one.name}".strip()):
                size, items = read[file]
                kept = [item for item in items if difficult or not item.difficult]
                tally["difficult objects"] += len(items) - len(kept)
                rows = [box_row(numbers[item.name], item.box, size, tally) for item in kept]
                folder.write(str(Path(one.name, f"{file.stem}.txt")), rows)
            tally["images without an annotation"] += sum(file not in read for file in one.files)
    for one in sets:
        if images and one.images:
            for file in shown([file for file in one.files if file in read], "linking"):
                _link(one.images, file.stem, images / one.name, tally)
    return tally, names


def _link(folder: Path, stem: str, into: Path, tally: Tally) -> None:
    """Put an image into a folder, by a second name for the same file or else a copy."""
    source = next(
        (folder / f"{stem}{s}" for s in (".jpg", *sorted(IMAGE_SUFFIXES)) if (folder / f"{stem}{s}").exists()), None
    )
    if source is None:
        tally["annotations without an image"] += 1
        return
    target = into / source.name
    if target.exists():
        return
    try:
        into.mkdir(parents=True, exist_ok=True)
        with suppress(OSError):
            os.link(source, target)
            return
        with replacing(target) as file, source.open("rb") as content:
            shutil.copyfileobj(content, file)
    except OSError as error:
        raise UserError(
            f"{source} cannot be put to {target}: {error.strerror}; free space, or leave --images out"
        ) from None


# COCO


def convert_coco(
    file: Path, labels: Path, polygons: bool = False, crowd: bool = False, flat: bool = False, exist_ok: bool = False
) -> tuple[Tally, list[str]]:
    """Label files of a COCO annotation file, one for each image that has an object. Classes are numbered in the order
    of the categories' ids: COCO's 80, whose ids are 1 to 90, become 0 to 79.

    polygons: rows `class x1 y1 x2 y2 ...`; crowd: with regions that hold many objects (iscrowd 1); flat: names without
    the folders that the images' file names have. Returns what was done, and the names. Raises `UserError`.
    """
    content, tally = _read_json(file), Tally()
    try:
        categories = sorted(content["categories"], key=lambda category: category["id"])
        numbers = {category["id"]: number for number, category in enumerate(categories)}
        names = [str(category["name"]) for category in categories]
        images = {image["id"]: image for image in content["images"]}
        by_image: dict[Any, list[Mapping[str, Any]]] = {}
        for item in content["annotations"]:
            by_image.setdefault(item["image_id"], []).append(item)
    except (KeyError, TypeError) as error:
        raise UserError(
            f"{file} is no COCO annotation file of objects ({error!r} is missing); give another one"
        ) from None
    tally["boxes of images that the file does not have"] = sum(len(v) for k, v in by_image.items() if k not in images)
    written: set[str] = set()
    with label_folder(labels, exist_ok, tally) as folder:
        for image, known in shown([(i, images[i]) for i in images if i in by_image], "writing"):
            rows = []
            for item in by_image[image]:
                if item.get("iscrowd") and not crowd:
                    tally["crowds"] += 1
                    continue
                try:
                    rows.append(_coco_row(item, known, numbers, polygons, tally))
                except (KeyError, TypeError, ValueError, IndexError) as error:
                    raise UserError(f"{file}: annotation {item.get('id')} is damaged ({error!r}); mend it") from None
            if any(rows):
                name = _label_name(file, known, flat)
                if name in written:
                    raise UserError(f"{file}: two images would have the label file {name}; leave --flat out")
                written.add(name)
                folder.write(name, rows)
    return tally, names


def _read_json(file: Path) -> Any:
    try:
        with file.open("rb") as opened:
            return json.load(opened)
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} is not JSON ({error}); fetch it again") from None


def _label_name(file: Path, image: Mapping[str, Any], flat: bool) -> str:
    name = PurePosixPath(str(image.get("file_name") or "").replace("\\", "/"))
    path = PureWindowsPath(str(name))
    if not name.name or path.anchor or ".." in path.parts:
        raise UserError(f"{file}: image {image.get('id')} has the file name '{name}', which is no name below a folder")
    return str(PurePosixPath(name.name if flat else name).with_suffix(".txt"))


def _coco_row(
    item: Mapping[str, Any], image: Mapping[str, Any], numbers: Mapping[Any, int], polygons: bool, tally: Tally
) -> str:
    label, size = numbers[item["category_id"]], (int(image["width"]), int(image["height"]))
    x, y, width, height = map(float, item["bbox"])
    row = box_row(label, (x, y, width, height), size, tally)
    if not polygons or not row:
        return row
    parts = item.get("segmentation")
    if isinstance(parts, list):
        outlines = [list(zip(map(float, part[::2]), map(float, part[1::2]), strict=True)) for part in parts]
        outlines = [outline for outline in outlines if len(outline) > 2]
    else:
        outlines = []  # a mask, which crowds have
    if not outlines:
        tally["outlines, of which the box was taken"] += 1
        outlines = [[(x, y), (x + width, y), (x + width, y + height), (x, y + height)]]
    shares = [
        min(max(value / side, 0.0), 1.0) for point in joined(outlines) for value, side in zip(point, size, strict=True)
    ]
    return f"{label} {' '.join(f'{share:.6g}' for share in shares)}\n"


def joined(parts: Sequence[Points]) -> Points:
    """One outline of several: from one to the next, around it, and back by the same way, at the points that are nearest
    to each other. Such ways enclose nothing."""
    whole = list(parts[0])
    for part in parts[1:]:
        _, here, there = min((math.dist(a, b), i, j) for i, a in enumerate(whole) for j, b in enumerate(part))
        whole = [*whole[: here + 1], *part[there:], *part[: there + 1], *whole[here:]]
    return whole


# VisDrone


def convert_visdrone(source: Path, exist_ok: bool = False) -> Tally:
    """Label files beside the images of VisDrone-DET's sets: `labels` in each folder that has `images` and
    `annotations`, `source` or those in it. Regions to be ignored and the category "others" are left out.

    Raises `UserError`.
    """
    sets = [p for p in (source, *sorted(source.glob("*"))) if (p / "annotations").is_dir() and (p / "images").is_dir()]
    if not sets:
        raise UserError(f"{source} has no `images` and `annotations`, nor has a folder in it; give one that has")
    tally = Tally()
    for one in sets:
        with label_folder(one / "labels", exist_ok, tally) as folder:
            for image in shown(sorted((one / "images").iterdir()), f"writing {one.name}"):
                file = one / "annotations" / f"{image.stem}.txt"
                if image.suffix.lower() not in IMAGE_SUFFIXES:
                    continue
                if not file.is_file():
                    tally["images without an annotation"] += 1
                    continue
                folder.write(f"{image.stem}.txt", _visdrone_rows(file, _size(image), tally))
    return tally


def _size(image: Path) -> tuple[int, int]:
    try:
        with Image.open(image) as opened:
            return opened.size
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise UserError(f"{image} is no image that can be read ({error}); fetch it again, or move it away") from None


def _visdrone_rows(file: Path, size: tuple[int, int], tally: Tally) -> list[str]:
    """Rows are left, top, width, height, score, category, truncation, occlusion; a score of 0 is for what is to be
    ignored."""
    rows = []
    for number, line in enumerate(_lines(file), 1):
        if not line.strip():
            continue
        try:
            left, top, width, height, score, category = map(int, line.split(",")[:6])
        except ValueError:
            raise UserError(f"{file}, line {number}: '{line[:80]}' is no row of VisDrone's; mend it") from None
        if not score or not 1 <= category <= VISDRONE_CLASSES:
            tally["regions to be ignored" if not score or not category else "boxes of the category others"] += 1
            continue
        rows.append(box_row(category - 1, (left, top, width, height), size, tally))
    return rows


# For `convert:` of a data YAML: what is to be done in the folder that was downloaded, given the names of the classes.


def _fetched_voc(folder: Path, names: Sequence[str]) -> None:
    kit = folder / "VOCdevkit"
    source = kit if kit.is_dir() else folder
    convert_voc(source, folder / "labels", folder / "images", names, one_based=True, exist_ok=True)


def _fetched_visdrone(folder: Path, names: Sequence[str]) -> None:
    convert_visdrone(folder, exist_ok=True)


CONVERTERS: dict[str, Callable[[Path, Sequence[str]], None]] = {"voc": _fetched_voc, "visdrone": _fetched_visdrone}


# The command line


def class_names(text: str) -> list[str]:
    """Names as a flag gives them: separated by commas, or the YAML that has them. Raises `UserError`."""
    if text.endswith((".yaml", ".yml")):
        return list(read_spec(Path(text)).names.values())
    names = [name.strip() for name in text.split(",") if name.strip()]
    if len(set(names)) < len(names):
        raise UserError(f"--names {text}: each class once")
    return names


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m data.convert", description="Label files out of other formats.")
    formats = parser.add_subparsers(dest="format", required=True, metavar="voc|coco|visdrone")
    voc = formats.add_parser("voc", help="Pascal VOC's XML files", description="Label files out of Pascal VOC's XML.")
    voc.add_argument("source", type=Path, help="a VOCdevkit, one year of it, or a folder of XML files")
    voc.add_argument("--labels", type=Path, required=True, help="the folder for label files; for sets, folders in it")
    voc.add_argument("--images", type=Path, help="put a VOCdevkit's images here, by links, in folders like the labels'")
    voc.add_argument("--names", default="", help="classes in order: a,b,c or a data YAML; default: by alphabet")
    voc.add_argument("--difficult", action="store_true", help="with objects that are marked difficult")
    voc.add_argument(
        "--one-based", action="store_true", help="the first pixel is 1, as in the VOC challenge's own files"
    )
    coco = formats.add_parser("coco", help="COCO's JSON", description="Label files out of a COCO annotation file.")
    coco.add_argument("source", type=Path, help="such as annotations/instances_val2017.json")
    coco.add_argument("--labels", type=Path, required=True, help="the folder for label files")
    coco.add_argument("--polygons", action="store_true", help="outlines instead of boxes")
    coco.add_argument("--crowd", action="store_true", help="with regions of many objects (iscrowd)")
    coco.add_argument("--flat", action="store_true", help="without the folders of the images' file names")
    coco.add_argument("--names-to", type=Path, help="write the classes into this file, as `names:` of a data YAML")
    visdrone = formats.add_parser("visdrone", help="VisDrone-DET", description="Label files beside VisDrone's images.")
    visdrone.add_argument("source", type=Path, help="a folder with images and annotations, or one of such folders")
    for one in (voc, coco, visdrone):
        one.add_argument("--exist-ok", action="store_true", help="replace label files that are there")
    return parser


def main() -> None:
    """Command line: convert, and say what was done."""
    given = _parser().parse_args()
    names: list[str] = []
    if given.format == "voc":
        tally, names = convert_voc(
            given.source,
            given.labels,
            given.images,
            class_names(given.names),
            given.difficult,
            given.one_based,
            given.exist_ok,
        )
    elif given.format == "coco":
        if given.names_to and given.names_to.exists() and not given.exist_ok:
            raise UserError(f"--names-to {given.names_to} is there already; give --exist-ok to replace it")
        tally, names = convert_coco(given.source, given.labels, given.polygons, given.crowd, given.flat, given.exist_ok)
        if given.names_to:
            with replacing(given.names_to) as file:
                file.write(names_text(names).encode())
    else:
        tally = convert_visdrone(given.source, given.exist_ok)
    print(*tally.lines(given.source if given.format == "visdrone" else given.labels), sep="\n")
    if names:
        print(f"classes: {', '.join(f'{number} {name}' for number, name in enumerate(names))}")


def names_text(names: Sequence[str]) -> str:
    """The end of a data YAML: `names:` and a line for each class."""
    return "names:\n" + "".join(
        f"  {number}: {json.dumps(name, ensure_ascii=False)}\n" for number, name in enumerate(names)
    )


if __name__ == "__main__":
    run_main(main)
