"""Save a W&B workspace for a project, with its charts in sections: train, val, metrics, sweep, system.

    python -m utils.tracking.workspace ENTITY/PROJECT

W&B orders the sections of its default workspace by itself; this view is made once, for everybody in the project. It
needs the package wandb-workspaces, and a key of W&B.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from utils.distributed.failure import run_main
from utils.errors import UserError, first_line

SECTIONS = ("train", "val", "metrics", "sweep", "system")  # prefixes of keys; W&B fills each with its charts
SWEPT = ("lr0", "lrf", "momentum", "weight_decay", "box", "cls", "obj", "mosaic", "mixup")  # of sweep.yaml


def save(entity: str, project: str) -> str:
    """Save the workspace and return its address. Raises `UserError`."""
    try:
        from wandb_workspaces import workspaces
        from wandb_workspaces.reports import v2
    except ImportError:
        raise UserError("wandb-workspaces is not installed: pip install wandb-workspaces") from None
    metrics: list[Any] = [*(v2.Config(f"hyperparameters.{name}") for name in SWEPT), v2.SummaryMetric("best/fitness")]
    columns = [v2.ParallelCoordinatesPlotColumn(metric=metric) for metric in metrics]
    chart: Any = v2.ParallelCoordinatesPlot(columns=columns, title="hyperparameters and the best fitness")
    panels = {"sweep": [chart]}
    sections = [workspaces.Section(name=name, panels=panels.get(name, []), is_open=True) for name in SECTIONS]
    workspace = workspaces.Workspace(
        entity=entity, project=project, name="Lockstep", sections=sections, auto_generate_panels=True
    )
    try:
        return workspace.save().url
    except Exception as error:
        raise UserError(f"W&B has not saved the workspace of {entity}/{project}: {first_line(error)}") from None


def main(argv: Sequence[str] | None = None) -> None:
    """Save the workspace that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m utils.tracking.workspace", description=__doc__)
    parser.add_argument("project", metavar="ENTITY/PROJECT")
    entity, slash, project = parser.parse_args(argv).project.partition("/")
    if not (entity and slash and project):
        parser.error("give ENTITY/PROJECT, as in the project's address")
    print(f"saved: {save(entity, project)}")


if __name__ == "__main__":
    run_main(main)
