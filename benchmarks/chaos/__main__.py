"""Disturb a training on two simulated machines again and again, restart it each time, and check that nothing is lost.

    python -m benchmarks.chaos [--rounds 50] [--seed 0] [--only "the cable is cut" ...]
        [--round N --from-step S] [--folder F] [--list]

A round is one fault, at a moment that is drawn by seed and round: the training starts (with --save-steps 1 --resume
auto), pauses at the drawn fault point, the fault strikes, and the training goes on. It must end by itself, or it must
take two more optimizer steps, after which all machines are asked to end, as a scheduler does. Then the oracle checks
files, processes and messages. A training that is finished is compared with an undisturbed one, and the next one starts.

A failure prints the flags that repeat its round, after an undisturbed training to the step at which the round began.
cluster.py starts the training on the machines and stops it, faults.py has the faults, oracle.py the checks.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from random import Random

from benchmarks.chaos.cluster import Attempt, Cluster, Start, two_machines
from benchmarks.chaos.faults import Fault, NotHere, catalogue
from benchmarks.chaos.oracle import Oracle

EPOCHS = 10  # of a training, each with four optimizer steps
WHOLE_SECONDS = 600.0  # of an undisturbed training
START_SECONDS = 120.0  # to the drawn moment
END_SECONDS = 90.0  # from the fault to the end of all launchers, which leave the processes 30 s
ALONE_SECONDS = 45.0  # of these, until a scheduler ends what is left
DISK_SECONDS = 6.0  # that a training goes on while it cannot save, until it is asked to end
STEPS_AFTER = 2  # optimizer steps that a training takes after a fault that must not end it


def schedule(faults: Sequence[Fault], rounds: int, seed: int, in_turn: bool) -> list[Fault]:
    """Return the fault of each round: one after another, or shuffled, and again once each was drawn."""
    turns = -(-rounds // len(faults))
    shuffled = [Random(f"{seed} turn {turn}").sample(faults, len(faults)) for turn in range(turns)]
    return [fault for turn in shuffled for fault in (faults if in_turn else turn)][:rounds]


def draw_moment(random: Random, fault: Fault) -> tuple[str, int, int]:
    """Draw the moment of a fault: a fault point, the number of times it is reached, and the rank that pauses there."""
    step = ("optimizer step", random.randint(2, 5), random.randrange(2))
    points = [step, step, ("validation batch", 1, 0)]  # a step twice as often
    points += [("file replacement", random.randint(3, 9), 0), ("flush to disk", random.randint(3, 9), 0)]
    return step if "loader" in fault.name else random.choice(points)  # between epochs there is no loader


class Soak:
    """Rounds on a cluster, with one training after another."""

    def __init__(self, cluster: Cluster, seed: int) -> None:
        self.cluster, self.seed = cluster, seed
        self.run, self.trainings = "", 0
        self.undisturbed("reference")
        self.oracle = Oracle(cluster, cluster.disk / "reference")
        self.next_training()

    def next_training(self) -> None:
        """Start a training anew."""
        if self.run:
            shutil.rmtree(self.cluster.disk / self.run, ignore_errors=True)
        self.trainings += 1
        self.run = f"training{self.trainings}"

    def undisturbed(self, run: str, step: int = 0) -> None:
        """Train to the end, or ask the training to end after an optimizer step."""
        attempt = Attempt(self.cluster, run, Start(), ("optimizer step", step, 0) if step else None)
        try:
            if step and attempt.until(attempt.paused, WHOLE_SECONDS):
                attempt.ask_to_end()
                attempt.go()
            if not attempt.until(attempt.ended, WHOLE_SECONDS) or (not step and not self.cluster.finished(run)):
                sys.exit(f"error: the undisturbed training failed: {attempt.output()}")
        finally:
            attempt.kill()

    def play(self, number: int, fault: Fault) -> list[str]:
        """Play a round, print what came of it, and return what is wrong."""
        if self.cluster.finished(self.run):
            self.next_training()
        began, random = time.monotonic(), Random(f"{self.seed} {number}")
        point, times, rank = draw_moment(random, fault)
        first = self.cluster.step(self.run)
        title = f"round {number:3d} from step {first:3d}  {fault.name:<45} at {f'{point} {times}, rank {rank}':<36}"
        with ExitStack() as stack:
            try:
                start = stack.enter_context(fault.before(self.cluster, self.run, random))
                resumed = self.cluster.step(self.run)
                attempt = Attempt(self.cluster, self.run, start, (point, times, rank % len(start.machines)))
                stack.callback(attempt.kill)
                result, problems = self.strike(attempt, fault)
            except NotHere as reason:
                print(title, f"skipped: {reason}", flush=True)
                return []
            completed = resumed + times if point == "optimizer step" else self.cluster.step(self.run)
            problems += self.oracle.check(attempt, fault.ends and result != "finished before")
        if result.startswith("ended") and (lost := completed - self.cluster.step(self.run)) > 0:
            result += f", {lost} steps lost"
        if self.cluster.finished(self.run):
            problems += self.oracle.compare_end(self.run)
        print(title, f"{result} ({time.monotonic() - began:.0f} s)", flush=True)
        if problems:
            print(*(f"    FAILED: {problem}" for problem in problems), sep="\n")
            print(f"    to repeat it, beside the other flags: --round {number} --from-step {first}", flush=True)
        return problems

    def strike(self, attempt: Attempt, fault: Fault) -> tuple[str, list[str]]:
        """Let the fault happen at its moment, and wait for what must follow; return the result, and what is wrong."""
        if not attempt.until(attempt.paused, START_SECONDS):
            if attempt.ended() and self.cluster.finished(attempt.run):
                return "finished before", []
            return "-", [f"the moment did not come in {START_SECONDS:g} s: {attempt.output()}"]
        problems, struck = [], time.monotonic()
        with fault.during(attempt):
            attempt.go()
            if fault.seconds is None:
                self.follow(attempt, fault)
            else:
                time.sleep(fault.seconds)
        followed = self.follow(attempt, fault)
        # If the training came to its last epoch while it could not save, that is an error.
        unsaved = fault.disk and any(" cannot be written: " in text for text in attempt.output().values())
        if not followed and not unsaved:
            what = "ended" if fault.ends else "gone on"
            problems.append(f"it has not {what} in {END_SECONDS:g} s: {attempt.output()}")
        result = f"ended after {time.monotonic() - struck:.0f} s" if attempt.ended() and fault.ends else "went on"
        attempt.ask_to_end()
        if not attempt.until(attempt.ended, END_SECONDS):
            problems.append(f"it has not ended {END_SECONDS:g} s after SIGTERM")
        return result, problems

    def follow(self, attempt: Attempt, fault: Fault) -> bool:
        """Wait until the training has ended, if the fault must end it, or gone on; return whether it has.

        A machine whose only training process is stopped cannot notice that the others have ended: it is asked to end.
        """
        if fault.ends:
            if not attempt.until(attempt.ended, ALONE_SECONDS):
                attempt.ask_to_end()
            return attempt.until(attempt.ended, END_SECONDS - ALONE_SECONDS)
        if fault.disk and fault.seconds is None:  # no state shows that it goes on
            if not attempt.ended():
                time.sleep(DISK_SECONDS)
                attempt.ask_to_end()
            return attempt.until(attempt.ended, END_SECONDS)
        target = self.cluster.step(attempt.run) + STEPS_AFTER
        attempt.until(lambda: self.cluster.step(attempt.run) >= target, END_SECONDS)
        return self.cluster.step(attempt.run) >= target or self.cluster.finished(attempt.run)


def main() -> None:
    """Play the rounds and print each of them; exit with 1 if one has failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=EPOCHS, help="of each training")
    parser.add_argument("--only", nargs="+", default=[], metavar="FAULT", help="these faults only, one after another")
    parser.add_argument("--round", type=int, help="play this round only")
    parser.add_argument("--from-step", type=int, default=0, help="with --round: optimizer step at which it begins")
    parser.add_argument("--folder", type=Path, help="new folder for everything that is written, and kept")
    parser.add_argument("--list", action="store_true", help="list the faults")
    options = parser.parse_args()
    known = {fault.name: fault for fault in catalogue()}
    if options.list:
        return print(*known, sep="\n")
    if unknown := sorted(set(options.only) - set(known)):
        sys.exit(f"error: there is no fault named {', '.join(unknown)}; see --list")
    faults = [known[name] for name in options.only or known]
    numbers = range(options.rounds) if options.round is None else range(options.round, options.round + 1)
    order = schedule(faults, numbers.stop, options.seed, in_turn=bool(options.only))
    folder = options.folder or Path(tempfile.mkdtemp(prefix="lockstep-chaos-"))
    cluster, failed = Cluster(folder, options.epochs), []
    with two_machines(cluster):
        soak = Soak(cluster, options.seed)
        if options.from_step:
            soak.undisturbed(soak.run, options.from_step)
        for number in numbers:
            if soak.play(number, order[number]):
                failed.append(number)
                keep, ignored = folder / "failed" / f"round{number}", shutil.ignore_patterns("checkpoint", "wandb")
                shutil.copytree(cluster.disk / soak.run, keep, ignore=ignored)
                soak.next_training()
    print(f"failed rounds: {failed}; see {folder}" if failed else "no round failed")
    if not options.folder and not failed:
        shutil.rmtree(folder)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
