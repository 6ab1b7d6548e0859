"""The command `python -m utils.plots runs/train/exp`, which training starts too. Imports no torch."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import cv2

from utils.plots.drawing import printable
from utils.plots.pictures import DRAWINGS, draw_document


def main(argv: Sequence[str] | None = None) -> None:
    """Draw the pictures of a run folder, and exit: with 1 after a warning or an error."""
    parser = argparse.ArgumentParser("python -m utils.plots", description="Draw the pictures of a run folder.")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="run folder")
    parser.add_argument("--only", nargs="+", choices=list(DRAWINGS), help="text files to draw from")
    options = parser.parse_args(argv)
    os.environ.pop("MPLBACKEND", None)  # notebooks set it to a back end that matplotlib may not find here
    cv2.setNumThreads(1)  # the other cores are the training's
    files = [file for name in options.only or DRAWINGS if (file := options.folder / name).is_file()]
    if not files:
        sys.exit(f"error: {printable(str(options.folder))} has nothing to draw from, such as results.csv")
    sys.exit(max(map(draw_document, files)))


if __name__ == "__main__":
    main()
