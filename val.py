"""Validate a model on a split of a data set: `python val.py --weights best.pt --data data/coco128.yaml`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from data import DATASETS
from data.sources import read_spec
from models.hub import find_weights
from models.tasks import TASKS, task_of
from models.weights import Weights, read_weights, transfer
from utils.config import ValOptions, parse_options, with_defaults
from utils.errors import UserError
from utils.failures import run_main
from utils.files import find_file
from utils.launch import describe, loader_workers, processes_to_start, start
from utils.layout import layout
from utils.processes import spread
from utils.run import Run
from utils.stopping import Asked
from utils.summary import SHOWN, Summary, evenly

MANY_CLASSES = 50  # from here on a row per class is shown on demand only


@torch.inference_mode()
def evaluate(
    run: Run,
    task: Any,
    model: nn.Module,
    loader: Iterable[Any],
    images: int,
    keep: Callable[[Any, Any], object] = lambda batch, predictions: None,
    asked: Callable[[], str] = str,
) -> Summary:
    """Metrics of `model` over `loader`, which holds this process's share of the batches; the same on every process.

    `keep` is shown each batch with its predictions. The losses are means over the batches, weighed by the task. `asked`
    tells whether the run is asked to end: where it is, on any process, `Asked` is raised on all.
    """
    model.eval()
    device = run.accelerator.device
    records, losses = [], []
    bar = run.bar("validating", images)
    for batch in bar.over(loader, lambda batch: len(batch.infos) * run.accelerator.num_processes):
        run.beat()
        if asked():
            break
        batch = batch.to(device)
        with run.accelerator.autocast():
            outputs = model(task.inputs(batch))
        terms = task.losses(outputs, batch)
        losses.append((batch.infos[0].image, task.weight(batch), terms.means(terms.counts).tolist()))
        predictions = task.predict(outputs, batch)
        keep(batch, predictions)
        records += task.score(predictions, batch)
    if word := next(filter(None, run.gather([asked()])), ""):
        raise Asked(word)
    summary = task.summarise(run.gather(records))
    # Sorted, so that the sum's rounding does not depend on which process had which batch.
    per_batch = [(weight, [weight * value for value in values]) for _, weight, values in sorted(run.gather(losses))]
    total = sum(weight for weight, _ in per_batch)
    means = (sum(column) / total for column in zip(*(values for _, values in per_batch), strict=True))
    return run.agree(replace(summary, losses=dict(zip(task.loss_names, means, strict=True)), rate=bar.rate))


def table(summary: Summary, brief: bool = False) -> list[str]:
    """The metrics as lines of text; `brief` is the row of all classes alone."""
    return [*summary.overall, *([] if brief else summary.details)]


def rounding(asked: int, taken: int) -> list[str]:
    """A sentence where the image size had to be changed."""
    return [] if asked == taken else [f"--imgsz {asked} is not a multiple of the model's stride; taking {taken}"]


def main() -> None:
    """Validate as the flags say."""
    argv = sys.argv[1:]
    options = parse_options(ValOptions, argv)
    if spread(main, processes_to_start(options.device, options.processes)):
        return
    accelerator = start(options.device, options.mixed_precision, options.dist_timeout)
    spec = read_spec(find_file(options.data, "data set", ["data"]))
    weights = read_weights(find_weights(options.weights))
    if weights.model is None:
        raise UserError(
            f"{options.weights} holds bare tensors without a model; give weights that train.py or YOLOv5 wrote"
        )
    task_name = task_of({"task": weights.task}, options.weights)
    kind, task_kind = DATASETS[task_name], TASKS[task_name]
    sizes = ({"imgsz": values["imgsz"]} for values in (task_kind.defaults, spec.defaults) if "imgsz" in values)
    options = with_defaults(options, argv, *sizes)
    task = task_kind(kind.class_names(spec, options.single_cls), task_kind.recipe())
    model = load_model(task, weights, options).to(accelerator.device, memory_format=layout(accelerator.device))
    task.set_thresholds(options.conf_thres, options.iou_thres, options.max_det)

    data = kind(
        spec,
        imgsz=task.imgsz,
        stride=task.stride,
        single_class=options.single_cls,
        workers=loader_workers(options.workers),
        cache="",
        strict=options.strict,
    )
    split = data.split(options.task)

    run = Run(accelerator, options.project, options.name, options.exist_ok)
    run.quiet = options.quiet
    if not options.noplots:
        run.paint()
        task.shown = frozenset(evenly(len(split.images), SHOWN))
    run.say(describe(accelerator), *spec.doubts, *split.report(options.task), *rounding(options.imgsz, task.imgsz))
    run.write_problems(split.problems)
    run.write_settings({**vars(options), "imgsz": task.imgsz})
    batches = run.share(data.evaluation_batches(split, batch_size=options.batch_size, square=options.square))
    if options.show_processes:
        run.say(*run.processes(batches))
    keep = TextFiles(run.folder / "labels", task, options.save_conf) if options.save_txt else lambda batch, found: None
    with run.watch(options.dist_timeout):
        summary = evaluate(run, task, model, data.evaluation_loader(split, batches), len(split.images), keep)
    run.write_documents(task.documents(summary))
    run.plots(lambda: task.pictures(summary, split))
    run.charts()
    run.finish_writing()
    brief = options.quiet or (len(task.names) > MANY_CLASSES and not options.verbose)
    run.say(*table(summary, brief), f"{summary.rate:.1f} images/s; results in {run.folder}", always=True)
    run.finish()


def load_model(task: Any, weights: Weights, options: ValOptions) -> Any:
    """The model inside a weight file. Raises `UserError` where it was made for other classes than the data set's."""
    assert weights.model is not None
    model = task.build_model(weights.model, options.imgsz, options.weights)
    found = transfer(model, weights.state)
    if found.loaded < found.total:
        raise UserError(
            f"{options.weights} knows {weights.model.get('nc')} classes and {options.data} has {len(task.names)}; "
            "give the data set that the weights were trained for"
        )
    return model


class TextFiles:
    """Keeps what was found in an image as rows of a text file named like it."""

    def __init__(self, folder: Path, task: Any, with_confidence: bool) -> None:
        self.folder, self.task, self.with_confidence = folder, task, with_confidence
        folder.mkdir(parents=True, exist_ok=True)

    def __call__(self, batch: Any, predictions: Any) -> None:
        rows = self.task.text_rows(predictions, batch, self.with_confidence)
        for info, lines in zip(batch.infos, rows, strict=True):
            (self.folder / f"{Path(info.path).stem}.txt").write_text("".join(f"{line}\n" for line in lines))


if __name__ == "__main__":
    run_main(main)
