"""The files for Kubernetes, Kubeflow and SkyPilot are what these read; `make test-clusters` installs their packages."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from tests.conftest import not_here
from tests.machines import CONFIGS

KUBERNETES = ("1.29", "1.33", "1.37")  # the first with all that is used, the one that made all of it stable, the newest


def package(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError:
        not_here(f"the package {name}, which make test-clusters installs")


@pytest.mark.parametrize("version", KUBERNETES)
def test_kubernetes(version: str) -> None:
    validate = package("kubernetes_validate").validate
    documents = list(yaml.safe_load_all((CONFIGS / "kubernetes.yaml").read_text()))
    assert [document["kind"] for document in documents] == ["Service", "PersistentVolumeClaim", "Job"]
    for document in documents:
        validate(document, version, strict=True)


def test_the_oldest_kubernetes_is_named() -> None:
    assert re.search(rf"Kubernetes {KUBERNETES[0]} or newer", (CONFIGS / "kubernetes.yaml").read_text())


def test_kubeflow() -> None:
    """The models drop what they do not know, so all that is read must be written again."""
    models = package("kubeflow_trainer_api.models")
    content: dict[str, Any] = yaml.safe_load((CONFIGS / "kubeflow.yaml").read_text())
    job = models.TrainerV1alpha1TrainJob.from_dict(content)
    assert job.to_dict() == content
    assert job.spec.runtime_ref.name == "torch-distributed"


def test_skypilot(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # it writes its own files there
    monkeypatch.setenv("SKYPILOT_DISABLE_USAGE_COLLECTION", "1")
    sky = package("sky")
    task = sky.Task.from_yaml(str(CONFIGS / "skypilot.yaml"))
    (resources,) = task.resources
    assert (task.num_nodes, resources.use_spot, resources.job_recovery["max_restarts_on_errors"]) == (2, True, 3)
    assert resources.image_id == {None: "docker:registry.example.com/lockstep"}
    modes = {path: storage.mode.value for path, storage in task.storage_mounts.items()}
    assert modes == {"/runs": "MOUNT_CACHED", "/datasets": "MOUNT"}


def test_all_have_the_same_image() -> None:
    images = re.findall(
        r"(?:image|image_id): (?:docker:)?(\S+)",
        "\n".join((CONFIGS / name).read_text() for name in ("kubernetes.yaml", "kubeflow.yaml", "skypilot.yaml")),
    )
    assert (len(images), set(images)) == (3, {"registry.example.com/lockstep"})
    assert f"docker build -t {images[0]} ." in (CONFIGS / "kubernetes.yaml").read_text()
