"""Errors contain their problems as data, and render them in one place."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ddpm_core import errors
from ddpm_core.console import report_errors
from ddpm_core.errors import Invalid, Problem, UserError, got, invalid, write_termination_message
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


# The termination message of a container


@pytest.fixture
def termination_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "termination-log"
    monkeypatch.setattr(errors, "TERMINATION_LOG", file)
    return file


def test_the_last_error_is_the_termination_message(termination_log: Path) -> None:
    termination_log.write_text("a longer message of an earlier process")
    with pytest.raises(SystemExit), report_errors("ddpm train"):
        assert termination_log.read_text() == ""
        raise UserError("https://me:hunter2@h is gone.")
    assert json.loads(termination_log.read_text()) == {"error": "https://***@h is gone."}
    with pytest.raises(SystemExit), report_errors("ddpm train"):
        raise OSError(28, "No space left on device", "/workspace/run")
    expected = {"error": "No space left on device: /workspace/run."}
    assert json.loads(termination_log.read_text()) == expected


@pytest.mark.parametrize("text", ["x" * 10_000, "\x00" * 10_000, "ü" * 10_000])
def test_a_long_termination_message_is_cut(termination_log: Path, text: str) -> None:
    termination_log.touch()
    write_termination_message(UserError(text))
    data = termination_log.read_bytes()
    assert 2048 < len(data) <= 4096
    assert text.startswith(json.loads(data)["error"])


def test_a_missing_termination_log_is_not_created(termination_log: Path) -> None:
    write_termination_message("gone")
    assert not termination_log.exists()
    termination_log.mkdir()
    write_termination_message("not a file")
