"""examples/dfine, a task that `--task` names: network and loss against transformers, exactness, and whole runs."""

from __future__ import annotations

import importlib
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from models.export import read_exported
from models.loading import transfer
from models.tasks import TASKS, add_tasks
from models.weights import read_weights
from tests.conftest import NOT_HERE, ROOT, RunScript
from tests.curves import identical
from tests.faults.fault_points import planted
from tests.making import write_image, write_yaml
from utils.batch import Batch
from utils.files import read_yaml

PACKAGE = ROOT / "examples" / "dfine"
NAMES = {0: "red", 1: "green", 2: "blue"}
QUERIES, LAYERS, SLOTS, CELLS = 30, 3, 12, 200  # an image of 96 pixels has fewer cells


@pytest.fixture(scope="module")
def dfine() -> Iterator[SimpleNamespace]:
    """The modules of the package, whose task is registered meanwhile, and the task."""
    for needed in ("scipy", "transformers.models.d_fine"):
        pytest.importorskip(needed, reason=f"{NOT_HERE}examples/dfine/requirements-dfine.txt")
    add_tasks(str(PACKAGE))
    modules = {name: importlib.import_module(f"dfine.{name}") for name in ("denoising", "network", "task")}
    yield SimpleNamespace(**modules, built=modules["task"].DFineTask(NAMES, modules["task"].DFineRecipe()))
    sys.path.remove(str(PACKAGE.parent))
    del TASKS["dfine"]


def targets_of(counts: list[int]) -> Tensor:
    """Return drawn targets (m, 7) for images with so many each."""
    image = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))[:, None]
    boxes = torch.rand(len(image), 4) * torch.tensor([0.6, 0.6, 0.3, 0.3]) + torch.tensor([0.2, 0.2, 0.02, 0.02])
    return torch.cat((image, torch.randint(len(NAMES), image.shape), boxes, torch.randint(1 << 24, image.shape)), 1)


@pytest.fixture(scope="module", params=["dfine-n", "rtdetrv2-r18"])
def published(dfine: SimpleNamespace, request: pytest.FixtureRequest, tmp_path_factory: Any) -> SimpleNamespace:
    """A model of transformers, its weight file, and ours of this file."""
    folder, yaml = tmp_path_factory.mktemp("hub"), read_yaml(PACKAGE / f"{request.param}.yaml")
    kind, frozen = yaml["config"]["model_type"], request.param != "dfine-n"
    yaml["config"] |= {"num_queries": CELLS, "num_denoising": SLOTS, "freeze_backbone_batch_norms": frozen}
    config = dfine.built.build_model(yaml, 96).config
    config.id2label = NAMES
    outer = getattr(dfine.network.modules_of(kind), f"{dfine.network.CLASSES[kind]}ForObjectDetection")(config)
    for parameter in outer.parameters():
        if not parameter.any():  # as of the last layers of heads, without which all decoder layers agree
            torch.nn.init.normal_(parameter, std=0.1)
    outer.save_pretrained(folder)
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    weights = read_weights(folder / "model.safetensors")
    model = dfine.built.build_model(weights.model, 96)
    loaded, total, _ = transfer(model, dfine.built.renamed(weights.state))
    assert loaded == total
    return SimpleNamespace(outer=outer, weights=weights, model=model, file=folder / "model.safetensors")


def test_published_weights(published: SimpleNamespace) -> None:
    """The files beside the weights give model, classes and licence; outputs are those of transformers."""
    weights, images, outer, model = published.weights, torch.rand(2, 3, 96, 96), published.outer, published.model
    assert (weights.task, weights.names, weights.origin.licence) == ("dfine", NAMES, "apache-2.0")
    outer.config.num_queries = model.queries = QUERIES
    with torch.no_grad():
        ours, theirs = model.eval()(images), outer.eval()(images)
    expected = theirs.logits, theirs.pred_boxes
    torch.testing.assert_close((ours.logits[:, -1], ours.boxes[:, -1]), expected, rtol=0, atol=1e-5)


@pytest.mark.long
def test_exports(dfine: SimpleNamespace, published: SimpleNamespace, run_script: RunScript) -> None:
    how = ("--task-file", str(PACKAGE), "--imgsz", "96", "--include", "onnx", "torchscript")
    run_script("export.py", "--weights", str(published.file), *how)
    images = torch.rand(1, 3, 96, 96)
    published.model.queries = CELLS  # rounding decides about queries of equal scores, unless all are taken
    with torch.no_grad():
        expected = dfine.network.Scored(published.model.eval())(images)[0]
        for suffix in (".onnx", ".torchscript"):
            gaps = (read_exported(published.file.with_suffix(suffix))(images)[0, :, None] - expected).abs()
            assert ((gaps[..., :4].amax(-1) < 1e-2) & (gaps[..., 4:].amax(-1) < 1e-4)).any(1).all()


def test_loss_of_transformers(dfine: SimpleNamespace, published: SimpleNamespace, monkeypatch: Any) -> None:
    """Terms and gradients are those of transformers, if layers are paired as there; three batches have no boxes."""
    outer, criterion = published.outer.train(), dfine.built.criterion(published.model)
    kind, outer.config.num_queries = outer.config.model_type, QUERIES
    name, first = "get_contrastive_denoising_training_group", "transformers.models.rt_detr.modeling_rt_detr"
    monkeypatch.setattr(dfine.network.modules_of(kind), name, getattr(importlib.import_module(first), name))
    # The layers that `_set_aux_loss2` pairs: of matched queries, of denoising ones.
    matched = (*range(LAYERS - 1), LAYERS - 1 + (kind == "d_fine"))
    pairs = (matched, slice(LAYERS - 1)), (range(LAYERS), slice(LAYERS))
    for seed in range(20):
        torch.manual_seed(seed)
        counts = torch.randint(1, 6, (3,)).tolist() if seed % 7 != 5 else [0, 0, 0]
        targets = targets_of(counts)
        labels = [{"class_labels": own[:, 1].long(), "boxes": own[:, 2:6]} for own in targets.split(counts)]
        theirs = outer(torch.rand(3, 3, 96, 96), labels=labels)
        meta, layers = theirs.denoising_meta_values, (theirs.intermediate_logits, theirs.intermediate_reference_points)
        edges = theirs.intermediate_predicted_corners, theirs.initial_reference_points
        encoder = theirs.enc_topk_logits, theirs.enc_topk_bboxes
        rows = torch.full((3, meta["dn_num_split"][0] if meta else 0), -1)
        for image, own in enumerate(torch.arange(len(targets)).split(counts) if meta else ()):
            rows[image, meta["dn_positive_idx"][image]] = own.repeat(meta["dn_num_group"])
        outputs = dfine.network.Outputs(*layers, *edges, *encoder, rows, torch.ones_like(rows).bool())
        terms = []
        for criterion.pairs in (lambda *_: pairs[0], lambda *_: pairs[1]):
            terms.append(criterion(outputs, Batch(rows, targets, ())))
        sums = torch.where(torch.tensor([False, True] * 2), terms[1].sums, terms[0].sums)
        means = replace(terms[0], sums=sums).local_means()
        for mean, name in zip(means, ("vfl", "bbox", "giou", "fgl", "ddf"), strict=False):
            total = sum(value for key, value in theirs.loss_dict.items() if key.startswith(f"loss_{name}"))
            torch.testing.assert_close(mean, torch.as_tensor(total), rtol=1e-6, atol=1e-6)
        leaves = [tensor for tensor in (*layers, *encoder, edges[0]) if tensor is not None]
        gradients = (torch.autograd.grad(loss, leaves, materialize_grads=True) for loss in (means.sum(), theirs.loss))
        for one, other in zip(*gradients, strict=True):
            assert (one - other).abs().max() <= 1e-5 * other.abs().max()


def test_denoising_queries(dfine: SimpleNamespace) -> None:
    """Fill the slots of an image by groups that do not see each other; positive ones are near their targets."""
    targets, noise = targets_of([2, 0, 15, 5]), {"label_noise_ratio": 0.5, "box_noise_scale": 1.0}
    arguments = (targets, 4), 3, QUERIES, torch.nn.Embedding(4, 8), SLOTS
    _, boxes, mask, (rows, used) = dfine.denoising.denoising_queries(*arguments, **noise)
    assert used.sum(1).tolist() == [24, 0, 24, 20]
    assert rows[0].tolist() == [0, 1] * 6 + [-1] * SLOTS
    first = boxes[0, :SLOTS].sigmoid().view(6, 2, 4)  # by group and target
    moved = (dfine.denoising.corners(first) - dfine.denoising.corners(targets[:2, 2:6])).abs()
    assert (moved <= targets[:2, 4:6].repeat(1, 2) / 2 + 1e-5).all()
    assert len(first[:, 0].unique(dim=0)) == 6
    seen = mask[:, 0, :, : 2 * SLOTS].isfinite()
    assert (seen[:, 2 * SLOTS :].any(), seen[0, 0].nonzero()[:, 0].tolist()) == (False, [0, 1, 12, 13])


def test_gradients_and_counts(dfine: SimpleNamespace, published: SimpleNamespace) -> None:
    """Every parameter has a gradient, without boxes and hints too; two processes, one without boxes, add up to one."""
    model, images, targets = published.model.train(), torch.rand(4, 3, 64, 64), targets_of([3, 2, 0, 0])
    criterion, model.queries = dfine.built.criterion(model), QUERIES
    assert criterion.pairs(4, 3) == (range(4), slice(1, 4))  # before its refinement a layer has no distances
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for boxes in (targets, targets[:0]):
        batch = Batch(images, boxes, ())
        for hints in (criterion.hints(batch), ()):
            objective = criterion.objective(criterion(model(images, *hints), batch).local_means(), 4)
            assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(objective, parameters))
    for norm in model.modules():
        norm.training = norm.training and not isinstance(norm, torch.nn.BatchNorm2d)
    batches = Batch(images, targets, ()), Batch(images[:2], targets, ()), Batch(images[2:], targets[:0], ())
    with torch.no_grad():
        whole, *shares = (criterion(model(batch.images, batch.targets), batch) for batch in batches)
    assert whole.counts.equal(sum(share.counts for share in shares))
    means = sum(share.share_of_mean(whole.counts) for share in shares)
    torch.testing.assert_close(means, whole.local_means(), rtol=1e-5, atol=1e-6)
    alike = torch.zeros(1, 1, 5, 3), torch.full((1, 1, 5, 4), 0.5)
    assert criterion.matched(*alike, targets[:2, :6]).tolist() == [[[0, 1, -1, -1, -1]]]  # equal costs


@pytest.mark.long
@pytest.mark.parametrize("published", ["dfine-n"], indirect=True)
def test_the_same_bytes(published: SimpleNamespace, run_script: RunScript, tmp_path: Path) -> None:
    """On one process, two and four, of which some have no boxes, and killed on one and continued on two."""
    for k in range(12):
        rows = [f"{k % 3} 0.5 {0.3 + 0.1 * (k % 4)} 0.4 0.3"] if k % 4 == 0 else []
        write_image(tmp_path / "images" / f"{k}.png", None, *rows)
    sets = {"path": str(tmp_path), "train": "images", "val": "images", "names": NAMES}
    what = ("--weights", str(published.file), "--data", str(write_yaml(tmp_path / "set.yaml", sets)))
    how = ("--imgsz", "64", "--epochs", "2", "--batch-size", "8", "--workers", "0", "--device", "cpu")
    four = ("train.py", "--task", str(PACKAGE), *what, *how, "--project", str(tmp_path), "--logical-processes", "4")
    for processes in ("1", "2", "4"):
        run_script(*four, "--processes", processes, "--name", processes)
        identical(tmp_path / processes, tmp_path / "1")
    four = (*four, "--save-steps", "1", "--name", "killed")
    run_script(*four, code=-signal.SIGKILL, **planted("SIGKILL", "optimizer step", 3))
    run_script("train.py", "--resume", str(tmp_path / "killed"), "--processes", "2", OMP_NUM_THREADS="1")
    identical(tmp_path / "killed", tmp_path / "1")
