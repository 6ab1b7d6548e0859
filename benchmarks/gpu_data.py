"""Gather what `make gpu` needs on a machine without a network, in the ignored folder .gpu, below 60 MiB.

    python -m benchmarks.gpu_data [--shared ../shared] [--yolov5 ../peers/yolov5] [--ultralytics ../peers/ultralytics]

Photos and weights are copied from the folder of reference files, and Python files and YAMLs of the peers' checkouts.
What is not there is left out: the report then uses drawn images and random weights, and measures no peers.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from utils.files import ROOT

LIMIT_MIB = 60
PEER_FILES = ("**/*.py", "**/*.yaml", "**/*.yml")


def copy(source: Path, target: Path, patterns: tuple[str, ...]) -> str:
    """Replace a folder by the files of another one that match; return a line for the console."""
    shutil.rmtree(target, ignore_errors=True)
    files = sorted({file for pattern in patterns for file in source.glob(pattern) if file.is_file()})
    for file in files:
        place = target / file.relative_to(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, place)  # not the mode, which may be read-only
    return f"{target.name}: {len(files) or 'no'} files of {source}"


def main(argv: list[str] | None = None) -> None:
    """Gather, and exit with 1 if it is too much to carry."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=ROOT / ".gpu")
    parser.add_argument("--shared", type=Path, default=ROOT.parent / "shared")
    parser.add_argument("--yolov5", type=Path, default=ROOT.parent / "peers" / "yolov5")
    parser.add_argument("--ultralytics", type=Path, default=ROOT.parent / "peers" / "ultralytics")
    options = parser.parse_args(argv)
    folder = options.folder
    photos = options.shared / "data" / "coco128"
    print(copy(photos, folder / "photos", ("images/**/*.jpg", "labels/**/*.txt")))
    print(copy(options.shared / "weights", folder / "weights", ("yolov5n.pt",)))
    print(copy(options.yolov5, folder / "yolov5", PEER_FILES))
    print(copy(options.ultralytics, folder / "ultralytics", PEER_FILES))
    mib = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 2**20
    print(f"{folder}: {mib:.0f} MiB")
    if mib > LIMIT_MIB:
        sys.exit(f"error: more than {LIMIT_MIB} MiB cannot be carried; give smaller checkouts, or remove results")


if __name__ == "__main__":
    main()
