"""Progress lines in a log file."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ddpm_core import console
from ddpm_core.config.durations import in_words


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """The lines of 1,000 steps; each step takes `seconds(step)`."""

    def run(seconds: Callable[[int], float], noted: int = 0, done: int = 0) -> list[str]:
        printed: list[str] = []
        now = 0.0
        monkeypatch.setattr(console, "say", printed.append)
        monkeypatch.setattr(console.time, "monotonic", lambda: now)
        with console.progress("train", 1000, "steps", done) as advance:
            for step in range(done + 1, 1001):
                now += seconds(step)
                advance()
                if step == noted:
                    advance(0, note="loss 0.5")
        return printed

    return run


def test_a_slow_start_is_forgotten(lines: Callable[..., list[str]]) -> None:
    printed = lines(lambda step: 300.0 if step == 1 else 1.0)
    assert printed[0] == "train: 1/1000 steps, 0.0033/s, 3 d 11 h left"
    assert printed[-2] == "train: 984/1000 steps, 1.0/s, 16 s left"


def test_resumed_units_do_not_count_for_the_rate(
    lines: Callable[..., list[str]],
) -> None:
    assert lines(lambda step: 2.0, done=900)[0] == "train: 905/1000 steps, 0.5/s, 3 min 10 s left"


def test_every_line_contains_the_last_note(lines: Callable[..., list[str]]) -> None:
    printed = lines(lambda step: 1.0, noted=55)
    assert not any("loss" in line for line in printed[:5])
    assert all(line.endswith(", loss 0.5") for line in printed[5:])


def test_long_runs_print_few_lines(lines: Callable[..., list[str]]) -> None:
    assert 18 <= len(lines(lambda step: 0.2)) <= 20  # 200 s: one in 10 s
    assert 995 <= len(lines(lambda step: 65.0)) <= 1000  # 18 h: one in 60 s
    assert len(lines(lambda step: 20.0)) < 1000 * 20 / 55


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0 s"),
        (45, "45 s"),
        (200, "3 min 20 s"),
        (7200, "2 h"),
        (7205, "2 h"),
        (7500, "2 h 5 min"),
        (187_200, "2 d 4 h"),
    ],
)
def test_times_have_at_most_two_units(seconds: float, text: str) -> None:
    assert in_words(seconds) == text
