"""Errors contain their problems as data, and render them in one place."""

from __future__ import annotations

import pickle

import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ddpm_core.errors import Invalid, Problem, UserError, got, invalid
from ddpm_core.problems import problems_of


@pytest.mark.parametrize(
    ("problem", "line"),
    [
        (Problem("a.b", "missing (required)"), "a.b: missing (required)"),
        (Problem("a", got(0), "must be at least 1"), "a: got 0; must be at least 1"),
        (Problem("a", "unknown key", hint="did you mean b?"), "a: unknown key; did you mean b?"),
        (Problem("a", got(None), "must be a text", option="-S"), "-S a: got null; must be a text"),
    ],
)
def test_a_problem_is_one_line(problem: Problem, line: str) -> None:
    assert str(problem) == line


def test_an_error_lists_its_problems_without_secrets() -> None:
    error = invalid(
        [Problem("a", got("https://me:hunter2@h/f")), Problem("b", "missing")], "p.yaml"
    )
    expected = "2 problems in p.yaml:\n  a: got 'https://***@h/f'\n  b: missing"
    assert str(error) == expected
    assert str(pickle.loads(pickle.dumps(error))) == expected  # from a worker process
    assert str(UserError("Disk full.")) == "Disk full."


class Inner(BaseModel):
    low: int = 0
    high: int = Field(1, ge=1)

    @model_validator(mode="after")
    def _check(self) -> Inner:
        if self.low > self.high:
            raise Invalid([Problem("low", got(self.low), "must be below high", involves=("high",))])
        return self


class Outer(BaseModel):
    model_config = ConfigDict(extra="forbid")

    inner: Inner = Inner()
    items: tuple[Inner, ...] = ()
    texts: dict[str, str] = {}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"inner": {"high": 0}}, Problem("inner.high", "got 0", "must be at least 1")),
        ({"items": [{}, {"high": 0}]}, Problem("items[1].high", "got 0", "must be at least 1")),
        ({"texts": {"a": 1}}, Problem("texts.a", "got 1", "must be a text in quotes")),
        ({"iner": 1}, Problem("iner", "unknown key", hint="did you mean inner?")),
        (
            {"inner": {"low": 5}},
            Problem("inner.low", "got 5", "must be below high", involves=("inner.high",)),
        ),
    ],
)
def test_problems_of_any_model(given: dict[str, object], expected: Problem) -> None:
    with pytest.raises(ValidationError) as caught:
        Outer.model_validate(given)
    assert problems_of(caught.value, Outer) == [expected]
