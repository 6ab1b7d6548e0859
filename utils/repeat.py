"""Train a run again and compare: `python -m utils.repeat RUN`.

Differences from the run's receipt.yaml come first (train.py compares data, weights and environment: utils/receipt.py),
then a training in a new folder. Exit code 0 for the same bytes, 1 for others, 2 if it cannot be repeated here.
"""

from __future__ import annotations

import argparse
import csv
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

from utils.compare_runs import HASHES, compare, described
from utils.errors import UserError
from utils.files import ROOT, SETTINGS_FILE, numbered_folder, read_yaml
from utils.receipt import RECEIPT, REPEATED, code_inputs, differences, require_inputs


def repeat(run: Path, changes: dict[str, object], check: bool, flags: Sequence[str]) -> int:
    """Repeat a run with `changes` of its settings; return the exit code. Raises `UserError`."""
    then, settings = read_yaml(run / RECEIPT), read_yaml(run / SETTINGS_FILE)
    require_inputs(code_inputs(settings), then)
    print(*(f"resumed: {line}\n" for line in then["resumed"]), sep="", end="")
    folder = numbered_folder(run.absolute().parent, f"{run.name}-repeat", exist_ok=False)
    place = {"project": str(folder.parent), "name": folder.name, "exist_ok": True}
    changes = {"processes": then["environment"]["processes"], **changes, **place}
    for name, content in ((SETTINGS_FILE, {**settings, **changes}), (REPEATED, {**then, "check": check})):
        (folder / name).write_text(yaml.safe_dump(content, sort_keys=False, allow_unicode=True))
    # It has settings and no state, so it starts with those.
    words = ["--resume", "auto", "--project", str(folder.parent), "--name", folder.name, "--exist-ok", *flags]
    variables = {**os.environ, "OMP_NUM_THREADS": str(settings["threads"])}
    code = subprocess.run([sys.executable, str(ROOT / "train.py"), *words], env=variables).returncode
    if not (folder / RECEIPT).exists():
        shutil.rmtree(folder)
    if code or check:
        return 2 if code else 0
    results = differences(read_yaml(folder / RECEIPT)["results"], then["results"])
    print(f"{folder}:", result := first_difference(run, folder) or "; ".join(results.values()) or "the same bytes")
    return int(result != "the same bytes")


def first_difference(run: Path, again: Path) -> str:
    """Return in which step of hashes.csv, else in which epoch of results.csv, two runs differ; '' if in none."""
    if (run / HASHES).is_file():
        result = compare(run, again)
        return "" if result["same"] else f"differs first at {described(result)[-1]}"
    tables = [[*csv.DictReader((folder / "results.csv").read_text().splitlines())] for folder in (run, again)]
    for one, two in zip(*tables, strict=False):
        if names := [name for name in one if one[name] != two.get(name)]:
            return f"differs first in epoch {one['epoch']}: {', '.join(names)}"
    return "" if len(tables[0]) == len(tables[1]) else f"{len(tables[0])} epochs then, {len(tables[1])} now"


def main(argv: Sequence[str] | None = None) -> None:
    """Repeat a run from the command line and exit."""
    parser = argparse.ArgumentParser("python -m utils.repeat", description="Train a run again, and compare.")
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder of train.py")
    parser.add_argument("--check", action="store_true", help="compare data, weights, code and machine; do not train")
    for name in ("data", "weights", "device"):
        parser.add_argument(f"--{name}", help="as of train.py; by default as the run had it")
    parser.add_argument("--processes", type=int, help="as of train.py; by default as many as the run had")
    options, flags = parser.parse_known_args(argv)
    changes = {name: value for name, value in vars(options).items() if value is not None}
    try:
        sys.exit(repeat(changes.pop("run"), changes, changes.pop("check"), flags))
    except (UserError, OSError, KeyError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
