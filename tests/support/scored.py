"""A row of scores as evaluate writes it, with the evidence that the gate and the card ask for."""

from __future__ import annotations

from typing import Any

from ddpm_core.scores import Row


def row(score: float, verdict: str = "none", **evidence: Any) -> Row:
    facts = {"data": "d", "extractor_fingerprint": "e", "sampler": {"steps": 4}, "count": 500}
    return Row.model_validate(
        {
            "step": 1,
            "score": score,
            "score_name": "fd_500",
            "evidence": {**facts, **evidence},
            "memorisation": {"verdict": verdict},
        }
    )
