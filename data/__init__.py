"""Data sets by task: what a model YAML's `task:` names."""

from typing import Any

from data.classification import ClassificationData
from data.detection import DetectionData

DATASETS: dict[str, Any] = {"detect": DetectionData, "classify": ClassificationData}
