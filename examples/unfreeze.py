"""Train the head first, then all layers: `python examples/unfreeze.py --data my.yaml --weights yolov5n.pt`.

DDP and the optimizer are made for the parameters that train at the start, so that a run cannot unfreeze a layer. The
hook ends the frozen run after `FROZEN_EPOCHS`; a second run starts from its weights. Flags go to both runs.

The hook decides by `epoch`, not by the number of its calls: a run that is killed and resumed calls it in a new process.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))  # the repository

import train
from utils.config.flags import TrainOptions
from utils.config.parser import given_flags
from utils.errors import UserError

FROZEN_EPOCHS = 3


def on_epoch(epoch: int, *_: Any) -> str | None:
    """End the frozen run, in which `epoch` counts from 0."""
    return "stop" if epoch + 1 >= FROZEN_EPOCHS else None


if __name__ == "__main__":
    try:
        flags = given_flags(TrainOptions, sys.argv[1:])
    except UserError as error:
        sys.exit(f"error: {error}")
    flags |= flags.pop("overrides", {})  # of --hyp.KEY
    # The file, not the function: other processes of the run cannot import what this script defines.
    frozen = train.run(**{**flags, "freeze": "backbone", "hooks": __file__})
    train.run(**{**flags, "weights": Path(frozen["folder"], "weights", "last.pt")})
