"""The tests that need two GPUs."""

from benchmarks.gpu_parts.measuring import machine
from benchmarks.gpu_parts.tests import run_marked

if __name__ == "__main__":
    run_marked(machine(), "gpu2")
