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
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from utils.compare_runs import HASHES, RECEIPT, compare, describe, differences
from utils.config.flags import as_flag
from utils.errors import UserError
from utils.files import ROOT, SETTINGS_FILE, numbered_folder, read_yaml
from utils.receipt import REPEATED, USER_FILES, code_inputs, require_inputs


def repeat(run: Path, check: bool, changes: dict[str, Any], flags: Sequence[str]) -> int:
    """Repeat a run with `changes` of its settings; return the exit code. Raises `UserError`."""
    then, settings = read_yaml(run / RECEIPT), read_yaml(run / SETTINGS_FILE)
    if "threads" not in settings or not {"inputs", "environment", "results", "resumed"} <= then.keys():
        raise UserError(f"{run} is not the folder of a training run with a whole {RECEIPT}; name one that is")
    paths = dict(pairwise(flags))
    user_files = {name: paths[as_flag(name)] for name in USER_FILES if as_flag(name) in paths}
    require_inputs(code_inputs(settings | user_files), then)
    print("".join(f"when the run was resumed: {line}\n" for line in then["resumed"]), end="", flush=True)
    folder = numbered_folder(run.absolute().parent, f"{run.name}-repeat", exist_ok=False)
    settings |= {"processes": then["environment"]["processes"], **changes}
    settings |= {"project": str(folder.parent), "name": folder.name, "exist_ok": True}
    for name, content in {SETTINGS_FILE: settings, REPEATED: {**then, "check": check}}.items():
        (folder / name).write_text(yaml.safe_dump(content, sort_keys=False, allow_unicode=True))
    # With settings and without a state it is a run that starts anew.
    words = ["--resume", "auto", "--project", str(folder.parent), "--name", folder.name, "--exist-ok", *flags]
    variables = {**os.environ, "OMP_NUM_THREADS": str(settings["threads"])}
    code = subprocess.run([sys.executable, str(ROOT / "train.py"), *words], env=variables).returncode
    if not (folder / RECEIPT).exists():
        shutil.rmtree(folder)
    if code or check:
        return 2 if code else 0
    results = differences(read_yaml(folder / RECEIPT)["results"], then["results"])
    found = first_difference(run, folder) or "; ".join(results.values())
    print(f"{folder}: {found or 'the same bytes'}")
    return 1 if found else 0


def first_difference(run: Path, again: Path) -> str:
    """Return in which step of hashes.csv, else in which epoch of results.csv, two runs differ; '' if in none."""
    if (run / HASHES).is_file():
        result = compare(run, again)
        return "" if result["same"] else f"differs first at {describe(result)[-1]}"
    tables = [csv.DictReader((folder / "results.csv").read_text().splitlines()) for folder in (run, again)]
    for one, two in zip(*tables, strict=False):
        if names := [name for name in one if one[name] != two.get(name)]:
            return f"differs first in epoch {one['epoch']}: {', '.join(names)}"
    return ""


def main(argv: Sequence[str] | None = None) -> None:
    """Repeat a run from the command line and exit."""
    parser = argparse.ArgumentParser("python -m utils.repeat", description="Train a run again, and compare.")
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder of train.py")
    parser.add_argument("--check", action="store_true", help="compare data, weights, code and machine; do not train")
    for flag, kind in {"--data": str, "--weights": str, "--device": str, "--processes": int}.items():
        parser.add_argument(flag, type=kind, help="as of train.py; by default the run's")
    options, flags = parser.parse_known_args(argv)
    changes = {name: value for name, value in vars(options).items() if value and name not in ("run", "check")}
    try:
        sys.exit(repeat(options.run, options.check, changes, flags))
    except (UserError, OSError, KeyError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
