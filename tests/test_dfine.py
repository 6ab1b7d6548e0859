"""examples/dfine, a task that `--task` names: network and loss against transformers, exactness, and whole runs."""

from __future__ import annotations

import importlib
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from models.export import read_exported
from models.loading import transfer
from models.tasks import TASKS
from models.weights import read_weights
from tests.conftest import ROOT, RunScript, not_here
from tests.curves import identical
from tests.faults.fault_points import planted
from tests.making import write_image, write_yaml
from utils.batch import Batch, GlobalCounts
from utils.files import read_yaml

PACKAGE = ROOT / "examples" / "dfine"
PARTS = ("data", "denoising", "loss", "network", "task")
NAMES = {0: "red", 1: "green", 2: "blue"}
QUERIES, LAYERS, BINS = 20, 3, 33
SMALL = {  # a network of 0.6 million parameters, with all of D-FINE's parts
    **{"decoder_layers": 3, "decoder_ffn_dim": 64, "encoder_ffn_dim": 64},
    **{"d_model": 32, "encoder_hidden_dim": 32, "decoder_in_channels": [32, 32], "encoder_in_channels": [64, 64]},
    "initializer_bias_prior_prob": 0.01,
}
CHANNELS = [32, 32, 64, 64]
BACKBONE = {"hidden_sizes": CHANNELS, "stage_out_channels": CHANNELS}
BACKBONE |= {"stage_mid_channels": [8] * 4, "stage_in_channels": [16, *CHANNELS[:3]]}


@pytest.fixture(scope="module")
def parts() -> Iterator[SimpleNamespace]:
    """The modules of the package. What they add to this process is removed after the tests."""
    path, modules = list(sys.path), set(sys.modules)
    sys.path.append(str(PACKAGE.parent))
    try:
        importlib.import_module("transformers.models.d_fine")
        yield SimpleNamespace(**{name: importlib.import_module(f"dfine.{name}") for name in PARTS})
    except ImportError:
        not_here("the packages transformers and scipy (examples/dfine/requirements-dfine.txt)")
    finally:
        sys.path[:] = path
        for name in set(sys.modules) - modules:
            if name.partition(".")[0] == "dfine":
                del sys.modules[name]


def small_yaml(kind: str = "d_fine") -> dict[str, Any]:
    """Return the YAML of a small D-FINE, or of RT-DETRv2."""
    yaml = read_yaml(PACKAGE / {"d_fine": "dfine-n.yaml", "rt_detr_v2": "rtdetrv2-r18.yaml"}[kind])
    config = {**yaml["config"], "num_queries": 30, "num_denoising": 12}
    if kind == "d_fine":
        config.update(SMALL, backbone_config={**config["backbone_config"], **BACKBONE})
    return {**yaml, "config": config}


def targets_of(counts: list[int], seed: int, classes: int) -> Tensor:
    """Return drawn targets (m, 7) for images with so many each."""
    generator = torch.Generator().manual_seed(seed)
    image = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    label = torch.randint(classes, image.shape, generator=generator)
    centres, sides = torch.rand(len(image), 2, generator=generator), torch.rand(len(image), 2, generator=generator)
    keys = torch.randint(1 << 24, (len(image), 1), generator=generator)
    return torch.cat((image[:, None], label[:, None], 0.2 + 0.6 * centres, 0.02 + 0.3 * sides, keys), 1)


# Against transformers


@pytest.mark.parametrize("kind", ["d_fine", "rt_detr_v2"])
def test_network_of_transformers(parts: SimpleNamespace, kind: str, tmp_path: Path) -> None:
    """A folder that transformers has written gives its outputs; nothing is missing."""
    model = parts.network.build(small_yaml(kind), NAMES, 96, "small")
    modeling = parts.network.modules_of(kind)
    outer = getattr(modeling, f"{parts.network.CLASSES[kind]}ForObjectDetection")(model.config).eval()
    outer.save_pretrained(tmp_path)
    import safetensors.torch

    state = parts.task.DFineTask.renamed(safetensors.torch.load_file(tmp_path / "model.safetensors"))
    expected = {name for name in model.state_dict() if "tracked" not in name}
    assert expected <= {*state}
    transfer(model.eval(), state)
    images = torch.rand(2, 3, 96, 96)
    with torch.no_grad():
        ours, theirs = model(images), outer(images)
    torch.testing.assert_close(ours.logits[:, -1], theirs.logits, rtol=0, atol=1e-5)
    torch.testing.assert_close(ours.boxes[:, -1], theirs.pred_boxes, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["d_fine", "rt_detr_v2"])
def test_loss_of_transformers(parts: SimpleNamespace, kind: str) -> None:
    """Terms and gradients are those of transformers, if layers are paired as there; three batches have no boxes."""
    from transformers.loss.loss_d_fine import DFineForObjectDetectionLoss
    from transformers.loss.loss_rt_detr import RTDetrForObjectDetectionLoss

    class Paired(parts.loss.DFineCriterion):  # type: ignore[misc, name-defined]
        def pairs(self, layers: int, refined: int, denoising: bool) -> list[tuple[int, int | None]]:
            """Return the pairs of `_set_aux_loss2`."""
            if not refined:
                return super().pairs(layers, refined, denoising)  # type: ignore[no-any-return]
            last: list[tuple[int, int | None]] = [] if denoising else [(refined, None)]
            return [(layer, layer) for layer in range(refined - (not denoising))] + last

    fine = kind == "d_fine"
    model = parts.network.build(small_yaml(kind), NAMES, 96, "small")
    config, modeling = model.config, parts.network.modules_of(kind)
    config.num_queries = QUERIES
    gains = 1.0, 5.0, 2.0, 0.15, 1.5
    criterion = Paired(model, gains)
    theirs_of = DFineForObjectDetectionLoss if fine else RTDetrForObjectDetectionLoss
    for seed in range(20):
        torch.manual_seed(seed)
        counts = [0, 0, 0] if seed % 7 == 6 or seed == 19 else torch.randint(0, 6, (3,)).tolist()
        targets = targets_of(counts, seed, len(NAMES))
        labels = [
            {"class_labels": rows[:, 1].long(), "boxes": rows[:, 2:6]}
            for rows in (targets[targets[:, 0] == image] for image in range(3))
        ]
        group = modeling.get_contrastive_denoising_training_group
        meta = group(labels, len(NAMES), QUERIES, torch.nn.Embedding(len(NAMES) + 1, 4), 12)[3]
        denoising = meta["dn_num_split"][0] if meta else 0
        rows = torch.full((3, denoising), -1)
        for image, first in enumerate(torch.tensor([0, *counts]).cumsum(0).tolist()[:3]):
            if meta:
                numbers = torch.arange(first, first + counts[image]).repeat(meta["dn_num_group"])
                rows[image, meta["dn_positive_idx"][image]] = numbers
        layers = LAYERS + fine
        leaves = {
            "logits": torch.randn(3, layers, denoising + QUERIES, len(NAMES)) - 1,
            "boxes": torch.rand(3, layers, denoising + QUERIES, 4) * 0.4 + 0.1,
            "encoder_logits": torch.randn(3, QUERIES, len(NAMES)) - 1,
            "encoder_boxes": torch.rand(3, QUERIES, 4) * 0.4 + 0.1,
        }
        references = torch.rand(3, LAYERS, denoising + QUERIES, 4) * 0.4 + 0.1 if fine else None
        if fine:
            leaves["distances"] = torch.randn(3, LAYERS, denoising + QUERIES, 4 * BINS)
        leaves = {name: values.requires_grad_() for name, values in leaves.items()}
        distances = leaves.get("distances")
        outputs = parts.network.Outputs(
            *(leaves["logits"], leaves["boxes"], distances, references),
            *(leaves["encoder_logits"], leaves["encoder_boxes"], rows, torch.ones_like(rows, dtype=torch.bool)),
        )
        means = criterion(outputs, Batch(torch.zeros(3, 3, 8, 8), targets, ())).local_means()
        loss, terms, _ = theirs_of(
            *(leaves["logits"][:, -1], labels, torch.device("cpu"), leaves["boxes"][:, -1], config),
            *(leaves["logits"], leaves["boxes"], leaves["encoder_logits"], leaves["encoder_boxes"], meta),
            predicted_corners=distances,
            initial_reference_points=references,
        )
        names = ("loss_vfl", "loss_bbox", "loss_giou", "loss_fgl", "loss_ddf")[: len(means)]
        totals = torch.stack(
            [sum(value for key, value in terms.items() if key.startswith(name)) + means.new_zeros(()) for name in names]
        )
        torch.testing.assert_close(means, totals, rtol=1e-6, atol=1e-6)
        values = list(leaves.values())
        ours, theirs = (torch.autograd.grad(each, values, materialize_grads=True) for each in (means.sum(), loss))
        for one, other in zip(ours, theirs, strict=True):
            assert (one - other).abs().max() <= 1e-5 * other.abs().max()


# Exactness


def test_sampling_by_gathers(parts: SimpleNamespace) -> None:
    """Values and gradients of `grid_sample`, also at places outside of the maps."""
    maps, grid = torch.randn(2, 3, 5, 7, requires_grad=True), (torch.rand(2, 6, 4, 2) * 2.6 - 1.3).requires_grad_()
    results = []
    for exact in (False, True):
        values = parts.network.sample(maps, grid, exact)
        results.append((values, *torch.autograd.grad((values * torch.arange(4)).sum(), (maps, grid))))
    torch.testing.assert_close(*results, rtol=0, atol=1e-5)


def test_noise_of_an_image(parts: SimpleNamespace) -> None:
    """Depends on the targets of the image alone; positive queries are near them, each group's apart from the others."""
    noisy_targets = parts.denoising.noisy_targets
    targets = targets_of([2, 0, 15, 5], 1, 3)
    every = noisy_targets(targets, 4, 12, 3, 0.5, 1.0)
    assert every.used[:, :12].sum(1).tolist() == [12, 0, 12, 10]
    for image in range(4):
        own = targets[targets[:, 0] == image]
        alone = noisy_targets(torch.cat((own[:, :1] * 0, own[:, 1:]), 1), 1, 12, 3, 0.5, 1.0)
        for name in ("labels", "boxes", "used", "groups"):
            assert getattr(alone, name)[0].equal(getattr(every, name)[image])
    first = every.boxes[0].view(2, 6, 2, 4)  # sign, group, target
    moved = (parts.denoising.corners(first) - parts.denoising.corners(targets[:2, 2:6])).abs()
    moved = moved / (targets[:2, 4:6].repeat(1, 2) / 2)
    assert moved[0].max() <= 1.001
    assert len(first[0, :, 0].unique(dim=0)) == 6
    mask = parts.denoising.attention_mask(every.groups, 30, torch.float32)[:, 0]
    assert mask.shape == (4, 54, 54)
    assert (mask[:, :, 24:] == 0).all()
    assert mask[:, 24:, :24].isinf().all()
    assert mask[0, 0, :24].isfinite().nonzero()[:, 0].tolist() == [0, 1, 12, 13]


@pytest.mark.parametrize("kind", ["d_fine", "rt_detr_v2"])
def test_every_parameter_has_a_gradient(parts: SimpleNamespace, kind: str) -> None:
    """With and without boxes; without hints every parameter is reached, and images of 64 pixels have fewer queries."""
    model = parts.network.build(small_yaml(kind), NAMES, 64, "small").train()
    task = parts.task.DFineTask(NAMES, parts.task.DFineRecipe())
    criterion, images = task.criterion(model), torch.rand(2, 3, 64, 64)
    assert len(task.loss_names_of(model)) == (5 if kind == "d_fine" else 3)
    parameters = [each for each in model.parameters() if each.requires_grad]
    for targets in (targets_of([0, 3], 3, 3), torch.zeros(0, 7)):
        batch = Batch(images, targets, ())
        for hints in (criterion.hints(batch), ()):
            terms = criterion(model(images, *hints), batch)
            loss = criterion.objective(terms.local_means(), 2)
            assert all(each.isfinite().all() for each in torch.autograd.grad(loss, parameters))
    assert criterion.pairs(4, 3, False) == [(0, None), (1, 0), (2, 1), (3, 2)]


def test_two_processes_have_the_loss_of_one(parts: SimpleNamespace) -> None:
    """Sums and counts of parts of a batch add up, one of them without boxes; equal costs match the first query."""
    model = parts.network.build(small_yaml(), NAMES, 96, "small").train()
    criterion = parts.loss.DFineCriterion(model, (1.0, 5.0, 2.0, 0.15, 1.5))
    for norm in model.modules():
        if isinstance(norm, torch.nn.BatchNorm2d):
            norm.eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)  # apart from the layers' equal outputs at the start
    images, targets = torch.rand(4, 3, 96, 96), targets_of([3, 2, 0, 0], 5, 3)
    with torch.no_grad():
        whole, *shares = (
            criterion(model(images[part], targets[rows]), Batch(images[part], targets[rows], ()))
            for part, rows in ((slice(None), slice(None)), (slice(2), slice(5)), (slice(2, 4), slice(0)))
        )
    assert whole.counts.equal(sum(each.counts for each in shares))
    means = sum(each.share_of(GlobalCounts(whole.counts)) for each in shares)
    torch.testing.assert_close(means, whole.local_means(), rtol=1e-5, atol=1e-6)
    logits, boxes = torch.zeros(1, 1, 5, 3), torch.full((1, 1, 5, 4), 0.5)
    assert criterion.matched(logits, boxes, targets[:2, :6]).tolist() == [[[0, 1, -1, -1, -1]]]


# Whole runs


@pytest.fixture(scope="module")
def train(run_script: RunScript, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Train on drawn images, most of them without boxes: a process has none in a batch; return the run folder."""
    folder, rng = tmp_path_factory.mktemp("drawn"), np.random.default_rng(0)
    for split, number in (("train", 12), ("val", 4)):
        for k in range(number):
            rows = [f"{k % 3} 0.5 {0.3 + 0.1 * (k % 4)} 0.4 0.3"] if k % 4 == 0 else []
            write_image(folder / "images" / split / f"{k}.png", rng.integers(0, 256, (48, 64, 3), np.uint8), *rows)
    content = {"path": str(folder), "train": "images/train", "val": "images/val", "names": NAMES}
    data, cfg = write_yaml(folder / "set.yaml", content), write_yaml(folder / "small.yaml", small_yaml())
    what = ("--task", str(PACKAGE), "--cfg", str(cfg), "--data", str(data))
    how = ("--imgsz", "64", "--epochs", "2", "--batch-size", "8", "--workers", "0", "--device", "cpu")

    def run(project: Path, *flags: str, **more: Any) -> Path:
        run_script("train.py", *what, *how, "--project", str(project), *flags, **{"OMP_NUM_THREADS": "1", **more})
        return project / "exp"

    return run


@pytest.mark.long
def test_the_same_bytes(train: Callable[..., Path], run_script: RunScript, tmp_path: Path) -> None:
    """On one process, two and four, and killed on two and continued on one."""
    four = ("--logical-processes", "4")
    alone = train(tmp_path / "1", *four)
    for processes in ("2", "4"):
        identical(train(tmp_path / processes, *four, "--processes", processes), alone)
    fault = planted("SIGKILL", "optimizer step", 3)
    train(tmp_path, *four, "--save-steps", "1", code=-signal.SIGKILL, **fault)
    run_script("train.py", "--resume", str(tmp_path / "exp"), "--processes", "2", OMP_NUM_THREADS="1")
    identical(tmp_path / "exp", alone)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["d_fine", "rt_detr_v2"])
def test_published_weights(
    parts: SimpleNamespace, run_script: RunScript, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A folder of transformers becomes a weight file with classes and licence; its exports predict the same."""
    yaml = small_yaml(kind)
    yaml["config"]["num_queries"] = 200  # all cells: rounding decides about the order of those with equal scores
    model = parts.network.build(yaml, NAMES, 96, "small")
    model.config.id2label = NAMES
    outer = getattr(parts.network.modules_of(kind), f"{parts.network.CLASSES[kind]}ForObjectDetection")(model.config)
    outer.save_pretrained(tmp_path / "hub")
    (tmp_path / "hub" / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    importlib.import_module("dfine.convert").convert(str(tmp_path / "hub"), str(tmp_path / "small.pt"))
    weights = read_weights(tmp_path / "small.pt")
    assert (weights.names, weights.origin.licence) == (NAMES, "apache-2.0")
    how = ("--task-file", str(PACKAGE), "--imgsz", "96", "--include", "onnx", "torchscript")
    run_script("export.py", "--weights", str(tmp_path / "small.pt"), *how)
    monkeypatch.setitem(TASKS, "dfine", sys.modules["dfine"].TASKS["dfine"])
    transfer(model, weights.state)
    images = torch.rand(1, 3, 96, 96)
    with torch.no_grad():
        expected = parts.network.Scored(model).eval()(images)
        for suffix in (".onnx", ".torchscript"):
            rows = read_exported(tmp_path / f"small{suffix}")(images)
            gaps = (rows[0, :, None] - expected[0]).abs()
            assert ((gaps[..., :4].amax(-1) < 1e-2) & (gaps[..., 4:].amax(-1) < 1e-4)).any(1).all()
