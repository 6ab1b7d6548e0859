"""The data sets of all tasks by name."""

from __future__ import annotations

from dataclasses import fields

import pytest

from data.dataset import DataOptions, data_source, dataset_class
from models.tasks import TASKS
from tests.data.test_contract import KINDS
from utils.config.options import TrainOptions
from utils.errors import UserError


def test_every_task_has_a_data_set_that_the_contract_is_tested_for() -> None:
    for entry in TASKS.values():
        kind = dataset_class(entry.data)
        assert kind.__name__ == entry.data.partition(":")[2]
        assert not kind.__abstractmethods__
    assert {entry.data for entry in TASKS.values()} == {kind.name for kind in KINDS.values()}


def test_options_are_flags() -> None:
    assert {field.name for field in fields(DataOptions)} <= {field.name for field in fields(TrainOptions)}


def test_a_yaml_that_does_not_exist_is_named() -> None:
    with pytest.raises(UserError, match=r"nothing\.yaml"):
        data_source("nothing.yaml", "data.detection:DetectionData")
