"""`python -m data.preview --data my.yaml`: a page of the images that training with the same flags shows its model.

Takes the flags of train.py, and reads only the ones that affect the images: data, hyperparameters, size, seed,
--augmentations. --cfg or --weights determines the task. Nothing is trained, and no weights are downloaded unless they
are named without --cfg.
"""

from __future__ import annotations

import base64
import html
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, ClassVar

import cv2
import numpy as np

from data.dataset import DataOptions, data_source
from data.remote import shown_path
from data.sampler import SampleIndex
from models.initial_weights import ModelOptions, starting_point
from models.tasks import model_words
from utils.config.options import TrainOptions, flag
from utils.config.parser import given_flags, over_defaults
from utils.config.settings import Settings
from utils.config.values import NOT_NEGATIVE, Range
from utils.distributed.failure import run_main
from utils.errors import UserError, plural
from utils.files import replacing

MODEL = "yolov5s.yaml"  # if neither --cfg nor --weights names one
PAGE = """<!DOCTYPE html>
<meta charset="utf-8">
<title>{title}</title>
<style>
body {{ font-family: sans-serif; margin: 1em; }}
main {{ display: flex; flex-wrap: wrap; gap: 1em; }}
figure {{ margin: 0; max-width: 32em; }}
img {{ max-width: 100%; }}
figcaption {{ font-size: small; overflow-wrap: anywhere; }}
</style>
<h1>{title}</h1>
{lines}
<main>
{figures}
</main>
"""


@dataclass(frozen=True)
class PreviewOptions(TrainOptions):
    """The flags of train.py, and a few that only the preview has."""

    examples: ClassVar[tuple[str, ...]] = (
        "python -m data.preview --data my.yaml --augmentations my_augmentations.py",
        "python -m data.preview --data my.yaml --cfg yolov5s-seg.yaml --hyp.mosaic 0 --items 8",
    )
    items: int = flag(32, "training items to show", "drawing", Range(1, 1000))
    epoch: int = flag(0, "epoch of these items, from 0", "drawing", NOT_NEGATIVE)
    out: str = flag("preview.html", "file to write", "drawing")


def preview(settings: Settings) -> list[str]:
    """Write the page that `PreviewOptions` describe, and return lines for the console. Raises `UserError`."""
    options = settings.options
    assert isinstance(options, PreviewOptions)
    start = starting_point(settings.select(ModelOptions), None, settings.given)
    kind = start.entry.load()
    settings.refuse(kind.concerns_of(start.yaml), model_words(start.yaml))
    source = data_source(options.data, start.entry.data)
    defaults = (kind.defaults, source.spec.defaults)
    is_trained = bool(settings.value("weights", *defaults))
    choose = partial(kind.recipes.choose, is_trained, lambda: len(source.spec.images("train")))
    settings = settings.resolve(kind.recipe, *defaults, choose=choose)
    task = kind(source.names(options.single_cls), settings.hyp, settings.options.label_smoothing)
    model = task.build_model(task.model_yaml(start.yaml), settings.options.imgsz, start.source)
    data = source.open(model.imgsz, model.stride, settings.select(DataOptions, cache=""))
    own = data.own_augmentations(settings.hyp, "augmentations" in settings.given)
    split = data.split("train", settings.hyp)
    data = replace(data, options=replace(data.options, workers=0))
    loader: Any = data.train_loader(split, max(settings.options.batch_size, 1), settings.hyp, options.seed)
    loader.batch_sampler.set_epoch(options.epoch)
    samples: list[SampleIndex] = list(islice(chain.from_iterable(loader.batch_sampler), options.items))
    batches = ((sample, data.collate([loader.dataset[sample]])) for sample in samples)
    figures = (
        figure(task.draw_batch(batch), f"{sample.position}: {shown_path(split.images[sample.image])}")
        for sample, batch in batches
    )
    lines = [settings.choice or f"hyperparameters: --hyp {settings.options.hyp}", *own.messages]
    title = f"{options.data}, epoch {options.epoch}"
    write_page(Path(options.out), title, lines, figures)
    return [*source.spec.warnings, *lines, f"{plural(len(samples), 'training item')} in {options.out}"]


def figure(picture: np.ndarray, caption: str) -> str:
    """Return an HTML figure of a picture, uint8 (h, w, 3) BGR, and its caption."""
    data = base64.b64encode(cv2.imencode(".jpg", picture)[1].tobytes()).decode()
    return f'<figure><img src="data:image/jpeg;base64,{data}"><figcaption>{html.escape(caption)}</figcaption></figure>'


def write_page(file: Path, title: str, lines: Sequence[str], figures: Iterator[str]) -> None:
    """Write a page of figures. Raises `UserError` if the file cannot be written."""
    paragraphs = "\n".join(f"<p>{html.escape(line)}</p>" for line in lines)
    page = PAGE.format(title=html.escape(title), lines=paragraphs, figures="\n".join(figures))
    try:
        with replacing(file) as opened:
            opened.write(page.encode(errors="surrogateescape"))
    except OSError as error:
        raise UserError(f"--out {file} cannot be written ({error.strerror}); name another file") from None


def main(argv: Sequence[str] | None = None) -> None:
    """Write the page that the command line describes."""
    given = given_flags(PreviewOptions, sys.argv[1:] if argv is None else argv)
    if not given.get("cfg") and not given.get("weights"):
        given["cfg"] = MODEL
    print(*preview(Settings(over_defaults(PreviewOptions, given), given)), sep="\n")


if __name__ == "__main__":
    run_main(main)
