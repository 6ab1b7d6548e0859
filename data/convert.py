"""The command line of data/converters.py: `python -m data.convert voc|coco|visdrone`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from data.converters import convert_coco, convert_visdrone, convert_voc
from data.sources import read_spec
from utils.distributed.exit import run_main
from utils.errors import UserError
from utils.files import replacing


def class_names(text: str) -> list[str]:
    """Return the class names of --names: separated by commas, or of a data YAML. Raises `UserError`."""
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
    for each in (voc, coco, visdrone):
        each.add_argument("--exist-ok", action="store_true", help="replace label files that are there")
    return parser


def names_text(names: Sequence[str]) -> str:
    """Return `names:` of a data YAML, with a line for each class."""
    return "names:\n" + "".join(
        f"  {number}: {json.dumps(name, ensure_ascii=False)}\n" for number, name in enumerate(names)
    )


def main() -> None:
    """Convert as the command line says, and print the counts."""
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


if __name__ == "__main__":
    run_main(main)
