"""Layers that draw no first weights: what is to be overwritten costs no time and no randomness."""

from __future__ import annotations

from torch import Tensor, nn

from ddpm_core.models import cpu as onednn


class Conv2d(nn.Conv2d):
    """A convolution whose weights are undefined until they are set."""

    packed: onednn.Convolution | None = None

    def reset_parameters(self) -> None:
        """Leave the memory as it is."""

    def pack(self) -> None:
        """Lay bfloat16 weights out for good: they change no more."""
        self.packed = onednn.packed(self)

    def forward(self, x: Tensor, onto: Tensor | None = None) -> Tensor:
        """(B, in, H, W) -> (B, out, H', W'), the sum with `onto` where there is one."""
        if self.packed is not None:
            return self.packed(x, onto)
        convolved = super().forward(x)
        return convolved if onto is None else onto + convolved


class Linear(nn.Linear):
    """A linear layer whose weights are undefined until they are set."""

    def reset_parameters(self) -> None:
        """Leave the memory as it is."""


class Embedding(nn.Embedding):
    """An embedding whose vectors are undefined until they are set."""

    def reset_parameters(self) -> None:
        """Leave the memory as it is."""
