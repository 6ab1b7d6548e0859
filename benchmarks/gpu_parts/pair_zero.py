"""DeepSpeed ZeRO-1, 2 and 3 on two devices against two processes without it, if deepspeed is installed."""

from __future__ import annotations

from importlib.util import find_spec

from benchmarks.gpu_parts.measuring import machine, row, run_flags, script
from benchmarks.gpu_parts.pair_curves import devices, gap
from utils.files import ROOT

STAGES = ("zero1", "zero2", "zero3")


def main() -> None:
    """Compare the stages' curves in float32."""
    here = machine()
    if not (find_spec("deepspeed") and find_spec("transformers")):
        row("DeepSpeed ZeRO", note="not measured: deepspeed or transformers is not installed here")
        return
    script("train.py", *run_flags(here, "ddp", "no", 1, "--sync-bn", *devices(here, 2)))
    for stage in STAGES[:1] if here.quick else STAGES:
        file = ROOT / "accelerate_configs" / f"deepspeed_{stage}.yaml"
        launcher = ["-m", "accelerate.commands.launch", "--config_file", str(file), "--num_processes", "2"]
        flags = run_flags(here, stage, "no", 1, "--sync-bn", "--device", here.device)
        script("train.py", *flags, launcher=launcher)
        runs = here.scratch / "runs"
        row("ZeRO on two devices against DDP: largest differences", stage=stage, **gap(runs / "ddp", runs / stage))


if __name__ == "__main__":
    main()
