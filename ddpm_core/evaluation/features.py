"""What turns images into features, and which one a run uses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ddpm_core.config import Evaluate


@dataclass(frozen=True)
class Extractor:
    """Features of images, and what makes two runs' features the same.

    `run` maps uint8 (B, H, W, C), of 1 or 3 channels, to float32 features (B, D) and, where it is
    a classifier, logits (B, K), on the CPU. `space` stands in the name of each score and is empty
    for the standard Inception alone. `accuracy` is that on held-out images, in [0, 1].
    """

    name: str
    space: str
    fingerprint: str
    run: Callable[[Tensor], tuple[Tensor, Tensor | None]]
    accuracy: float | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    def __call__(self, pixels: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.run(pixels)


def chosen(settings: Evaluate) -> str:
    """`inception` or `in_domain`: what `evaluate.extractor` comes to; auto goes by the weights."""
    if settings.extractor == "auto":
        return "inception" if settings.inception_weights else "in_domain"
    return settings.extractor


# How a person reads the name of a space.
SPACES = {
    "": "Inception features",
    "inception": "features of an Inception network that is not the standard one",
    "in_domain": "features of a small classifier trained on these images",
}
