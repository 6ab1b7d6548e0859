"""Problems of a split: the first few as warnings, or the first as an error."""

from __future__ import annotations

import pytest

from data.problems import problem_warnings, refuse
from utils.errors import UserError


def problems(count: int) -> list[str]:
    return [f"{number}.png: torn; left out" for number in range(count)]


@pytest.mark.parametrize("count", [0, 1, 5])
def test_up_to_five_problems_are_all_shown(count: int) -> None:
    assert problem_warnings(problems(count), "train") == [
        f"warning: {number}.png: torn; left out" for number in range(count)
    ]


def test_the_first_five_of_many_problems_are_shown_and_the_others_counted() -> None:
    assert problem_warnings(problems(7), "val") == [
        *problem_warnings(problems(5), "val"),
        "warning: 2 more such problems in val; problems.txt in the run folder lists all",
    ]


def test_strict_raises_the_first_problem_without_its_consequence() -> None:
    with pytest.raises(UserError) as caught:
        refuse(["a.txt, line 2: 5 words; 6 are needed; row left out", *problems(2)], "train")
    assert str(caught.value) == "a.txt, line 2: 5 words; 6 are needed (--strict; 3 such problems in train)"


def test_strict_raises_nothing_without_problems() -> None:
    refuse((), "train")
