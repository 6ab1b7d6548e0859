"""Validate a model on a split of a data set: `python val.py --weights best.pt --data data/coco128.yaml`.

`main` reads the flags, `assemble` makes the parts of a validation, `validate` runs it. train.py uses `Evaluator` too.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    from utils.birth import start_script

    start_script()

import numpy as np
import torch
from torch.utils.data import DataLoader

from data.dataset import DataOptions, DataSet, DataSource, data_source
from models.ensemble import Inference, Members, for_inference, read_members
from models.tasks.contract import Criterion, Metrics, Model, Prediction, Task, Thresholds, refuse, terms_of
from utils import coco
from utils.batch import Batch, CocoImage, Split
from utils.config.options import ValOptions
from utils.config.parser import given_flags, over_defaults, with_defaults
from utils.config.select import select
from utils.distributed.accelerator import start
from utils.distributed.devices import loader_workers
from utils.distributed.failure import barrier, run_main
from utils.distributed.spawn import spawn_for_devices
from utils.errors import UserError
from utils.files import located, unique_stems, write_rows
from utils.python_api import call, write_result
from utils.run import FolderOptions, Run
from utils.stage_times import POSTPROCESSING, StageTimer, format_times, milliseconds_per_image, without_warmup
from utils.summary import DRAWN_IMAGES, Summary, evenly_spaced, job_values
from utils.tracking.own_tracker import add_own_trackers
from utils.tracking.run_log import ValidationLog

MANY_CLASSES = 50  # with more, a row per class is printed only with --verbose
SPEED_DEFAULTS = {"conf_thres": 0.25, "iou_thres": 0.45, "square": True}  # defaults of flags with --task speed
SPLIT_OF_TASK = {"speed": "val"}  # the split of a --task that does not name one


@dataclass
class Evaluator:
    """A validator of models on this process's share of a split.

    Attributes:
        run: processes, folder and console of the run
        criterion: loss of the first model's outputs
        inference: forward pass and postprocessing
        metrics: metrics of the task
        loader: loader of this process's share of the split
        images: number of images in the whole split, for the progress bar
        loss_names: names of the loss terms
        timer: timer of the stages
        keepers: functions that are called with each batch and its predictions
    """

    run: Run
    criterion: Criterion
    inference: Inference
    metrics: Metrics
    loader: DataLoader[Any]
    images: int
    loss_names: Sequence[str]
    timer: StageTimer = field(default_factory=StageTimer)
    keepers: Sequence[Callable[[Batch, Sequence[Prediction]], object]] = ()

    @torch.inference_mode()
    def __call__(self, models: Sequence[Model], stop_requested: Callable[[], str] = str) -> Summary:
        """Return the metrics of the models, an ensemble if there are several; the same on every process.

        The losses come from the first model. Raises `StopRequested` on all processes if one of them is asked to stop.

        Args:
            stop_requested: returns the reason to stop, or ''
        """
        run, timer, records, losses, numbers = self.run, self.timer, [], [], []
        task, data = self.inference.task, self.loader.dataset
        for model in models:
            model.eval()
        bar = run.bar("validating", self.images)
        for batch in bar.over(self.loader, lambda batch: len(batch.infos) * run.accelerator.num_processes):
            run.beat()
            if stop_requested():
                break
            with run.accelerator.autocast():
                batch, views = self.inference.views(models, batch, timer)
            if views[0].outputs is not None:  # some exported files return no raw outputs
                terms = terms_of(self.criterion, views[0].outputs, batch, self.loss_names, reads=True)
                losses.append((batch.infos[0].image, self.criterion.weight(batch), terms.means(terms.counts).tolist()))
            timer.end_stage("losses")
            predictions = self.inference.postprocess(views, batch)
            timer.end_stage(POSTPROCESSING)
            images, predicted = [info.image for info in batch.infos], [each.image for each in predictions]
            refuse(len({*images}) < len(images), data, f"has an image number twice: a batch of images {images}")
            refuse(predicted != images, self.inference.postprocess, f"predicted images {predicted} instead of {images}")
            for keep in self.keepers:
                keep(batch, predictions)
            records += self.metrics.update(predictions, batch)
            numbers += images
            refuse(len(records) != len(numbers), self.metrics, f"made {len(records)} records of {len(numbers)} images")
        run.stop_together(stop_requested())
        numbers = sorted(run.collectives.gather(numbers))
        refuse(numbers != [*range(self.images)], data, f"gave {len(numbers)} images for {self.images}, or one twice")
        summary = self.metrics.summarise(run.collectives.gather(records))
        missing = {*task.metric_names} - {*summary.metrics} | {*task.class_metric_names} - {*summary.by_class}
        refuse(bool(missing), self.metrics, f"has no metric {', '.join(sorted(missing))}")
        means = self._mean_losses(run.collectives.gather(losses))
        return run.collectives.broadcast(replace(summary, losses=means, rate=bar.rate))

    @torch.inference_mode()
    def warm_up(self, models: Sequence[Model], batch: Batch) -> None:
        """Run the models on a batch before the timed ones: the first pass allocates memory and selects kernels."""
        with self.run.accelerator.autocast():
            batch, views = self.inference.views(models, batch, StageTimer())
        self.inference.postprocess(views, batch)

    def _mean_losses(self, losses: Sequence[tuple[int, float, list[float]]]) -> dict[str, float]:
        """Return the mean of each loss term, weighted by the criterion; nan without losses.

        Args:
            losses: for each batch the index of its first image, its weight, and its loss terms
        """
        # Sorted, so that the sum's rounding does not depend on which process had which batch.
        weighted = [(weight, [weight * value for value in values]) for _, weight, values in sorted(losses)]
        total = sum(weight for weight, _ in weighted)
        means = [sum(column) / total for column in zip(*(values for _, values in weighted), strict=True)]
        names = self.loss_names
        return dict(zip(names, means or [math.nan] * len(names), strict=True))


def evaluator(
    run: Run,
    task: Task,
    model: Model,
    criterion: Criterion,
    data: DataSet[Any],
    split: Split,
    batch_size: int,
    logged: int = 0,
    draws: bool = True,
    thresholds: Thresholds | None = None,
    square: bool = False,
) -> Evaluator:
    """Make the evaluator of a split.

    Args:
        model: one of the models that the evaluator will be called with
        batch_size: number of images per process and batch
        logged: number of images whose predictions go to trackers
        draws: whether pictures are drawn too
        square: whether all images are padded to squares
    """
    batches = run.collectives.shard(data.evaluation_batches(split, batch_size, square))
    drawn = frozenset(evenly_spaced(len(split.images), max(logged, DRAWN_IMAGES if draws else 0)))
    inference = Inference(task, task.postprocess(model, thresholds or Thresholds()), run.accelerator.device)
    loader = data.evaluation_loader(split, batches)
    names = task.loss_names_of(model)
    return Evaluator(run, criterion, inference, task.metrics(drawn), loader, len(split.images), names)


@dataclass
class Validation:
    """The parts of a validation, which `assemble` makes."""

    options: ValOptions
    run: Run
    members: Members
    models: list[Model]
    evaluate: Evaluator
    split: Split
    source: DataSource
    log: ValidationLog
    times_stages: bool  # whether the stages can be timed without slowing them down
    coco_images: list[CocoImage] = field(default_factory=list)  # predictions of this process, with --save-json


def assemble(given: Mapping[str, Any]) -> Validation:
    """Make the parts of a validation from the flags that are given, by name.

    Nothing is written before all input has been checked. Raises `UserError`.
    """
    options = over_defaults(ValOptions, given)
    run = Run(*start(options.device, "no" if options.half else options.mixed_precision, options.dist_timeout))
    device = run.accelerator.device
    with barrier(options.dist_timeout):  # one machine may have more to download than another
        members = read_members(options.weights, options.layers, options.task_file, options.augment)
        source = data_source(options.data, members.entry.data)
    kind = members.entry.load()
    check_flags(members, given, options.annotations)
    options = with_defaults(options, given, SPEED_DEFAULTS if options.task == "speed" else {})
    size = members.image_size(options.imgsz, source.spec.defaults.get("imgsz", 0))
    options = with_size(options, size.sides, size.is_fixed)
    with barrier(options.dist_timeout):
        names = source.names(options.single_cls)
    task = kind(names, kind.recipe())
    half = options.half and device.type == "cuda"
    models = [for_inference(model, device, half) for model in members.build(task, options.imgsz, options.data)]
    workers, stride = loader_workers(options.workers), math.lcm(*(model.stride for model in models))
    data = source.open(models[0].imgsz, stride, select(DataOptions, options, workers=workers, cache=""))
    split_name = SPLIT_OF_TASK.get(options.task, options.task)
    with barrier(options.dist_timeout):
        split = data.split(split_name)
    add_own_trackers(options.log_with)
    run.open_folder(select(FolderOptions, options))
    run.quiet = options.quiet
    files = located({"weights": members.files.values(), "data": [source.spec.file]})
    lines = [*run.description, files, *source.spec.warnings, *split.report(split_name)]
    about_files = members.class_warnings(names) + members.overridden({**given, "half": half})
    run.print(*lines, *size.rounded(stride).messages, *messages(options, half, members, size.is_fixed), *about_files)
    run.files.write_problems(split.problems)
    run.files.write_settings({**vars(options), "imgsz": models[0].imgsz})
    log = ValidationLog(run, vars(options), members.settings)
    if not options.noplots:
        run.enable_plots()
    thresholds = select(Thresholds, options)
    evaluate = evaluator(
        run,
        task,
        models[0],
        task.criterion(models[0]),
        data,
        split,
        batch_size=options.batch_size,
        thresholds=thresholds,
        square=options.square,
        draws=not options.noplots,
    )
    run.print(*metric_warnings(members.suppression, evaluate.metrics, thresholds))
    # On other devices a stage is over only after a synchronisation, which takes time.
    times_stages = options.task == "speed" or device.type == "cpu"
    validation = Validation(options, run, members, models, evaluate, split, source, log, times_stages)
    evaluate.inference = replace(evaluate.inference, augment=options.augment, half=half)
    evaluate.keepers = keepers(validation)
    if times_stages and device.type != "cpu":
        evaluate.timer = StageTimer(torch.accelerator.synchronize)
    return validation


def keepers(validation: Validation) -> list[Callable[[Batch, Sequence[Prediction]], object]]:
    """Return the functions that write or collect predictions, as the flags ask for."""
    options = validation.options
    chosen: list[Callable[[Batch, Sequence[Prediction]], object]] = []
    if options.save_json:
        chosen.append(lambda _, predictions: validation.coco_images.extend(p.coco_rows() for p in predictions))
    if options.save_txt or options.save_hybrid:
        folder = validation.run.path / "labels"
        folder.mkdir(parents=True, exist_ok=True)
        files = [folder / f"{stem}.txt" for stem in unique_stems(map(str, validation.split.images))]
        chosen.append(partial(write_labels, files, options.save_conf, options.save_hybrid))
    return chosen


def write_labels(
    files: Sequence[Path], with_confidence: bool, hybrid: bool, batch: Batch, predictions: Sequence[Prediction]
) -> None:
    """Write a label file for each image of a batch.

    Args:
        files: label file of each image of the split
        hybrid: whether to write the image's labels too, and to leave out the predictions that match one of them
    """
    for info, prediction in zip(batch.infos, predictions, strict=True):
        rows = (prediction.with_labels() if hybrid else prediction).label_rows(with_confidence)
        write_rows(files[info.image], rows)


def validate(validation: Validation) -> None:
    """Run a validation, write its results and print them."""
    options, run, evaluate, split = validation.options, validation.run, validation.evaluate, validation.split
    with run.watchdog(options.dist_timeout):
        if validation.times_stages:
            evaluate.warm_up(validation.models, grey_batch(validation))
        summary = evaluate(validation.models)
    documents = evaluate.metrics.documents(summary)
    run.files.write_documents(documents)
    validation.log.log(job_values(summary), documents)
    run.plot(lambda: evaluate.metrics.pictures(summary, split, validation.models[0].imgsz))
    run.charts()
    run.files.finish_writing()
    names = evaluate.inference.task.names
    brief = options.quiet or (len(names) > MANY_CLASSES and not options.verbose)
    run.print(*summary.table(brief), f"{summary.rate:.1f} images/s; results in {run.path}", always=True)
    batches = run.collectives.gather(without_warmup(evaluate.timer.batches))
    if validation.times_stages:
        run.print(*speed(milliseconds_per_image(batches), options), always=options.task == "speed")
    run.on_main(lambda: write_result(summary, run.path))
    run.finish()
    if options.save_json:
        images = run.collectives.gather(validation.coco_images)
        run.on_main(lambda: write_coco(validation, images))


def write_coco(validation: Validation, predictions: Sequence[CocoImage]) -> None:
    """Write the predictions of all processes in COCO's format, and COCO's metrics if there are annotations.

    Raises `UserError` for unsuitable annotations that --annotations names, after the results are written.
    """
    options, run, spec, images = validation.options, validation.run, validation.source.spec, validation.split.images
    name = SPLIT_OF_TASK.get(options.task, options.task)
    file, missing = Path(options.annotations) if options.annotations else spec.annotation_file(name), ""
    if file is None:
        file, missing = coco.find_annotations(spec.roots, name, images)
    stem = next(iter(validation.members.files.values())).stem
    report = coco.report(file, predictions, validation.evaluate.inference.task.names, images, stem)
    run.files.write_documents(report.documents)
    run.print(*report.lines, *filter(None, [missing]))
    run.print(*report.tables, always=True)
    if report.problem and options.annotations:
        raise UserError(report.problem)
    if report.problem:
        run.print(f"warning: {report.problem}")


def check_flags(members: Members, given: Mapping[str, Any], annotations: str) -> None:
    """Raise `UserError` for a flag that does not apply to the task, and for annotations that do not exist."""
    members.refuse(ValOptions, given)
    if annotations and not Path(annotations).is_file():
        raise UserError(f"--annotations {annotations} is not a file; check the path")


def with_size(options: ValOptions, sides: tuple[int, int], is_fixed: bool) -> ValOptions:
    """Return the flags for images of a height and width. Raises `UserError` if both are fixed and differ.

    Args:
        sides: height and width, pixels
        is_fixed: whether images must have exactly these sides; otherwise the longer one is the side of a square
    """
    height, width = sides
    if is_fixed and height != width:
        raise UserError(
            f"--weights takes only images of {height}x{width}, and val.py makes square ones; "
            "export it with --dynamic, or with one number for --imgsz"
        )
    return replace(options, imgsz=max(sides), square=options.square or is_fixed)


def messages(options: ValOptions, half: bool, members: Members, is_fixed: bool = False) -> list[str]:
    """Return lines about precision, square images, an ensemble, and --augment.

    Args:
        is_fixed: whether an exported file takes one image size only
    """
    lines = ["weights and images in half precision"] if half and len(members.exported) < len(members.files) else []
    if options.half and not half:
        lines.append("warning: --half is for CUDA; using full precision")
    if is_fixed and "padding" in members.concerns:
        lines.append("images are square: the metrics are comparable with a .pt file's under --square")
    first, *others = members.files
    if others:
        lines.append(f"an ensemble of {len(members.files)} models; the losses come from {first}")
    return lines + ["--augment: the model runs on scaled and mirrored copies of each image too"] * options.augment


def metric_warnings(suppression: str, metrics: Metrics, thresholds: Thresholds) -> list[str]:
    """Return a warning if the metrics are not comparable with other runs.

    Args:
        suppression: see `Members`
    """
    if suppression:
        return [f"warning: {suppression}; the metrics are comparable only among files that were exported alike"]
    return metrics.threshold_warnings(thresholds)


def grey_batch(validation: Validation) -> Batch:
    """Return a batch of one grey image at the validation's image size."""
    kind, model = validation.source.kind, validation.models[0]
    grey = np.full((model.imgsz, model.imgsz, 3), 128, np.uint8)
    return kind.collate([kind.item(grey, "", (model.imgsz, model.imgsz), model.stride, full=True)])


def speed(times: Mapping[str, float], options: ValOptions) -> list[str]:
    """Format per-image stage times, in milliseconds, for the console; with --task speed the rate too."""
    lines = format_times(times)
    if options.task == "speed":
        rate = 1000 / max(sum(times.values()), 1e-9)
        lines[-1] += f": {rate:.1f} images/s in batches of {options.batch_size}"
    return lines


def start_validation(given: Mapping[str, Any]) -> None:
    """Validate with flags by name, on as many processes as they say."""
    options = over_defaults(ValOptions, given)
    if not spawn_for_devices(partial(run_process, given), options.device, options.processes):
        run_process(given)


def run_process(given: Mapping[str, Any]) -> None:
    """Validate as one of the processes."""
    validate(assemble(given))


def main(argv: Sequence[str] | None = None) -> None:
    """Validate from the command line."""
    start_validation(given_flags(ValOptions, sys.argv[1:] if argv is None else argv))


def run(**flags: Any) -> dict[str, Any]:
    """Validate from Python: `val.run(weights="best.pt", data="my.yaml")`.

    Returns the metrics and losses by the names of results.csv, `fitness`, and the run's `folder`. Raises `UserError` if
    the command would end with an error.

    Args:
        flags: flags of the command, by name with underscores
    """
    return call(start_validation, "val", flags)


if __name__ == "__main__":
    run_main(main)
