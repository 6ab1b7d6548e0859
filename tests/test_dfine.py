"""examples/dfine, a task that `--task` names: network and loss against transformers, exactness, and whole runs."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from models.loading import transfer
from tests.conftest import ROOT, not_here
from utils.batch import Batch
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
        rows = torch.full((3, denoising), len(targets))
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
