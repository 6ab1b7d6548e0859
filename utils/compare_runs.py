"""Name the first difference of two runs trained with --hashes: `python -m utils.compare_runs A B`.

Differences of settings, data, versions or threads come first, then the first step whose hashes differ and what differs
in it, in the order in which a step computes: pixels, targets, loss terms, gradients, weights. Exit code 0 if all steps
are equal, 1 if not, 2 if the runs cannot be compared.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from utils.config.settings import curve_settings
from utils.errors import UserError, plural, shortened
from utils.files import read_yaml

HASHES, MACHINE = "hashes.csv", "hashes.yaml"  # in a run folder
COUNTERS = ("step", "epoch", "batch")  # columns of hashes.csv that are no hashes; the batch is the step's last
BY_PARAMETER = ("gradients", "weights")  # columns with the sum of the columns of all parameters: `gradients NAME`
MAX_CAUSES = 6  # differences before the first step that are printed


def read_hashes(run: Path) -> list[dict[str, str]]:
    """Return the rows of a run's hashes.csv, one per optimizer step; a row cut off by a kill is left out."""
    path = run / HASHES
    if not path.is_file():
        raise UserError(f"{run} has no {HASHES}; train both runs with --hashes")
    with path.open(newline="") as file:
        return [row for row in csv.DictReader(file) if None not in row.values()]


def compare(first: Path, second: Path) -> dict[str, Any]:
    """Return `same`, the `causes` known before any step, and of the first different step what is equal and what not."""
    before = [
        {**curve_settings(read_yaml(run / "settings.yaml")), **read_yaml(run / MACHINE)} for run in (first, second)
    ]
    causes = {
        key: [values.get(key) for values in before]
        for key in dict.fromkeys([*before[0], *before[1]])
        if before[0].get(key) != before[1].get(key)
    }
    rows, others = read_hashes(first), read_hashes(second)
    result: dict[str, Any] = {"same": len(rows) == len(others), "steps": [len(rows), len(others)], "causes": causes}
    for row, other in zip(rows, others, strict=False):
        if row != other:
            names = [name for name in row.keys() | other.keys() if row.get(name) != other.get(name)]
            columns = [name for name in row if name in COUNTERS or " " not in name]
            return {
                **result,
                "same": False,
                **{name: int(row[name]) for name in COUNTERS},
                "equal": [name for name in columns if name not in (*names, *COUNTERS)],
                "different": [name for name in columns if name in names],
                "parameters": {kind: _parameters(row, other, kind) for kind in BY_PARAMETER if kind in names},
            }
    return result


def _parameters(row: Mapping[str, str], other: Mapping[str, str], kind: str) -> list[str]:
    """Return the names of the parameters whose hashes differ."""
    return [name.partition(" ")[2] for name in row if name.startswith(f"{kind} ") and row[name] != other.get(name)]


def described(result: Mapping[str, Any]) -> list[str]:
    """Return the lines that say what `compare` has found."""
    causes = [
        f"{key} differs: {shortened(repr(one), 60)} and {shortened(repr(two), 60)}"
        for key, (one, two) in result["causes"].items()
    ]
    lines, steps = causes[:MAX_CAUSES], result["steps"]
    if len(causes) > MAX_CAUSES:
        lines.append(f"and {plural(len(causes) - MAX_CAUSES, 'more setting')}")
    if "step" not in result:
        end = f"the same: {plural(min(steps), 'step')}"
        return [*lines, end if result["same"] else f"{end}, then only one run goes on, to step {max(steps)}"]
    place = f"step {result['step']} (epoch {result['epoch']}, batch {result['batch']})"
    equal = f"{' and '.join(result['equal'])} are equal; " if result["equal"] else ""
    found = []
    for name in result["different"]:
        parameters = result["parameters"].get(name)
        rest = f" and {plural(len(parameters) - 1, 'other')}" if parameters and len(parameters) > 1 else ""
        found.append(f"{name} in {parameters[0]}{rest}" if parameters else name)
    return [*lines, f"{place}: {equal}different are {', '.join(found)}"]


def weights_hash(run: Path) -> str:
    """Return the SHA-256 of the names and the bytes of all tensors in weights/last.pt."""
    import torch  # only here, because a comparison needs none

    digest = sha256()
    for name, tensor in torch.load(run / "weights" / "last.pt", map_location="cpu")["state"].items():
        digest.update(name.encode() + tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def main(argv: Sequence[str] | None = None) -> None:
    """Compare two runs, or final weights with a hash, print the result and exit."""
    parser = argparse.ArgumentParser(
        "python -m utils.compare_runs", description="Name the first difference of two runs."
    )
    parser.add_argument("run", type=Path, metavar="A", help="run folder, trained with --hashes")
    parser.add_argument("other", type=Path, nargs="?", metavar="B", help="run folder to compare with")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--expect", metavar="HASH", help="SHA-256 of the final weights, with which A is compared too")
    options = parser.parse_args(argv)
    try:
        result = compare(options.run, options.other or options.run)
        result["weights"] = weights_hash(options.run)
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    expected = options.expect in (None, result["weights"])
    lines = described(result) if options.other else []
    lines.append(f"SHA-256 of the weights of {options.run}: {result['weights']}")
    if not expected:
        lines.append(f"expected: {options.expect}")
    print(json.dumps(result) if options.json else "\n".join(lines))
    sys.exit(not (result["same"] and expected))


if __name__ == "__main__":
    main()
