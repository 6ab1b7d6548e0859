"""The settings of a training, in one chain: the command line, the run that is resumed, the defaults, the refusals.

train.py calls `read_settings`; job.py calls `with_defaults` and `resolve` with what it has read of task and data, then
`refuse_flags`. Nothing replaces the result.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from utils.config.flags import AUTO, BUILT_IN_JOB, SHARDABLE_OPTIMIZERS, TrainOptions, as_flag, flags_of, profile_window
from utils.config.hyperparameters import OVERRIDE_PREFIX, Recipe, defaults_of_hyp, from_mapping, read_hyperparameters
from utils.config.parser import given_flags
from utils.config.resume import RecipeOf, continued_run
from utils.distributed.deepspeed import is_requested
from utils.distributed.launch import connect, select_device_type
from utils.distributed.ranks import broadcast_from_main, world_size
from utils.distributed.tree import check_logical_processes
from utils.errors import UserError
from utils.user_code import package_version


@dataclass(frozen=True)
class Settings:
    """The flags of train.py over their defaults, and the hyperparameters of the task.

    Attributes:
        flags: flags of the command line, or arguments of a call from Python, by name
        saved: content of the resumed run's settings.yaml, None for a new run
        is_fixed: whether the options come from a resumed run and already include the defaults of task and data set
        hyp: hyperparameters of the task
        origin: licence and origin of the weights, which are stored in every file made from them
    """

    options: TrainOptions
    flags: Mapping[str, Any] = field(default_factory=dict)
    saved: Mapping[str, Any] | None = None
    is_fixed: bool = False
    hyp: Recipe = field(default_factory=Recipe)
    origin: Mapping[str, Any] = field(default_factory=dict)

    def with_defaults(self, *defaults: Mapping[str, Any]) -> Settings:
        """Return the settings over further defaults of flags, the last of which counts; a resumed run has all."""
        values = {} if self.is_fixed else {name: value for layer in defaults for name, value in layer.items()}
        changed = {name: value for name, value in values.items() if name not in self.flags}
        return dataclasses.replace(self, options=dataclasses.replace(self.options, **changed))

    def resolve(self, recipe: type[Recipe], choose: Callable[[], str], **values: Any) -> Settings:
        """Return the settings with the hyperparameters of a task, the flags that follow from them, and other `values`.

        `choose` returns what --hyp auto stands for. Raises `UserError` for a wrong hyperparameter file or flag.
        """
        if self.saved:
            hyp = from_mapping(recipe, self.saved["hyperparameters"], f"settings.yaml of {self.options.resume}")
            return dataclasses.replace(self, hyp=hyp, **values)
        name = choose() if self.options.hyp == AUTO else self.options.hyp
        hyp = read_hyperparameters(name, recipe, self.options.overrides)
        options = dataclasses.replace(self.options, hyp=name)
        defaults, settings = defaults_of_hyp(name), dataclasses.replace(self, options=options, hyp=hyp, **values)
        return settings.with_defaults(hyp.flags(settings.with_defaults(defaults).options.epochs), defaults)

    def content(
        self, model_yaml: Mapping[str, Any], imgsz: int, batch_size: int, run_id: str, threads: int
    ) -> dict[str, Any]:
        """Return the content of settings.yaml, with the model's image size and what --batch-size -1 has measured."""
        sizes: dict[str, Any] = {"imgsz": imgsz} | ({} if self.options.batch_size > 0 else {"batch_size": batch_size})
        parts = {"hyperparameters": vars(self.hyp), "model": model_yaml, **self.origin}
        if version := package_version(self.options.optimizer):
            sizes["optimizer_version"] = version
        return {**vars(self.options), **sizes, "threads": threads, "wandb_id": run_id, **parts}


def read_settings(
    argv: Sequence[str], recipe_of: RecipeOf, hyperparameters: Callable[[], Collection[str]] = tuple
) -> Settings:
    """Return the settings that a command line starts or continues with; the main process decides for all.

    If no flag names data, model, weights or hyperparameters, the built-in job gives the defaults. See `given_flags` and
    `continued_run` for the arguments and errors.
    """
    flags = given_flags(TrainOptions, argv, hyperparameters=hyperparameters)
    job = {} if {"data", "cfg", "weights", "hyp"} & flags.keys() else BUILT_IN_JOB
    settings = Settings(options := TrainOptions(**{**job, **flags}), flags)
    resume = partial(continued_run, options, flags, recipe_of)
    # With --resume auto the doctor has all flags, and names the processes that cannot be reached.
    if not options.resume or (world_size() > 1 and options.doctor and options.resume == AUTO):
        return settings
    if world_size() == 1:  # the processes that `spawn` starts get the settings from their parent
        return dataclasses.replace(settings, **resume())
    connect(options.device, options.dist_timeout)
    return dataclasses.replace(settings, **broadcast_from_main(resume))


def refuse_flags(
    options: Any,
    flags: Mapping[str, Any],
    features: Collection[str],
    model: str,
    unused_keys: Collection[str] = (),
    left_out: Collection[tuple[str, str]] = (),
) -> None:
    """Raise `UserError` for the first refused flag in a table of conditions and sentences; nothing is written yet.

    Args:
        flags: those that the user gives, by name; one that is off or 0 needs no feature
        features: what the model, described by `model`, has of what flags need; see `Task.features`
        unused_keys: hyperparameters that it does not use
        left_out: flags that its predictions leave out, with the message of each
    """
    table: list[tuple[object, str]] = []
    for option in flags_of(type(options)):
        name, needed = as_flag(option.name), option.metadata["needs"]
        is_missing = needed and needed not in features and flags.get(option.name)
        table += [(is_missing, f"{name} needs {needed}, which {model} does not have; leave it out")]
    for key in flags.get("overrides", {}):
        table += [(key in unused_keys, f"{OVERRIDE_PREFIX}{key} has no effect on {model}; leave it out")]
    table += [(flags.get(key), message) for key, message in left_out]
    if isinstance(options, TrainOptions):
        size, logical, window = options.batch_size, options.logical_processes, options.profile
        processes, noun = logical or world_size(), "logical processes" if logical else "processes"
        table += [
            (not size or (size > 0 and size % processes),
             f"--batch-size {size} cannot be shared evenly; give a multiple of {processes}, the number of {noun}, or "
             "-1 for what the GPU holds"),
            (window and not any(profile_window(window)),
             f"--profile {window}: give the first and the last optimizer step, counted from 1, such as 10:15"),
            (options.hashes and is_requested(),
             "--hashes cannot see DeepSpeed's gradients; leave it out, or use another launch file"),
            (options.optimizer not in SHARDABLE_OPTIMIZERS and is_requested(),
             f"--optimizer {options.optimizer} may need whole parameters, and DeepSpeed gives it parts; use one of "
             f"{', '.join(SHARDABLE_OPTIMIZERS)}, or another launch file"),
            (options.no_deterministic and logical,
             "--no-deterministic cannot be used with --logical-processes, which promises equal bytes"),
            (options.rect and options.image_weights,
             "--rect and --image-weights both determine the order of the images; leave one of them out"),
        ]  # fmt: skip
    for is_refused, sentence in table:
        if is_refused:
            raise UserError(sentence)
    if isinstance(options, TrainOptions):
        check_logical_processes(logical, size, options.sync_bn and select_device_type(options.device) != "cpu")
