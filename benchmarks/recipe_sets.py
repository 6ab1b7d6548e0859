"""Write small public data sets as YOLO folders, from checkouts of their repositories.

    python -m benchmarks.recipe_sets OUT NAME=CHECKOUT ...

SOURCES lists the names and commits. `OUT/NAME` gets data.yaml, images/{train,val} and
labels/{train,val}: at most 200 photos, drawn by a seed, a quarter of them for validation.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import yaml
from PIL import Image, ImageOps

from data.formats import annotated_names, find_annotated
from data.images import is_image
from data.labels import OUTLINES

MAX_PHOTOS, MIN_VALIDATION_PHOTOS, LONG_SIDE, JPEG_QUALITY, SEED = 200, 20, 640, 90, 0
EXPORT = "*/_annotations.coco.json"  # Roboflow's COCO files
CARDS = "EdjeElectronics/TensorFlow-Object-Detection-API-Tutorial-Train-Multiple-Objects-Windows-10@c164582"
KITCHEN = "bell pepper, butter, cheese, chilli, corn, garlic, beans, mushrooms, pasta, peas and carrots, tomato sauce"
VEGETABLES = (
    "okra flower, okra, okra bud, okra seed, pepper flower, green pepper, red pepper, pepper seed, "
    "eggplant flower, eggplant, eggplant seed, eggplant bud"
)


class Source(NamedTuple):
    """A repository of photos.

    Attributes:
        repository: owner, name and commit on GitHub
        annotations: pattern of its COCO files, folders of VOC's XML files, or folders of YOLO's label files
        images: folder of photos, beside each of them
        names: classes of YOLO's label files
    """

    repository: str
    licence: str
    annotations: str
    images: str
    names: str = ""


SOURCES = {
    "raccoon": Source("datitran/raccoon_dataset@9393884", "MIT", "annotations", "images"),
    "plates": Source("RobertLucian/license-plate-dataset@f00f309", "MIT", "dataset/*/annots", "images"),
    "cards": Source(CARDS, "Apache-2.0", "images/*", ""),
    "chess": Source("jsansao/ChessPiecesv23@246442c", "CC0-1.0", EXPORT, ""),
    "boards": Source("Grod-d/classifier_microcontrollers@482d529", "MIT", f"dataset/{EXPORT}", ""),
    "teeth": Source("hongjin4790/cavity_detecting@7971a68", "CC-BY-4.0", EXPORT, ""),
    "traffic": Source("kioenguyen0207/traffic_dataset@0bca9d8", "CC-BY-4.0", "train/_annotations.coco.json", ""),
    "symbols": Source("MajidrNEO1879/arithmetic-detection@85b9bdc", "CC-BY-4.0", f"data/{EXPORT}", ""),
    "kitchen": Source("HMI2-Research-Group/Kitchen-YOLO-Dataset@8d92e22", "AAL", "labels", "my_images", KITCHEN),
    "vegetables": Source(
        "FatihEmin48/okra-pepper-eggplant-yolo-dataset@36e7f71", "CC-BY-4.0", "*/labels", "images", VEGETABLES
    ),
    "go": Source("wimi321/katago-go-analyzer@d8422e0", "CC-BY-4.0", "temp_stone/*/labels", "images", "black, white"),
    "foosball": Source("DaanS8/foosball_detection@f82e68c", "MIT", "data/*/_annotations.coco.json", ""),
    "trees": Source("KillerJacKTM05/TreeCountingProgram@141596e", "CC-BY-4.0", "Dataset/*/labels", "images", "tree"),
    "wagons": Source("DipanMondal/wagon_defect-2-coco@47fcf86", "CC-BY-4.0", EXPORT, ""),
}


def photos(source: Source, checkout: Path, names: list[str]) -> Iterator[tuple[Path, str]]:
    """Yield each photo with the rows of its label file; outlines stay outlines."""
    for location in sorted(checkout.glob(source.annotations)):
        folder = location.parent / source.images
        if source.names:
            labels = {file.stem: file.read_text() for file in location.glob("*.txt")}
            images = (file for file in folder.iterdir() if is_image(file.name))
            yield from ((image, labels[image.stem]) for image in images if image.stem in labels)
        elif annotated := find_annotated(location, [folder], names, "train"):
            rows, problems = annotated.rows(OUTLINES)
            print(*annotated.problems, *problems, sep="\n")
            yield from ((Path(image), described.text) for image, described in rows.items())


def write(source: Source, checkout: Path, folder: Path) -> None:
    """Write the data set: the first by name of the copies of a photo that Roboflow augmented, and equal rows once."""
    locations = sorted(checkout.glob(source.annotations))
    names = source.names.split(", ") if source.names else list(annotated_names(locations).values())
    originals: dict[str, tuple[Path, str]] = {}
    for image, rows in sorted(photos(source, checkout, names)):
        originals.setdefault(str(image.parent / image.name.partition(".rf.")[0]), (image, rows))
    drawn = random.Random(SEED).sample(sorted(originals.values()), min(len(originals), MAX_PHOTOS))
    held_out = max(MIN_VALIDATION_PHOTOS, len(drawn) // 4)
    for part in ("images/train", "images/val", "labels/train", "labels/val"):
        (folder / part).mkdir(parents=True)
    for number, (image, rows) in enumerate(drawn):
        split = "val" if number < held_out else "train"
        picture = ImageOps.exif_transpose(Image.open(image)).convert("RGB")
        picture.thumbnail((LONG_SIDE, LONG_SIDE))
        picture.save(folder / "images" / split / f"{number:03}.jpg", quality=JPEG_QUALITY)
        (folder / "labels" / split / f"{number:03}.txt").write_text("".join(dict.fromkeys(rows.splitlines(True))))
    data = {"path": str(folder.resolve()), "train": "images/train", "val": "images/val", "names": names}
    (folder / "data.yaml").write_text(yaml.safe_dump(data, sort_keys=False))
    print(f"{folder}: {len(drawn) - held_out} and {held_out} photos, {len(names)} classes")


if __name__ == "__main__":
    for argument in sys.argv[2:]:
        name, checkout = argument.split("=", 1)
        write(SOURCES[name], Path(checkout), Path(sys.argv[1], name))
