"""The gate: the champion gives way only to a better score that was measured in the same way."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.scored import row

from ddpm_core.registry.gate import Champion, Decision, Unfit, best_of, decide
from ddpm_core.scores import Row


def kid(score: float) -> Row:
    return row(score).model_copy(update={"score_name": "kid_500"})


def gate(candidate: Row, *champion: Row, anew: Row | Unfit | None = None) -> Decision:
    """The decision over version 7, which has the rows `champion`; `anew` is its new score."""

    def rescore() -> Row:
        assert anew is not None, "it was not to be scored anew"
        if isinstance(anew, Unfit):
            raise anew
        return anew

    return decide(candidate, Champion("7", list(champion)), rescore)


def test_a_lower_score_of_the_same_evidence_is_promoted() -> None:
    decision = gate(row(10.0), row(11.0))
    assert decision.promote
    assert decision.why == ("Promoted: fd_500 10 is below the 11 of the champion, version 7.")


@pytest.mark.parametrize("score", [11.0, 12.0])
def test_an_equal_or_higher_score_is_not(score: float) -> None:
    decision = gate(row(score), row(11.0))
    assert not decision.promote
    assert "is not below the 11 of the champion" in decision.why


def test_scores_that_are_nearly_equal_are_told_in_digits_that_differ() -> None:
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
def test_a_champion_of_other_evidence_is_scored_anew(change: dict[str, Any]) -> None:
    anew = row(9.0)
    decision = gate(row(10.0), row(11.0, **change), anew=anew)
    assert not decision.promote
    assert decision.rescored is anew
    assert f"measured anew, as it differs in {next(iter(change))}" in decision.why
    assert gate(row(10.0), row(9.0, **change), anew=row(11.0)).promote


@pytest.mark.parametrize("scale", [0.01, 100.0])
def test_another_score_is_never_compared_whichever_is_the_smaller(scale: float) -> None:
    candidate = kid(scale)
    worse, better = [kid(scale * by) for by in (2, 0.5)]
    decision = gate(candidate, row(1.0), anew=worse)
    assert decision.promote and decision.rescored is worse
    assert decision.why.endswith("version 7 (measured anew, as it differs in score).")
    assert not gate(candidate, row(1.0), anew=better).promote


def test_a_champion_once_scored_anew_is_not_scored_again() -> None:
    assert gate(row(10.0), row(11.0), row(3.0, data="older")).promote


def test_another_seed_is_no_other_evidence() -> None:
    assert gate(row(10.0, seed=1), row(11.0, seed=2)).promote


def test_what_cannot_be_measured_any_more_gives_way() -> None:
    decision = gate(row(10.0), row(1.0, data="x"), anew=Unfit("it draws other sizes."))
    assert decision.promote
    assert decision.why.endswith(
        "cannot be measured with the present evidence: it draws other sizes."
    )


def test_a_model_that_copies_is_never_promoted() -> None:
    decision = gate(row(1.0, verdict="copies"), row(11.0))
    assert not decision.promote
    assert not decide(row(1.0, verdict="copies"), None, dict).promote
    assert "copies training images" in decision.why


def test_a_champion_that_copies_gives_way_whatever_the_scores() -> None:
    decision = decide(row(10.0), Champion("7", [row(1.0)], "memorisation"), dict)
    assert decision.promote
    assert decision.why == "Promoted: the champion, version 7, copies training images."


def test_a_model_that_has_collapsed_is_never_promoted_and_gives_way() -> None:
    collapsed = Row.model_validate({**row(1.0), "collapse": {"verdict": "collapsed"}})
    for decision in (gate(collapsed, row(11.0)), decide(collapsed, None, dict)):
        assert not decision.promote
        assert decision.why == (
            "Not promoted: it draws the same images repeatedly, by the collapse check."
        )
    repeating = Row.model_validate({**row(1.0), "collapse": {"verdict": "repeats"}})
    assert gate(repeating, row(11.0)).promote
    decision = decide(row(10.0), Champion("7", [row(1.0)], "collapse"), dict)
    assert decision.why == "Promoted: the champion, version 7, draws the same images repeatedly."


def test_of_versions_announced_at_once_all_find_the_same_to_be_the_best() -> None:
    scores = {"2": 11.0, "10": 9.0, "3": 9.0}
    for own, score in scores.items():
        rivals = [Champion(v, [row(s)]) for v, s in scores.items() if v != own]
        rivals.append(Champion("4", [row(1.0, data="x")]))  # does not compare
        assert best_of(row(score), own, rivals) == "3"
    assert best_of(row(11.0), "5", [Champion("6", [row(9.0), row(12.0)])]) == "6"
