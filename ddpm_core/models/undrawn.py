"""Layers that draw no first weights: what is to be overwritten costs no time and no randomness."""

from __future__ import annotations

from torch import nn


class Conv2d(nn.Conv2d):
    """A convolution whose weights are undefined until they are set."""

    def reset_parameters(self) -> None:
        """Leave the memory as it is."""


class Linear(nn.Linear):
    """A linear layer whose weights are undefined until they are set."""

    def reset_parameters(self) -> None:
        """Leave the memory as it is."""


class Embedding(nn.Embedding):
    """An embedding whose vectors are undefined until they are set."""

    def reset_parameters(self) -> None:
        """Leave the memory as it is."""
