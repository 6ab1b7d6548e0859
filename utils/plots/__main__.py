"""Draw the pictures of a run folder: `python -m utils.plots runs/train/exp`.

Training starts this command in a separate process (plotter.py). Imports no torch.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import cv2

from utils.errors import UserError
from utils.files import read_regular
from utils.plots.drawing import printable
from utils.plots.run_pictures import PICTURES, draw_run

NICENESS = 10  # added to the nice value of a process beside the training


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the command and exit."""
    os.environ.pop("MPLBACKEND", None)  # notebooks set it to a back end that matplotlib may not find here
    try:
        sys.exit(run(argv))
    except KeyboardInterrupt:
        sys.exit(130)


def run(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 1 after an error or a warning."""
    parser = argparse.ArgumentParser(
        "python -m utils.plots", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="run folder")
    parser.add_argument("--only", nargs="+", choices=list(PICTURES), help="pictures to draw")
    parser.add_argument("--background", action="store_true", help="run at low priority; print warnings only")
    options = parser.parse_args(argv)
    if options.background:
        cv2.setNumThreads(1)
        if hasattr(os, "nice"):
            os.nice(NICENESS)
    try:
        print_line = (lambda _: None) if options.background else print
        return 0 if draw_run(options.folder, options.only or list(PICTURES), print_line, read_regular) else 1
    except UserError as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    main()
