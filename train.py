"""Train a model: `python train.py` alone runs the built-in job, YOLOv5's flags run yours.

Read from the top in the order of a run: `train` makes the parts, then trains and validates epoch by epoch;
`train_one_epoch` is one pass over the images: forward, loss, backward, step. job.py reads what the flags name.
"""

from __future__ import annotations

import gc
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    gc.disable()  # the imports make 400,000 objects and hardly any garbage; `run_main` turns it on again
    # Read with torch. By default OpenMP's threads spin long for one that a busy program has displaced (benchmarks.md).
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")

import torch
from torch import nn

from job import VALIDATION_BATCH, Job, read_job
from models.loading import rate_factors, recipe_of
from models.tasks import hyperparameters
from models.tasks.contract import Criterion, LossTerms, check_contract, compute_terms
from utils.batch import Batch
from utils.checkpoint import Identity, MeasuredConfig, TrainingState, explain_misfit
from utils.config.resume import read_saved_state
from utils.config.settings import Settings, read_settings
from utils.console import log
from utils.distributed.failure import StopRequested, barrier, run_main
from utils.distributed.launch import describe_device, log_plan, seed_everything, spawn, start
from utils.distributed.model import DistributedModel, place_model, prepare, replicate
from utils.distributed.ranks import broadcast_from_main
from utils.distributed.tree import LogicalProcesses
from utils.python_api import call
from utils.run import Run
from utils.tracking.run_log import RunLog
from utils.training import memory
from utils.training.log import log_best_epoch, log_epoch
from utils.training.optimizer import ModelEMA, Schedule, build_optimizer, log_optimizer
from utils.training.steps import OptimizerSteps
from utils.user_code import NO_HOOKS, Hooks
from utils.user_code import StopTraining as StopTraining  # for users
from val import Evaluator, make_evaluator

DRAWN_BATCHES = 3  # training batches that are drawn into the run folder
TRACKER_SECONDS = 10.0  # time for trackers to send their last data when a run must end


def train(unresolved: Settings, hooks: Hooks = NO_HOOKS) -> None:  # noqa: PLR0915 - one page, in the order of a run
    """Train as one of the run's processes, and call the user's hooks.

    Raises `UserError` before anything is written if the settings, data or weights cannot be used, and `StopRequested`
    once everything is saved after a signal or at the time limit.
    """
    options = unresolved.options
    accelerator, precision = start(options.device, options.mixed_precision, options.dist_timeout)
    run = Run(accelerator, precision)  # folder, console and trackers: what only the main process does

    # Read and check all input. Nothing is written yet, and what is printed waits for the run folder.
    with barrier(options.dist_timeout):  # one machine may have more to download than another
        job = read_job(unresolved, run.collectives.broadcast)
    settings, task, options, hyp = job.settings, job.task, job.settings.options, job.settings.hyp
    hooks = hooks.with_file(options.hooks, "hooks" in settings.flags)
    logical = LogicalProcesses.create(options.logical_processes, accelerator)
    logical.fix_kernels(accelerator.device)
    seed_everything(options.seed, not options.no_deterministic)
    model, pretrained_share = job.load_model()
    factors = rate_factors(model, hyp.lr_factor)  # of the learning rate
    with barrier(options.dist_timeout):  # one machine may have more labels to check
        data = job.open_data(model)
    receipt = broadcast_from_main(partial(job.receipt, run, model, data))

    # Open the run folder: a new one, or the folder of the run that is resumed.
    name = Path(options.resume).name if settings.is_fixed else options.name
    inputs = [job.start.weights_file] if job.start.weights_file and not settings.is_fixed else []
    run.open_folder(options.project, name, options.exist_ok, inputs)
    identity = Identity(task.names, model.imgsz, {"train": data.train.identity(), "val": data.val.identity()})
    saved = read_saved_state(run, settings, identity)
    if saved:
        with explain_misfit(saved):
            model.load_state_dict(saved["model"])  # before `task.criterion`, which may read what `adapt` has changed
            measured = MeasuredConfig(**saved["decisions"])
    else:
        measured = job.measure(run, model, data, pretrained_share)
    batch_size, pretrained_share = measured.batch_size, measured.known
    accelerator.gradient_accumulation_steps = measured.accumulation  # unknown until the memory is measured
    content = settings.content(model.yaml, model.imgsz, batch_size, measured.run_id, torch.get_num_threads())
    run_log = job.write_inputs(run, data, identity, content, saved)
    receipt.environment["device"] = describe_device(accelerator.device)  # small steps have fewer threads
    run.files.write_receipt(receipt, content, bool(saved))

    # Loaders, loss and evaluation.
    loader = data.set.train_loader(data.train, batch_size, hyp, options.seed)
    hyp = job.recipe_for(data.train, options.epochs * len(loader), pretrained_share)
    sampler: Any = loader.batch_sampler  # the batches of all processes: data.sampler.GlobalBatches
    criterion = task.criterion(model)
    evaluate = make_evaluator(run, task, model, criterion, data.set, data.val, min(2 * batch_size, VALIDATION_BATCH))
    log_plan(measured.accumulation, logical, batch_size, len(loader), options.epochs)
    log(f"saving results to {run.path}")

    # Optimizer, schedule and average; then Accelerate wraps them: DDP, DeepSpeed, or copies for logical processes.
    with memory.explain_out_of_memory(batch_size, model.imgsz):
        place_model(accelerator, model)
        step_images = batch_size * measured.accumulation
        optimizer: Any = build_optimizer(model, options.optimizer, hyp, pretrained_share, step_images, factors)
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        hyp.log_weights_rules(pretrained_share)
        schedule = Schedule.of(hyp, pretrained_share, options.epochs, len(loader), options.cos_lr, model, factors)
        log_optimizer(optimizer, schedule)
        ema = ModelEMA(model, hyp.ema_share, options.epochs * math.ceil(len(loader) / measured.accumulation))
        if saved:
            ema.load_state(saved)  # before `prepare`, in which ZeRO-3 partitions them
        distributed, optimizer, loader = prepare(
            accelerator,
            logical,
            model,
            optimizer,
            loader,
            batch_size=batch_size,
            sync_bn=options.sync_bn,
            precision=precision.name,
            clip_norm=hyp.clip_norm,
            freezes_batchnorm=hyp.freezes_batchnorm(pretrained_share),
        )
        ema.replicas = replicate(ema.model, len(logical.local))
        identity = replace(identity, settings=content)
        state = TrainingState(identity, measured, distributed, parameters, ema, optimizer, len(evaluate.loss_names))
        if saved:
            state.load(saved)
    if distributed.second:
        evaluate.map = distributed.second.map
    capture = not (options.no_cuda_graph or options.rect or options.multi_scale)  # images of one size
    steps = OptimizerSteps(run, distributed, state, schedule, evaluate.loss_names, options.profile, options.hashes)
    criterion = steps.captured(task, criterion, capture)
    progress, half = steps.progress, accelerator.mixed_precision != "no"
    flags = {**vars(options), "imgsz": model.imgsz, "wandb_id": measured.run_id}
    weights = {"yaml": model.yaml, "names": task.names, "settings": flags, "half": half, **settings.origin}

    with run.graceful_stop(options.time_limit) as stop:
        with memory.explain_out_of_memory(batch_size, model.imgsz), run.watchdog(options.dist_timeout):
            try:
                while not progress.finished:
                    losses = train_one_epoch(run, job, distributed, loader, sampler, criterion, steps)
                    if not options.nosave:
                        steps.save()  # written while the epoch is validated; only its scores are missing
                    started_at, summary = time.monotonic(), None
                    if progress.epoch + 1 == options.epochs or not options.noval:
                        summary = evaluate([ema.model], run.stop_requested).with_fitness(job.fitness)  # on every rank
                    improved = progress.record(summary)
                    progress.finished = progress.epoch + 1 == options.epochs or progress.stalled(options.patience)
                    row = log_epoch(
                        run_log, steps, losses, summary, improved, evaluate.columns, evaluate.metrics, started_at
                    )
                    if summary and hooks.call(run.collectives.gather, "on_epoch", progress.epoch, ema.model, row):
                        progress.finished = True  # a process wants to stop
                    run_log.save_weights(ema.model, weights, progress, improved)
                    steps.next_epoch()
            except StopRequested as request:
                stop_early(run, steps, evaluate, weights, request)
                raise
        stop.finished = True
        run.files.finish_writing()
        steps.save(keep_tensors=False)  # finished: no weights are missing
        finish(run, job, data, evaluate, run_log, steps, hooks)


def train_one_epoch(
    run: Run, job: Job, model: DistributedModel, loader: Any, sampler: Any, criterion: Criterion, steps: OptimizerSteps
) -> dict[str, float]:
    """Train the rest of an epoch: one pass over the training images. Raises `StopRequested` if the run must end.

    Returns the mean of each loss term over its batches, the same on every process.

    Args:
        loader: yields lists: the batch of each logical process of this process, usually one
        sampler: the loader's batches of all processes
    """
    accelerator, progress, batches = run.accelerator, steps.progress, len(loader)
    task, options = job.task, job.settings.options
    first = progress.batch  # the first step of this process checks the criterion

    def loss_terms(module: nn.Module, batch: Batch) -> LossTerms:
        """Return the loss terms of a logical process, which is usually this process."""
        outputs = module(task.inputs(batch), *criterion.hints(batch))
        return compute_terms(criterion, outputs, batch, steps.log.terms, progress.batch == first)

    model.train()
    loader.set_epoch(progress.epoch)
    sampler.skip(progress.batch)  # a resumed epoch begins where it was left
    size, step_images = sampler.batch_size, sampler.batch_size * accelerator.gradient_accumulation_steps
    bar = run.bar(f"epoch {progress.epoch + 1}/{options.epochs}", batches * size, progress.batch * size)
    steps.log.start_epoch(bar)
    remaining = loader if progress.batch < batches else ()  # nothing if only the validation is missing
    for number, local_batches in enumerate(bar.iterate(remaining, lambda _: size), progress.batch):
        run.keep_alive("training step")
        batches_so_far = progress.epoch * batches + number
        with accelerator.accumulate(model.wrapped):
            steps.schedule.apply(steps.optimizer, batches_so_far)  # no lr_scheduler: a resumed run needs no state of it
            terms = model.each(loss_terms, local_batches, options.seed + batches_so_far)
            losses = model.over_global_counts(terms)  # two processes have the gradient of one
            model.backward([criterion.objective(loss, step_images) for loss in losses])
            taken = steps.step() if accelerator.sync_gradients else None  # None: only accumulated
            steps.optimizer.zero_grad()  # Accelerate ignores this while batches accumulate
        steps.add(losses, local_batches)  # no `.item()`: on a GPU the host would wait for each batch
        if taken is not None:
            steps.finish(taken, number + 1, batches)
            run.check_stop(progress.step, steps.lag)  # every process leaves after the same step
            if options.save_steps and progress.step % options.save_steps == 0:
                run.keep_alive()  # the disk may be slow
                steps.save()
        steps.log.update_bar(steps.state.loss_sums, number + 1, batches, progress.summary)
        if progress.epoch == 0 and number < DRAWN_BATCHES:
            run.plot(partial(job.draw_batch, local_batches[0], number))
    run.keep_alive()
    check_contract(progress.batch >= batches, loader.dataset, f"gave {progress.batch} of {batches} batches of an epoch")
    return steps.end_epoch()


def stop_early(
    run: Run, steps: OptimizerSteps, evaluate: Evaluator, weights: Mapping[str, Any], request: StopRequested
) -> None:
    """Save everything before the run ends early; at the time limit validate the EMA too."""
    steps.save()
    run.files.finish_writing()
    if request.by_time_limit:
        steps.model.average_statistics(steps.ema.replicas)
        summary = evaluate([steps.ema.model])
        log(*summary.table())
        run.files.save_weights(["last.pt"], steps.ema.model, **weights)
        run.on_main(lambda: summary.write_result(run.path))
        run.files.finish_writing()
    reason = "the time limit" if request.by_time_limit else request.reason
    log(f"stopped by {reason} {steps.progress}; everything is saved: continue with --resume {run.path}")
    run.finish(TRACKER_SECONDS)
    run.collectives.broadcast(None)  # no process ends while another one still writes


def finish(
    run: Run, job: Job, data: Any, evaluate: Evaluator, run_log: RunLog, steps: OptimizerSteps, hooks: Hooks
) -> None:
    """Draw, upload and print the results of the run."""
    progress, best, patience = steps.progress, steps.progress.summary, job.settings.options.patience
    assert best is not None
    if progress.epoch < job.settings.options.epochs:
        stalled = f"--patience {patience}: no better fitness since epoch {progress.best_epoch + 1}"
        log(f"stopped by {stalled if progress.stalled(patience) else 'on_epoch'}")
    run.plot(lambda: evaluate.metrics.pictures(best, data.val, steps.model.model.imgsz))
    run.charts()
    run.files.finish_writing()
    run_log.log_results(progress)
    log_best_epoch(progress, best)
    log(f"results in {run.path}")
    run.on_main(lambda: best.write_result(run.path))
    hooks.call(run.collectives.gather, "on_end", run.path, {**best.columns(), "fitness": best.fitness})
    # The store that `stop_requested` asks may end with the main process. A launcher waits for 30 s.
    run.on_main(lambda: run.finish(TRACKER_SECONDS if run.stop_requested() else math.inf))


def launch(unresolved: Settings, hooks: Hooks = NO_HOOKS) -> None:
    """Start a run, or continue one, on as many processes as the settings say; or examine the machines (--doctor)."""
    work = partial(train, unresolved, hooks)
    if unresolved.options.doctor:
        from job import doctor_inputs
        from utils.distributed.doctor import run_doctor  # only here, because training does not need it

        work = partial(run_doctor, vars(unresolved.options), partial(doctor_inputs, unresolved))
    if not spawn(work, unresolved.options.processes, unresolved.options.device):
        work()


def main(argv: Sequence[str] | None = None) -> None:
    launch(read_settings(sys.argv[1:] if argv is None else argv, recipe_of))


def run(
    on_epoch: Callable[..., object] | None = None, on_end: Callable[..., object] | None = None, **flags: Any
) -> dict[str, Any]:
    """Train from Python: `train.run(data="my.yaml", lr0=0.02)`.

    Returns the values of the best epoch by the names of results.csv, its `fitness`, and the run's `folder`. Raises
    `UserError` if the command would end with an error, and KeyboardInterrupt if Ctrl-C has stopped it; then everything
    is saved, and `train.run(resume=folder)` continues.

    Args:
        on_epoch, on_end: hooks, see `Hooks`
        flags: flags of the command and hyperparameters, by name with underscores
    """
    names = partial(hyperparameters, str(flags.get("task_file") or flags.get("task") or ""))
    return call(lambda words: launch(read_settings(words, recipe_of, names), Hooks(on_epoch, on_end)), flags)


if __name__ == "__main__":
    run_main(main)
