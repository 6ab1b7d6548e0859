"""Draw the pictures of a run folder, or compare several runs.

    python -m utils.plots runs/train/exp                     all pictures of a run, into its folder
    python -m utils.plots runs/train/exp runs/train/exp2     several runs in one chart, and a table of their best epochs

Training starts this command in a separate process (plotter.py). Imports no torch.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import cv2

from data.storage import read_bytes
from utils.errors import UserError, nearest
from utils.plots.drawing import printable
from utils.plots.run_pictures import PICTURES, Print, compare_runs, draw_run

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
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="run folder; several are compared")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="pictures of a run to draw: " + ", ".join(PICTURES))
    parser.add_argument("--out", type=Path, help="file for the chart of several runs; default: comparison.png")
    parser.add_argument("--background", action="store_true", help="run at low priority; print warnings only")
    options = parser.parse_args(argv)
    if options.background:
        cv2.setNumThreads(1)
        if hasattr(os, "nice"):
            os.nice(NICENESS)
    print_line: Print = (lambda _: None) if options.background else _print
    try:
        return 0 if _draw(options, print_line) else 1
    except UserError as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        return 1


def _draw(options: argparse.Namespace, print_line: Print) -> bool:
    """Check the flags and draw; return whether there was no warning. Raises `UserError`."""
    several = len(options.folders) > 1
    if several and options.only:
        raise UserError("--only is for the pictures of one run; give one folder")
    if options.out and not several:
        raise UserError("--out is for the chart of several runs; give several folders")
    for name in options.only or ():
        if name not in PICTURES:
            raise UserError(f"unknown picture {name}{nearest(name, PICTURES)}; known are {', '.join(PICTURES)}")
    if several:
        return compare_runs(options.folders, options.out or Path("comparison.png"), print_line)
    return draw_run(options.folders[0], options.only or list(PICTURES), print_line, read_bytes)


def _print(line: str) -> None:
    with suppress(BrokenPipeError):  # the reader of the output, such as `head`, has closed it
        print(line, flush=True)


if __name__ == "__main__":
    main()
