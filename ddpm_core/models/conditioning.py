"""Conditions of an image: a class, or a text of at most 64 bytes.

Both become a vector that is added to the time embedding. Both have a null vector for "no
condition", learned from the samples whose condition was dropped, for classifier-free guidance (Ho &
Salimans 2022). A text can also become tokens, one for each byte, that the pixels attend to.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from ddpm_core.models.layers import Embedding, JoinedLinear, Linear, attend

TEXT_BYTES = 64


class Tokens(NamedTuple):
    """What the pixels attend to: float (B, N, width), and bool (B, N), False at padding."""

    values: Tensor
    visible: Tensor


Embedded = tuple[Tensor, Tokens | None]  # the vector of a condition, (B, width), and its tokens


class ClassEmbedding(nn.Module):
    """One vector for each class, and a last one for "no class"."""

    def __init__(self, classes: int, width: int) -> None:
        super().__init__()
        self.classes = classes
        self.embedding = Embedding(classes + 1, width)

    def forward(self, condition: Tensor | None, drop: Tensor | None, batch: int) -> Embedded:
        """int64 (B,) class numbers or None, bool (B,) or None -> (B, width).

        `drop` is True where an image gets the vector for "no class".
        """
        if condition is None:
            return self.embedding.weight[self.classes].expand(batch, -1), None
        if drop is not None:
            condition = torch.where(drop, self.classes, condition)
        return self.embedding(condition), None


class TextEncoder(nn.Module):
    """Embed bytes and their positions, apply two transformer blocks, average over the bytes.

    With `tokens` it also returns the bytes themselves, after a null token that every image sees: it
    alone stands for "no text", and pixels that need no byte can attend to it.
    """

    def __init__(self, channels: int, tokens: bool = False) -> None:
        super().__init__()
        width = self.width(channels)
        self.embedding = Embedding(256, width)
        self.position = nn.Parameter(torch.empty(TEXT_BYTES, width))
        self.blocks = nn.ModuleList(TextBlock(width) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.out = Linear(width, 4 * channels)
        self.null = nn.Parameter(torch.empty(4 * channels))
        self.null_token = nn.Parameter(torch.empty(width)) if tokens else None

    @staticmethod
    def width(channels: int) -> int:
        """Return the width of the tokens in a network of so many channels."""
        return 64 if channels < 64 else 128

    def forward(self, condition: Tensor | None, drop: Tensor | None, batch: int) -> Embedded:
        """uint8 (B, 64), UTF-8 padded with zeros, or None; bool (B,) or None -> (B, 4 * channels).

        `drop` is True where a text is ignored. An empty text counts as no text.
        """
        if condition is None:
            return self.null.expand(batch, -1), self._tokens(None, batch)
        read = self._read(condition)
        weight = read.visible / read.visible.sum(dim=1, keepdim=True)
        vector = self.out((read.values * weight[:, :, None]).sum(dim=1))
        ignored = condition[:, 0] == 0
        ignored = ignored if drop is None else ignored | drop
        vector = torch.where(ignored[:, None], self.null.to(vector.dtype), vector)
        visible = read.visible & ~ignored[:, None]
        return vector, self._tokens(Tokens(read.values, visible), batch)

    def _read(self, text: Tensor) -> Tokens:
        first = torch.arange(TEXT_BYTES, device=text.device) == 0
        # The softmax over no token at all would be NaN, so an empty text keeps its first byte.
        visible = (text != 0) | first
        h = self.embedding(text.long()) + self.position
        for block in self.blocks:
            h = block(h, visible)
        return Tokens(self.norm(h), visible)

    def _tokens(self, read: Tokens | None, batch: int) -> Tokens | None:
        """Return what the pixels attend to, the null token first; None: to nothing."""
        if self.null_token is None:
            return None
        null = self.null_token.expand(batch, 1, -1)
        seen = torch.ones(batch, 1, dtype=torch.bool, device=null.device)
        if read is None:
            return Tokens(null, seen)
        values = torch.cat([null.to(read.values.dtype), read.values], dim=1)
        return Tokens(values, torch.cat([seen, read.visible], dim=1))


class TextBlock(nn.Module):
    """Self-attention, then two linear layers; each after a LayerNorm, each added to its input."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = JoinedLinear(width, [width] * 3)
        self.out = Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.widen = Linear(width, 4 * width)
        self.narrow = Linear(4 * width, width)

    def forward(self, x: Tensor, visible: Tensor) -> Tensor:
        """(B, N, width), bool (B, N) -> (B, N, width)."""
        x = x + self.mix(self.norm1(x), visible)
        added: Tensor = x + self.narrow(functional.gelu(self.widen(self.norm2(x))))
        return added

    def mix(self, x: Tensor, visible: Tensor) -> Tensor:
        """(B, N, width), bool (B, N) -> (B, N, width)."""
        mixed: Tensor = self.out(attend(self.qkv(x).chunk(3, 2), self.heads, visible))
        return mixed
