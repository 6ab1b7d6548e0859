"""D-FINE, the example of a task from outside: equal runs, and its steps, deterministic and not."""

from __future__ import annotations

from importlib.util import find_spec

from benchmarks.gpu_parts.measuring import Machine, rounded, row, run
from benchmarks.gpu_parts.runs import same, train, train_killed
from benchmarks.gpu_parts.steps import timed
from utils.files import ROOT

PACKAGE = ROOT / "examples" / "dfine"
FLAGS = ("--task", str(PACKAGE), "--cfg", str(PACKAGE / "dfine-n.yaml"))


def dfine(here: Machine) -> None:
    """Compare two runs with one seed, and one that is killed and resumed; measure steps."""
    if not (find_spec("transformers") and find_spec("scipy")):
        row("D-FINE", note="not measured: transformers or scipy is not installed here")
        return
    precision = here.precision
    own = (*FLAGS, "--hyp", str(PACKAGE / "hyp.yaml"))
    first, second = (train(here, name, precision, *own, model="dfine-n") for name in ("first", "second"))
    columns = {"a second run": same(first, second)}
    columns["killed and resumed"] = same(first, train_killed(here, "killed", precision, *own, model="dfine-n"))
    row("Results.csv and the tensors of weights/last.pt, two epochs of dfine-n", precision=precision, **columns)
    for batch, imgsz in [here.size(16)] if here.quick else [here.size(16), here.size(64)]:
        exact, free = (timed(here, "dfine-n", imgsz, batch, *FLAGS, *flags) for flags in ((), ("--no-deterministic",)))
        columns = {"deterministic, ms": rounded(exact.seconds * 1000), "not, ms": rounded(free.seconds * 1000)}
        columns |= {"images/s": rounded(batch / exact.seconds), "step/mfu": rounded(exact.mfu, 2)}
        row(f"Steps of dfine-n in bf16 at {imgsz} px", batch=batch, **columns, **{"peak GiB": exact.peak_gib})


if __name__ == "__main__":
    run(dfine)
