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


def attend(qkv: Tensor, heads: int, visible: Tensor | None = None) -> Tensor:
    """Apply scaled dot-product attention, softmax(Q K^T / sqrt(d)) V (Vaswani et al. 2017, eq. 1).

    Args:
        qkv: (B, N, 3 * C), the queries, keys and values of N tokens side by side.
        heads: The number of heads; d = C / heads.
        visible: bool (B, N), False at padding, which no token attends to. None: all are visible.

    Returns:
        (B, N, C).
    """
    query, key, value = split_heads(qkv, heads)
    mask = None if visible is None else visible[:, None, None, :]
    mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    return join_heads(mixed)


def split_heads(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Split (B, N, 3 * C) into query, key and value, (B, heads, N, C / heads) each."""
    batch, length, width = qkv.shape
    split = qkv.view(batch, length, 3, heads, width // 3 // heads)
    query, key, value = split.permute(2, 0, 3, 1, 4).unbind(0)
    return query, key, value


def join_heads(mixed: Tensor) -> Tensor:
    """Return (B, heads, N, C / heads) as (B, N, C)."""
    batch, heads, length, width = mixed.shape
    return mixed.transpose(1, 2).reshape(batch, length, heads * width)
