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

MIB, LIMIT_MIB = 2**20, 60
WEIGHTS = ("yolov5n.pt", "yolov5n-seg-coco128.pt")
PEER_FILES = ("**/*.py", "**/*.yaml", "**/*.yml")


def copy(source: Path, target: Path, patterns: tuple[str, ...]) -> int:
    """Copy the files of a folder that match; return how many."""
    files = {file for pattern in patterns for file in source.glob(pattern) if file.is_file()}
    for file in sorted(files):
        place = target / file.relative_to(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, place)  # not the mode, which may be read-only
    return len(files)


def gather(folder: Path, shared: Path, peers: dict[str, Path]) -> list[str]:
    """Fill the folder anew, but for results; return a line about each thing."""
    parts = {
        "photos": (shared / "data" / "coco128", ("images/**/*.jpg", "labels/**/*.txt")),
        "weights": (shared / "weights", WEIGHTS),
        **{name: (checkout, PEER_FILES) for name, checkout in peers.items()},
    }
    lines = []
    for name, (source, patterns) in parts.items():
        shutil.rmtree(folder / name, ignore_errors=True)
        count = copy(source, folder / name, patterns) if source.is_dir() else 0
        lines.append(f"{name}: {count} files of {source}" if count else f"{name}: none, {source} is not there")
    return lines


def size(folder: Path) -> int:
    """Return the bytes of all files of a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def main() -> None:
    """Gather, and exit with 1 if it is too much to carry."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=ROOT / ".gpu")
    parser.add_argument("--shared", type=Path, default=ROOT.parent / "shared")
    parser.add_argument("--yolov5", type=Path, default=ROOT.parent / "peers" / "yolov5")
    parser.add_argument("--ultralytics", type=Path, default=ROOT.parent / "peers" / "ultralytics")
    options = parser.parse_args()
    peers = {"yolov5": options.yolov5, "ultralytics": options.ultralytics}
    print(*gather(options.folder, options.shared, peers), sep="\n")
    total = size(options.folder) / MIB
    print(f"{options.folder}: {total:.0f} MiB")
    if total > LIMIT_MIB:
        sys.exit(f"error: more than {LIMIT_MIB} MiB cannot be carried; give smaller checkouts, or remove results")


if __name__ == "__main__":
    main()
