"""Search for hyperparameters with optuna: `python examples/tune.py --data my.yaml --trials 30` (pip install optuna).

A trial is a short run of train.py, which gets all other flags; change `SPACE` to your job. The results are in
runs/tune/trials.log, so that the same command continues a search, and several machines may share it by a common folder.
The best values are printed: write them into a file for --hyp.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this repository, whatever the current folder is

import train
from utils.config.flags import TrainOptions
from utils.config.parser import given_flags
from utils.errors import UserError

# Ranges of hyperparameters, and whether small differences count most at the low end.
SPACE = {
    "lr0": (1e-4, 1e-2, True),
    "weight_decay": (1e-5, 1e-2, True),
    "mosaic": (0.0, 1.0, False),
    "scale": (0.1, 0.9, False),
    "hsv_v": (0.0, 0.9, False),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=30)
    parser.add_argument("--data", default="data/shapes.yaml")
    parser.add_argument("--weights", default="")
    parser.add_argument("--cfg", default="", help="model YAML; '': the model in --weights, or yolov5n.yaml")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--folder", "--project", type=Path, default=Path("runs/tune"))
    flags, others = parser.parse_known_args()
    try:
        more = given_flags(TrainOptions, others)
        if "name" in more:
            raise UserError("--name: each trial has a name of its own; leave it out")
        more |= more.pop("overrides", {})  # of --hyp.KEY
    except UserError as error:
        parser.error(str(error))
    import optuna
    from optuna.storages.journal import JournalFileBackend

    def fitness(trial: optuna.Trial) -> float:
        values = {name: trial.suggest_float(name, low, high, log=log) for name, (low, high, log) in SPACE.items()}
        cfg = flags.cfg or ("" if flags.weights else "yolov5n.yaml")
        job: dict[str, Any] = {**more, "data": flags.data, "weights": flags.weights, "cfg": cfg, "epochs": flags.epochs}
        job |= {"project": flags.folder, "name": f"trial{trial.number}", "no_wandb": True}
        try:
            result = train.run(**{**job, **values})
        except UserError as error:  # such as weights that have grown to infinity
            print(f"trial {trial.number} failed: {error}")
            if trial.number >= 2 and not study.get_trials(deepcopy=False, states=succeeded):
                study.stop()  # the reason is not in the values
            raise optuna.TrialPruned from error
        return float(result["fitness"])

    flags.folder.mkdir(parents=True, exist_ok=True)
    storage = optuna.storages.JournalStorage(JournalFileBackend(str(flags.folder / "trials.log")))
    name = " ".join(map(str, (flags.data, flags.weights, flags.cfg, flags.epochs, *others)))
    study = optuna.create_study(study_name=name, storage=storage, direction="maximize", load_if_exists=True)
    succeeded = (optuna.trial.TrialState.COMPLETE,)
    count = flags.trials - len(study.get_trials(deepcopy=False, states=succeeded))
    study.optimize(fitness, count, callbacks=[optuna.study.MaxTrialsCallback(flags.trials, succeeded)])
    if not study.get_trials(deepcopy=False, states=succeeded):
        sys.exit("error: no trial has succeeded; see the messages above")
    print(f"best fitness {study.best_value:.4f} with {study.best_params}")


if __name__ == "__main__":
    main()
