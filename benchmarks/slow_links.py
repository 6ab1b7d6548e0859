"""Seconds of the gradients' all-reduce between two machines on a slow link, with and without compression.

    python -m benchmarks.slow_links [--models yolov5n yolov5m] [--gbit 1 10]        (root, commands ip and tc)

The machines are network namespaces, and `tc` limits their cable. Per model, link and hook: the median of the seconds of
a backward pass (through a sum of the parameters) that sends gradients, minus that of one that does not.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time

import torch
from torch import Tensor, distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from models.yolo import build_model
from tests.machines import ip, machines
from utils.files import ROOT, read_yaml

HOOKS = {"fp16": fp16_compress_hook, "bf16": bf16_compress_hook}
HOSTS = ("lockstepslow0", "lockstepslow1")
ROUNDS = 7


class Sum(nn.Module):
    """The sum of all parameters: the cheapest backward pass that reaches each of them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ParameterList(list(model.parameters()))

    def forward(self) -> Tensor:
        return torch.stack([part.sum() for part in self.parts]).sum()


def seconds(model: DistributedDataParallel, send: bool) -> float:
    """Return the median duration of backward passes, on the slower process."""
    times = []
    for _ in range(ROUNDS):
        distributed.barrier()
        begun = time.perf_counter()
        if send:
            model().backward()
        else:
            with model.no_sync():
                model().backward()
        taken = torch.tensor(time.perf_counter() - begun)
        distributed.all_reduce(taken, distributed.ReduceOp.MAX)
        times.append(taken.item())
    return statistics.median(times)


def work(names: list[str], gbit: float) -> None:
    """Measure on each machine; rank 0 prints."""
    distributed.init_process_group("gloo")
    for name in names:
        bare = build_model(read_yaml(ROOT / "models" / f"{name}.yaml"))
        size = sum(parameter.numel() for parameter in bare.parameters()) * 4 / 1e6
        for hook in ("", *HOOKS):
            model = DistributedDataParallel(Sum(bare), gradient_as_bucket_view=True)
            if hook:
                model.register_comm_hook(None, HOOKS[hook])
            seconds(model, send=True)  # buckets are arranged
            sent, silent = seconds(model, send=True), seconds(model, send=False)
            if distributed.get_rank() == 0:
                print(
                    f"{name:<9} {size:6.1f} MB {gbit:5g} Gbit/s {hook or 'none':<9} {sent - silent:7.3f} s", flush=True
                )
    distributed.destroy_process_group()


def main() -> None:
    """Create the machines, limit the link between them, and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["yolov5n", "yolov5m"])
    parser.add_argument("--gbit", type=float, nargs="+", default=[1.0, 10.0])
    options = parser.parse_args()
    if "RANK" in os.environ:
        work(options.models, options.gbit[0])
        return
    try:
        with machines(HOSTS):
            for gbit in options.gbit:
                limit = ("tbf", "rate", f"{gbit}gbit", "burst", f"{int(gbit * 500)}kb", "latency", "50ms")
                for host in HOSTS:
                    ip("netns", "exec", host, "tc", "qdisc", "replace", "dev", "cable", "root", *limit)
                measure(options.models, gbit)
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"{error}\n{error.stderr.strip()}") from None


def measure(names: list[str], gbit: float) -> None:
    """Run the measurement on both machines."""
    rendezvous = {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29500", "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.slow_links", "--models", *names, "--gbit", str(gbit)]
    started = [
        subprocess.Popen(
            ["ip", "netns", "exec", host, *command],
            cwd=ROOT,
            env={
                **os.environ,
                **rendezvous,
                "RANK": str(rank),
                "GLOO_SOCKET_IFNAME": "cable",
                "TORCH_CPP_LOG_LEVEL": "ERROR",
            },
        )
        for rank, host in enumerate(HOSTS)
    ]
    if max(process.wait() for process in started):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
