"""The gate: only a better score that was measured in the same way replaces the champion."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.scored import row

from ddpm_core.registry.gate import Champion, Decision, Unfit, best_of, decide
from ddpm_core.scores import Row


def kid(score: float) -> Row:
    return row(score).model_copy(update={"score_name": "kid_500"})


def gate(candidate: Row, *champion: Row, rescored: Row | Unfit | None = None) -> Decision:
    """Decide against version 7 with the rows `champion`; rescoring gives or raises `rescored`."""

    def rescore() -> Row:
        assert rescored is not None, "the champion must not be scored again"
        if isinstance(rescored, Unfit):
            raise rescored
        return rescored

    return decide(candidate, Champion("7", list(champion)), rescore)


def test_a_lower_score_with_the_same_evidence_is_promoted() -> None:
    decision = gate(row(10.0), row(11.0))
    assert decision.promote
    assert decision.why == ("Promoted: fd_500 10 is below the 11 of the champion, version 7.")


@pytest.mark.parametrize("score", [11.0, 12.0])
def test_an_equal_or_higher_score_is_not_promoted(score: float) -> None:
    decision = gate(row(score), row(11.0))
    assert not decision.promote
    assert "is not below the 11 of the champion" in decision.why


def test_nearly_equal_scores_are_shown_with_enough_digits() -> None:
    assert "fd_500 268.31 is below the 268.34 of" in gate(row(268.312), row(268.338)).why
    assert "fd_500 268.3 is not below the 268.3 of" in gate(row(268.312), row(268.312)).why
    beside = float(np.nextafter(268.312, 300))
    assert "fd_500 268.312 is below the 268.3120000000001 of" in gate(row(268.312), row(beside)).why


def test_the_first_version_is_the_champion() -> None:
    decision = decide(row(10.0), None, dict)
    assert (decision.promote, decision.why) == (True, "Promoted: there was no champion.")


@pytest.mark.parametrize(
    "change",
    [{"data": "x"}, {"extractor_fingerprint": "x"}, {"sampler": {"steps": 5}}, {"count": 10}],
)
def test_a_champion_with_different_evidence_is_scored_again(change: dict[str, Any]) -> None:
    rescored = row(9.0)
    decision = gate(row(10.0), row(11.0, **change), rescored=rescored)
    assert not decision.promote
    assert decision.rescored is rescored
    assert f"measured again, because it differs in {next(iter(change))}" in decision.why
    assert gate(row(10.0), row(9.0, **change), rescored=row(11.0)).promote


@pytest.mark.parametrize("scale", [0.01, 100.0])
def test_different_metrics_are_never_compared(scale: float) -> None:
    candidate = kid(scale)
    worse, better = [kid(scale * by) for by in (2, 0.5)]
    decision = gate(candidate, row(1.0), rescored=worse)
    assert decision.promote and decision.rescored is worse
    assert decision.why.endswith("version 7 (measured again, because it differs in score).")
    assert not gate(candidate, row(1.0), rescored=better).promote


def test_a_champion_is_scored_again_only_once() -> None:
    assert gate(row(10.0), row(11.0), row(3.0, data="older")).promote


def test_scores_with_different_seeds_compare() -> None:
    assert gate(row(10.0, seed=1), row(11.0, seed=2)).promote


def test_an_unfit_champion_is_replaced() -> None:
    decision = gate(row(10.0), row(1.0, data="x"), rescored=Unfit("it draws other sizes."))
    assert decision.promote
    assert decision.why.endswith(
        "cannot be measured with the present evidence: it draws other sizes."
    )


FAULTY = {
    "memorisation": (row(1.0, verdict="copies"), "copies training images"),
    "collapse": (
        Row.model_validate({**row(1.0), "collapse": {"verdict": "collapsed"}}),
        "draws the same images repeatedly",
    ),
}


@pytest.mark.parametrize("check", FAULTY)
def test_a_model_that_fails_a_check_is_never_promoted(check: str) -> None:
    faulty, fault = FAULTY[check]
    for decision in (gate(faulty, row(11.0)), decide(faulty, None, dict)):
        assert not decision.promote
        assert decision.why == f"Not promoted: it {fault}, by the {check} check."


@pytest.mark.parametrize("check", FAULTY)
def test_a_champion_that_fails_a_check_is_always_replaced(check: str) -> None:
    decision = decide(row(10.0), Champion("7", [row(1.0)], check), dict)
    assert decision.promote
    assert decision.why == f"Promoted: the champion, version 7, {FAULTY[check][1]}."


def test_some_repeated_images_do_not_prevent_a_promotion() -> None:
    repeating = Row.model_validate({**row(1.0), "collapse": {"verdict": "repeats"}})
    assert gate(repeating, row(11.0)).promote


def test_concurrent_versions_agree_on_the_best() -> None:
    scores = {"2": 11.0, "10": 9.0, "3": 9.0}
    for own, score in scores.items():
        rivals = [Champion(v, [row(s)]) for v, s in scores.items() if v != own]
        rivals.append(Champion("4", [row(1.0, data="x")]))  # does not compare
        assert best_of(row(score), own, rivals) == "3"
    assert best_of(row(11.0), "5", [Champion("6", [row(9.0), row(12.0)])]) == "6"
