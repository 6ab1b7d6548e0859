"""examples/dfine, a task that `--task` names: network and loss against transformers, exactness, and whole runs."""

from __future__ import annotations

import importlib
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from models.export import read_exported
from models.loading import transfer
from models.weights import read_weights
from tests.conftest import ROOT, RunScript, not_here
from tests.curves import identical
from tests.faults.fault_points import planted
from tests.making import write_image, write_yaml
from utils.batch import Batch, GlobalCounts
from utils.files import read_yaml

PACKAGE = ROOT / "examples" / "dfine"
PARTS = ("convert", "denoising", "loss", "network", "task")
NAMES = {0: "red", 1: "green", 2: "blue"}
GAINS = 1.0, 5.0, 2.0, 0.15, 1.5
IMAGES, QUERIES, LAYERS, BINS = 3, 20, 3, 33
FILES = {"d_fine": "dfine-n.yaml", "rt_detr_v2": "rtdetrv2-r18.yaml"}
CHANNELS = [32, 32, 64, 64]
SMALL = {"decoder_ffn_dim": 64, "encoder_ffn_dim": 64, "d_model": 32, "encoder_hidden_dim": 32}
SMALL |= {"decoder_in_channels": [32, 32], "encoder_in_channels": CHANNELS[2:]}
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


def small_yaml(kind: str = "d_fine", **changes: Any) -> dict[str, Any]:
    """Return the YAML of a D-FINE with 0.2 million parameters, or of an RT-DETRv2."""
    yaml = read_yaml(PACKAGE / FILES[kind])
    config = {**yaml["config"], "num_queries": 30, "num_denoising": 12, **changes}
    if kind == "d_fine":
        config |= {**SMALL, "backbone_config": {**config["backbone_config"], **BACKBONE}}
    return {**yaml, "config": config}


def targets_of(counts: list[int]) -> Tensor:
    """Return drawn targets (m, 7) for images with so many each."""
    image = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))[:, None]
    label, keys = torch.randint(len(NAMES), image.shape), torch.randint(1 << 24, image.shape)
    return torch.cat(
        (image, label, 0.2 + 0.6 * torch.rand(len(image), 2), 0.02 + torch.rand(len(image), 2) / 3, keys), 1
    )


# Against transformers


@pytest.fixture(scope="module", params=FILES)
def published(parts: SimpleNamespace, request: pytest.FixtureRequest, tmp_path_factory: Any) -> SimpleNamespace:
    """A model of transformers, its folder made into a weight file, and ours."""
    folder, kind = tmp_path_factory.mktemp("hub"), request.param
    model = parts.network.build(small_yaml(kind, num_queries=200), NAMES, 96, "small").eval()  # of all cells
    model.config.id2label = NAMES
    outer = getattr(parts.network.modules_of(kind), f"{parts.network.CLASSES[kind]}ForObjectDetection")(model.config)
    outer.eval().save_pretrained(folder)
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    parts.convert.convert(str(folder), str(folder / "small.pt"))
    transfer(model, parts.task.DFineTask.renamed(read_weights(folder / "model.safetensors").state))
    outer.config.num_queries = model.config.num_queries = {"d_fine": 30, "rt_detr_v2": 100}[kind]
    return SimpleNamespace(outer=outer, model=model, file=folder / "small.pt")


def test_published_weights(published: SimpleNamespace) -> None:
    """Outputs are those of transformers; the weight file has the tensors, the classes and the licence."""
    weights, images = read_weights(published.file), torch.rand(2, 3, 96, 96)
    assert (weights.names, weights.origin.licence) == (NAMES, "apache-2.0")
    for name, tensor in published.model.state_dict().items():
        assert weights.state[name].equal(tensor), name
    with torch.no_grad():
        ours, theirs = published.model(images), published.outer(images)
    torch.testing.assert_close(ours.logits[:, -1], theirs.logits, rtol=0, atol=1e-5)
    torch.testing.assert_close(ours.boxes[:, -1], theirs.pred_boxes, rtol=0, atol=1e-5)


@pytest.mark.long
def test_exports(parts: SimpleNamespace, published: SimpleNamespace, run_script: RunScript) -> None:
    how = ("--task-file", str(PACKAGE), "--imgsz", "96", "--include", "onnx", "torchscript")
    run_script("export.py", "--weights", str(published.file), *how)
    images = torch.rand(1, 3, 96, 96)
    published.model.config.num_queries = 200  # rounding decides about queries of equal scores, unless all are taken
    with torch.no_grad():
        expected = parts.network.Scored(published.model)(images)[0]
        for suffix in (".onnx", ".torchscript"):
            gaps = (read_exported(published.file.with_suffix(suffix))(images)[0, :, None] - expected).abs()
            assert ((gaps[..., :4].amax(-1) < 1e-2) & (gaps[..., 4:].amax(-1) < 1e-4)).any(1).all()


@pytest.mark.parametrize("kind", FILES)
def test_loss_of_transformers(parts: SimpleNamespace, kind: str) -> None:
    """Terms and gradients are those of transformers, if layers are paired as there; three batches have no boxes."""
    from transformers.loss.loss_d_fine import DFineForObjectDetectionLoss
    from transformers.loss.loss_rt_detr import RTDetrForObjectDetectionLoss

    def pairs(layers: int, refined: int, denoising: bool) -> list[tuple[int, int | None]]:
        """Return the pairs of `_set_aux_loss2`."""
        if not refined:
            return [(layer, None) for layer in range(layers)]
        last: list[tuple[int, int | None]] = [] if denoising else [(refined, None)]
        return [(layer, layer) for layer in range(refined - (not denoising))] + last

    fine, shape = kind == "d_fine", (IMAGES, LAYERS)
    model = parts.network.build(small_yaml(kind, num_queries=QUERIES), NAMES, 96, "small")
    loss_of = DFineForObjectDetectionLoss if fine else RTDetrForObjectDetectionLoss
    group = parts.network.modules_of(kind).get_contrastive_denoising_training_group
    criterion = parts.loss.DFineCriterion(model, GAINS)
    criterion.pairs = pairs
    for seed in range(20):
        torch.manual_seed(seed)
        counts = [0, 0, 0] if seed % 7 == 5 else torch.randint(1, 6, (IMAGES,)).tolist()
        targets = targets_of(counts)
        labels = [{"class_labels": own[:, 1].long(), "boxes": own[:, 2:6]} for own in targets.split(counts)]
        meta = group(labels, len(NAMES), QUERIES, torch.nn.Embedding(len(NAMES) + 1, 4), 12)[3]
        queries = QUERIES + (meta["dn_num_split"][0] if meta else 0)
        rows = torch.full((IMAGES, queries - QUERIES), -1)
        for image, own in enumerate(torch.arange(len(targets)).split(counts) if meta else ()):
            rows[image, meta["dn_positive_idx"][image]] = own.repeat(meta["dn_num_group"])
        logits, encoder_logits, distances = (
            torch.randn(each, requires_grad=True)
            for each in ((IMAGES, LAYERS + fine, queries, 3), (IMAGES, QUERIES, 3), (*shape, queries, 4 * BINS))
        )
        boxes, encoder_boxes, references = (
            (torch.rand(each) * 0.4 + 0.1).requires_grad_()
            for each in ((IMAGES, LAYERS + fine, queries, 4), (IMAGES, QUERIES, 4), (*shape, queries, 4))
        )
        refined = (distances, references) if fine else (None, None)
        used = torch.ones_like(rows, dtype=torch.bool)
        outputs = parts.network.Outputs(logits, boxes, *refined, encoder_logits, encoder_boxes, rows, used)
        means = criterion(outputs, Batch(torch.zeros(3, 3, 8, 8), targets, ())).local_means()
        last = logits[:, -1], labels, torch.device("cpu"), boxes[:, -1], model.config
        loss, terms, _ = loss_of(*last, logits, boxes, encoder_logits, encoder_boxes, meta, *refined[: 2 * fine])
        for mean, name in zip(means, ("vfl", "bbox", "giou", "fgl", "ddf"), strict=False):
            expected = sum(value for key, value in terms.items() if key.startswith(f"loss_{name}"))
            torch.testing.assert_close(mean, torch.as_tensor(expected), rtol=1e-6, atol=1e-6)
        leaves = [logits, boxes, encoder_logits, encoder_boxes, *([distances] if fine else [])]
        ours, theirs = (torch.autograd.grad(each, leaves, materialize_grads=True) for each in (means.sum(), loss))
        for one, other in zip(ours, theirs, strict=True):
            assert (one - other).abs().max() <= 1e-5 * other.abs().max()


# Exactness


def test_sampling_by_gathers(parts: SimpleNamespace) -> None:
    """Values and gradients of `grid_sample`, also at places outside of the maps."""
    maps, grid = torch.randn(2, 3, 5, 7, requires_grad=True), (torch.rand(2, 6, 4, 2) * 2.6 - 1.3).requires_grad_()
    values = [parts.network.sample(maps, grid, exact) for exact in (False, True)]
    results = [(each, *torch.autograd.grad((each * torch.arange(4)).sum(), (maps, grid))) for each in values]
    torch.testing.assert_close(*results, rtol=0, atol=1e-5)


def test_noise_of_an_image(parts: SimpleNamespace) -> None:
    """Depends on the targets of the image alone; positive queries are near them; groups do not see each other."""
    noisy_targets, targets = parts.denoising.noisy_targets, targets_of([2, 0, 15, 5])
    every = noisy_targets(targets, 4, 12, 3, 0.5, 1.0)
    assert every.used[:, :12].sum(1).tolist() == [12, 0, 12, 10]
    for image, own in enumerate(targets.split([2, 0, 15, 5])):
        alone = noisy_targets(torch.cat((own[:, :1] * 0, own[:, 1:]), 1), 1, 12, 3, 0.5, 1.0)
        for name in ("labels", "boxes", "used", "groups"):
            assert getattr(alone, name)[0].equal(getattr(every, name)[image])
    first = every.boxes[0, :12].view(6, 2, 4)  # by group and target
    moved = (parts.denoising.corners(first) - parts.denoising.corners(targets[:2, 2:6])).abs()
    assert (moved <= targets[:2, 4:6].repeat(1, 2) / 2 + 1e-6).all()
    assert len(first[:, 0].unique(dim=0)) == 6
    seen = parts.denoising.attention_mask(every.groups, 30, torch.float32)[:, 0].isfinite()
    assert seen[..., 24:].all()
    assert not seen[:, 24:, :24].any()
    assert seen[0, 0, :24].nonzero()[:, 0].tolist() == [0, 1, 12, 13]


@pytest.mark.parametrize("kind", FILES)
def test_gradients_and_counts(parts: SimpleNamespace, kind: str) -> None:
    """Every parameter has a gradient, without boxes and hints too; two processes, one without boxes, add up to one."""
    task = parts.task.DFineTask(NAMES, parts.task.DFineRecipe())
    model = task.build_model(small_yaml(kind), 64).train()
    criterion, images, targets = task.criterion(model), torch.rand(4, 3, 64, 64), targets_of([3, 2, 0, 0])
    assert criterion.pairs(4, 3, False) == [(0, None), (1, 0), (2, 1), (3, 2)]  # before its refinement a layer has none
    parameters = [each for each in model.parameters() if each.requires_grad]
    for boxes, hints in ((targets, True), (targets, False), (targets[:0], True), (targets[:0], False)):
        batch = Batch(images, boxes, ())
        terms = criterion(model(images, *(criterion.hints(batch) if hints else ())), batch)
        gradients = torch.autograd.grad(criterion.objective(terms.local_means(), 4), parameters)
        assert all(each.isfinite().all() for each in gradients)
    for norm in model.modules():
        norm.training = norm.training and not isinstance(norm, torch.nn.BatchNorm2d)
    with torch.no_grad():
        whole, *shares = (
            criterion(model(images[part], targets[rows]), Batch(images[part], targets[rows], ()))
            for part, rows in ((slice(4), slice(5)), (slice(2), slice(5)), (slice(2, 4), slice(0)))
        )
    assert whole.counts.equal(sum(each.counts for each in shares))
    means = sum(each.share_of(GlobalCounts(whole.counts)) for each in shares)
    torch.testing.assert_close(means, whole.local_means(), rtol=1e-5, atol=1e-6)
    alike = torch.zeros(1, 1, 5, 3), torch.full((1, 1, 5, 4), 0.5)
    assert criterion.matched(*alike, targets[:2, :6]).tolist() == [[[0, 1, -1, -1, -1]]]  # equal costs


@pytest.mark.long
def test_the_same_bytes(run_script: RunScript, tmp_path: Path) -> None:
    """On one process, two and four, of which some have no boxes, and killed on one and continued on two."""
    for split, number in (("train", 12), ("val", 4)):
        for k in range(number):
            rows = [f"{k % 3} 0.5 {0.3 + 0.1 * (k % 4)} 0.4 0.3"] if k % 4 == 0 else []
            write_image(tmp_path / "images" / split / f"{k}.png", None, *rows)
    content = {"path": str(tmp_path), "train": "images/train", "val": "images/val", "names": NAMES}
    data, cfg = write_yaml(tmp_path / "set.yaml", content), write_yaml(tmp_path / "small.yaml", small_yaml())
    what = ("--task", str(PACKAGE), "--cfg", str(cfg), "--data", str(data), "--project", str(tmp_path))
    how = ("--imgsz", "64", "--epochs", "2", "--batch-size", "8", "--workers", "0", "--device", "cpu")
    four = ("train.py", *what, *how, "--logical-processes", "4")
    for processes in ("1", "2", "4"):
        run_script(*four, "--processes", processes, "--name", processes)
        identical(tmp_path / processes, tmp_path / "1")
    fault = planted("SIGKILL", "optimizer step", 3)
    run_script(*four, "--save-steps", "1", "--name", "killed", code=-signal.SIGKILL, **fault)
    run_script("train.py", "--resume", str(tmp_path / "killed"), "--processes", "2", OMP_NUM_THREADS="1")
    identical(tmp_path / "killed", tmp_path / "1")
