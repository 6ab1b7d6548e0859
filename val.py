"""Validate a model on a split of a data set: `python val.py --weights best.pt --data data/coco128.yaml`."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from data import DATASETS
from data.sources import DataSpec, read_spec
from models.ensemble import (
    check_programs,
    common_task,
    fixed_size,
    halve,
    load_models,
    refuse_flags,
    weight_files,
)
from models.export.runtime import read_model
from models.layer_registry import add_layers
from models.tasks import TASKS
from utils import coco
from utils.config.options import ValOptions
from utils.config.parser import parse_options, with_defaults
from utils.distributed.accelerator import describe, loader_workers, processes_to_start, start
from utils.distributed.barrier import in_own_time
from utils.distributed.exit import run_main
from utils.distributed.graceful_stop import Asked
from utils.distributed.ranks import speaks
from utils.distributed.spawn import spread
from utils.errors import UserError
from utils.files import find_file
from utils.memory_format import layout
from utils.python_api import call, hand_over
from utils.run import Run
from utils.stage_times import (
    INFERENCE,
    POSTPROCESSING,
    PREPARING,
    StageTimer,
    format_times,
    milliseconds_per_image,
    without_warmup,
)
from utils.summary import DRAWN_IMAGES, Summary, evenly_spaced

MANY_CLASSES = 50  # from here on a row per class is shown on demand only
SPEED = {"conf_thres": 0.25, "iou_thres": 0.45, "square": True}  # what flags are with --task speed, unless given
SPLIT_OF = {"speed": "val"}  # of a --task that is no split


@torch.inference_mode()
def evaluate(
    run: Run,
    task: Any,
    model: nn.Module,
    loader: Iterable[Any],
    images: int,
    keep: Callable[[Any, Any], object] = lambda batch, predictions: None,
    asked: Callable[[], str] = str,
    *,
    others: Sequence[tuple[Any, nn.Module]] = (),
    half: bool = False,
    stages: StageTimer | None = None,
) -> Summary:
    """Metrics of `model` over `loader`, which holds this process's share of the batches; the same on every process.

    `keep` is shown each batch with its predictions. The losses are means over the batches, weighed by the task. `asked`
    tells whether the run is asked to end: where it is, on any process, `Asked` is raised on all. `others`: more models,
    each with the task that built it, whose predictions are joined with those of `model`; the losses are its alone.
    half: the models' weights are, and so are the images to be. `stages`: takes the time.
    """
    members, stages = ((task, model), *others), stages or StageTimer()
    for _, member in members:
        member.eval()
    device = run.accelerator.device
    records, losses = [], []
    bar = run.bar("validating", images)
    for batch in bar.over(loader, lambda batch: len(batch.infos) * run.accelerator.num_processes):
        run.beat()
        if asked():
            break
        stages.start_batch(len(batch.infos))
        batch = batch.to(device)
        inputs = task.inputs(batch)
        if half:
            inputs = inputs.half()
        stages.end_stage(PREPARING)
        with run.accelerator.autocast():
            looks = [look for own, member in members for look in own.looks(member, inputs)]
        stages.end_stage(INFERENCE)
        if looks[0].outputs is not None:  # an exported model may give none that losses could be computed of
            terms = task.losses(looks[0].outputs, batch)
            losses.append((batch.infos[0].image, task.weight(batch), terms.means(terms.counts).tolist()))
        stages.end_stage("losses")
        predictions = task.predict(looks, batch)
        stages.end_stage(POSTPROCESSING)
        keep(batch, predictions)
        records += task.score(predictions, batch)
    if word := next(filter(None, run.gather([asked()])), ""):
        raise Asked(word)
    summary = task.summarise(run.gather(records))
    # Sorted, so that the sum's rounding does not depend on which process had which batch.
    per_batch = [(weight, [weight * value for value in values]) for _, weight, values in sorted(run.gather(losses))]
    total = sum(weight for weight, _ in per_batch)
    means = [sum(column) / total for column in zip(*(values for _, values in per_batch), strict=True)]
    means = means or [math.nan] * len(task.loss_names)
    return run.agree(replace(summary, losses=dict(zip(task.loss_names, means, strict=True)), rate=bar.rate))


def table(summary: Summary, brief: bool = False) -> list[str]:
    """The metrics as lines of text; `brief` is the row of all classes alone."""
    return [*summary.overall, *([] if brief else summary.details)]


def rounding(asked: int, taken: int) -> list[str]:
    """A sentence where the image size had to be changed."""
    return [] if asked == taken else [f"--imgsz {asked} is not a multiple of the model's stride; taking {taken}"]


def main(argv: Sequence[str] | None = None) -> None:
    """Validate as the flags say."""
    argv = sys.argv[1:] if argv is None else argv
    options = parse_options(ValOptions, argv, prints=speaks())
    if spread(partial(main, argv), processes_to_start(options.device, options.processes)):
        return
    accelerator = start(options.device, "no" if options.half else options.mixed_precision, options.dist_timeout)
    device = accelerator.device
    spec = read_spec(find_file(options.data, "data set", ["data"]))
    if options.layers:
        add_layers(options.layers)
    with in_own_time():  # one machine may have more to download than another
        files = weight_files(options.weights)
    weights = {name: read_model(file) for name, file in files.items()}
    task_name = common_task(weights)
    check_programs(weights, options.augment)
    kind, task_kind = DATASETS[task_name], TASKS[task_name]
    check_flags(options, task_kind.refused)
    sizes = ({"imgsz": values["imgsz"]} for values in (task_kind.defaults, spec.defaults) if "imgsz" in values)
    options = with_defaults(options, argv, *sizes, SPEED if options.task == "speed" else {})
    size = fixed_size(weights)
    options = fitted(options, size)
    with in_own_time():
        names = kind.class_names(spec, options.single_cls)
    tasks = [task_kind(names, task_kind.recipe()) for _ in weights]
    members = load_models(tasks, weights, options.imgsz, options.data)
    half = options.half and device.type == "cuda"
    for own, model in members:
        own.augment = options.augment
        (halve(model) if half else model).to(device, memory_format=layout(device))
    (task, model), *others = members
    task.set_thresholds(options.conf_thres, options.iou_thres, options.max_det)

    stride = math.lcm(*(own.stride for own, _ in members))
    data = kind(
        spec,
        imgsz=task.imgsz,
        stride=stride,
        single_class=options.single_cls,
        workers=loader_workers(options.workers),
        cache="",
        strict=options.strict,
    )
    chosen = SPLIT_OF.get(options.task, options.task)
    with in_own_time():
        split = data.split(chosen)

    run = Run(accelerator, options.project, options.name, options.exist_ok)
    run.quiet = options.quiet
    if not options.noplots:
        run.paint()
        task.shown = frozenset(evenly_spaced(len(split.images), DRAWN_IMAGES))
    run.say(describe(accelerator), *spec.doubts, *split.report(chosen), *rounding(options.imgsz, task.imgsz))
    run.say(*precision(options.half, half), *panel(options, list(weights), size))
    run.write_problems(split.problems)
    run.write_settings({**vars(options), "imgsz": task.imgsz})
    batches = run.share(data.evaluation_batches(split, batch_size=options.batch_size, square=options.square))
    if options.show_processes:
        run.say(*run.processes(batches))
    results = Results(task)
    keepers: list[Callable[[Any, Any], object]] = [results] if options.save_json else []
    if options.save_txt or options.save_hybrid:
        keepers.append(TextFiles(run.folder / "labels", task, options.save_conf, options.save_hybrid))

    def keep(batch: Any, predictions: Any) -> None:
        for keeper in keepers:
            keeper(batch, predictions)

    exact = options.task == "speed" or device.type == "cpu"  # elsewhere it costs time to know when a stage is over
    stages = StageTimer(torch.accelerator.synchronize if exact and device.type != "cpu" else lambda: None)
    loader, images = data.evaluation_loader(split, batches), len(split.images)
    with run.watch(options.dist_timeout):
        summary = evaluate(run, task, model, loader, images, keep, others=others, half=half, stages=stages)
    run.write_documents(task.documents(summary))
    run.plots(lambda: task.pictures(summary, split))
    run.charts()
    run.finish_writing()
    brief = options.quiet or (len(task.names) > MANY_CLASSES and not options.verbose)
    run.say(*table(summary, brief), f"{summary.rate:.1f} images/s; results in {run.folder}", always=True)
    laps = run.gather(without_warmup(stages.batches))
    if exact:
        run.say(speed(milliseconds_per_image(laps), options), always=options.task == "speed")
    run.alone(lambda: hand_over(summary, run.folder))
    run.finish()
    if options.save_json:
        found = run.gather(results.found)
        stem = next(iter(files.values())).stem
        run.alone(lambda: write_results(run, options, spec, found, task.names, split.images, stem))


def fitted(options: ValOptions, size: tuple[int, int] | None) -> ValOptions:
    """The flags for a file that takes images of one size alone: height and width. Raises `UserError` for an oblong."""
    if size is None:
        return options
    if size[0] != size[1]:
        raise UserError(
            f"--weights takes images of {size[0]}x{size[1]} alone, and val.py makes square ones; "
            "export it with --dynamic, or with one number for --imgsz"
        )
    return replace(options, imgsz=size[0], square=True)


def run(**flags: Any) -> dict[str, Any]:
    """Validate from Python: `val.run(weights="best.pt", data="my.yaml")`. The flags are those of the command, by their
    names with underscores.

    Returns the metrics and losses by the names of results.csv, `fitness`, and the run's `folder`. Raises `UserError`
    where the command would end with an error.
    """
    return call(main, ValOptions, flags)


def check_flags(options: ValOptions, refused: Mapping[str, str]) -> None:
    """Raises `UserError` for a flag that means nothing to the task, and for annotations that are not there."""
    refuse_flags(options, refused)
    if options.annotations and not Path(options.annotations).is_file():
        raise UserError(f"--annotations {options.annotations} is not a file; check the path")


def precision(asked: bool, half: bool) -> list[str]:
    """What becomes of --half."""
    if asked and not half:
        return ["warning: --half is for CUDA; taking full precision"]
    return ["weights and images in half precision"] if half else []


def speed(times: Mapping[str, float], options: ValOptions) -> str:
    """What is told of the milliseconds that the stages take for an image."""
    if options.task != "speed":
        return format_times(times)
    rate = 1000 / max(sum(times.values()), 1e-9)
    return f"{format_times(times)}; {rate:.1f} images/s in batches of {options.batch_size}, loading left out"


def panel(options: ValOptions, names: Sequence[str], size: tuple[int, int] | None) -> list[str]:
    """What is told of an ensemble of these weights, of images of one `size`, and of looking more than once."""
    told = [f"an ensemble of {len(names)} models; the losses are those of {names[0]}"] if len(names) > 1 else []
    if size:
        told.append(f"exported for images of {size[0]}x{size[1]} alone: square batches of that size")
    return told + ["--augment: each image is looked at several times"] * options.augment


def write_results(
    run: Run,
    options: ValOptions,
    spec: DataSpec,
    found: Sequence[coco.CocoImage],
    names: Mapping[int, str],
    images: Sequence[Path],
    stem: str,
) -> None:
    """What was found in all `images` as COCO's results, and COCO's own numbers where there are annotations.

    Raises `UserError` for annotations that do not fit, where --annotations named them, when the results are written.
    """
    file, missing = Path(options.annotations) if options.annotations else None, ""
    if file is None:
        file, missing = coco.find_annotations(spec.roots, SPLIT_OF.get(options.task, options.task), images)
    ids, annotations, problem = coco.default_ids(names, images), None, None
    if file:
        try:
            annotations = coco.read_annotations(file, names, images)
            ids = annotations.ids
        except UserError as error:
            problem = error
    rows = coco.results(found, ids)
    run.write_documents({f"{stem}_predictions.json": json.dumps(rows)})
    run.say(f"{len(rows)} results in {run.folder / f'{stem}_predictions.json'}; {ids.origin}", *filter(None, [missing]))
    try:
        if problem:
            raise problem
        if annotations:
            scores = coco.score(annotations, rows)
            run.write_documents({"coco.csv": coco.csv_document(scores)})
            run.say(*annotations.warnings(), *coco.table(scores))
    except UserError as error:
        if options.annotations:
            raise
        run.say(f"warning: {error}")


class TextFiles:
    """Keeps what was found in an image as rows of a text file named like it; `hybrid`: beside its labels."""

    def __init__(self, folder: Path, task: Any, with_confidence: bool, hybrid: bool = False) -> None:
        self.folder, self.task, self.with_confidence, self.hybrid = folder, task, with_confidence, hybrid
        folder.mkdir(parents=True, exist_ok=True)

    def __call__(self, batch: Any, predictions: Any) -> None:
        rows = self.task.text_rows(predictions, batch, self.with_confidence, self.hybrid)
        for info, lines in zip(batch.infos, rows, strict=True):
            (self.folder / f"{Path(info.path).stem}.txt").write_text("".join(f"{line}\n" for line in lines))


class Results:
    """Keeps what was found in the images of this process, for COCO's results."""

    def __init__(self, task: Any) -> None:
        self.task = task
        self.found: list[Any] = []

    def __call__(self, batch: Any, predictions: Any) -> None:
        self.found += self.task.results(predictions, batch)


if __name__ == "__main__":
    run_main(main)
