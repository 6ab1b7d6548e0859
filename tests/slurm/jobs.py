"""The command lines of sbatch and srun, batch files, and jobs, as sbatch(1) and srun(1) describe them."""

from __future__ import annotations

import re
import shlex
import signal
from argparse import REMAINDER, ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

ENDED = ("COMPLETED", "FAILED", "TIMEOUT", "PREEMPTED")
DEFAULT_SIGNAL_SECONDS = 60


class Refused(Exception):
    """A command ends with this error and exit code 1."""


class Parser(ArgumentParser):
    """A parser whose errors are exceptions."""

    def error(self, message: str) -> NoReturn:
        raise Refused(message)


def sbatch_parser() -> Parser:
    """Return the parser of the options that the stand-in knows; any other is refused."""
    parser = Parser("sbatch", allow_abbrev=False, add_help=False)
    parser.add_argument("-J", "--job-name", default=None)
    parser.add_argument("-N", "--nodes", type=int, default=1)
    parser.add_argument("--ntasks-per-node", type=int, default=1)
    parser.add_argument("--gpus-per-node", type=int, default=0)
    parser.add_argument("-c", "--cpus-per-task", type=int, default=0)
    parser.add_argument("-t", "--time", default="")
    parser.add_argument("-o", "--output", default="slurm-%j.out")
    parser.add_argument("--open-mode", choices=("append", "truncate"), default="truncate")
    parser.add_argument("--requeue", action="store_true", default=True)  # JobRequeue=1 is SLURM's default
    parser.add_argument("--no-requeue", dest="requeue", action="store_false")
    parser.add_argument("--signal", default="")
    parser.add_argument("-d", "--dependency", default="")
    parser.add_argument("--parsable", action="store_true")
    return parser


def srun_parser() -> Parser:
    """Return the parser of srun's options inside of a job."""
    parser = Parser("srun", allow_abbrev=False, add_help=False)
    # Without a value it is 1; the value, if any, follows an equals sign.
    parser.add_argument("-K", "--kill-on-bad-exit", nargs="?", type=int, const=1, default=0)
    parser.add_argument("-c", "--cpus-per-task", type=int, default=0)
    parser.add_argument("command", nargs=REMAINDER)
    return parser


@dataclass
class Job:
    """A batch job."""

    number: int
    options: Namespace
    script: Path  # SLURM's own copy
    arguments: Sequence[str]
    environment: dict[str, str]
    folder: str
    state: str = "PENDING"
    restarts: int = 0
    seconds: float = float("inf")
    ends: float = float("inf")  # of the clock, while it runs
    end_because: str = ""  # the state that a request to end it leads to
    codes: list[int] = field(default_factory=list)  # exit code of the batch file in each start

    @property
    def name(self) -> str:
        return str(self.options.job_name)

    @property
    def log(self) -> Path:
        """The file of --output; %x is the job's name, %j its number, %% a percent sign."""
        values = {"%x": self.name, "%j": str(self.number), "%%": "%"}
        return Path(self.folder) / re.sub("%[xj%]", lambda found: values[found[0]], self.options.output)

    def awaits(self, jobs: dict[int, Job]) -> bool:
        """Return whether a dependency is not satisfied yet: afterany:JOB[:JOB...], afterok: the same with success."""
        for part in filter(None, self.options.dependency.split(",")):
            kind, *numbers = part.split(":")
            if kind not in ("afterany", "afterok"):
                raise Refused(f"dependency {kind} is unknown to the stand-in")
            wanted = ENDED if kind == "afterany" else ("COMPLETED",)
            if any(jobs[int(number)].state not in wanted for number in numbers):
                return True
        return False

    def stop_signal(self) -> tuple[str, signal.Signals, float] | None:
        """Return --signal=[B:]NAME[@SECONDS]: the letter, '' for the steps; the signal; the seconds before the end."""
        match = re.fullmatch(r"(?:([BR]+):)?(?:SIG)?(\w+)(?:@(\d+))?", self.options.signal)
        if not match:
            return None
        letters, name, seconds = match.groups()
        number = signal.Signals(int(name)) if name.isdigit() else signal.Signals[f"SIG{name}"]
        return letters or "", number, float(seconds or DEFAULT_SIGNAL_SECONDS)


def parse_batch(arguments: Sequence[str], folder: str) -> tuple[Namespace, str]:
    """Parse the command line of sbatch and the #SBATCH lines of its file; return the options and the file's text.

    The command line wins. Lines after the first command of the file are comments.
    """
    parser = sbatch_parser()
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=REMAINDER)
    script = Path(folder, parser.parse_args(list(arguments)).script)
    text = script.read_text()
    if not text.startswith("#!"):
        raise Refused("This does not look like a batch script.")
    words: list[str] = []
    for line in text.splitlines():
        if line.strip() and not line.startswith("#"):
            break
        if line.startswith("#SBATCH"):
            words += shlex.split(line.removeprefix("#SBATCH"), comments=True)
    defaults: dict[str, Any] = vars(sbatch_parser().parse_args(words))
    parser.set_defaults(**defaults)
    options = parser.parse_args(list(arguments))
    options.job_name = options.job_name or script.name
    return options, text


def parse_time(text: str) -> float:
    """Return the seconds of minutes, minutes:seconds, h:m:s, days-h, days-h:m, or days-h:m:s; '' is unlimited."""
    if not text:
        return float("inf")
    days, dash, clock = text.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    if dash:
        hours, minutes, seconds = [*parts, 0, 0][:3]
    elif len(parts) == 3:
        hours, minutes, seconds = parts
    else:
        hours, (minutes, seconds) = 0, [*parts, 0][:2]
    return 86400 * int(days or 0) + 3600 * hours + 60 * minutes + seconds


def expand(names: str) -> list[str]:
    """Return the hosts of a list such as a[1-2,4],b."""
    hosts: list[str] = []
    for prefix, ranges in re.findall(r"([^,\[]+)(?:\[([^\]]*)\])?", names):
        if not ranges:
            hosts.append(prefix)
        for part in filter(None, ranges.split(",")):
            first, _, last = part.partition("-")
            width = len(first)
            hosts += [f"{prefix}{number:0{width}d}" for number in range(int(first), int(last or first) + 1)]
    return hosts
