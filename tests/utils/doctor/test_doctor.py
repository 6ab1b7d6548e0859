"""Exchange of the processes' facts; whole runs of the doctor are in tests/test_doctor.py."""

from __future__ import annotations

import dataclasses
import json

import pytest
from torch import distributed

from tests.utils.doctor.test_comparison import A
from utils.distributed.store import RunStore
from utils.doctor.comparison import compare, table
from utils.doctor.doctor import check_ranks, collect_facts
from utils.doctor.process_facts import ProcessFacts


def test_missing_and_repeated_ranks_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    store = RunStore(distributed.HashStore(), "doctor")
    for _ in range(2):
        store.count("facts/0/times")
    store.write("facts", dataclasses.asdict(A))
    facts = collect_facts(store, 0.1)
    assert [process.host for process in facts] == ["a"]
    missing, repeated = check_ranks(store, facts, 0.1)
    assert "no answer from ranks 1 and 2 within 0.1 s" in missing.text
    assert "2 processes have rank 0" in repeated.text


def test_facts_of_another_version_of_the_code_may_have_other_keys() -> None:
    """The key in the store never changes."""
    shared = distributed.HashStore()
    store = RunStore(shared, "doctor")
    facts = {"host": "b", "rank": 0, "unknown": 1, "compared": {"code": {"train.py": "2222"}}}
    distributed.PrefixStore("lockstep/0/doctor", shared).set("facts/0", json.dumps(facts))
    (read,) = collect_facts(store, 1.0)
    assert read == ProcessFacts(host="b", rank=0, compared={"code": {"train.py": "2222"}})
    assert table([read])
    assert "the code in train.py, utils/training/ema.py differs" in compare([A, read])[0].text
