"""The command `lockstep` of `pip install .`: `lockstep train --data my.yaml` is `python train.py --data my.yaml`.

The wheel has the repository's files in one folder, `lockstep`, so that no other package meets `data`, `models` or
`utils`. The command runs a script there as `python -m` does in that folder, which is the first in `sys.path`.
`python -m lockstep` is the same, for launchers.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent
COMMANDS = ("train", "val", "detect", "export", "data.split", "utils.plots.pictures", "utils.repeat")  # modules
EXAMPLES = """examples:
  lockstep train --data my.yaml --weights yolov5n.pt    as python train.py
  lockstep data.split my.yaml --val 0.2                 as python -m data.split
  accelerate launch --num_processes 2 -m lockstep train --data my.yaml
The flags of a command: lockstep train --help"""


def main() -> None:
    """Run the module that the first word of the command line names, with the other words as its flags."""
    sys.path.insert(0, str(ROOT))
    from utils.files import VERSION

    parser = argparse.ArgumentParser(
        prog="lockstep", epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"lockstep {VERSION}", help="print the version and exit")
    # The action `version` prints any text.
    parser.add_argument("--folder", action="version", version=str(ROOT), help="print the files' folder and exit")
    parser.add_argument("command", choices=COMMANDS, metavar="command", help=", ".join(COMMANDS))
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="of the command")
    given = parser.parse_args(sys.argv[1:] or ["--help"])
    sys.argv[1:] = given.flags
    runpy.run_module(given.command, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
