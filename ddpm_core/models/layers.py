"""Layers without random first weights, and the attention that images and texts share."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional


class Conv2d(nn.Conv2d):
    """A convolution whose weights are undefined until they are set.

    PyTorch's layers draw first weights from the global generator. Here every weight is overwritten
    (see init.py or a checkpoint), so that would cost time and disturb the generator for nothing.
    """

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


class JoinedLinear(Linear):
    """Several linear layers with the same input, `sizes` outputs each, as one matrix product."""

    def __init__(self, inputs: int, sizes: Sequence[int]) -> None:
        super().__init__(inputs, sum(sizes))
        self.sizes = list(sizes)


def attend(parts: Sequence[Tensor], heads: int, visible: Tensor | None = None) -> Tensor:
    """Apply scaled dot-product attention, softmax(Q K^T / sqrt(d)) V (Vaswani et al. 2017, eq. 1).

    Args:
        parts: The queries (B, N, C), and the keys and values (B, M, C).
        heads: The number of heads; d = C / heads.
        visible: bool (B, M), False at padding, which no token attends to. None: all are visible.

    Returns:
        (B, N, C).
    """
    mask = None if visible is None else visible[:, None, None, :]
    query, key, value = (split_heads(part, heads) for part in parts)
    mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    return join_heads(mixed)


def split_heads(tokens: Tensor, heads: int) -> Tensor:
    """Return (B, N, C) as (B, heads, N, C / heads)."""
    batch, length, width = tokens.shape
    return tokens.view(batch, length, heads, width // heads).transpose(1, 2)


def join_heads(mixed: Tensor) -> Tensor:
    """Return (B, heads, N, C / heads) as (B, N, C)."""
    batch, heads, length, width = mixed.shape
    return mixed.transpose(1, 2).reshape(batch, length, heads * width)
