"""The command line of data/converters.py: `python -m data.convert voc|coco|visdrone`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from data.converters import convert_coco, convert_visdrone, convert_voc
from data.sources import read_spec
from utils.distributed.failure import run_main
from utils.errors import UserError
from utils.files import replacing


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


def names_text(names: Sequence[str]) -> str:
    """Return `names:` of a data YAML, with a line for each class."""
    lines = (f"  {number}: {json.dumps(name, ensure_ascii=False)}\n" for number, name in enumerate(names))
    return "names:\n" + "".join(lines)


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
        tally, names = convert_coco(given.source, given.labels, given.polygons, given.crowd, given.flat, given.exist_ok)
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
