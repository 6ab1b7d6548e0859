"""Data sets by task: what a model YAML's `task:` names."""

from data.detection import DetectionData

DATASETS = {"detect": DetectionData}
