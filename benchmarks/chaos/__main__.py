"""Disturb a training on two simulated machines again and again, restart it each time, and check that nothing is lost.

    python -m benchmarks.chaos [--rounds 50] [--seed 0] [--task detect|classify|segment] [--zero 2] [--per-machine 2]
        [--only "the cable is cut" ...] [--round N --from-step S] [--folder F] [--list]

A round is one fault, at a moment that is drawn by seed and round: the training starts (with --save-steps 1 --resume
auto), pauses at the drawn fault point, the fault strikes, and the training goes on. It must end by itself, or it must
take two more optimizer steps, after which all machines are asked to end, as a scheduler does. Then the oracle checks
files, processes and messages. A training that is finished is compared with an undisturbed one, and the next one starts.

A failure prints the command that repeats its round: an undisturbed training to the step at which the round began, then
the round. The soak runs that command itself, and says whether the failure came again.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random

from benchmarks.chaos.cluster import Attempt, Cluster, Start, two_machines
from benchmarks.chaos.faults import Fault, NotHere, catalogue
from benchmarks.chaos.oracle import Oracle

EPOCHS = 10  # of a training, each with four optimizer steps
START_SECONDS = 120.0  # to the drawn moment
END_SECONDS = 90.0  # from the fault to the end of all launchers, which leave the processes 30 s
ALONE_SECONDS = 45.0  # of these, until a scheduler ends what is left
DISK_SECONDS = 6.0  # that a training goes on while it cannot save, until it is asked to end
STEPS_AFTER = 2  # optimizer steps that a training takes after a fault that must not end it
VALIDATION = {"detect": "", "classify": " of a classifier", "segment": " of a segmenter"}


@dataclass
class Outcome:
    """What came of a round. Times in seconds.

    back: from the start of the round to its first new optimizer step, None if it was not seen. ended: from the fault to
    the end of all launchers, None if it went on. lost: completed optimizer steps that the saved state lacks.
    """

    number: int
    fault: str
    moment: str
    step: int  # of the state that the round began with
    result: str = ""
    back: float | None = None
    ended: float | None = None
    lost: int = 0
    exact: bool = True
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        """Return a line for the console."""
        lost = f", {self.lost} lost" if self.lost else ""
        rounding = "" if self.exact else ", within rounding"
        drawn = f"round {self.number:3d} from step {self.step:3d}  {self.fault:<45} at {self.moment:<36}"
        return f"{drawn} {self.result}{lost}{rounding}"


def moment(random: Random, fault: Fault, task: str, processes: int) -> tuple[str, int, int]:
    """Draw the moment of a fault: a fault point, the number of times it is reached, and the rank that pauses there."""
    rank = random.randrange(processes)
    points = [("optimizer step", random.randint(2, 5), rank), (f"validation batch{VALIDATION[task]}", 1, 0)]
    points += [("file replacement", random.randint(3, 9), 0), ("flush to disk", random.randint(3, 9), 0)]
    if "loader" in fault.name:  # between epochs there is none
        points = points[:1]
    return random.choice([points[0], *points])  # an optimizer step twice as often as each other one


class Soak:
    """The rounds of a seed, on a cluster."""

    def __init__(self, cluster: Cluster, task: str, seed: int, faults: Sequence[Fault], in_turn: bool) -> None:
        self.cluster, self.task, self.seed, self.faults, self.in_turn = cluster, task, seed, faults, in_turn
        self.run, self.trainings, self.exact, self.log_gaps = "", 0, True, False
        self.undisturbed("reference")
        self.oracle = Oracle(cluster, cluster.disk / "reference")
        self.next_training()

    def next_training(self) -> None:
        """Start a training anew; from its first attempt on it is compared to the byte again."""
        if self.run:  # not before the first one
            shutil.rmtree(self.cluster.disk / self.run, ignore_errors=True)
        self.trainings += 1
        self.run, self.exact, self.log_gaps = f"training{self.trainings}", True, False

    def undisturbed(self, run: str, step: int = 0) -> None:
        """Train to the end, or ask the training to end after an optimizer step."""
        attempt = Attempt(self.cluster, run, Start(), ("optimizer step", step, 0) if step else None)
        try:
            if step and attempt.until(attempt.paused, 600):
                ask_to_end(attempt)
                attempt.go()
            if not attempt.until(attempt.ended, 600) or (not step and not self.cluster.finished(run)):
                sys.exit(f"error: the undisturbed training failed: {attempt.output()}")
        finally:
            attempt.kill()

    def draw(self, number: int) -> Fault:
        """Return the fault of a round: the seed shuffles all faults, and again once each was drawn."""
        turn, place = divmod(number, len(self.faults))
        faults = list(self.faults)
        if not self.in_turn:
            Random(f"{self.seed} turn {turn}").shuffle(faults)
        return faults[place]

    def play(self, number: int) -> Outcome:
        """Play a round."""
        if self.cluster.finished(self.run):
            self.next_training()
        random = Random(f"{self.seed} {number}")
        fault = self.draw(number)
        point, times, rank = moment(random, fault, self.task, 2 * self.cluster.per_machine)
        outcome = Outcome(number, fault.name, f"{point} {times}, rank {rank}", self.cluster.step(self.run))
        with ExitStack() as stack:
            try:
                start = stack.enter_context(fault.before(self.cluster, self.run, random))
                resumed = self.cluster.step(self.run)
                rank %= len(start.machines) * self.cluster.per_machine
                attempt = Attempt(self.cluster, self.run, start, (point, times, rank))
                stack.callback(attempt.kill)
                self.exact = self.exact and (self.cluster.same_bytes or len(start.machines) == 2)
                self.log_gaps = self.log_gaps or fault.disk
                self.strike(attempt, fault, outcome)
            except NotHere as reason:
                outcome.result = f"skipped: {reason}"
                return outcome
            completed = resumed + times if point == "optimizer step" else self.cluster.step(self.run)
            must_end = fault.ends and outcome.result != "finished before"
            outcome.problems += self.oracle.check(attempt, self.exact, must_end)
        outcome.lost = (
            max(completed - self.cluster.step(self.run), 0) if outcome.result.startswith("ended") else 0
        )  # a full disk takes more
        outcome.exact = self.exact
        if self.cluster.finished(self.run):
            self.undisturbed(self.run)  # it has nothing to train, but W&B may lack its last epoch
            outcome.problems += self.oracle.compare_end(self.run, self.exact, self.log_gaps)
        return outcome

    def repeat(self, outcome: Outcome) -> bool:
        """Return whether a failed round fails again after an undisturbed training to the step at which it began."""
        self.next_training()
        if outcome.step:
            self.undisturbed(self.run, outcome.step)
        again = self.play(outcome.number)
        self.next_training()
        return bool(again.problems)

    def strike(self, attempt: Attempt, fault: Fault, outcome: Outcome) -> None:
        """Let the fault happen at its moment, and wait for what must follow."""
        resumed = self.cluster.step(attempt.run)
        if attempt.until(lambda: attempt.paused() or self.cluster.step(attempt.run) > resumed, START_SECONDS):
            outcome.back = time.monotonic() - attempt.began if self.cluster.step(attempt.run) > resumed else None
        if not attempt.until(attempt.paused, START_SECONDS):
            outcome.result = "finished before" if self.cluster.finished(attempt.run) else "the moment did not come"
            if outcome.result != "finished before" or not attempt.ended():
                outcome.problems.append(f"the moment did not come in {START_SECONDS:g} s: {attempt.output()}")
            return
        began = time.monotonic()
        with fault.during(attempt):
            attempt.go()
            if fault.seconds is not None:
                time.sleep(fault.seconds)
            elif fault.ends:
                wait_for_end(attempt)
            elif fault.disk:  # no state shows that it goes on
                time.sleep(DISK_SECONDS)
                outcome.result = "finished with an error" if attempt.ended() else "went on"
                ask_to_end(attempt)
                attempt.until(attempt.ended, END_SECONDS)
                return
            else:
                self.go_on(attempt)
        if fault.ends:
            wait_for_end(attempt)
        elif not self.go_on(attempt) and not attempt.ended():
            outcome.problems.append(f"no {STEPS_AFTER} optimizer steps in {END_SECONDS:g} s after the fault")
        if not fault.ends and attempt.ended() and self.cluster.finished(attempt.run):
            outcome.result = "finished"
            return
        if fault.ends or attempt.ended():
            outcome.ended = time.monotonic() - began
            outcome.result = f"ended after {outcome.ended:.0f} s"
            # If the training came to its last epoch while it could not save, that is an error.
            unsaved = fault.disk and any(" cannot be written: " in text for text in attempt.output().values())
            if not fault.ends and not unsaved:
                outcome.problems.append(f"it should have gone on: {attempt.output()}")
            if not attempt.ended():
                outcome.problems.append(f"it has not ended in {END_SECONDS:g} s")
            return
        outcome.result = "went on"
        ask_to_end(attempt)
        if not attempt.until(attempt.ended, END_SECONDS):
            outcome.problems.append(f"it has not ended {END_SECONDS:g} s after SIGTERM")

    def go_on(self, attempt: Attempt) -> bool:
        """Wait until the training has saved `STEPS_AFTER` more optimizer steps, or is finished."""
        target = self.cluster.step(attempt.run) + STEPS_AFTER
        attempt.until(lambda: self.cluster.step(attempt.run) >= target, END_SECONDS)
        return self.cluster.step(attempt.run) >= target or self.cluster.finished(attempt.run)


def wait_for_end(attempt: Attempt) -> None:
    """Wait until all launchers have ended; ask those to end that outlive others for long, as a scheduler does.

    A machine whose only training process is stopped cannot notice that the others have ended.
    """
    if not attempt.until(attempt.ended, ALONE_SECONDS):
        ask_to_end(attempt)
        attempt.until(attempt.ended, END_SECONDS - ALONE_SECONDS)


def ask_to_end(attempt: Attempt) -> None:
    """Send SIGTERM to all launchers, as a scheduler does."""
    for machine, launcher in attempt.launchers.items():
        if launcher.poll() is None:
            attempt.launcher(machine).send_signal(signal.SIGTERM)


def table(outcomes: Sequence[Outcome]) -> list[str]:
    """Return a row per fault, for docs/reliability.md; rounds whose moment came too late do not count."""
    groups: dict[str, list[int]] = defaultdict(list)
    for place, outcome in enumerate(outcomes):
        if outcome.result != "finished before":
            groups[outcome.fault].append(place)
    lines = [
        "| fault | rounds | ended by itself | went on | failed | seconds to end | seconds to be back | steps lost |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for fault, places in sorted(groups.items()):
        rounds = [outcomes[place] for place in places]
        # The next start brings back a training that has ended.
        back = [outcomes[place + 1].back for place in places if place + 1 < len(outcomes) and outcomes[place + 1].step]
        went_on = sum(outcome.result in ("went on", "finished") for outcome in rounds)
        failed = sum(bool(outcome.problems) for outcome in rounds)
        ends = [outcome.ended for outcome in rounds]
        cells = (fault, len(rounds), len(_known(ends)), went_on, failed, _seconds(ends), _seconds(back))
        lines.append(f"| {' | '.join(map(str, cells))} | {max(outcome.lost for outcome in rounds)} |")
    return lines


def _known(times: Sequence[float | None]) -> list[float]:
    return [seconds for seconds in times if seconds is not None]


def _seconds(times: Sequence[float | None]) -> str:
    known = _known(times)
    return f"{statistics.median(known):.0f} (at most {max(known):.0f})" if known else "-"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--task", default="detect", choices=list(VALIDATION))
    parser.add_argument("--zero", type=int, default=0, choices=(0, 1, 2, 3))
    parser.add_argument("--per-machine", type=int, default=1, help="training processes of each machine")
    parser.add_argument("--epochs", type=int, default=EPOCHS, help="of each training")
    parser.add_argument("--only", nargs="+", default=[], metavar="FAULT", help="these faults only, one after another")
    parser.add_argument("--round", type=int, help="play this round only")
    parser.add_argument("--from-step", type=int, default=0, help="with --round: optimizer step at which it begins")
    parser.add_argument("--folder", type=Path, help="new folder for everything that is written, and kept")
    parser.add_argument("--list", action="store_true", help="list the faults")
    return parser.parse_args()


def repeat_command(options: argparse.Namespace, outcome: Outcome) -> str:
    """Return the command that plays a round again, into another folder."""
    flags = {"seed": options.seed, "task": options.task, "zero": options.zero, "per-machine": options.per_machine}
    flags |= {"epochs": options.epochs, "round": outcome.number, "from-step": outcome.step}
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    only = ["--only", *options.only] if options.only else []
    return shlex.join(["python", "-m", "benchmarks.chaos", *words, *only])


def main() -> None:
    """Play the rounds, print each of them and the table; exit with 1 if one has failed."""
    options = parse()
    known = {fault.name: fault for fault in catalogue()}
    if unknown := sorted(set(options.only) - set(known)):
        sys.exit(f"error: there is no fault named {', '.join(unknown)}; see --list")
    if options.list:
        print(*known, sep="\n")
        return
    faults = [known[name] for name in options.only or known]
    folder = options.folder or Path(tempfile.mkdtemp(prefix="lockstep-chaos-"))
    cluster = Cluster(folder, options.task, options.zero, options.per_machine, options.epochs)
    outcomes = []
    with two_machines(cluster):
        soak = Soak(cluster, options.task, options.seed, faults, bool(options.only))
        if options.from_step:
            soak.undisturbed(soak.run, options.from_step)
        numbers = [options.round] if options.round is not None else range(options.rounds)
        for number in numbers:
            began = time.monotonic()
            outcome = soak.play(number)
            outcomes.append(outcome)
            with (folder / "rounds.jsonl").open("a") as file:
                file.write(json.dumps(asdict(outcome)) + "\n")
            print(outcome, f"({time.monotonic() - began:.0f} s)", flush=True)
            for problem in outcome.problems:
                print(f"    FAILED: {problem}", flush=True)
            if outcome.problems and options.round is None:
                keep = folder / "failed" / f"round{number}"
                shutil.copytree(cluster.disk / soak.run, keep, ignore=shutil.ignore_patterns("checkpoint", "wandb"))
                print(f"    to repeat it: {repeat_command(options, outcome)}", flush=True)
                print(f"    repeated: {'it fails again' if soak.repeat(outcome) else 'no failure'}", flush=True)
    print(*table(outcomes), sep="\n")
    if not options.folder and not any(outcome.problems for outcome in outcomes):
        shutil.rmtree(folder)
    sys.exit(any(outcome.problems for outcome in outcomes))


if __name__ == "__main__":
    main()
