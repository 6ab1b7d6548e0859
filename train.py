"""Train a model: `python train.py` alone for the built-in job, or with YOLOv5's flags for yours."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from data import DATASETS
from data.sources import label_file, read_spec
from models.hub import find_weights
from models.tasks import TASKS, task_of
from models.weights import Weights, read_weights, transfer
from utils.batchnorm import average_statistics, synchronise
from utils.compression import BUCKETS, compress
from utils.config import BUILT_IN_JOB, Hyperparameters, TrainOptions, parse_options, read_hyperparameters, select
from utils.doctor import Inputs, examine
from utils.ema import ModelEMA
from utils.errors import UserError
from utils.files import find_file, read_yaml
from utils.launch import BUCKET, check_batch_size, describe, loader_workers, processes_to_start, seed_everything, start
from utils.optim import Schedule, build_optimizer, freeze
from utils.processes import run_main, spread
from utils.progress import Progress
from utils.run import Run
from utils.summary import Summary
from utils.zero import configure, refuse_comm_hook, whole
from val import evaluate, rounding, table

CLIP = 10.0  # largest norm of the gradient of an optimizer step
PICTURES = 3  # training batches to draw
VALIDATION_BATCH = 32  # images that a process validates at a time, at most: whatever the number of processes


@dataclass(frozen=True)
class Trainer:
    """All that an epoch needs. `model` is what Accelerate prepared from `bare`, which `ema` follows."""

    run: Run
    task: Any
    model: nn.Module
    bare: nn.Module
    ema: ModelEMA
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    loader: DataLoader
    batch_size: int
    plots: bool

    def train_one_epoch(self, epoch: int) -> tuple[dict[str, float], float]:
        """One pass over the training images. Returns the mean of each loss term over its batches, the same on every
        process, and images per second."""
        accelerator, task, optimizer = self.run.accelerator, self.task, self.optimizer
        # DDP takes the mean over processes and Accelerate the mean over accumulated batches; YOLOv5's gradient is the
        # sum over all images of an optimizer step.
        to_sum_over_images = self.batch_size * accelerator.num_processes * accelerator.gradient_accumulation_steps
        totals = torch.zeros(len(task.loss_names), device=accelerator.device)
        self.model.train()
        self.loader.set_epoch(epoch)  # type: ignore[attr-defined]  # Accelerate's loader hands it on to the sampler
        bar = self.run.bar(f"epoch {epoch + 1}/{self.schedule.epochs}", len(self.loader) * self.batch_size)
        for number, batch in enumerate(bar.over(self.loader, lambda _: self.batch_size)):
            with accelerator.accumulate(self.model):
                self.schedule.apply(optimizer, epoch * self.schedule.batches + number)
                terms = task.losses(self.model(task.inputs(batch)), batch)
                means = terms.means(accelerator.reduce(terms.counts, "sum"))
                accelerator.backward(means.sum() * to_sum_over_images)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(self.model.parameters(), CLIP)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients and not accelerator.optimizer_step_was_skipped:
                with whole(self.model):
                    self.ema.update(self.bare)
            totals += means.detach()
            if bar.due():  # this process's share, taken for one like the others'
                shown = totals * accelerator.num_processes / (number + 1)
                bar.show(dict(zip(task.loss_names, shown.tolist(), strict=True)))
            if self.plots and epoch == 0 and number < PICTURES:
                self.run.plot(f"train_batch{number}.jpg", task.picture(batch))
        average_statistics(self.model)
        average_statistics(self.ema.model)
        losses = (accelerator.reduce(totals, "sum") / len(self.loader)).tolist()
        if not all(map(math.isfinite, losses)):
            raise UserError(
                f"the loss is no longer finite in epoch {epoch + 1}; lower lr0, or try --mixed-precision no"
            )
        return dict(zip(task.loss_names, losses, strict=True)), bar.rate


def main() -> None:
    """Train as the flags say."""
    options = parse_options(TrainOptions, sys.argv[1:], BUILT_IN_JOB)
    if spread(main, processes_to_start(options.device, options.processes)):
        return
    check_batch_size(options.batch_size)
    refuse_comm_hook(options.comm_hook)
    if options.doctor:
        return examine(options, lambda: inputs(options))
    hyp = read_hyperparameters(options.hyp)
    accumulation = max(round(hyp.nbs / options.batch_size), 1)
    bucket = BUCKETS.get(options.comm_hook, BUCKET)
    accelerator = start(options.device, options.mixed_precision, options.dist_timeout, accumulation, bucket)
    seed_everything(options.seed)
    spec = read_spec(find_file(options.data, "data set", ["data"]))
    weights = read_weights(find_weights(options.weights)) if options.weights else None
    yaml = model_yaml(options, hyp, weights)
    kind = task_of(yaml)
    task = TASKS[kind](DATASETS[kind].class_names(spec, options.single_cls), hyp, options.label_smoothing)
    model = task.build_model(yaml, options.imgsz)
    facts = start_from(model, weights, options, hyp)
    facts.append(f"an optimizer step for every {options.batch_size * accelerator.gradient_accumulation_steps} images")
    facts += rounding(options.imgsz, task.imgsz)
    data = DATASETS[kind](
        spec,
        imgsz=task.imgsz,
        stride=int(model.stride.max()),
        single_class=options.single_cls,
        workers=loader_workers(options.workers),
        cache=options.cache,
    )
    train_split, val_split = data.split("train"), data.split("val")

    run = Run(accelerator, options.project, options.name, options.exist_ok)  # now that nothing of the input is wrong
    run.say(describe(accelerator), *facts, *train_split.report("train"), *val_split.report("val"))
    if not options.noautoanchor:
        run.say(task.adapt(model, train_split))
    run.write_settings({**vars(options), "imgsz": task.imgsz, "hyperparameters": vars(hyp), "model": model.yaml})

    loader = data.train_loader(
        train_split, batch_size=options.batch_size, hyp=hyp, seed=options.seed, rect=options.rect
    )
    validation_batch = min(2 * options.batch_size, VALIDATION_BATCH)
    batches = data.evaluation_batches(val_split, batch_size=validation_batch, square=False)
    val_loader = data.evaluation_loader(val_split, run.share(batches))
    trainer = prepare(run, task, model, loader, options, hyp)
    if options.show_processes:
        run.say(*run.processes(trainer.loader.batch_sampler))
    best = fit(trainer, val_loader, len(val_split.images), options)
    run.say(*table(best), f"results in {run.folder}")


def inputs(options: TrainOptions) -> Inputs:
    """What the job reads: settings, and files by what they are for. Raises `UserError` where it could not start."""
    hyp = read_hyperparameters(options.hyp)
    spec = read_spec(find_file(options.data, "data set", ["data"]))
    weights = find_weights(options.weights) if options.weights else None
    yaml = model_yaml(options, hyp, read_weights(weights) if weights else None)
    kind = task_of(yaml)
    names = DATASETS[kind].class_names(spec, options.single_cls)
    TASKS[kind](names, hyp, options.label_smoothing).build_model(yaml, options.imgsz)
    images = {split: spec.images(split) for split in ("train", "val")}
    files = images | {f"labels of {split}": list(map(label_file, found)) for split, found in images.items()}
    if weights:
        files["weights"] = [weights]
    return {**vars(hyp), "model": yaml, "class names": names}, files


def model_yaml(options: TrainOptions, hyp: Hyperparameters, weights: Weights | None) -> dict[str, Any]:
    """The model's description: --cfg, else the one inside --weights."""
    if options.cfg:
        yaml = read_yaml(find_file(options.cfg, "model", ["models"]))
    elif weights and weights.model:
        yaml = {"task": weights.task, **weights.model}
    else:
        raise UserError("no model is given; name one with --cfg, such as --cfg yolov5n.yaml")
    if hyp.anchors:
        yaml["anchors"] = round(hyp.anchors)
    return yaml


def start_from(model: nn.Module, weights: Weights | None, options: TrainOptions, hyp: Hyperparameters) -> list[str]:
    """Load what fits of the weights and freeze layers; sentences that say so."""
    facts = [f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters"]
    if weights:
        own_anchors = bool(options.cfg or hyp.anchors)  # they are asked for, so the file's are not
        loaded, total = transfer(model, weights.state, ("anchors",) if own_anchors else ())
        facts.append(f"{loaded} of {total} tensors taken from {options.weights}")
    if frozen := freeze(model, options.freeze):
        facts.append(f"layers {', '.join(map(str, frozen))} are frozen")
    return facts


def prepare(
    run: Run, task: Any, model: nn.Module, loader: DataLoader, options: TrainOptions, hyp: Hyperparameters
) -> Trainer:
    """The optimizer, schedule and EMA, and what Accelerate makes of model and loader."""
    accelerator = run.accelerator
    model.to(accelerator.device)
    run.align(model)
    accumulated = options.batch_size * accelerator.gradient_accumulation_steps
    optimizer = build_optimizer(
        model, options.optimizer, hyp.lr0, hyp.momentum, weight_decay=hyp.weight_decay * accumulated / hyp.nbs
    )
    schedule = select(Schedule, hyp, epochs=options.epochs, batches=len(loader), cosine=options.cos_lr)
    ema = ModelEMA(model)
    if options.sync_bn:
        model = synchronise(model)
    if plugin := accelerator.state.deepspeed_plugin:
        configure(plugin, options.batch_size // accelerator.num_processes, CLIP)
    bare = model  # kept, for Accelerate's way back to it imports deepspeed wherever that is installed
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if isinstance(model, DistributedDataParallel):
        model.broadcast_buffers = False  # not with every batch: --sync-bn or an average makes the statistics equal
        if options.comm_hook:
            compress(model, options.comm_hook, schedule.warmup // accelerator.gradient_accumulation_steps)
    plots = not options.noplots
    return Trainer(run, task, model, bare, ema, optimizer, schedule, loader, options.batch_size, plots)


def fit(trainer: Trainer, val_loader: DataLoader, val_images: int, options: TrainOptions) -> Summary:
    """The loop over epochs; what the best of them reached."""
    run, task, ema, schedule = trainer.run, trainer.task, trainer.ema, trainer.schedule
    progress, best = Progress(), None
    described = {"yaml": ema.model.yaml, "names": task.names, "settings": vars(options)}
    for epoch in range(options.epochs):
        losses, rate = trainer.train_one_epoch(epoch)
        final = epoch + 1 == options.epochs
        summary = evaluate(run, task, ema.model, val_loader, val_images) if final or not options.noval else None
        run.log(results_row(epoch, losses, summary, task, schedule))
        run.say(epoch_line(epoch, options.epochs, losses, summary, rate))
        improved = summary is not None and progress.record(epoch, summary.fitness)
        last = final or progress.stalled(options.patience)
        if last or not options.nosave:
            run.save("last.pt", ema.model, **described)
            if improved:
                run.save("best.pt", ema.model, **described)
        if options.save_period > 0 and epoch % options.save_period == 0:
            run.save(f"epoch{epoch}.pt", ema.model, **described)
        if improved:
            best = summary
        if last:
            break
    if epoch + 1 < options.epochs:
        run.say(
            f"stopped: no better fitness for {options.patience} epochs; the best was epoch {progress.best_epoch + 1}"
        )
    assert best is not None
    return best


def results_row(
    epoch: int, losses: dict[str, float], summary: Summary | None, task: Any, schedule: Schedule
) -> dict[str, float | None]:
    """A row of results.csv: YOLOv5's columns, empty where there was no validation."""
    rates = schedule.at((epoch + 1) * schedule.batches - 1).lrs
    return {
        "epoch": epoch,
        **{f"train/{name}": value for name, value in losses.items()},
        **{f"metrics/{name}": summary.metrics[name] if summary else None for name in task.metric_names},
        **{f"val/{name}": summary.losses[name] if summary else None for name in task.loss_names},
        **{f"x/lr{group}": rate for group, rate in enumerate(rates)},
    }


def epoch_line(epoch: int, epochs: int, losses: dict[str, float], summary: Summary | None, rate: float) -> str:
    """One line per epoch for people."""
    parts = [f"{name} {value:.4f}" for name, value in losses.items()]
    parts += [f"{name} {value:.4f}" for name, value in (summary.metrics if summary else {}).items()]
    return f"epoch {epoch + 1}/{epochs}: {', '.join(parts)}; {rate:.0f} images/s"


if __name__ == "__main__":
    run_main(main)
