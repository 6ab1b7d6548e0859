"""--logical-processes on one GPU: four on one process and on two that share the GPU, and one against four."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

from benchmarks.gpu_parts.determinism import same
from benchmarks.gpu_parts.measuring import Machine, machine, row, run_flags, script
from benchmarks.gpu_parts.pair_curves import gap
from utils.files import ROOT

# NCCL refuses two processes on one GPU. As two machines of one GPU each, over gloo, they share it.
OVER_GLOO = """
import runpy, sys
import utils.distributed.launch as ours
class OverGloo(ours.PartialState):
    def __init__(self, **given):
        super().__init__(**{**given, "backend": "gloo"})
ours.PartialState = OverGloo
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def on_two_processes(flags: list[str]) -> None:
    """Train on two processes that share the device. Raises RuntimeError with the end of their output."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    given = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": "lo"}
    given |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    given["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", OVER_GLOO, str(ROOT / "train.py"), *flags],
            cwd=ROOT,
            env={**os.environ, **given, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in (0, 1)
    ]
    printed = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise RuntimeError(" / ".join(each[-1000:] for each in printed))


def compare(here: Machine, precision: str) -> None:
    """Print the row of a precision."""
    runs, what = here.scratch / "runs", ("--device", here.device)
    for name, count in (("one", 1), ("four", 4)):
        flags = run_flags(here, f"{name}-{precision}", precision, 2, *what, "--logical-processes", str(count))
        script("train.py", *flags)
    device = () if here.on_gpu else what  # the numbers of CUDA devices are those of a machine
    on_two_processes(run_flags(here, f"two-{precision}", precision, 1, *device, "--logical-processes", "4"))
    four = runs / f"four-{precision}"
    differences = gap(four, runs / f"one-{precision}")
    row(
        "--logical-processes 4 of yolov5n, two epochs: on two processes that share the GPU, and against 1",
        precision=precision,
        **{"two processes": same(four, runs / f"two-{precision}")},
        **{f"from 1: {name}": value for name, value in differences.items()},
    )


def compare_recorded(here: Machine) -> None:
    """Print whether two processes that share the GPU, whose gradients DDP adds, may record their kernels."""
    device = () if here.on_gpu else ("--device", here.device)
    for name, flags in (("recorded", ()), ("launched", ("--no-cuda-graph",))):
        on_two_processes(run_flags(here, f"ddp-{name}", "bf16" if here.on_gpu else "no", 1, *device, *flags))
    row(
        "Two processes of yolov5n that share the GPU, two epochs: kernels recorded, and launched one by one",
        bytes=same(here.scratch / "runs" / "ddp-recorded", here.scratch / "runs" / "ddp-launched"),
    )


def main() -> None:
    """Compare in float32, and in bf16 on a GPU; then recorded kernels."""
    here = machine()
    for precision in ("no", "bf16") if here.on_gpu else ("no",):
        compare(here, precision)
    compare_recorded(here)


if __name__ == "__main__":
    main()
