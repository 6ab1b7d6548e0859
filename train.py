"""Train a model: `python train.py` alone runs the built-in job, YOLOv5's flags run yours.

`main` reads the flags and starts the processes, `assemble` makes the parts of a run, `train` runs its epochs.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":
    from utils.birth import start_script

    start_script()

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from data.dataset import DataOptions, DataSet, DataSource, data_source
from models.initial_weights import ModelOptions, StartingPoint, load_and_freeze, recipe_of, starting_point
from models.parts import rate_factors
from models.tasks import TASKS, add_tasks, model_words
from models.tasks.contract import Criterion, LossTerms, Model, Task, refuse, terms_of
from models.tasks.shared.losses import balanced_weights
from models.weights.licence import Origin
from utils.batch import Batch, Split
from utils.checkpoint.resume import read_saved_state, resolve_settings
from utils.config.hyperparameters import is_shipped, unread_message
from utils.config.options import TrainOptions
from utils.config.parser import given_flags
from utils.config.settings import Settings
from utils.console import columns, listed
from utils.distributed.accelerator import plan, seed_everything, start
from utils.distributed.failure import barrier, run_main
from utils.distributed.logical_processes import LogicalProcesses, SyncOptions, check_logical_processes
from utils.distributed.spawn import spawn_for_devices
from utils.distributed.stop import StopRequested
from utils.errors import UserError
from utils.files import located
from utils.python_api import call, write_result
from utils.run import FolderOptions, Run
from utils.tracking.own_tracker import add_own_trackers
from utils.tracking.run_log import RunLog, TrackingOptions, wandb_run_id
from utils.training import memory, report
from utils.training.batch_gradients import BatchGradients
from utils.training.fitness import Fitness
from utils.training.optimizer_steps import OptimizerOptions, OptimizerSteps, prepare_training
from utils.training.profiler import parsed_window
from val import Evaluator, evaluator

DRAWN_BATCHES = 3  # training batches that are drawn into the run folder
VALIDATION_BATCH = 32  # images per process and validation batch, at most
TRACKER_SECONDS = 10.0  # time for trackers to send their last data when a run must end


@dataclass(frozen=True)
class LoopOptions:
    """The flags that the loop reads."""

    epochs: int
    batch_size: int  # images of all processes
    seed: int
    patience: int
    nosave: bool
    noval: bool
    save_period: int
    save_steps: int
    keep_state: bool
    no_oom_retry: bool
    no_cuda_graph: bool
    rect: bool
    multi_scale: bool
    time_limit: float
    dist_timeout: float
    verbose: bool
    quiet: bool


@dataclass
class Training:
    """The parts of a training run, which `assemble` makes, and the loop over them."""

    options: LoopOptions
    run: Run
    task: Task
    criterion: Criterion
    loader: DataLoader[Any]  # this process's share of each batch
    sampler: Any  # the batches of all processes: data.sampler.GlobalBatches
    steps: OptimizerSteps
    evaluate: Evaluator
    val_split: Split
    fitness: Fitness
    run_log: RunLog
    weights_content: Mapping[str, Any]  # what goes into a weight file beside the tensors

    def __post_init__(self) -> None:
        # Accelerate takes the mean over accumulated batches; `images`, of a whole optimizer step, makes up for that.
        images = self.options.batch_size * self.run.accelerator.gradient_accumulation_steps
        retry = not self.options.no_oom_retry
        objective = partial(self.criterion.objective, images=images)
        record = not (self.options.no_cuda_graph or self.options.rect or self.options.multi_scale)  # images of one size
        self.add_gradients = BatchGradients(self.run, self.steps.model, self.loss_terms, objective, retry, record)

    def train_one_epoch(self) -> tuple[dict[str, float], Any]:
        """Train the rest of an epoch: one pass over the training images.

        Returns the mean of each loss term over its batches, the same on every process, and the progress bar, which has
        measured the rate. Raises `StopRequested` if the run must end.
        """
        run, steps, state, size = self.run, self.steps, self.steps.state, self.options.batch_size
        progress, batches = state.progress, len(self.loader)
        steps.model.train()
        self.loader.set_epoch(progress.epoch)  # type: ignore[attr-defined]  # Accelerate passes it on to the sampler
        self.sampler.skip(progress.batch)
        bar = run.bar(f"epoch {progress.epoch + 1}/{self.options.epochs}", batches * size, progress.batch * size)
        steps.step_log.start_epoch(bar)
        remaining = self.loader if progress.batch < batches else ()  # nothing if only the validation is missing
        for number, shares in enumerate(bar.over(remaining, lambda _: size), progress.batch):
            run.beat()
            self.train_on(shares, number)
            if bar.due():  # estimated from this process
                share = state.loss_sums.sum(0) * run.accelerator.num_processes / (number + 1)
                losses = dict(zip(self.evaluate.loss_names, share.tolist(), strict=True))
                bar.show(report.bar_values(losses, progress.summary, bar, steps.remaining, run.accelerator.device))
            if progress.epoch == 0 and number < DRAWN_BATCHES:
                run.plot(partial(self.draw_batch, shares[0], number))
        refuse(progress.batch < batches, self.loader.dataset, f"gave {progress.batch} of {batches} batches of an epoch")
        steps.flush_pending()
        steps.model.average_statistics(state.ema.replicas)
        means = steps.model.sum(list(state.loss_sums)) / progress.taken
        return dict(zip(self.evaluate.loss_names, means.tolist(), strict=True)), bar

    def draw_batch(self, batch: Batch, number: int) -> dict[str, np.ndarray]:
        """Draw a training batch as the model sees it; return the picture by its file name."""
        return {f"train_batch{number}.jpg": self.task.draw_batch(batch)}

    def loss_terms(self, module: nn.Module, batch: Batch) -> LossTerms:
        """Run the forward pass and the criterion on a batch."""
        outputs = module(self.task.inputs(batch), *self.criterion.hints(batch))
        return terms_of(self.criterion, outputs, batch, self.evaluate.loss_names, not self.steps.remaining.done)

    def train_on(self, shares: Sequence[Batch], number: int) -> None:
        """Run forward and backward, and the optimizer step if the batch is the last of the accumulated ones.

        Args:
            shares: part of the batch of each of this process's logical processes; usually there is one
            number: index of the batch in the epoch
        """
        accelerator, steps = self.run.accelerator, self.steps
        batches_so_far = steps.progress.epoch * len(self.loader) + number
        with accelerator.accumulate(steps.model.prepared):
            steps.schedule.apply(steps.optimizer, batches_so_far)
            # With the same seed everywhere, dropout depends on the batch alone.
            losses = self.add_gradients(shares, self.options.seed + batches_so_far)
            taken = steps.step() if accelerator.sync_gradients else None
            steps.optimizer.zero_grad()
        steps.add_batch(torch.stack(losses), ([info.path for info in batch.infos] for batch in shares))
        if taken is None:
            return
        steps.finish_step(taken, number + 1, len(self.loader))
        self.run.check_stop(steps.progress.step, steps.behind)
        if self.options.save_steps and steps.progress.step % self.options.save_steps == 0:
            self.save_state()

    def run_epochs(self) -> None:
        """Train and validate epoch by epoch. Raises `StopRequested` if the run must end."""
        options, run, steps, progress = self.options, self.run, self.steps, self.steps.progress
        while not progress.finished:
            epoch = progress.epoch
            losses, bar = self.train_one_epoch()
            final = epoch + 1 == options.epochs
            if not options.nosave:
                self.save_state()  # written while the epoch is validated; only its scores are missing
            began = time.monotonic()
            validates = final or not options.noval
            summary = self.fitness.of(self.evaluate([steps.ema.model], run.stop_requested)) if validates else None
            timing = report.epoch_timing(bar, time.monotonic() - began, progress)
            row = report.results_row(epoch, losses, summary, self.task.metric_names, steps.optimizer)
            run.files.add_row(row)
            run.print(*report.epoch_lines(epoch, options.epochs, losses, summary, bar.rate, progress.skipped))
            improved = summary is not None and progress.record(epoch, summary.fitness)
            if summary and improved:
                progress.summary = summary
                run.files.write_documents(self.evaluate.metrics.documents(summary))
            self.run_log.log_epoch(row, timing, summary, progress)
            if summary:
                self.run_log.log_examples(partial(self.evaluate.metrics.examples, summary), epoch)
            progress.finished = final or progress.stalled(options.patience)
            if summary and options.verbose and not (improved and progress.finished):  # `finish` prints the best epoch's
                run.print(*summary.table())
            latest = ["last.pt"] + ["best.pt"] * improved if progress.finished or not options.nosave else []
            numbered = [f"epoch{epoch}.pt"] * (options.save_period > 0 and epoch % options.save_period == 0)
            upload = partial(self.run_log.upload, numbered, "latest", f"epoch-{epoch}", *["best"] * improved)
            self.save_weights([*latest, *numbered], upload)
            progress.next_epoch()
            steps.state.loss_sums.zero_()
            steps.guard.snapshot()
        run.files.finish_writing()
        self.save_state()  # finished: no weights are missing

    def save_state(self) -> None:
        """Save everything that --resume needs to continue from here. All processes must call it together."""
        self.steps.flush_pending()
        self.steps.state.save(self.run.files, self.options.keep_state)

    def save_weights(self, names: Sequence[str], then: Callable[[], object] = lambda: None) -> None:
        """Save the EMA in weights/ under these names.

        Args:
            then: function that is called once the files are written
        """
        self.run.files.save_weights(names, self.steps.ema.model, then, **self.weights_content)

    def leave(self, request: StopRequested) -> None:
        """Save everything before the run ends early; at the time limit validate the EMA too."""
        run, steps, reason = self.run, self.steps, request.reason
        self.save_state()
        run.files.finish_writing()
        if request.by_time_limit:
            steps.model.average_statistics(steps.ema.replicas)
            run.print(*self.evaluate([steps.ema.model]).table())
            self.save_weights(["last.pt"])
            run.files.finish_writing()
            reason = f"the time limit of {self.options.time_limit:g} hours"
        run.print(f"stopped by {reason} {steps.progress}; everything is saved: continue with --resume {run.path}")
        run.finish(TRACKER_SECONDS)
        run.collectives.broadcast(None)  # no process ends while another one still writes

    def finish(self) -> None:
        """Draw, upload and print the results of the run."""
        run, options, progress, best = self.run, self.options, self.steps.progress, self.steps.progress.summary
        assert best is not None
        if progress.epoch < options.epochs:
            epoch = progress.best_epoch + 1
            run.print(f"stopped by --patience {options.patience}: no better fitness since epoch {epoch}")
        imgsz = self.steps.model.bare.imgsz
        run.plot(lambda: self.evaluate.metrics.pictures(best, self.val_split, imgsz))
        run.charts()
        run.files.finish_writing()
        self.run_log.log_results(progress)
        run.print(*report.best_epoch_table(progress, best, options.quiet), f"results in {run.path}", always=True)
        run.on_main(lambda: write_result(best, run.path))
        run.finish(TRACKER_SECONDS if run.stop_requested() else float("inf"))  # a launcher waits for 30 s
        run.on_main(lambda: self.run_log.push(self.task, best, self.weights_content))


def train(training: Training) -> None:
    """Run the remaining epochs and print the best one. Raises `StopRequested` if the run ends early."""
    run, options = training.run, training.options
    imgsz = training.steps.model.bare.imgsz
    with run.graceful_stop(options.time_limit) as stop:
        with memory.explain_out_of_memory(options.batch_size, imgsz), run.watchdog(options.dist_timeout):
            try:
                training.run_epochs()
            except StopRequested as request:
                training.leave(request)
                raise
        stop.finished = True
        training.finish()


class Job(NamedTuple):
    """What the flags name, read and checked: settings with all defaults, data, initial model, task and fitness."""

    settings: Settings
    source: DataSource
    start: StartingPoint
    task: Task
    fitness: Fitness


class Inputs(NamedTuple):
    """All input of a run, checked: its job, the model with its initial weights, and the splits."""

    job: Job
    model: Model
    data: DataSet[Any]
    train_split: Split
    val_split: Split
    factors: Mapping[str, float]  # learning-rate factors of parameters, by name
    messages: list[str]


def read_job(settings: Settings) -> Job:
    """Read the files that the flags name; download what is missing. Raises `UserError`."""
    saved_yaml = settings.saved and settings.saved["model"]
    start_from = starting_point(settings.select(ModelOptions), saved_yaml, settings.given)
    kind = start_from.entry.load()
    settings.refuse(kind.concerns_of(start_from.yaml), model_words(start_from.yaml))
    source = data_source(settings.options.data, start_from.entry.data)
    defaults = (kind.defaults, source.spec.defaults)
    if not settings.saved:
        start_from = start_from.with_weights(settings.value("weights", *defaults))
    recommended = kind.prefers_trained and not settings.names("weights", source.spec.defaults)
    if recommended:
        start_from = start_from.with_default_weights()
    choose = partial(kind.recipes.choose, bool(start_from.weights), lambda: len(source.spec.images("train")))
    settings = settings.resolve(kind.recipe, *defaults, choose=choose)
    if recommended:
        settings = settings.with_options(weights=start_from.weights_name)
    origin = Origin.recorded(settings.saved) if settings.saved else start_from.origin
    origin.require(settings.options.allow_licence)
    settings = replace(settings, origin=origin.content())
    task = kind(source.names(settings.options.single_cls), settings.hyp, settings.options.label_smoothing)
    settings.refuse_unread(task.unread(start_from.yaml), model_words(start_from.yaml))
    yaml = start_from.yaml if settings.saved else task.model_yaml(start_from.yaml)
    names = task.names.values()
    fitness = Fitness.parsed(settings.options.fitness, task.metric_names, task.class_metric_names, names)
    return Job(settings, source, replace(start_from, yaml=yaml), task, fitness)


def read_inputs(run: Run, settings: Settings) -> Inputs:
    """Read and check everything that a run needs, and build its model; nothing is written. Raises `UserError`."""
    with barrier(settings.options.dist_timeout):  # one machine may have more to download than another
        job = read_job(settings)
    everywhere = not job.start.message or all(run.collectives.gather([job.start.weights_name]))
    if job.start.weights and not everywhere:
        job = read_job(replace(settings.with_options(weights=""), given={**settings.given, "weights": ""}))
        job = job._replace(start=job.start.from_scratch("not every machine has the weights"))
    settings, source, start_from, task, fitness = job
    options, data_options = settings.options, settings.select(DataOptions)
    memory.check_batch_size(options.batch_size, options.logical_processes)
    parsed_window(options.profile)
    if options.no_deterministic and options.logical_processes:
        raise UserError("--no-deterministic cannot be used with --logical-processes, which promises equal bytes")
    if options.multi_scale:  # raises here for a model of one size only
        task.build_model(start_from.yaml, data_options.largest(options.imgsz), start_from.source)
    chosen_kernels = seed_everything(options.seed, not options.no_deterministic)
    model = task.build_model(start_from.yaml, options.imgsz, start_from.source)
    weights = [start_from.weights_file] if start_from.weights_file else []
    messages = [*chosen_kernels, *[settings.choice] * bool(settings.choice)]
    messages += [located({"weights": weights, "data": [source.spec.file]})]
    messages += load_and_freeze(model, start_from, task, settings.select(ModelOptions))
    messages += [f"the best epoch is the one with the highest {options.fitness}"] * bool(options.fitness)
    factors, about_rates = rate_factors(model, options.lr_factor)
    messages += about_rates
    if not is_shipped(options.hyp):
        messages += unread_message(settings.hyp, task.unread(start_from.yaml), model_words(start_from.yaml))
    settings, rules = settings.for_weights(start_from.known_share(model, task))
    images = max(options.batch_size // run.accelerator.num_processes, VALIDATION_BATCH)  # in this process's batch
    batch_bytes = images * 3 * data_options.largest(model.imgsz) ** 2
    workers, warnings = memory.loader_processes(options.workers, batch_bytes)
    data = source.open(model.imgsz, model.stride, replace(data_options, workers=workers))
    messages += data.own_augmentations(settings.hyp, "augmentations" in settings.given).messages
    add_own_trackers(options.log_with, "log_with" in settings.given)
    with barrier(options.dist_timeout):
        train_split, val_split = data.split("train", settings.hyp), data.split("val")
    if fitness.class_weights:
        fitness.check_labels({task.names[number] for number in val_split.instances().classes.tolist()})
    settings, task, weighted = with_class_weights(settings, task, train_split)
    messages += [*rules, *warnings, *data.messages(train_split, val_split), *weighted]
    return Inputs(job._replace(settings=settings, task=task), model, data, train_split, val_split, factors, messages)


def with_class_weights(settings: Settings, task: Task, train_split: Split) -> tuple[Settings, Task, list[str]]:
    """Return settings and task with the class weights of --class-weights auto, and a line about the weights, if any.

    Weights in --hyp take precedence over these. The settings of a resumed run have them already.
    """
    hyp: Any = settings.hyp
    if settings.options.class_weights == "auto" and not settings.saved:
        balanced = balanced_weights(task.names, train_split.instances().classes)
        hyp = replace(hyp, class_weights={**balanced, **hyp.class_weights})
        settings, task = replace(settings, hyp=hyp), type(task)(task.names, hyp, settings.options.label_smoothing)
    weights = getattr(hyp, "class_weights", {})
    title = "class weights in the loss: "
    line = title + listed([f"{name} {weight:g}" for name, weight in weights.items()], columns() - len(title))
    return settings, task, [line] * bool(weights)


def assemble(settings: Settings) -> Training:
    """Make the parts of a run from its settings; see `settings_of`. Raises `UserError` before anything is written."""
    options = settings.options
    accelerator, precision = start(options.device, options.mixed_precision, options.dist_timeout, options.comm_hook)
    run = Run(accelerator, precision, options.quiet)
    sync = settings.select(SyncOptions)
    logical = LogicalProcesses.of(sync, accelerator)
    logical.fix_kernels(accelerator.device)
    inputs = read_inputs(run, settings)
    settings, task, model, data = inputs.job.settings, inputs.job.task, inputs.model, inputs.data
    train_split, val_split = inputs.train_split, inputs.val_split
    options = settings.options  # with the defaults of task and data set
    accelerator.gradient_accumulation_steps = settings.accumulation

    run.open_folder(settings.select(FolderOptions))
    run.print(*run.device_lines(options.verbose), *logical.messages(sync, accelerator.device), *inputs.messages)
    splits = {"train": train_split.identity(), "val": val_split.identity()}
    identity, saved = read_saved_state(run, settings, task.names, model.imgsz, splits)
    if saved:
        model.load_state_dict(saved["model"])  # before `task.criterion`, which may read what `adapt` has changed
    elif not options.noautoanchor:
        run.print(*task.adapt(model, train_split))
    criterion = task.criterion(model)
    if settings.options.batch_size == -1:
        settings = settings.with_options(batch_size=measure_batch_size(run, inputs, criterion))
        accelerator.gradient_accumulation_steps = settings.accumulation
    settings = settings.with_options(wandb_id=run.collectives.broadcast(wandb_run_id(options.wandb_id, saved)))
    run_log = write_inputs(run, inputs, settings, splits, saved)

    loop = settings.select(LoopOptions)
    loader = data.train_loader(train_split, loop.batch_size, settings.hyp, loop.seed)
    sampler: Any = loader.batch_sampler
    validation_batch = min(2 * loop.batch_size, VALIDATION_BATCH)
    evaluate = evaluator(run, task, model, criterion, data, val_split, validation_batch, logged=options.max_images)
    run.print(*(data.cache_messages(loader) or data.cache_messages(evaluate.loader)), *sampler.messages)
    run.print(*plan(accelerator, loop.batch_size, len(loader), loop.epochs), f"saving results to {run.path}")
    optimizer = settings.select(OptimizerOptions)
    with memory.explain_out_of_memory(loop.batch_size, model.imgsz):
        identity = replace(identity, settings=settings.content(model.yaml, model.imgsz))
        steps, loader = prepare_training(
            run, model, loader, settings.hyp, optimizer, evaluate.loss_names, identity, saved, inputs.factors
        )
    half = {"fp32": False, "fp16": True}.get(options.weights_precision, accelerator.mixed_precision != "no")
    flags = {**settings.flags(), "imgsz": model.imgsz}
    return Training(
        options=loop,
        run=run,
        task=task,
        criterion=criterion,
        loader=loader,
        sampler=sampler,
        steps=steps,
        evaluate=evaluate,
        val_split=val_split,
        fitness=inputs.job.fitness,
        run_log=run_log,
        weights_content={"yaml": model.yaml, "names": task.names, "settings": flags, "half": half, **settings.origin},
    )


def write_inputs(
    run: Run, inputs: Inputs, settings: Settings, splits: Mapping[str, Any], saved: Mapping[str, Any] | None
) -> RunLog:
    """Write settings, problems and data documents into the run folder, and start the trackers; return their log."""
    job, model, data = inputs.job, inputs.model, inputs.data
    train_split, val_split = inputs.train_split, inputs.val_split
    content, identity = settings.content(model.yaml, model.imgsz), {"yaml": str(job.source.spec.file), **splits}
    run.files.write_problems([*train_split.problems, *val_split.problems])
    run.files.write_settings(content)
    run.files.write_documents(data.documents(train_split, val_split))
    tracking = settings.select(TrackingOptions, given=settings.given)
    run_log = RunLog(run, tracking, val_split.shown, list(job.task.names.values()))
    run_log.start(content, identity, saved)
    run_log.upload_dataset(job.source.spec.file, job.source.files, identity)
    if not settings.options.noplots:
        run.enable_plots("labels.jpg")
    return run_log


def measure_batch_size(run: Run, inputs: Inputs, criterion: Criterion) -> int:
    """Return the batch size for --batch-size -1, measured by training steps on the first images."""
    settings, task, model, split = inputs.job.settings, inputs.job.task, inputs.model, inputs.train_split
    uncached = inputs.data.uncached()

    def train_step(size: int) -> None:
        loader: Any = uncached.train_loader(split, size, settings.hyp, seed=0)
        items = [loader.dataset[sample] for sample in loader.batch_sampler.largest()]
        batch = loader.collate_fn(items).to(run.accelerator.device)
        with run.accelerator.autocast():
            outputs = model(task.inputs(batch), *criterion.hints(batch))
        terms = terms_of(criterion, outputs, batch, task.loss_names_of(model), reads=True)
        criterion.objective(terms.means(terms.counts), size).backward()  # type: ignore[no-untyped-call]
        model.zero_grad()

    device, images = run.accelerator.device, len(split.images)
    size, message = memory.auto_batch_size(train_step, model, device, images, model.imgsz, run.collectives)
    run.print(message)
    return size


def doctor_inputs(settings: Settings) -> tuple[Mapping[str, Any], Mapping[str, Sequence[Path]], Sequence[str]]:
    """Return the settings of a job, its files by purpose, and the messages that a start prints about the data.

    Raises `UserError` if the job could not start.
    """
    job = read_job(settings)
    options = job.settings.options
    model = job.task.build_model(job.start.yaml, options.imgsz, job.start.source)
    data = job.source.open(model.imgsz, model.stride, settings.select(DataOptions))
    messages = data.messages(data.split("train", job.settings.hyp), data.split("val"))
    files: dict[str, Sequence[Path]] = {**job.source.files()}
    if job.start.weights_file:
        files["weights"] = [job.start.weights_file]
    if options.augmentations:
        data.own_augmentations(job.settings.hyp, "augmentations" in settings.given)
        files["augmentations"] = [Path(options.augmentations)]
    return {**vars(job.settings.hyp), "model": job.start.yaml, "class names": job.task.names}, files, messages


def settings_of(argv: Sequence[str]) -> Settings:
    """Return the settings that a command line describes. A wrong flag ends the process with exit code 2."""
    return resolve_settings(given_flags(TrainOptions, argv), recipe_of)


def start_run(settings: Settings) -> None:
    """Start a run, or continue one, on as many processes as the settings say."""
    if not spawn_for_devices(partial(run_process, settings), settings.options.device, settings.options.processes):
        run_process(settings)


def run_process(settings: Settings) -> None:
    """Train as one of the run's processes, or with --doctor examine the machines."""
    if settings.options.doctor:
        from utils.doctor.doctor import run_doctor  # only here, because training does not need it

        memory.check_batch_size(settings.options.batch_size, settings.options.logical_processes)
        check_logical_processes(settings.select(SyncOptions))
        run_doctor(settings.flags(), lambda: doctor_inputs(settings))
    else:
        train(assemble(settings))


def main(argv: Sequence[str] | None = None) -> None:
    """Train from the command line."""
    start_run(settings_of(sys.argv[1:] if argv is None else argv))


def run(**flags: Any) -> dict[str, Any]:
    """Train from Python: `train.run(data="my.yaml", lr0=0.02)`.

    Returns the values of the best epoch by the names of results.csv, its `fitness`, and the run's `folder`. Raises
    `UserError` if the command would end with an error, and KeyboardInterrupt if Ctrl-C has stopped it; then everything
    is saved, and `train.run(resume=folder)` continues.

    Args:
        flags: flags of the command and hyperparameters, by name with underscores
    """
    task_file = flags.get("task_file") or flags.get("task")
    known = partial(hyperparameters, str(task_file or ""))
    return call(lambda given: start_run(resolve_settings(given, recipe_of)), "train", flags, known)


def hyperparameters(task_file: str = "") -> list[str]:
    """Return the names of the hyperparameters of all tasks.

    Args:
        task_file: file or package of your own task, see `add_tasks`; '' for none
    """
    if task_file:
        add_tasks(task_file)
    return sorted({field.name for entry in TASKS.values() for field in fields(entry.load().recipe)})


if __name__ == "__main__":
    run_main(main)
