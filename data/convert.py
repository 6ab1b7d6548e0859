"""Convert annotations of VOC, COCO and VisDrone to label files: `python -m data.convert voc|coco|visdrone`.

The input is never changed. data/voc.py and data/coco_json.py parse the files. Called also by data/data_yaml.py, for
`convert:` of a data YAML.
"""

from __future__ import annotations

import argparse
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from PIL import Image
from tqdm import tqdm

from data.archives import is_inside
from data.coco_json import Tally, box_row, coco_rows, read_contents
from data.data_yaml import names_text, read_spec
from data.images import IMAGE_SUFFIXES
from data.voc import LISTS, read_voc
from utils.distributed.failure import run_main
from utils.errors import UserError, nearest
from utils.files import read_lines, replacing

VOC_SETS = ("train", "val", "test")  # in ImageSets/Main; trainval is the first two
VISDRONE_CLASSES = 10  # categories 1 to 10; 0 is for regions to ignore, 11 for other objects


def _write_rows(path: Path, rows: Sequence[str], tally: Tally) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(rows), encoding="utf-8")
    tally["files"] += 1


@contextmanager
def label_folder(folder: Path, exist_ok: bool) -> Iterator[Path]:
    """Yield a temporary folder for label files, which is renamed to `folder` at the end.

    If `folder` has files, the new ones are moved into it instead. Raises `UserError` if `folder` is not empty and
    `exist_ok` is False, or if it cannot be written to.

    Args:
        exist_ok: whether to replace files of the same name, keeping all others
    """
    part = folder.with_name(f".{folder.name}-{os.getpid()}-{secrets.token_hex(4)}")
    try:
        if not exist_ok and folder.exists() and any(folder.iterdir()):
            raise UserError(f"{folder} is not empty; name another folder, or give --exist-ok to replace label files")
        part.mkdir(parents=True)
        yield part
        try:
            os.rename(part, folder)  # over an empty folder too
        except OSError:
            for file in [path for path in part.rglob("*") if path.is_file()]:
                target = folder / file.relative_to(part)
                target.parent.mkdir(parents=True, exist_ok=True)
                os.replace(file, target)
    except OSError as error:
        raise UserError(
            f"label files cannot be written to {folder} ({error.strerror}: {error.filename}); free disk space, fix the "
            "permissions, or name another folder"
        ) from None
    finally:
        shutil.rmtree(part, ignore_errors=True)  # after a rename there is nothing left to remove


def with_progress(items: Iterable[Any], title: str) -> tqdm:
    """Iterate over `items` with a progress bar if this is a terminal."""
    return tqdm(items, desc=title, unit=" files", disable=None, leave=False, dynamic_ncols=True)


# Pascal VOC


class VocSet(NamedTuple):
    """The annotations of one set."""

    name: str  # also the subfolder for the labels; '' for none
    files: list[Path]
    images: Path | None  # the folder of the images, if known


def voc_sets(source: Path) -> list[VocSet]:
    """Return the sets of a VOCdevkit, or of one of its years, by their lists of images; else all XML files as one set.

    Raises `UserError` if there are no annotations.
    """
    years = [y for y in (source, *sorted(source.glob("*"))) if (y / "Annotations").is_dir() and _image_lists(y)]
    if years:
        return [
            VocSet(
                f"{file.stem}{year.name.removeprefix('VOC')}" if len(years) > 1 or year != source else file.stem,
                [year / "Annotations" / f"{line.split()[0]}.xml" for line in read_lines(file) if line.strip()],
                year / "JPEGImages",
            )
            for year in years
            for file in _image_lists(year)
        ]
    files = sorted(source.glob("*.xml")) or sorted((source / "Annotations").glob("*.xml"))
    if not files:
        raise UserError(
            f"{source} has neither .xml files nor Annotations and ImageSets/Main; name a folder with either"
        )
    return [VocSet("", files, None)]


def _image_lists(year: Path) -> list[Path]:
    """Return the image lists of a year's sets; trainval.txt only if there is no list of either of its parts."""
    folder = year / LISTS
    lists = [folder / f"{name}.txt" for name in VOC_SETS if (folder / f"{name}.txt").is_file()]
    both = folder / "trainval.txt"
    return [both, *lists] if both.is_file() and not any(f.stem in ("train", "val") for f in lists) else lists


def convert_voc(
    source: Path,
    labels: Path,
    images: Path | None = None,
    names: Sequence[str] = (),
    difficult: bool = False,
    one_based: bool = False,
    exist_ok: bool = False,
) -> tuple[Tally, list[str]]:
    """Write label files below `labels`, in a folder for each set of a VOCdevkit, and return counts and class names.

    Raises `UserError`.

    Args:
        images: folder for links to the images, in the same subfolders, or for copies if links are impossible
        names: class names in order; by default the names that occur, alphabetically
        difficult: whether to include objects that are marked difficult, which the VOC challenge does not count
        one_based: whether coordinates start at 1, as in the VOC challenge's own files
        exist_ok: whether to replace existing label files
    """
    tally, sets = Tally(), voc_sets(source)
    if images and not any(each.images for each in sets):
        raise UserError(f"{source} is not a VOCdevkit, so the images are not known; leave --images out")
    annotations = {}
    for file in with_progress(sorted({file for each in sets for file in each.files}), "reading"):
        if file.exists():  # the challenge's lists name images without a published annotation
            annotations[file] = read_voc(file, one_based)
    occurring = sorted({item.name for _, items in annotations.values() for item in items})
    names = list(names) or occurring
    for name in occurring:
        if name not in names:
            file = next(file for file, (_, items) in annotations.items() if any(item.name == name for item in items))
            raise UserError(f"{file} has the class '{name}', which --names lacks{nearest(name, names)}; add it")
    numbers = {name: number for number, name in enumerate(names)}
    with label_folder(labels, exist_ok) as folder:
        for each in sets:
            annotated = [file for file in each.files if file in annotations]
            for file in with_progress(annotated, f"writing {each.name}".strip()):
                size, items = annotations[file]
                counted = [item for item in items if difficult or not item.difficult]
                tally["difficult objects"] += len(items) - len(counted)
                rows = [box_row(numbers[item.name], item.box, size, tally) for item in counted]
                _write_rows(folder / each.name / f"{file.stem}.txt", rows, tally)
            tally["images without an annotation"] += len(each.files) - len(annotated)
    for each in sets:
        if images and each.images:
            for file in with_progress([file for file in each.files if file in annotations], "linking"):
                _link(each.images, file.stem, images / each.name, tally)
    return tally, names


def _link(folder: Path, stem: str, into: Path, tally: Tally) -> None:
    """Link an image into a folder, or copy it if hard links are impossible."""
    candidates = (folder / f"{stem}{suffix}" for suffix in (".jpg", *sorted(IMAGE_SUFFIXES)))
    source = next(filter(Path.exists, candidates), None)
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
            f"{source} cannot be linked or copied to {target}: {error.strerror}; free disk space, or leave --images out"
        ) from None


# COCO


def convert_coco(
    file: Path,
    labels: Path,
    names: Sequence[str] = (),
    polygons: bool = False,
    crowd: bool = False,
    flat: bool = False,
    exist_ok: bool = False,
) -> tuple[Tally, list[str]]:
    """Write a label file for each image with objects in a COCO annotation file; return counts and class names.

    Raises `UserError`.

    Args:
        names: class names in order; by default the file's categories by ascending id, as for a data set without
            `names`: COCO's 80, whose ids are 1 to 90, become 0 to 79
        polygons: whether to write rows `class x1 y1 x2 y2 ...` instead of boxes
        crowd: whether to include regions of many objects (iscrowd 1)
        flat: whether to drop the folders in the images' file names
        exist_ok: whether to replace existing label files
    """
    tally, names = Tally(), list(names) or read_contents(file).classes
    written: set[str] = set()
    with label_folder(labels, exist_ok) as folder:
        for image in with_progress(coco_rows(file, names, tally, polygons, crowd), "writing"):
            if image.rows:
                name = _label_name(file, image.name, image.image_id, flat)
                if name in written:
                    raise UserError(f"{file}: two images would have the label file {name}; leave --flat out")
                written.add(name)
                _write_rows(folder / name, image.rows, tally)
    return tally, names


def _label_name(file: Path, image: str, image_id: int | str, flat: bool) -> str:
    name = PurePosixPath(image)
    if not name.name or not is_inside(str(name)):
        raise UserError(f"{file}: image {image_id} has the file name '{name}'; it must be a relative path")
    return str(PurePosixPath(name.name if flat else name).with_suffix(".txt"))


# VisDrone


def convert_visdrone(source: Path, exist_ok: bool = False) -> Tally:
    """Write label files into the folder `labels` of each VisDrone-DET set.

    The sets are `source` itself, or the folders in it, with `images` and `annotations`. Regions to ignore and the
    category "others" are left out. Raises `UserError`.
    """
    sets = [p for p in (source, *sorted(source.glob("*"))) if (p / "annotations").is_dir() and (p / "images").is_dir()]
    if not sets:
        raise UserError(f"neither {source} nor a folder in it has `images` and `annotations`; name a folder with both")
    tally = Tally()
    for each in sets:
        with label_folder(each / "labels", exist_ok) as folder:
            for image in with_progress(sorted((each / "images").iterdir()), f"writing {each.name}"):
                file = each / "annotations" / f"{image.stem}.txt"
                if image.suffix.lower() not in IMAGE_SUFFIXES:
                    continue
                if not file.is_file():
                    tally["images without an annotation"] += 1
                    continue
                _write_rows(folder / f"{image.stem}.txt", _visdrone_rows(file, _image_size(image), tally), tally)
    return tally


def _image_size(image: Path) -> tuple[int, int]:
    try:
        with Image.open(image) as opened:
            return opened.size
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise UserError(f"{image} cannot be read as an image ({error}); download it again, or move it away") from None


def _visdrone_rows(file: Path, size: tuple[int, int], tally: Tally) -> list[str]:
    """Return the label rows of an annotation file.

    Its columns are left, top, width, height, score, category, truncation, occlusion; boxes of score 0 are ignored.
    """
    rows = []
    for number, line in enumerate(read_lines(file), 1):
        if not line.strip():
            continue
        try:
            left, top, width, height, score, category = map(int, line.split(",")[:6])
        except ValueError:
            raise UserError(f"{file}, line {number}: '{line[:80]}' is not a VisDrone row; fix it") from None
        if not score or not 1 <= category <= VISDRONE_CLASSES:
            tally["regions to ignore" if not score or not category else "boxes of the category others"] += 1
            continue
        rows.append(box_row(category - 1, (left, top, width, height), size, tally))
    return rows


def convert_downloaded(kind: str, folder: Path, names: Sequence[str]) -> None:
    """Convert the annotations of a downloaded data set to label files.

    Args:
        kind: value of `convert:` in the data YAML, "voc" or "visdrone"
        folder: folder of the unpacked download
        names: class names by number
    """
    if kind == "visdrone":
        convert_visdrone(folder, exist_ok=True)
        return
    kit = folder / "VOCdevkit"
    source = kit if kit.is_dir() else folder
    convert_voc(source, folder / "labels", folder / "images", names, one_based=True, exist_ok=True)


# The command line


def class_names(text: str) -> list[str]:
    """Return the class names in --names, separated by commas or in a data YAML. Raises `UserError`."""
    if text.endswith((".yaml", ".yml")):
        return list(read_spec(Path(text)).names.values())
    names = [name.strip() for name in text.split(",") if name.strip()]
    if len(set(names)) < len(names):
        raise UserError(f"--names {text} repeats a class; name each class once")
    return names


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m data.convert", description="Convert annotations to label files.")
    formats = parser.add_subparsers(dest="format", required=True, metavar="voc|coco|visdrone")
    voc = formats.add_parser("voc", help="Pascal VOC's XML files", description="Convert Pascal VOC's XML files.")
    voc.add_argument("source", type=Path, help="a VOCdevkit, one year of it, or a folder of XML files")
    voc.add_argument("--labels", type=Path, required=True, help="folder for label files, with a subfolder per set")
    voc.add_argument("--images", type=Path, help="link a VOCdevkit's images to this folder, with the same subfolders")
    voc.add_argument("--names", default="", help="classes in order: a,b,c or a data YAML; default: alphabetically")
    voc.add_argument("--difficult", action="store_true", help="include objects that are marked difficult")
    voc.add_argument(
        "--one-based", action="store_true", help="coordinates start at 1, as in the VOC challenge's own files"
    )
    coco = formats.add_parser("coco", help="COCO's JSON", description="Convert a COCO annotation file.")
    coco.add_argument("source", type=Path, help="such as annotations/instances_val2017.json")
    coco.add_argument("--labels", type=Path, required=True, help="folder for label files")
    coco.add_argument("--names", default="", help="classes in order: a,b,c or a data YAML; default: by category id")
    coco.add_argument("--polygons", action="store_true", help="write outlines instead of boxes")
    coco.add_argument("--crowd", action="store_true", help="include regions of many objects (iscrowd)")
    coco.add_argument("--flat", action="store_true", help="drop the folders in the images' file names")
    coco.add_argument("--names-to", type=Path, help="write the classes to this file, as `names:` of a data YAML")
    visdrone = formats.add_parser(
        "visdrone", help="VisDrone-DET", description="Write label files beside VisDrone's images."
    )
    visdrone.add_argument("source", type=Path, help="a folder with images and annotations, or its parent folder")
    for each in (voc, coco, visdrone):
        each.add_argument("--exist-ok", action="store_true", help="replace existing label files")
    return parser


def main() -> None:
    """Convert the annotations that the command line names, and print the counts."""
    given = _parser().parse_args()
    names: list[str] = []
    if given.format == "voc":
        tally, names = convert_voc(
            given.source,
            given.labels,
            given.images,
            class_names(given.names),
            difficult=given.difficult,
            one_based=given.one_based,
            exist_ok=given.exist_ok,
        )
    elif given.format == "coco":
        if given.names_to and given.names_to.exists() and not given.exist_ok:
            raise UserError(f"--names-to {given.names_to} exists already; add --exist-ok to replace it")
        tally, names = convert_coco(
            given.source,
            given.labels,
            class_names(given.names),
            polygons=given.polygons,
            crowd=given.crowd,
            flat=given.flat,
            exist_ok=given.exist_ok,
        )
        for message in () if given.names else read_contents(given.source).group_messages(given.source):
            print(message)
        if given.names_to:
            with replacing(given.names_to) as file:
                file.write(names_text(names).encode())
    else:
        tally = convert_visdrone(given.source, given.exist_ok)
    print(*tally.lines(given.source if given.format == "visdrone" else given.labels), sep="\n")
    if names:
        print(f"classes: {', '.join(f'{number} {name}' for number, name in enumerate(names))}")


if __name__ == "__main__":
    run_main(main)
