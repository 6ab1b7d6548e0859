"""The job of a training: what the flags of train.py name, read and checked.

train.py calls `read_job`, which resolves the settings with every default of the task and the data YAML, then
`load_model`, `open_data`, `measure` and `write_inputs`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from data.data_yaml import read_data
from data.dataset import DataOptions, DataSet, DataSource, first_batch
from models.loading import StartingPoint, add_user_code, head_tensors, load_and_freeze, starting_point
from models.tasks import describe_model
from models.tasks.contract import Model, Task, compute_terms
from models.weights import Origin, same_names
from utils.batch import Batch, PixelFormat
from utils.checkpoint import Identity, MeasuredConfig
from utils.compare_runs import tensors_hash
from utils.config.flags import select
from utils.config.hyperparameters import Recipe, is_shipped, log_unused
from utils.config.settings import Settings, refuse_flags
from utils.console import log
from utils.distributed.ranks import broadcast_from_main, world_size
from utils.distributed.second_thread import fix_threads
from utils.errors import UserError, plural
from utils.files import format_paths
from utils.receipt import Receipt, environment, split_inputs, user_files
from utils.run import Run
from utils.summary import evenly_spaced, fitness_weights, metric_columns
from utils.tracking.run_log import RunLog, wandb_run_id
from utils.tracking.trackers import add_user_trackers
from utils.training import memory
from utils.training.optimizer import build_optimizer
from utils.user_code import class_named

VALIDATION_BATCH = 32  # images per process and validation batch, at most
REPEATING_BATCH = 64  # largest batch that may have more images than the training set
FITTED_BATCH, FITTED_BATCHES = 16, 32  # size and number of the batches that new classes are fitted to, at most


class Data(NamedTuple):
    """A data set, and its splits, read and checked."""

    set: DataSet[Any]
    train: Any
    val: Any


class Job(NamedTuple):
    """What the flags name, read and checked: settings with all defaults, data, initial model, task and fitness."""

    settings: Settings
    source: DataSource
    start: StartingPoint
    task: Task
    fitness: Mapping[str, float]  # weights of metrics; {} for the task's own

    def draw_batch(self, batch: Batch, number: int) -> dict[str, np.ndarray]:
        """Draw a training batch as the model sees it; return the picture by its file name."""
        return {f"train_batch{number}.jpg": self.task.draw_batch(batch)}

    def load_model(self) -> tuple[Model, float | None]:
        """Build the model with its initial weights, freeze layers, and print how. Raises `UserError`.

        Also returns the share of the task's classes that the weights know; None without weights that fit the model.
        """
        settings, source, start_from, task, _ = self
        options, hyp = settings.options, settings.hyp
        if options.multi_scale:  # raises here for a model of one size only
            largest = select(DataOptions, options).largest(options.imgsz)
            task.build_model(start_from.yaml, largest, start_from.source)
        model = task.build_model(start_from.yaml, options.imgsz, start_from.source)
        weights = [start_from.weights_file] if start_from.weights_file else []
        log(format_paths({"weights": weights, "data": [source.spec.file]}))
        load_and_freeze(model, start_from, task, options)
        build_optimizer(model, options.optimizer, hyp, None, 1)  # raises here for a class or arguments that do not work
        if options.fitness:
            log(f"the best epoch is the one with the highest {options.fitness}")
        if not is_shipped(options.hyp):
            log_unused(hyp, task.unused_keys(start_from.yaml), describe_model(start_from.yaml))
        return model, start_from.pretrained_share(model, task)

    def open_data(self, model: Model) -> Data:
        """Read and check the data set. Raises `UserError`."""
        options, data_options = self.settings.options, select(DataOptions, self.settings.options)
        images = max(-(-options.batch_size // world_size()), VALIDATION_BATCH)  # in this process's batch
        batch_bytes = self.source.spec.pixels.bytes(images) * data_options.largest(model.imgsz) ** 2
        workers = memory.loader_processes(options.workers, batch_bytes)
        data = self.source.open(model.imgsz, model.stride, replace(data_options, workers=workers))
        user = data.user_augmentations("augmentations" in self.settings.flags)
        log(f"augmentations of {user.file}: {', '.join(name for name, _ in user.calls)}" if user.calls else "")
        add_user_trackers(options.log_with, "log_with" in self.settings.flags)
        splits = data.split("train", self.settings.hyp), data.split("val")
        size, count = options.batch_size, len(splits[0].images)
        if size > (most := max(count, REPEATING_BATCH)):
            raise UserError(f"--batch-size {size} of {plural(count, 'training image')}: give {most} or less")
        data.report(*splits)
        return Data(data, *splits)

    def measure(self, run: Run, model: Model, data: Data, pretrained_share: float | None) -> MeasuredConfig:
        """Adapt a new run's anchors, and measure what depends on the memory and the weights; --resume keeps it."""
        options, hyp, uncached = self.settings.options, self.settings.hyp, data.set.uncached()
        if not options.noautoanchor:
            self.task.adapt(model, data.train)
        if pretrained_share is not None:
            model.load_state_dict(broadcast_from_main(lambda: self.fitted_head(run, model, data)), strict=False)

        def train_step(size: int) -> None:
            """Run forward and backward of the model on the first images, and drop the gradients."""
            criterion, loader = self.task.criterion(model), uncached.train_loader(data.train, size, hyp, seed=0)
            batch = first_batch(loader).to(run.accelerator.device)
            with run.accelerator.autocast():
                outputs = model(self.task.inputs(batch), *criterion.hints(batch))
            terms = compute_terms(criterion, outputs, batch, self.task.loss_names_of(model), reads=True)
            criterion.objective(terms.local_means(), size).backward()  # type: ignore[no-untyped-call]
            model.zero_grad()

        device, images = run.accelerator.device, len(data.train.images)
        logical = options.logical_processes or run.accelerator.num_processes
        size, parts = memory.fitted_batch(
            options.batch_size, train_step, model, device, images, run.collectives, logical
        )
        if not options.logical_processes:
            fix_threads(run.accelerator, model, size * model.gflops)
        accumulation = hyp.accumulation(size * parts) * parts
        return MeasuredConfig(size, accumulation, pretrained_share, run.collectives.broadcast(wandb_run_id()))

    def fitted_head(self, run: Run, model: Model, data: Data) -> dict[str, Tensor]:
        """Fit the head's outputs of classes that the initial weights do not know; return the head's tensors."""
        weights, device, uncached = self.start.weights, run.accelerator.device, data.set.uncached()
        known = same_names(weights.names, self.task.names) if weights else {}
        if not (new := [number for number in self.task.names if number not in known]):
            return {}
        batches = uncached.evaluation_batches(data.train, FITTED_BATCH, square=True)
        fitted = [batches[k] for k in evenly_spaced(len(batches), FITTED_BATCHES)]
        loader = uncached.evaluation_loader(data.train, fitted)
        self.task.fit_classes(model.to(device), (batch.to(device) for batch in loader), new)
        return {name: tensor.cpu() for name, tensor in head_tensors(model).items()}

    def recipe_for(self, train: Any, batches: int, pretrained_share: float | None) -> Recipe:
        """Return the hyperparameters, for a run of `batches` from weights that know a share of the classes."""
        hyp = self.settings.hyp
        are_new = pretrained_share == 0 and "boxes" in self.task.features
        return hyp.for_boxes(train.side_lengths(1), batches) if are_new else hyp

    def receipt(self, run: Run, model: Model, data: Data) -> Receipt:
        """Return the receipt of what the run begins with, compared if it repeats another run: `check_repetition`."""
        settings, splits = self.settings, {"train": data.train, "val": data.val}
        inputs: dict[str, Any] = {"classes": [*self.task.names.values()], "hyperparameters": {**vars(settings.hyp)}}
        inputs["initial weights"] = "unknown" if settings.saved else tensors_hash(model.state_dict())  # see `begin`
        inputs |= {name: split_inputs(split, settings.options.hashes) for name, split in splits.items()}
        receipt = Receipt(inputs, environment(run.accelerator.device, run.accelerator))
        if settings.is_fixed and not settings.saved:
            receipt.check_repetition(Path(settings.options.resume))
        return receipt

    def write_inputs(
        self, run: Run, data: Data, identity: Identity, content: Mapping[str, Any], saved: Mapping[str, Any] | None
    ) -> RunLog:
        """Write settings, problems and data documents into the run folder, and start the trackers; return their log.

        Args:
            content: content of settings.yaml
            saved: state of a resumed run
        """
        source = {"yaml": str(self.source.spec.file), **identity.splits}
        run.files.write_inputs(content, [*data.train.problems, *data.val.problems])
        run.files.write_documents(data.set.documents(data.train, data.val))
        options, names = self.settings.options, list(self.task.names.values())
        run_log = RunLog(run, options, content["wandb_id"], data.val.display_image, names)
        run_log.start(content, source, saved)
        run_log.upload_dataset(self.source.spec.file, self.source.files, source)
        if not options.noplots:
            run.enable_plots("labels.csv")
        return run_log


def read_job(settings: Settings, from_main: Callable[[bool], bool] = bool) -> Job:
    """Read the files that the flags name, downloaded if necessary, and resolve the settings of `read_settings`.

    `from_main` returns the main process's value: one machine may lack weights that no flag names. Raises `UserError`.
    """
    saved, options = settings.saved, settings.options
    add_user_code(options.layers, options.task_file, settings.flags)
    spec = read_data(options.data)
    settings = settings.with_defaults(spec.defaults)
    start_from = starting_point(options.cfg, settings.options.weights, saved and saved["model"])
    task_class, model_yaml = start_from.entry.load(), start_from.yaml
    source = DataSource(spec, class_named(start_from.entry.data))
    settings = settings.with_defaults(task_class.defaults, spec.defaults)
    if task_class.prefers_trained and not (settings.is_fixed or "weights" in {**spec.defaults, **settings.flags}):
        settings = settings.with_defaults({"weights": start_from.default_weights(from_main)})
    if not saved:
        start_from = start_from.with_weights(settings.options.weights)

    def choose() -> str:
        """Return the recipe of a new run. Weights of which few tensors fit do not count."""
        trained = start_from.weights is not None
        if trained and start_from.from_yaml:  # else the model is the file's own
            task = task_class(source.names(options.single_cls), task_class.recipe())
            model = task.build_model(model_yaml, settings.options.imgsz, start_from.source)
            trained = start_from.pretrained_share(model, task) is not None
        return task_class.recipes.choose(trained, lambda: len(source.spec.listing("train").images))

    origin = Origin.recorded(saved) if saved else start_from.origin
    settings = settings.resolve(task_class.recipe, choose, origin=origin.content())
    options = settings.options
    origin.require(options.allow_licence)
    task = task_class(source.names(options.single_cls), settings.hyp, options.label_smoothing)
    features, unused_keys = task_class.features_of(model_yaml), task.unused_keys(model_yaml)
    left_out = task_class.prediction.refused().items() if task_class.prediction else ()
    flags = {} if saved else {**settings.flags, "tile": spec.tiles}
    refuse_flags(options, flags, features, describe_model(model_yaml), unused_keys, left_out)
    columns = metric_columns(task.metric_names, spec.sets.get("val", ()))
    fitness = fitness_weights(options.fitness, columns) if options.fitness else {}
    if (known := PixelFormat.of_model(model_yaml)) != spec.pixels:
        if saved:
            raise UserError(f"{spec.file} has images of {spec.pixels}, but the run began with {known}; correct that")
        model_yaml = {**model_yaml, **spec.pixels.model_keys()}
    start_from = replace(start_from, yaml=model_yaml if saved else task.model_yaml(model_yaml))
    return Job(settings, source, start_from, task, fitness)


def doctor_inputs(settings: Settings) -> tuple[Mapping[str, Any], Mapping[str, Sequence[Path]]]:
    """Return the settings of a job and its files by purpose. Raises `UserError` if the job could not start."""
    job = read_job(settings)
    job.open_data(job.load_model()[0])
    files: dict[str, Sequence[Path]] = {**job.source.files()}
    if job.start.weights_file:
        files["weights"] = [job.start.weights_file]
    code = user_files(vars(job.settings.options))
    return {**vars(job.settings.hyp), "model": job.start.yaml, "class names": job.task.names, "your code": code}, files
