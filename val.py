"""Validate a model on a split of a data set: `python val.py --weights best.pt --data data/coco128.yaml`.

`validate` is a validation from its flags to its results; train.py calls the same `Evaluator` after each epoch.
"""

from __future__ import annotations

import gc
import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    gc.disable()  # the imports make 400,000 objects and hardly any garbage; `run_main` turns it on again
    if "OMP_WAIT_POLICY" not in os.environ:  # see train.py
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")

import torch
from torch.utils.data import DataLoader

from data.dataset import DataOptions, DataSet, data_source
from data.labels import label_name
from models.ensemble import Inference, for_inference, join_windows, read_members
from models.loading import log_rounding
from models.tasks.contract import Criterion, Metrics, Model, Prediction, Task, Thresholds, check_contract, compute_terms
from utils.batch import Batch, CocoImage, Split
from utils.config.flags import ValOptions, select
from utils.config.parser import given_flags
from utils.console import log
from utils.distributed.failure import barrier, run_main
from utils.distributed.launch import cores_per_process, spawn, start
from utils.distributed.ranks import broadcast_from_main
from utils.errors import UserError, plural
from utils.files import csv_text, format_paths, unique_stems, write_text
from utils.plots.drawing import write_picture
from utils.python_api import call
from utils.receipt import Receipt, environment, split_inputs
from utils.review import COLUMNS, MAX_CONF_THRES, PICTURE_PIXELS, ImageReview, draw_review, ranked
from utils.run import Run
from utils.summary import DRAWN_IMAGES, POSTPROCESSING, StageTimer, Summary, evenly_spaced, log_times, metric_columns
from utils.tracking import run_log, wandb
from utils.tracking.trackers import add_user_trackers

MANY_CLASSES = 50  # with more, a row per class is printed only with --verbose
SPEED_DEFAULTS = {"conf_thres": 0.25, "iou_thres": 0.45, "square": True}  # defaults of flags with --task speed


@dataclass
class Evaluator:
    """A validator of models on this process's share of a split."""

    run: Run
    criterion: Criterion
    inference: Inference
    metrics: Metrics
    loader: DataLoader[Any]
    split: Split
    batch_size: int  # images that the models run on at a time
    thresholds: Thresholds
    loss_names: Sequence[str]
    columns: Sequence[str]  # names of the metrics, with those of each data set that the split lists
    timer: StageTimer = field(default_factory=StageTimer)
    map: Callable[..., Iterable[Any]] = map  # calls a function with each batch, in order
    batch_callbacks: list[Callable[[Batch, Sequence[Prediction]], object]] = field(default_factory=list)

    @torch.inference_mode()
    def __call__(self, models: Sequence[Model], stop_requested: Callable[[], str] = str) -> Summary:
        """Return the metrics of the models, an ensemble if there are several; the same on every process.

        The losses come from the first model. Raises `StopRequested` on all processes if `stop_requested` returns a
        reason on one of them, and `UserError` for a part of a task that breaks its contract.
        """
        run, timer, data = self.run, self.timer, self.loader.dataset
        records, losses, numbers = list[Any](), list[Any](), list[int]()
        for model in models:
            model.eval()
        count, processes = len(self.split.images), run.accelerator.num_processes
        bar = run.bar("validating", count)
        loaded = bar.iterate(self.loader, lambda batch: len({info.image for info in batch.infos}) * processes)
        for batch, predictions, terms in self.map(partial(self._predict, models), loaded):
            run.keep_alive("validation batch")
            if stop_requested():
                break
            losses += terms
            joined, batch = join_windows(predictions, batch, self.thresholds)
            images, predicted = [info.image for info in batch.infos], [result.image for result in joined]
            fault = f"has an image number twice: a batch of images {images}"
            check_contract(len({*images}) == len(images), data, fault)
            fault = f"predicted images {predicted} instead of {images}"
            check_contract(predicted == images, self.inference.postprocess, fault)
            for callback in self.batch_callbacks:
                callback(batch, joined)
            records += self.metrics.update(joined, batch)
            timer.end_stage("records")
            numbers += images
            fault = f"made {len(records)} records of {len(numbers)} images"
            check_contract(len(records) == len(numbers), self.metrics, fault)
        run.keep_alive()
        run.stop_together(stop_requested())
        numbers, records = run.collectives.gather(numbers), run.collectives.gather(records)
        is_whole = sorted(numbers) == [*range(count)]
        check_contract(is_whole, data, f"gave {len(numbers)} images for {count}, or one twice")
        summary = self.metrics.summarise(records)
        for name, indices, _ in self.split.sets:
            chosen = [record for number, record in zip(numbers, records, strict=True) if number in indices]
            summary = summary.with_set(name, self.metrics.summarise(chosen))
        values = {**dict.fromkeys(self.columns), **summary.metrics, "fitness": summary.fitness}
        missing = [name for name, value in values.items() if not isinstance(value, (int, float))]
        check_contract(not missing, self.metrics, f"has no int or float for {', '.join(missing)}")
        means = self._mean_losses(run.collectives.gather(losses))
        return run.collectives.broadcast(replace(summary, losses=means, rate=bar.rate))

    @torch.inference_mode()
    def _predict(self, models: Sequence[Model], whole: Batch) -> tuple[Batch, list[Prediction], list[Any]]:
        """Return a batch, on the device unless it was too large, with its predictions, and the losses of its parts."""
        predictions, losses, timer = list[Prediction](), list[Any](), self.timer
        for batch in (parts := whole.parts(self.batch_size)):
            with self.run.accelerator.autocast():
                batch, views = self.inference.views(models, batch, timer)
            if views[0].outputs is not None:  # some exported files return no raw outputs
                terms = compute_terms(self.criterion, views[0].outputs, batch, self.loss_names, reads=True)
                losses.append((batch.infos[0].image, self.criterion.weight(batch), terms.local_means().tolist()))
            timer.end_stage("losses")
            predictions += self.inference.postprocess(views, batch)
            timer.end_stage(POSTPROCESSING)
        return whole if len(parts) > 1 else batch, predictions, losses

    def _mean_losses(self, losses: Sequence[tuple[int, float, list[float]]]) -> dict[str, float]:
        """Return the weighted mean of each loss term over batches (first image, weight, terms); nan without batches."""
        # Sorted, so that the sum's rounding does not depend on which process had which batch.
        weighted = [(weight, [weight * value for value in values]) for _, weight, values in sorted(losses)]
        total = sum(weight for weight, _ in weighted)
        means = [sum(column) / total for column in zip(*(values for _, values in weighted), strict=True)]
        return dict(zip(self.loss_names, means or [math.nan] * len(self.loss_names), strict=True))


def make_evaluator(
    run: Run,
    task: Task,
    model: Model,
    criterion: Criterion,
    data: DataSet[Any],
    split: Split,
    batch_size: int,
    draws: bool = True,
    thresholds: Thresholds | None = None,
    square: bool = False,
) -> Evaluator:
    """Make the evaluator of a split, in batches of `batch_size` per process, padded to squares if `square`.

    Args:
        model: one of the models that the evaluator will be called with
        draws: whether images are kept for pictures and trackers
    """
    batches = run.collectives.shard(data.evaluation_batches(split, batch_size, square))
    drawn = frozenset(evenly_spaced(len(split.images), DRAWN_IMAGES if draws else 0))
    limits = thresholds or Thresholds()
    inference = Inference(task, task.postprocess(model, limits), run.accelerator.device)
    loader, metrics = data.evaluation_loader(split, batches), task.metrics(drawn)
    losses, columns = task.loss_names_of(model), metric_columns(task.metric_names, split.sets)
    return Evaluator(run, criterion, inference, metrics, loader, split, batch_size, limits, losses, columns)


def validate(flags: Mapping[str, Any]) -> Evaluator:  # noqa: PLR0915 - one page, in the order of a validation
    """Validate as one of the processes; return the evaluator. Raises `UserError` before anything is written."""
    options = ValOptions(**flags)
    precision = "no" if options.half else options.mixed_precision
    run = Run(*start(options.device, precision, options.dist_timeout), options.quiet)
    device = run.accelerator.device
    half, times_speed = options.half and device.type == "cuda", options.task == "speed"
    split_name = "val" if times_speed else options.task

    # Read and check the weights and the data.
    with barrier(options.dist_timeout):  # one machine may have more to download than another
        members = read_members(options.weights, options.layers, options.task_file, options.augment)
        members.refuse_flags(options, flags)
        if options.annotations and not (options.save_json and Path(options.annotations).is_file()):
            raise UserError(f"--annotations {options.annotations} must be a file, and needs --save-json")
        if options.review and (times_speed or options.conf_thres > MAX_CONF_THRES):
            limit = f"--conf-thres {MAX_CONF_THRES:g} or less"
            raise UserError(f"--review needs {limit}, as low confidences count too, and no --task speed; correct that")
        source = data_source(options.data, members.entry.data)
        names = source.names(options.single_cls)
    members.pixel_format(source.spec.pixels, options.data)
    defaults: Any = {name: value for name, value in SPEED_DEFAULTS.items() if times_speed and name not in flags}
    options = replace(options, **defaults)
    size = members.image_size(options.imgsz, source.spec.defaults.get("imgsz", 0))
    options = replace(options, imgsz=max(size.sides), square=options.square or size.is_fixed)
    task_class = members.entry.load()
    members.refuse_flags(options, {"tile": source.spec.tiles})
    task = task_class(names, task_class.recipe())
    models = [for_inference(model, device, half) for model in members.build(task, options.imgsz, options.data)]
    first, stride = models[0], math.lcm(*(model.stride for model in models))
    workers = min(options.workers, cores_per_process())
    data = source.open(first.imgsz, stride, select(DataOptions, options, workers=workers, cache=""))
    with barrier(options.dist_timeout):
        split = data.split(split_name)
    add_user_trackers(options.log_with)

    # Open the run folder.
    files = (name for image in map(str, split.images) for name in (image, label_name(image)))
    run.open_folder(options.project, options.name, options.exist_ok, files)
    log(format_paths({"weights": members.files.values(), "data": [source.spec.file]}), *source.spec.warnings)
    split.report(split_name)
    log_rounding(size.sides, size.rounded(stride).sides, stride)
    members.first.compare_names(names, next(iter(members.files)))
    members.log_notes(options.half, half)
    run.files.write_inputs({**vars(options), "imgsz": first.imgsz}, split.problems)
    run_log.start_validation(run, vars(options), members.first.settings)
    if not options.noplots:
        run.enable_plots()

    # Evaluate.
    thresholds, draws, square = select(Thresholds, options), not options.noplots, options.square
    batch_size, criterion = options.batch_size, task.criterion(first)
    evaluate = make_evaluator(run, task, first, criterion, data, split, batch_size, draws, thresholds, square)
    if not times_speed and not any(file.suppression for file in members.exported.values()):
        evaluate.metrics.check_thresholds(thresholds)
    evaluate.inference = replace(evaluate.inference, augment=options.augment, half=half)
    coco_images: list[CocoImage] = []  # predictions of this process, with --save-json
    if options.save_json:
        evaluate.batch_callbacks.append(lambda _, images: coco_images.extend(image.coco_rows() for image in images))
    reviews: list[ImageReview] = []  # of this process's images, with --review
    if options.review:
        evaluate.batch_callbacks.append(
            lambda batch, images: reviews.extend(
                one.review(info) for one, info in zip(images, batch.infos, strict=True)
            )
        )
    if options.save_txt or options.save_hybrid:
        evaluate.batch_callbacks.append(label_writer(options, run.path / "labels", split.images))
    if times_speed and device.type != "cpu":  # elsewhere a stage is over only after a synchronisation, which takes time
        evaluate.timer = StageTimer(torch.accelerator.synchronize)
    with run.watchdog(options.dist_timeout):
        summary = evaluate(models)
    if options.review:
        write_review(evaluate, reviews, split, options)
    sources = [weights.origin.files[-1] for weights in members.weights.values()]
    write_results(evaluate, summary, options, split, first.imgsz, sources)
    if options.save_json:
        from utils import coco  # only here, because most validations do not need it

        annotations = options.annotations or source.spec.annotation_file(split_name, split.images)
        file, stem = annotations and Path(annotations), next(iter(members.files.values())).stem
        results, write = run.collectives.gather(coco_images), run.files.write_documents
        run.on_main(lambda: coco.report(write, file, bool(options.annotations), results, names, split.images, stem))
    return evaluate


def write_results(
    evaluate: Evaluator, summary: Summary, options: ValOptions, split: Split, imgsz: int, sources: Sequence[Any]
) -> None:
    """Write and draw the results of a validation, log them to the trackers, and print the metrics and times.

    sources: the origins of the weights, for receipt.yaml
    """
    run, device, times_speed = evaluate.run, evaluate.run.accelerator.device, options.task == "speed"
    run.files.write_documents(evaluate.metrics.documents(summary))
    run.log_point({**summary.columns(), "epoch/images_per_second": summary.rate, "epoch": 0}, 0)  # training's keys
    run.plot(lambda: evaluate.metrics.pictures(summary, split, imgsz))
    run.charts()
    run.files.finish_writing()
    brief = options.quiet or (len(evaluate.inference.task.names) > MANY_CLASSES and not options.verbose)
    log(*summary.table(brief), f"{summary.rate:.1f} images/s; results in {run.path}", always=True)
    times = run.collectives.gather([(evaluate.timer.images, evaluate.timer.seconds)])
    if times_speed or device.type == "cpu":
        log_times(times, options.batch_size if times_speed else 0, always=times_speed)
    run.on_main(lambda: summary.write_result(run.path))
    results = {name: float(value) for name, value in {**summary.columns(), "fitness": summary.fitness}.items()}
    names, split_name = [*evaluate.inference.task.names.values()], "val" if times_speed else options.task
    inputs = {"weights": [*sources], "classes": names, split_name: broadcast_from_main(partial(split_inputs, split))}
    run.files.write_receipt(Receipt(inputs, environment(device, run.accelerator), results), vars(options))
    run.finish()


def write_review(evaluate: Evaluator, reviews: list[ImageReview], split: Split, options: ValOptions) -> None:
    """Write review/review.csv from the images of all processes, and pictures of the first rows; log them to W&B."""
    run, names = evaluate.run, evaluate.inference.task.names
    found = [*ranked(run.collectives.gather(reviews), names)]
    run.files.write_documents({"review/review.csv": csv_text(COLUMNS, (row for *_, row in found))})
    kinds = ", ".join(f"{count} {kind}" for kind, count in Counter(one.kind for _, one, _ in found).most_common())
    log(f"{plural(len(found), 'contradiction')} ({kinds or 'none'}) in {run.path / 'review'}", always=True)
    first = found[: options.review]
    files = [run.path / "review" / f"{row[-1]:04}.jpg" for *_, row in first] if not options.noplots else []

    def draw() -> None:
        for earlier in (run.path / "review").glob("[0-9][0-9][0-9][0-9].jpg"):
            earlier.unlink()
        for file, shown in zip(files, first, strict=False):
            write_picture(file, draw_review(*shown, split.display_image(shown[0].image, PICTURE_PIXELS), names))

    run.on_main(draw)
    run.log_media(lambda: {"review": wandb.picture_table(COLUMNS, [row for *_, row in first], files)})


def label_writer(options: ValOptions, folder: Path, images: Sequence[Path]) -> Callable[..., None]:
    """Return a writer of each batch's label files; with --save-hybrid labels too, not predictions that match them."""
    files = [folder / f"{stem}.txt" for stem in unique_stems(map(str, images))]

    def write(batch: Batch, predictions: Sequence[Prediction]) -> None:
        for info, prediction in zip(batch.infos, predictions, strict=True):
            written = prediction.with_labels() if options.save_hybrid else prediction
            write_text(files[info.image], "".join(f"{row}\n" for row in written.label_rows(options.save_conf)))

    return write


def main(argv: Sequence[str] | None = None) -> None:
    """Validate from the command line, on as many processes as it says."""
    flags = given_flags(ValOptions, sys.argv[1:] if argv is None else argv)
    options = ValOptions(**flags)
    if not spawn(partial(validate, flags), options.processes, options.device):
        validate(flags)


def run(**flags: Any) -> dict[str, Any]:
    """Validate from Python, with flags of the command: `val.run(weights="best.pt", data="my.yaml")`.

    Returns the metrics and losses by the names of results.csv, `fitness`, and the run's `folder`. Raises `UserError` if
    the command would end with an error.
    """
    return call(main, flags)


if __name__ == "__main__":
    run_main(main)
