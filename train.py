"""Train a model: `python train.py` alone for the built-in job, or with YOLOv5's flags for yours."""

from __future__ import annotations

import copy
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from accelerate.utils import send_to_device
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from data import DATASETS
from data.sampler import Sampling
from data.sources import DataSpec, overlap, read_spec
from models.flops import gflops
from models.layer_registry import add_layers
from models.tasks import TASKS, task_of
from models.weights.reader import Weights, read_weights
from models.weights.releases import find_weights
from models.weights.transfer import transfer
from utils.checkpoint.progress import Progress
from utils.checkpoint.resume import Settled, check_same, settle
from utils.checkpoint.state_files import STATE_FORMAT
from utils.config.options import (
    BUILT_IN_JOB,
    Recipe,
    TrainOptions,
    parse_options,
    read_hyperparameters,
    select,
    with_defaults,
)
from utils.config.resumed import changes
from utils.console import Bar, RemainingTime, duration
from utils.distributed.accelerator import (
    check_batch_size,
    describe,
    device_name,
    device_table,
    loader_workers,
    plan,
    processes_to_start,
    seed_everything,
    start,
)
from utils.distributed.barrier import in_own_time
from utils.distributed.comm_hooks import compress
from utils.distributed.deepspeed import configure, load_optimizer_state, optimizer_state, refuse_comm_hook, whole
from utils.distributed.exit import Stopped, run_main
from utils.distributed.graceful_stop import TIME, Asked, Stop, exit_code
from utils.distributed.preflight import Inputs, examine
from utils.distributed.ranks import speaks
from utils.distributed.spawn import spread
from utils.distributed.sync_batchnorm import average_statistics, exact
from utils.distributed.sync_dropout import draw_for_all
from utils.errors import UserError
from utils.files import find_file, read_yaml
from utils.memory_format import layout
from utils.python_api import call, hand_over
from utils.run import Run
from utils.summary import DRAWN_IMAGES, Summary, evenly_spaced
from utils.tracking.run_log import RunLog, TrackingOptions, wandb_run_id
from utils.training.ema import ModelEMA
from utils.training.memory import ON_CPU, explained, fitting_workers, largest_batch
from utils.training.nonfinite_steps import Guard, Later, Window, explain, statistics
from utils.training.optimizer import Schedule, build_optimizer, freeze, start_momentum, step_if
from utils.training.step_log import Meter, Point, memory
from val import evaluate, rounding, table

CLIP = 10.0  # largest norm of the gradient of an optimizer step
NAMED = 5  # tensors that are named where they do not fit
PICTURES = 3  # training batches to draw
LAST_WORDS = 10.0  # seconds that trackers have where the run is asked to end
VALIDATION_BATCH = 32  # images that a process validates at a time, at most: whatever the number of processes


class Ended(NamedTuple):
    """A window of batches, which ended with an optimizer step."""

    taken: Later  # was the step?
    batches: int
    step: int
    window: Window


@dataclass
class Trainer:
    """All that an epoch needs. `model` is what Accelerate prepared from `bare`, which `ema` follows."""

    run: Run
    task: Any
    model: nn.Module
    bare: nn.Module
    ema: ModelEMA
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    meter: Meter
    remaining: RemainingTime
    loader: DataLoader
    draws: Any  # the loader's batches of the whole run
    progress: Progress
    totals: Tensor  # sums of the loss terms over this epoch's batches: this process's share
    guard: Guard
    stop: Stop
    identity: Mapping[str, Any]  # of classes and images: what a state must be resumed with
    options: TrainOptions
    saved: dict[str, Any] | None = None  # the progress that was saved last
    ended: deque[Ended] = field(default_factory=deque)  # windows that are yet to be counted
    points: deque[Point] = field(default_factory=deque)  # of the step curves, that are yet to be logged

    @property
    def behind(self) -> int:
        """Windows that may be counted later: a GPU's, so that the next one's work is on its way when it is asked."""
        return 1 if self.totals.is_cuda else 0

    def train_one_epoch(self) -> tuple[dict[str, float], Bar]:
        """The rest of an epoch: one pass over the training images. Returns the mean of each loss term over its batches,
        the same on every process, and how fast it went. Raises `Asked` where the run is asked to end."""
        run, progress, size = self.run, self.progress, self.options.batch_size
        epochs, batches = self.options.epochs, len(self.loader)
        self.model.train()
        self.loader.set_epoch(progress.epoch)  # type: ignore[attr-defined]  # Accelerate hands it on to the sampler
        self.draws.skip(progress.batch)
        bar = run.bar(f"epoch {progress.epoch + 1}/{epochs}", batches * size, progress.batch * size)
        self.meter.follow(bar)
        todo = self.loader if progress.batch < batches else ()  # nothing where the validation alone is missing
        for number, batch in enumerate(bar.over(todo, lambda _: size), progress.batch):
            run.beat()
            self.train_on(batch, number)
            self.remaining.done += 1
            if bar.due():
                bar.show(self.shown(number + 1, bar))
            if progress.epoch == 0 and number < PICTURES:
                run.plots(partial(self.picture, batch, number))
        self.count_steps()
        average_statistics(self.model)
        average_statistics(self.ema.model)
        losses = run.accelerator.reduce(self.totals, "sum") / progress.taken
        return dict(zip(self.task.loss_names, losses.tolist(), strict=True)), bar

    def picture(self, batch: Any, number: int) -> dict[str, np.ndarray]:
        """A training batch, as the model sees it."""
        return {f"train_batch{number}.jpg": self.task.picture(batch)}

    def shown(self, batches: int, bar: Bar) -> dict[str, str]:
        """What stands beside the bar after so many batches of the epoch."""
        # This process's share, taken for one like the others'.
        losses = (self.totals * self.run.accelerator.num_processes / batches).tolist()
        values = {
            name.removesuffix("_loss"): f"{value:.4f}" for name, value in zip(self.task.loss_names, losses, strict=True)
        }
        if best := self.progress.summary:
            values[f"best {self.task.metric_names[-1]}"] = f"{best.metrics[self.task.metric_names[-1]]:.3f}"
        values |= {"wait": f"{bar.waiting:.0%}", "memory": f"{memory(self.totals.device):.1f} GiB"}
        return values | {"left": duration(self.remaining.seconds())}

    def train_on(self, batch: Any, number: int) -> None:
        """Forward and backward, and the optimizer's step where the batch ends a window of accumulated ones."""
        accelerator, task, optimizer = self.run.accelerator, self.task, self.optimizer
        # DDP takes the mean over processes and Accelerate the mean over accumulated batches; the task says what the
        # images of an optimizer step are worth.
        images = self.options.batch_size * accelerator.gradient_accumulation_steps
        step = self.progress.epoch * len(self.loader) + number
        torch.manual_seed(self.options.seed + step)  # what a model draws, in dropout, does not depend on the past
        with accelerator.accumulate(self.model):
            self.schedule.apply(optimizer, step)
            terms = task.losses(self.model(task.inputs(batch), *task.hints(batch)), batch)
            means = terms.means(accelerator.reduce(terms.counts, "sum"))
            accelerator.backward(task.objective(means, images) * accelerator.num_processes)
            taken = self.step_optimizer() if accelerator.sync_gradients else None
            optimizer.zero_grad()
        self.totals += means.detach()
        self.meter.saw(means.detach())
        self.guard.saw(means.detach(), (info.path for info in batch.infos))
        if taken is not None:
            self.end_window(number, taken)

    def step_optimizer(self) -> Tensor:
        """Take the step, unless its gradients are not finite; was it taken? (), bool, on the device.

        The norm is of the gradients of all processes, so all skip the same steps. On CPU and CUDA nothing here waits
        for it, but for a scaler and for DeepSpeed's engine, which read it themselves.
        """
        accelerator, optimizer = self.run.accelerator, self.optimizer
        norm = self.meter.norm = accelerator.clip_grad_norm_(self.model.parameters(), CLIP)
        if accelerator.scaler is None and isinstance(norm, Tensor) and norm.device.type in ("cpu", "cuda"):
            return step_if(optimizer, norm.isfinite())
        finite = norm is None or math.isfinite(norm)
        if finite or accelerator.scaler is not None:  # a scaler skips by itself, and must hear of it
            optimizer.step()
        taken = finite and not accelerator.optimizer_step_was_skipped
        return torch.full((), taken, device=accelerator.device)

    def end_window(self, number: int, taken: Tensor) -> None:
        """After an optimizer step: EMA, or where it was skipped what goes with that; then it may be time to log, and to
        save."""
        progress = self.progress
        batches, progress.batch, progress.step = number + 1 - progress.batch, number + 1, progress.step + 1
        window = self.guard.close(taken)
        with whole(self.model):
            self.ema.update(self.bare, taken)
        self.ended.append(Ended(Later(taken), batches, progress.step, window))
        if self.meter.due(progress.step, last=progress.batch == len(self.loader)):
            epoch = progress.epoch + progress.batch / len(self.loader)
            self.points.append(self.meter.point(progress.step, epoch, self.optimizer, self.options.batch_size))
        self.count_steps(keep=self.behind)
        if word := self.stop.after(progress.step):
            raise Asked(word)
        if self.options.save_steps and progress.step % self.options.save_steps == 0:
            self.save_state()

    def count_steps(self, keep: int = 0) -> None:
        """Count the steps that were taken and those that were not, and log what was measured, but for the last `keep`
        steps."""
        while len(self.ended) > keep:
            ended, progress = self.ended.popleft(), self.progress
            taken = ended.taken.read()
            progress.taken += ended.batches * taken
            progress.skipped += not taken
            if self.guard.count(taken):
                self.explain_skips(ended)
        while self.points and self.points[0].step <= self.progress.step - keep:
            point = self.points.popleft()
            self.run.point(self.meter.values(point), point.step)

    def explain_skips(self, ended: Ended) -> NoReturn:
        """Too many steps in a row were skipped: say what is known, on every process alike."""
        run, guard = self.run, self.guard
        suspects = run.gather(guard.suspects(ended.window, self.task.loss_names))
        images = sum(run.gather([sum(len(images) for _, images in ended.window)]))
        precision, lr0 = run.accelerator.mixed_precision, self.schedule.lr0
        with whole(self.model):
            known = explain(ended.step, guard.row, suspects, images, self.bare, precision, lr0)
        run.writer.wait()
        raise UserError(f"{known}; the last good state is in {run.folder}")

    def described(self) -> dict[str, Any]:
        """What goes with the weights into a file."""
        return {"yaml": self.ema.model.yaml, "names": self.task.names, "settings": vars(self.options)}

    def save_state(self) -> None:
        """Everything that --resume needs to go on from here. All processes must come together."""
        self.count_steps()
        run, scaler, progress = self.run, self.run.accelerator.scaler, self.progress.plain()
        here = {**progress, "summary": None}  # which is of tensors too, and changes with the best epoch only
        if here == self.saved:
            return
        self.saved = here
        share = {"totals": self.totals, "model": statistics(self.bare), "ema": statistics(self.ema.model)}
        with whole(self.model):
            run.save_state(
                {
                    "format": STATE_FORMAT,
                    **self.identity,
                    "progress": progress,
                    "model": self.bare.state_dict(),
                    "ema": self.ema.model.state_dict(),
                    "updates": int(self.ema.updates),
                    "optimizer": optimizer_state(self.optimizer, self.bare),
                    "rates": [group["lr"] for group in self.optimizer.param_groups],
                    "scaler": scaler and scaler.state_dict(),
                    "shares": run.gather([send_to_device(share, "cpu")]),
                    "wandb_id": self.options.wandb_id,
                },
            )


class Job(NamedTuple):
    """What the files say that the flags name: options with all defaults known, data set, task, model, weights, and
    hyperparameters."""

    options: TrainOptions
    spec: DataSpec
    task: Any
    kind: str
    yaml: dict[str, Any]
    weights: Weights | None
    hyp: Recipe

    @property
    def source(self) -> str:
        """Where the model is from."""
        return self.options.cfg or self.options.weights


def read_job(settled: Settled, argv: Sequence[str]) -> Job:
    """Read and check the files. Raises `UserError`."""
    options, begun = settled.options, settled.begun
    if options.layers:
        add_layers(options.layers)
    spec = read_spec(find_file(options.data, "data set", ["data"]))
    weights = None
    if begun:
        yaml = begun["model"]
    elif options.cfg:
        yaml = read_yaml(find_file(options.cfg, "model", ["models", "models/hub"]))
    else:
        weights = read_weights(find_weights(options.weights)) if options.weights else None
        if weights is None or weights.model is None:
            raise UserError("no model is given; name one with --cfg, such as --cfg yolov5n.yaml")
        yaml = {"task": weights.task, **weights.model}
    kind = task_of(yaml, options.cfg or options.weights)
    if not settled.fixed:
        options = with_defaults(options, argv, TASKS[kind].defaults, spec.defaults)
    if options.cfg and options.weights and not begun:
        weights = read_weights(find_weights(options.weights, yaml, options.cfg))
    recipe = TASKS[kind].recipe
    if begun:
        hyp = recipe(**begun["hyperparameters"])
    else:
        hyp = read_hyperparameters(options.hyp, recipe, options.overrides)
    task = TASKS[kind](DATASETS[kind].class_names(spec, options.single_cls), hyp, options.label_smoothing)
    return Job(options, spec, task, kind, yaml if begun else task.describe(yaml), weights, hyp)


def main(argv: Sequence[str] | None = None) -> None:
    """Train as the flags say."""
    argv = sys.argv[1:] if argv is None else argv
    settled = settle(parse_options(TrainOptions, argv, BUILT_IN_JOB, prints=speaks()), argv, recipe_of)
    options, begun, _ = settled
    if spread(partial(main, argv), processes_to_start(options.device, options.processes)):
        return
    refuse_comm_hook(options.comm_hook)
    if options.doctor:
        check_batch_size(options.batch_size)
        return examine(options, lambda: inputs(settled, argv))
    accelerator = start(options.device, options.mixed_precision, options.dist_timeout, options.comm_hook)
    with in_own_time():  # one machine may have more to download than another
        job = read_job(settled, argv)
    options, spec, task, hyp = job.options, job.spec, job.task, job.hyp
    check_batch_size(options.batch_size)
    sampling = select(Sampling, options)
    accelerator.gradient_accumulation_steps = hyp.accumulation(max(options.batch_size, 1))
    if options.multi_scale:  # a model for one size only says so here
        task.build_model(job.yaml, sampling.largest(options.imgsz), job.source)
    seed_everything(options.seed)
    model = task.build_model(job.yaml, options.imgsz, job.source)
    facts = start_from(model, job)
    facts += rounding(options.imgsz, task.imgsz)
    workers, warnings = fitting_workers(
        loader_workers(options.workers),
        max(options.batch_size // accelerator.num_processes, VALIDATION_BATCH) * 3 * sampling.largest(task.imgsz) ** 2,
    )
    data = DATASETS[job.kind](
        spec,
        imgsz=task.imgsz,
        stride=task.stride,
        single_class=options.single_cls,
        workers=workers,
        cache=options.cache,
        strict=options.strict,
    )
    with in_own_time():
        train_split, val_split = data.split("train", hyp), data.split("val")

    run = Run(accelerator, options.project, options.name, options.exist_ok)  # now that nothing of the input is wrong
    run.quiet = options.quiet
    devices = run.gather([device_name(accelerator)])
    run.say(describe(accelerator), *device_table(devices, options.verbose), *facts, *warnings, *spec.doubts)
    run.say(*train_split.report("train"), *val_split.report("val"), *overlap(train_split.images, val_split.images))
    state = run.read_state() if begun else None
    identity = {"names": task.names, "imgsz": task.imgsz, "images": train_split.identity()}
    if begun and state:
        run.say(*check_same(state, identity), *changes(begun, options))
        run.say(f"going on with {run.folder} {Progress.of(state['progress'])}")
        model.load_state_dict(state["model"])
    run.take_up(state)
    if state is None and not options.noautoanchor:
        run.say(*task.adapt(model, train_split))
    if options.batch_size == -1:
        options = replace(options, batch_size=auto_batch(run, task, model, data, train_split, hyp, sampling))
        accelerator.gradient_accumulation_steps = hyp.accumulation(options.batch_size)
    options = replace(options, wandb_id=run.agree(wandb_run_id(options.wandb_id, state)))
    run.write_problems([*train_split.problems, *val_split.problems])
    settings = {**vars(options), "imgsz": task.imgsz, "hyperparameters": vars(hyp), "model": model.yaml}
    run.write_settings(settings)
    run.write_documents(data.documents(train_split, val_split))
    run_log = RunLog(run, select(TrackingOptions, options), val_split.images, list(task.names.values()))
    dataset = {"yaml": str(spec.file), "train": identity["images"], "val": val_split.identity()}
    run_log.start(settings, devices, dataset, Progress.of(state["progress"]).step if state else 0)
    run_log.upload_dataset(spec.file, lambda: DATASETS[job.kind].files(spec), dataset)
    if not options.noplots:
        run.paint()
        run.charts("labels.jpg")
    task.shown = frozenset(evenly_spaced(len(val_split.images), max(options.max_images, DRAWN_IMAGES)))

    loader = data.train_loader(
        train_split,
        batch_size=options.batch_size,
        hyp=hyp,
        seed=options.seed,
        sampling=sampling,
    )
    validation_batch = min(2 * options.batch_size, VALIDATION_BATCH)
    batches = data.evaluation_batches(val_split, batch_size=validation_batch, square=False)
    val_loader = data.evaluation_loader(val_split, run.share(batches))
    said = [*(loader.dataset.images.said or val_loader.dataset.images.said), *loader.batch_sampler.said]
    run.say(*said, *plan(options, accelerator, len(loader)), f"results go to {run.folder}")
    with explained(options.batch_size, task.imgsz):
        trainer = prepare(run, task, model, loader, options, hyp, identity, state)
        del state
        if options.show_processes:
            run.say(*run.processes(trainer.loader.batch_sampler))
        validate = partial(evaluate, run, task, trainer.ema.model, val_loader, len(val_split.images))
        with trainer.stop, run.watch(options.dist_timeout):
            try:
                best = fit(trainer, validate, run_log)
            except Asked as asked:
                leave(trainer, validate, asked.word)
    run.plots(lambda: task.pictures(best, val_split))
    run.charts()
    run.finish_writing()
    run_log.upload_last(trainer.progress)
    run.say(*result(trainer.progress, best, options.quiet), f"results in {run.folder}", always=True)
    run.alone(lambda: hand_over(best, run.folder))
    run.finish()


def run(**flags: Any) -> dict[str, Any]:
    """Train from Python: `train.run(data="my.yaml", weights="yolov5n.pt", imgsz=320)`. The flags are those of the
    command, by their names with underscores.

    Returns what the best epoch reached, by the names of results.csv, its `fitness` and the run's `folder`. Raises
    `UserError` where the command would end with an error.
    """
    return call(main, TrainOptions, flags)


def recipe_of(yaml: Mapping[str, Any]) -> type[Recipe]:
    """The kind of hyperparameters that goes with a model's YAML."""
    return TASKS[task_of(yaml, "the model")].recipe


def inputs(settled: Settled, argv: Sequence[str]) -> Inputs:
    """What the job reads: settings, and files by what they are for. Raises `UserError` where it could not start."""
    job = read_job(settled, argv)
    job.task.build_model(job.yaml, job.options.imgsz, job.source)
    files = DATASETS[job.kind].files(job.spec)
    if job.weights:
        files["weights"] = [find_weights(job.options.weights, job.yaml)]
    return {**vars(job.hyp), "model": job.yaml, "class names": job.task.names}, files


def auto_batch(run: Run, task: Any, model: nn.Module, data: Any, split: Any, hyp: Recipe, sampling: Sampling) -> int:
    """--batch-size -1: what the memory of the smallest GPU holds, on each process; on a CPU a fixed number.

    Measured by training steps on the first images; the model is left as it was.
    """
    device, processes = run.accelerator.device, run.accelerator.num_processes
    if device.type != "cuda":
        size = max(ON_CPU // processes, 1) * processes
        run.say(f"--batch-size -1 is measured on GPUs only; taking {size}")
        return size
    data = replace(data, cache="")  # what is tried here is not to take room in a cache
    model.to(device, memory_format=layout(device)).train()  # type: ignore[call-overload]
    before = copy.deepcopy(model.state_dict())
    # Beside a step's own: momentum (two for Adam) and EMA, as large as the weights each.
    kept = 3 * sum(value.numel() * value.element_size() for value in before.values())

    def peak(size: int) -> int:
        loader = data.train_loader(split, batch_size=size, hyp=hyp, seed=0, sampling=sampling)
        items = [loader.dataset[draw] for draw in loader.batch_sampler.largest()]
        batch = loader.collate_fn(items).to(device)
        torch.cuda.reset_peak_memory_stats(device)
        with run.accelerator.autocast():
            outputs = model(task.inputs(batch), *task.hints(batch))
        terms = task.losses(outputs, batch)
        task.objective(terms.means(terms.counts), size).backward()
        model.zero_grad()
        return torch.cuda.max_memory_allocated(device) + kept

    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_allocated(device)
    with explained(processes, task.imgsz):
        own = largest_batch(peak, free, len(split.images))
    model.load_state_dict(before)
    torch.cuda.empty_cache()
    size = min(run.gather([own])) * processes
    run.say(f"--batch-size -1: taking {size}, by measurement")
    return size


def start_from(model: nn.Module, job: Job) -> list[str]:
    """Load what fits of the weights and freeze layers; sentences that say so. Raises `UserError` where nothing fits."""
    options, weights = job.options, job.weights
    parameters, work = sum(parameter.numel() for parameter in model.parameters()), gflops(model, job.task.imgsz)
    modules = sum(not any(module.children()) for module in model.modules())
    work_told = f", {work:.3g} GFLOPs at {job.task.imgsz} px" if work else ""
    facts = [f"{job.source}: {modules} layers, {parameters:,} parameters{work_told}"]
    if weights:
        loaded, total, misfits = transfer(model, weights.state, job.task.not_taken(bool(options.cfg)))
        if not loaded:
            raise UserError(
                f"no tensor of {options.weights} fits the model; leave --cfg out to train the model that is in the "
                "file, or give --weights '' to start from scratch"
            )
        if weights.task not in ("", job.kind):
            facts.append(f"warning: {options.weights} is a model for another task, '{weights.task}'")
        few = "" if loaded > total / 2 else "warning: these are weights of another model: only "
        facts.append(f"{few}{loaded} of {total} tensors taken from {options.weights}")
        if misfits:
            dropped = [f"{name} ({_shape(theirs)}, here {_shape(own)})" for name, theirs, own in misfits[:NAMED]]
            more = f" and {len(misfits) - NAMED} more" if len(misfits) > NAMED else ""
            facts.append(f"dropped, for they are of another shape: {', '.join(dropped)}{more}")
    if frozen := freeze(model, options.freeze):
        facts.append(f"layers {', '.join(map(str, frozen))} are frozen")
    return facts


def _shape(sides: Sequence[int]) -> str:
    return "x".join(map(str, sides))


def prepare(
    run: Run,
    task: Any,
    model: nn.Module,
    loader: DataLoader,
    options: TrainOptions,
    hyp: Recipe,
    identity: Mapping[str, Any],
    state: Mapping[str, Any] | None,
) -> Trainer:
    """The optimizer, schedule and EMA, and what Accelerate makes of model and loader; from `state` where there is one,
    whose weights the model has."""
    accelerator = run.accelerator
    draw_for_all(model)
    plugin = accelerator.state.deepspeed_plugin
    # DeepSpeed takes weights in torch's usual layout only; the maps, which are more, follow the images in any case.
    form = torch.contiguous_format if plugin else layout(accelerator.device)
    model.to(accelerator.device, memory_format=form)  # type: ignore[call-overload]
    run.align(model)
    if options.scale_lr:
        hyp = replace(hyp, lr0=hyp.lr0 * accelerator.num_processes)
    optimizer = build_optimizer(model, options.optimizer, hyp.lr0, hyp.momentum, hyp.decay(options.batch_size))
    schedule = select(Schedule, hyp, epochs=options.epochs, batches=len(loader), cosine=options.cos_lr)
    ema, progress = ModelEMA(model), Progress()
    totals = torch.zeros(len(task.loss_names), device=accelerator.device)
    if state:
        progress = Progress.of(state["progress"])
        progress.finished = False  # where it was, there are more epochs now
        ema.model.load_state_dict(state["ema"])
        ema.updates.fill_(state["updates"])
    model = exact(model, options.sync_bn)
    if plugin:
        own_batch = options.batch_size // accelerator.num_processes
        configure(plugin, own_batch, accelerator.gradient_accumulation_steps, CLIP)
    bare = model  # kept, for Accelerate's way back to it imports deepspeed wherever that is installed
    draws = loader.batch_sampler
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if isinstance(model, DistributedDataParallel):
        model.broadcast_buffers = False  # not with every batch: --sync-bn or an average makes the statistics equal
        if options.comm_hook:
            compress(model, options.comm_hook, schedule.warmup // accelerator.gradient_accumulation_steps)
    if not plugin:
        start_momentum(optimizer)
    if state:
        restore_shares(run, state["shares"], totals, bare, ema.model)  # now that DDP has made all processes equal
        load_optimizer_state(optimizer, bare, state["optimizer"])
        for group, rate in zip(optimizer.param_groups, state["rates"], strict=True):
            group["lr"] = rate
        if accelerator.scaler is not None and state["scaler"]:
            accelerator.scaler.load_state_dict(state["scaler"])
    steps = math.ceil(len(loader) / accelerator.gradient_accumulation_steps)
    meter = Meter(task.loss_names, accelerator, options.log_interval, steps, run.tracked)
    remaining = RemainingTime(len(loader) * (options.epochs - progress.epoch) - progress.batch)
    guard = Guard([totals, *statistics(bare).values()], options.max_skips)
    stop = Stop(options.time_limit)
    return Trainer(
        run,
        task,
        model,
        bare,
        ema,
        optimizer,
        schedule,
        meter,
        remaining,
        loader,
        draws,
        progress,
        totals,
        guard,
        stop,
        identity,
        options,
    )


def restore_shares(run: Run, shares: Sequence[Mapping[str, Any]], totals: Tensor, *models: nn.Module) -> None:
    """What each process had of its own: loss sums and BatchNorm's statistics, of the model and of its EMA.

    Other processes than those that saved it share the sums, and take the mean of the statistics.
    """
    own = run.own(shares)
    if own is None:
        sums = sum(share["totals"] for share in shares) / run.accelerator.num_processes
        own = {"totals": sums, "model": {}, "ema": {}}
        for name in ("model", "ema"):
            for key in shares[0][name]:
                own[name][key] = torch.stack([share[name][key].double() for share in shares]).mean(0)
    totals.copy_(own["totals"])
    for model, name in zip(models, ("model", "ema"), strict=True):
        for key, buffer in statistics(model).items():
            buffer.copy_(own[name][key])


def fit(trainer: Trainer, validate: Callable[..., Summary], run_log: RunLog) -> Summary:
    """The loop over epochs; what the best of them reached. Raises `Asked` where the run is asked to end.

    validate: evaluates the EMA; may be given what tells whether to end.
    """
    run, task, ema, progress, options = trainer.run, trainer.task, trainer.ema, trainer.progress, trainer.options
    while not progress.finished:
        epoch = progress.epoch
        losses, bar = trainer.train_one_epoch()
        final = epoch + 1 == options.epochs
        if not options.nosave:
            trainer.save_state()  # written while the epoch is validated; nothing else is missing then
        since = time.monotonic()
        summary = validate(asked=trainer.stop.asked) if final or not options.noval else None
        row = results_row(epoch, losses, summary, task, trainer.optimizer)
        run.log(row)
        run.say(epoch_line(epoch, options.epochs, losses, summary, bar.rate, progress.skipped))
        if summary and options.verbose:
            run.say(*table(summary))
        improved = summary is not None and progress.record(epoch, summary.fitness)
        if summary and improved:
            progress.summary = summary
            run.write_documents(task.documents(summary))
        run_log.log_epoch(row, facts(bar, time.monotonic() - since, progress), summary, progress)
        if summary:
            run_log.log_examples(partial(task.examples, summary), epoch)
        progress.finished = final or progress.stalled(options.patience)
        names = []
        if progress.finished or not options.nosave:
            names += ["last.pt"] + ["best.pt"] * improved
        kept = [f"epoch{epoch}.pt"] * (options.save_period > 0 and epoch % options.save_period == 0)
        upload = partial(run_log.upload, kept, "latest", f"epoch-{epoch}", *["best"] * improved)
        run.save([*names, *kept], ema.model, upload, **trainer.described())
        progress.next_epoch()
        trainer.totals.zero_()
        trainer.guard.keep()
    run.finish_writing()
    trainer.save_state()  # finished: no weights are missing
    if progress.epoch < options.epochs:
        run.say(
            f"stopped: no better fitness for {options.patience} epochs; the best was epoch {progress.best_epoch + 1}"
        )
    assert progress.summary is not None
    return progress.summary


def leave(trainer: Trainer, validate: Callable[..., Summary], word: str) -> NoReturn:
    """Save all, and end with the exit code that `word` stands for; at the time limit the EMA is validated too."""
    run, progress, options = trainer.run, trainer.progress, trainer.options
    trainer.save_state()
    run.finish_writing()
    if word == TIME:
        average_statistics(trainer.ema.model)
        run.say(*table(validate()))
        run.save(["last.pt"], trainer.ema.model, **trainer.described())
        run.finish_writing()
    reason = f"the time limit of {options.time_limit:g} hours" if word == TIME else word
    run.say(f"stopped by {reason} {progress}; all is saved: go on with --resume {run.folder}")
    run.finish(LAST_WORDS)
    run.agree(None)  # nobody is ended while another one still writes
    raise Stopped(exit_code(word))


def facts(bar: Bar, validation: float, progress: Progress) -> dict[str, float]:
    """What trackers are told of an epoch beside its row: how long it took, in seconds, and what was skipped."""
    return {
        "images_per_second": bar.rate,
        "train_seconds": bar.seconds,
        "validation_seconds": validation,
        "data_wait": bar.waited / max(bar.seconds, 1e-9),
        "steps_skipped": progress.skipped,
    }


def result(progress: Progress, best: Summary, brief: bool) -> list[str]:
    """The table of the best epoch."""
    head = f"best epoch: {progress.best_epoch + 1} of {progress.epoch}, fitness {progress.best:.4f}"
    return [head, *table(best, brief)]


def results_row(
    epoch: int, losses: dict[str, float], summary: Summary | None, task: Any, optimizer: torch.optim.Optimizer
) -> dict[str, float | None]:
    """A row of results.csv: YOLOv5's columns, empty where there was no validation."""
    return {
        "epoch": epoch,
        **{f"train/{name}": value for name, value in losses.items()},
        **{f"metrics/{name}": summary.metrics[name] if summary else None for name in task.metric_names},
        **{f"val/{name}": summary.losses[name] if summary else None for name in task.loss_names},
        **{f"x/lr{number}": group["lr"] for number, group in enumerate(optimizer.param_groups)},
    }


def epoch_line(
    epoch: int, epochs: int, losses: dict[str, float], summary: Summary | None, rate: float, skipped: int
) -> str:
    """One line per epoch for people. `skipped`: optimizer steps of the run whose gradients were not finite."""
    parts = [f"{name} {value:.4f}" for name, value in losses.items()]
    parts += [f"{name} {value:.4f}" for name, value in (summary.metrics if summary else {}).items()]
    parts += [f"{rate:.0f} images/s"] if rate else []
    parts += [f"steps skipped so far, not finite: {skipped}"] if skipped else []
    return f"epoch {epoch + 1}/{epochs}: {', '.join(parts)}"


if __name__ == "__main__":
    run_main(main)
