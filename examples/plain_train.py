"""Train a detector with a loop of your own: the parts of train.py without its loop. Copy this file and change it.

    python examples/plain_train.py --data coco128.yaml --weights yolov5n.pt
    torchrun --nproc_per_node 2 examples/plain_train.py --data coco128.yaml --weights yolov5n.pt

On one CPU process and on two, the weights after each epoch are to the byte those of train.py with the same values of
these flags (its defaults differ), `--optimizer SGD` and `--noautoanchor`. Left out, and in train.py:

- the average of the weights (EMA), which it validates and saves; validation, best.pt, --patience
- states, --resume, stopping in order; results.csv, charts, trackers; one sentence for each error
- skipping a step whose gradients are not finite; equal rounding in a resumed run on three or more processes
- AutoAnchor, `defaults:` of YAMLs, and recipes whose rules depend on the weights or the data, such as `finetune`
- --freeze, --sync-bn, --logical-processes, --batch-size -1, DeepSpeed, CUDA graphs; the seeds of dropout
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this repository, whatever the current folder is

from accelerate import Accelerator, DataLoaderConfiguration, DistributedDataParallelKwargs

from data.data_yaml import read_data
from data.dataset import DataOptions
from data.detection import DetectionData
from models.loading import transfer
from models.tasks.detect import DetectionTask
from models.weights import YOURS, Origin, find_weights, read_weights
from models.yolo import build_model
from utils.checkpoint import weights_content
from utils.config.hyperparameters import read_hyperparameters
from utils.distributed.batchnorm import exact_batchnorm
from utils.distributed.launch import seed_everything
from utils.distributed.model import place_model
from utils.training.optimizer import Schedule, build_optimizer


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="data/shapes.yaml")
    parser.add_argument("--cfg", default="yolov5n.yaml")
    parser.add_argument("--weights", default="", help="initial weights; '': from scratch")
    parser.add_argument("--hyp", default="low")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=16, help="images per batch of all processes")
    parser.add_argument("--imgsz", type=int, default=160)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="", choices=["", "cpu"])
    parser.add_argument("--save", default="plain.pt", help="weight file to write, for val.py, detect.py and export.py")
    return parser.parse_args()


def main() -> None:
    args = read_arguments()

    # The model, its initial weights, its loss, and the data
    hyp = read_hyperparameters(args.hyp, DetectionTask.recipe)
    accumulated = hyp.accumulation(args.batch_size)  # batches per optimizer step
    step_images = args.batch_size * accumulated
    accelerator = Accelerator(
        cpu=args.device == "cpu",
        gradient_accumulation_steps=accumulated,
        dataloader_config=DataLoaderConfiguration(split_batches=True),  # each process gets its part of every batch
        kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False)],  # averaged below
    )
    spec = read_data(args.data)
    task = DetectionTask(spec.names, hyp)
    seed_everything(args.seed)
    model = build_model(args.cfg, nc=len(spec.names), imgsz=args.imgsz)
    origin = Origin(YOURS)  # the licence of the weights
    if args.weights:
        weights = read_weights(find_weights(args.weights))
        transfer(model, weights.state, exclude=task.fresh_tensors(from_yaml=True))
        origin = weights.origin
    criterion = task.criterion(model)
    data = DetectionData(spec, model.imgsz, model.stride, DataOptions(workers=args.workers))
    loader = data.train_loader(data.split("train", hyp), args.batch_size, hyp, args.seed)

    # The optimizer, and what Accelerate wraps
    place_model(accelerator, model)
    optimizer = build_optimizer(model, "SGD", hyp, pretrained_share=None, images=step_images)
    schedule = Schedule(args.epochs, len(loader), cosine=False, hyp=hyp)
    exact_batchnorm(model)  # torch's kernel for the CPU is not exact in channels_last
    wrapped, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    batches = 0
    for epoch in range(args.epochs):
        wrapped.train()
        loader.set_epoch(epoch)
        for batch in loader:
            with accelerator.accumulate(wrapped):
                schedule.apply(optimizer, batches)
                terms = criterion(wrapped(task.inputs(batch), *criterion.hints(batch)), batch)
                losses = terms.share_of_mean(accelerator.reduce(terms.counts))  # divided by the counts of all processes
                loss = criterion.objective(losses, step_images)
                accelerator.backward(loss * accelerator.num_processes)  # DDP takes the mean over processes
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), hyp.clip_norm)
                optimizer.step()
                optimizer.zero_grad()
            batches += 1
        for name, buffer in model.named_buffers():  # each process has BatchNorm's statistics of its own images
            if name.endswith(("running_mean", "running_var")):
                buffer.copy_(accelerator.reduce(buffer.double(), "mean"))
        means = accelerator.reduce(losses.detach()).tolist()
        named = zip(task.loss_names_of(model), means, strict=True)
        accelerator.print(f"epoch {epoch + 1}/{args.epochs}: {', '.join(f'{name} {mean:.4f}' for name, mean in named)}")

    content = weights_content(model, model.yaml, spec.names, vars(args), **origin.content())
    accelerator.save(content, args.save)
    accelerator.end_training()


if __name__ == "__main__":
    main()
