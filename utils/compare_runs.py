"""Name the first difference of two runs trained with --hashes: `python -m utils.compare_runs A B`.

Differences of settings, data, versions or threads come first, then the first step whose hashes differ and what differs
in it, in the order of a step. Exit code 0 if all steps are equal, 1 if not, 2 if the runs cannot be compared.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Mapping, Sequence
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from utils.errors import UserError, first_line, plural, public, quoted
from utils.files import read_regular, read_yaml

if TYPE_CHECKING:
    from torch import Tensor

HASHES, FORMAT_FILE, RECEIPT = "hashes.csv", "hashes.yaml", "receipt.yaml"  # in a run folder
NOT_HASHED = "above 1 GiB, without --hashes"  # in a receipt, for the content of images
COUNTERS = ("step", "epoch", "batch")  # columns of hashes.csv that are not hashes; the batch is the step's last
FORMAT = 2  # of hashes.yaml: how hashes are computed; only equal formats can be compared
BY_PARAMETER = ("gradients", "weights")  # columns with the sum of the columns of all parameters: `gradients NAME`


def read_hashes(run: Path) -> list[dict[str, str]]:
    """Return the rows of hashes.csv, one per optimizer step, without one that a kill cut off. Raises `UserError`."""
    file = run / HASHES
    try:
        lines = read_regular(file).decode().rpartition("\n")[0].splitlines()
        header, *rows = csv.reader(lines or [""])
        kinds = {(len(row), *map(str.isdecimal, row[:3])) for row in rows}
        if header[:3] != [*COUNTERS] or kinds != {(len(header), True, True, True)}:
            raise ValueError("it is damaged, or has no optimizer steps")
    except (OSError, ValueError, csv.Error) as error:
        raise UserError(f"{file} cannot be read: {first_line(error)}; train again with --hashes") from None
    if (form := read_yaml(run / FORMAT_FILE).get("format")) != FORMAT:
        raise UserError(f"{run / FORMAT_FILE}: format {quoted(form)} cannot be compared, only {FORMAT}; train again")
    return [dict(zip(header, row, strict=True)) for row in rows]


def differences(now: Mapping[str, Any], then: Mapping[str, Any]) -> dict[str, str]:
    """Return a line for each difference of two mappings of values or mappings, by name: `torch 2.15.0, was 2.14.1`."""
    flat = []
    for values in (now, then):
        parts = {key: part if isinstance(part, dict) else {"": part} for key, part in values.items()}
        flat.append({f"{key} {name}".strip(): part[name] for key, part in parts.items() for name in part})
    pairs = {name: [part.get(name, "none") for part in flat] for name in {**flat[1], **flat[0]}}
    changed = {name: pair for name, pair in pairs.items() if pair[0] != pair[1] and NOT_HASHED not in pair}
    return {name: f"{name} {public(str(one), 40)}, was {public(str(two), 40)}" for name, (one, two) in changed.items()}


def compare(*runs: Path) -> dict[str, Any]:
    """Return whether two runs are the `same`, known `causes`, and what differs in the first step that does."""
    steps = [read_hashes(run) for run in runs]
    receipts = [read_yaml(run / RECEIPT) for run in runs]
    one, two = ({**receipt.get("inputs", {}), **receipt.get("environment", {})} for receipt in receipts)
    counts, causes = [len(rows) for rows in steps], differences(two, one)
    result = {"same": counts[0] == counts[1], "steps": counts, "causes": causes}
    for row, other in zip(*steps, strict=False):
        if row != other:
            different = [name for name in {**row, **other} if row.get(name) != other.get(name)]
            kinds = dict.fromkeys(name.partition(" ")[0] for name in different)
            by_parameter = [name.split(" ", 1) for name in different if " " in name]
            return {
                **result,
                "same": False,
                **{name: int(row[name]) for name in COUNTERS},
                "equal": [name for name in row if name not in (*kinds, *COUNTERS) and " " not in name],
                "different": [*kinds],
                "parameters": {kind: [name for of, name in by_parameter if of == kind] for kind in BY_PARAMETER},
            }
    return result


def describe(result: Mapping[str, Any]) -> list[str]:
    """Return the lines that say what `compare` has found."""
    lines, (shorter, longer) = [*result["causes"].values()], sorted(result["steps"])
    if "step" not in result:
        rest = "" if result["same"] else f", then one run goes on to step {longer}"
        return [*lines, f"the same: {plural(shorter, 'step')}{rest}"]
    parts = []
    for name in result["different"]:
        first, *other_names = result["parameters"].get(name) or [""]
        rest = f" and {plural(len(other_names), 'other')}" if other_names else ""
        parts.append(f"{name} of {first}{rest}" if first else name)
    equal = f"{', '.join(result['equal'])} are equal; " if result["equal"] else ""
    position = f"step {result['step']} (epoch {result['epoch']}, batch {result['batch']})"
    return [*lines, f"{position}: {equal}these differ: {', '.join(parts)}"]


def tensors_hash(state: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of the names and the bytes of tensors."""
    import torch  # only here, because a comparison of hashes needs none

    digest = sha256()
    for name, tensor in state.items():
        digest.update(name.encode() + tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def weights_hash(run: Path) -> str:
    """Return the SHA-256 of the names and the bytes of all tensors in weights/last.pt. Raises `UserError`."""
    import torch  # only here, as in `tensors_hash`

    file = run / "weights" / "last.pt"
    try:
        return tensors_hash(torch.load(BytesIO(read_regular(file)), map_location="cpu")["state"])
    except Exception as error:  # of any class, if the file is not one of train.py
        raise UserError(f"{file} cannot be read: {first_line(error)}; train the run again") from None


def main(argv: Sequence[str] | None = None) -> None:
    """Compare two runs, or final weights with a hash, print the result and exit."""
    parser = argparse.ArgumentParser("python -m utils.compare_runs", description="Name what differs first.")
    parser.add_argument("run", type=Path, metavar="A", help="run folder, trained with --hashes")
    parser.add_argument("other", type=Path, nargs="?", metavar="B", help="run folder to compare with")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--expect", metavar="HASH", help="SHA-256 that the final weights of A must have")
    options = parser.parse_args(argv)
    try:
        result: dict[str, Any] = compare(options.run, options.other) if options.other else {"same": True}
        is_needed = options.expect or not options.other or (options.run / "weights" / "last.pt").exists()
        result["weights"] = weights_hash(options.run) if is_needed else "not saved yet"
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    lines = describe(result) if options.other else []
    print(json.dumps(result) if options.json else "\n".join([*lines, f"SHA-256 of A's weights: {result['weights']}"]))
    sys.exit(not result["same"] or options.expect not in (None, result["weights"]))


if __name__ == "__main__":
    main()
