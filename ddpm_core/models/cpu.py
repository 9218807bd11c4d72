"""Faster layers for CPUs: the same functions of the same weights, computed in other ways.

`optimize` replaces layers of a network by the classes below. Those without "Packed" in their name
have gradients and serve training too; they compute with products of their weights, at every call in
training, once for sampling. The packed ones are for sampling in bfloat16.

A replacement changes the class of a layer, nothing else: the layer keeps its weights and its name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ddpm_core.models.conditioning import TextBlock, Tokens
from ddpm_core.models.layers import Conv2d, attend, join_heads, split_heads
from ddpm_core.models.unet import (
    Attention,
    CrossAttention,
    Dropout,
    Norm,
    ResidualBlock,
    UNet,
    Upsample,
)

EXPLICIT_LENGTH = 1024  # tokens; more would take much memory, length^2 scores for each head
CACHED = 2**19  # elements, 2 MB in float32; measured with caches of 1 MB a core and 32 MB for all
_ONEDNN = (
    "_convolution_pointwise",
    "_convolution_transpose_pointwise",
    "_reorder_convolution_weight",
    "_reorder_convolution_transpose_weight",
)


def optimize(model: UNet, training: bool = False) -> None:
    """Replace layers of a network on a CPU by faster ones, in place.

    For sampling (`training` False) the weights must have their final values and precision: the
    products of weights are computed once, here. Weights in bfloat16 are also laid out as oneDNN
    reads them, where PyTorch and the processor can; the sum that ends a residual block is then
    rounded once instead of twice.
    """
    for module in model.modules():
        if (faster := _FASTER.get(type(module))) is not None:
            module.__class__ = faster
        # Before packing, because PackedUpsample packs the product of its weights.
        if isinstance(module, Combined) and not training:
            module.freeze()
    if not training and model.conv_in.weight.dtype is torch.bfloat16 and has_packing():
        for module in model.modules():
            if (packed := _PACKED.get(type(module))) is not None:
                module.__class__ = packed
                if isinstance(module, PackedConv2d | PackedUpsample):
                    module.pack()


def attend_explicitly(parts: Sequence[Tensor], heads: int, visible: Tensor | None = None) -> Tensor:
    """Compute `attend` by its formula, which is twice as fast as PyTorch's kernel on CPUs."""
    query, key, value = (split_heads(part, heads) for part in parts)
    # The scale is applied to the query, which has fewer elements than the scores. The softmax of
    # autocast is float32, so its result is cast back for the second product.
    scores = (query * query.shape[-1] ** -0.5) @ key.transpose(-1, -2)
    if visible is not None:
        scores = scores.masked_fill(~visible[:, None, None, :], -torch.inf)
    return join_heads(scores.softmax(-1).to(value.dtype) @ value)


class FastTextBlock(TextBlock):
    """TextBlock with explicit attention: its texts are short."""

    def mix(self, x: Tensor, visible: Tensor) -> Tensor:
        mixed: Tensor = self.out(attend_explicitly(self.qkv(x).chunk(3, 2), self.heads, visible))
        return mixed


class FastCrossAttention(CrossAttention):
    """CrossAttention with explicit attention, unless there are many pixels."""

    def mix(self, pixels: Tensor, tokens: Tokens) -> Tensor:
        """(B, H * W, C) -> (B, H * W, C)."""
        if pixels.shape[1] > EXPLICIT_LENGTH:
            return super().mix(pixels, tokens)
        parts = self.parts(pixels, tokens)
        mixed: Tensor = self.out(attend_explicitly(parts, self.heads, tokens.visible))
        return mixed


class FastNorm(Norm):
    """Norm with its own computation for channels last without gradients.

    There PyTorch's GroupNorm is slow on CPUs, and most of the time that does not go into
    convolutions goes into norms.
    """

    def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
        """(B, C, H, W), (B, C) or None -> (B, C, H, W)."""
        if torch.is_grad_enabled() or not x.is_contiguous(memory_format=torch.channels_last):
            return super().forward(x, shift)
        batch, channels, height, width = x.shape
        pixels = x.permute(0, 2, 3, 1).view(batch, height * width, channels)
        normed = self._pixels(pixels, shift)
        return normed.view(batch, height, width, channels).permute(0, 3, 1, 2)

    def _pixels(self, x: Tensor, shift: Tensor | None) -> Tensor:
        """(B, N, C) -> (B, N, C), computed in float32, without a gradient.

        Both passes over the images take as many at a time as stay in the cache, in one buffer,
        `wide`; everything smaller than images is computed once for all. This is 1.2 to 1.5 times as
        fast as a separate computation, in new memory, for each handful of images.
        """
        batch, pixels, channels = x.shape
        images = min(batch, max(1, CACHED // (pixels * channels)))
        wide = x.new_empty((images, pixels, channels), dtype=torch.float32)
        totals = x.new_empty((2, batch, channels), dtype=torch.float32)
        normed = torch.empty_like(x)
        # The variance comes from a sum of squares, which loses its digits if the values are far
        # from 0. So one value of each channel, the pivot, is subtracted first. 16-bit numbers have
        # too few digits to lose any in float32; they are copied to float32 instead.
        narrow = x.dtype != torch.float32
        pivot = torch.zeros_like(totals[0]) if narrow else x[:, 0]
        parts = [slice(first, first + images) for first in range(0, batch, images)]
        for part in parts:
            y = wide[: len(x[part])]
            if narrow:
                y.copy_(x[part])
            else:
                torch.sub(x[part], pivot[part, None], out=y)
            torch.sum(y, 1, out=totals[0, part])
            torch.sum(y.square_(), 1, out=totals[1, part])
        scale, offset = self._affine(totals, pivot, shift, pixels)
        for part in parts:
            y = wide[: len(x[part])].copy_(x[part]) if narrow else normed[part]
            torch.addcmul(offset[part], y if narrow else x[part], scale[part], out=y)
            if self.active:
                functional.silu(y, inplace=True)
            if narrow:
                normed[part] = y
        return normed

    def _affine(
        self, totals: Tensor, pivot: Tensor, shift: Tensor | None, pixels: int
    ) -> tuple[Tensor, Tensor]:
        """Return a and b, (B, 1, C), of the norm a x + b. Changes `totals`.

        `totals` (2, B, C) are the sums over pixels of x - pivot and of its squares; `pivot` (B, C)
        is any value near x. With m and r the mean and 1 / standard deviation of a group of
        x + shift, a = r weight and b = bias + (shift - m) a.
        """
        _, batch, channels = totals.shape
        grouped = self.num_groups, channels // self.num_groups
        sums, squares = totals.view(2, batch, *grouped)
        pivot = pivot.reshape(batch, *grouped)
        moved = pivot if shift is None else pivot + shift.float().view(batch, *grouped)
        # A constant per group cancels in the norm, so the first channel's is subtracted from all:
        # that keeps the numbers small. The sums become those of x - pivot + moved.
        moved = moved - moved[..., :1]
        # Over N pixels, sum (y + m)^2 = sum y^2 + m (2 sum y + N m), without another pass.
        squares.addcmul_(moved, 2 * sums + pixels * moved)
        sums.add_(moved, alpha=pixels)
        means = totals.view(2, batch, *grouped).sum(3, keepdim=True).div_(pixels * grouped[1])
        # E y^2 - (E y)^2 can be slightly negative by rounding, hence the clamp.
        mean, variance = means[0], means[1].addcmul_(means[0], means[0], value=-1)
        scale = variance.clamp_(min=0.0).add_(self.eps).rsqrt_() * self.weight.view(grouped)
        offset = torch.addcmul(self.bias.view(grouped), moved - pivot - mean, scale)
        return scale.view(batch, 1, channels), offset.view(batch, 1, channels)


class Combined(nn.Module):
    """A layer that computes with products of its weights."""

    frozen: tuple[Tensor, ...] | None = None

    def combine(self) -> tuple[Tensor, ...]:
        """Return the products that `forward` uses."""
        raise NotImplementedError

    @torch.no_grad()
    def freeze(self) -> None:
        """Compute the products once; later changes of the weights have no effect."""
        self.frozen = self.combine()

    def combined(self) -> tuple[Tensor, ...]:
        return self.frozen or self.combine()


class FastAttention(Combined, Attention):
    """Attention with explicit products; with one head, half as many of them involve pixels.

    With X the (N, C) pixels, Q, K, V and O the matrices of query, key, value and output, and q, v
    and o biases, one head computes

        softmax((X Q + q) (X K + k)^T) (X V + v) O + o.

    The scores are (X Q K^T + q K^T) X^T, except for terms that are constant along a row, which the
    softmax ignores. Rows of a softmax sum to 1, so that the rest is softmax(...) (X V O) + v O + o.
    Q K^T and V O do not depend on the pixels.
    """

    def mix(self, pixels: Tensor) -> Tensor:
        """(B, N, C) -> (B, N, C)."""
        if pixels.shape[1] > EXPLICIT_LENGTH:
            mixed: Tensor = self.out(attend(self.qkv(pixels).chunk(3, 2), self.heads))
        elif self.heads > 1:
            mixed = self.out(attend_explicitly(self.qkv(pixels).chunk(3, 2), self.heads))
        else:
            weight, bias = self.combined()
            queries, values = functional.linear(pixels, weight, bias).chunk(2, dim=2)
            scores = (queries * pixels.shape[2] ** -0.5) @ pixels.transpose(1, 2)
            mixed = scores.softmax(-1).to(values.dtype) @ values
        return mixed

    def combine(self) -> tuple[Tensor, Tensor]:
        """Return the weight (2 * C, C) and the bias (2 * C,) of combined queries and values."""
        query, key, value = self.qkv.weight.chunk(3)  # transposed, as in nn.Linear
        query_bias, _, value_bias = self.qkv.bias.chunk(3)
        out_bias = functional.linear(value_bias, self.out.weight, self.out.bias)
        return (
            torch.cat([key.T @ query, self.out.weight @ value]),
            torch.cat([functional.linear(query_bias, key.T), out_bias]),
        )


class FastUpsample(Combined, Upsample):
    """Upsample as one transposed convolution with (in, out, 4, 4) weights, stride 2.

    Under 3 x 3 weights each pixel of the doubled image sees only 2 x 2 different pixels, so this
    takes 4 / 9 of the multiplications. Along each axis the four weights are w2, w2 + w1, w1 + w0
    and w0.
    """

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, C, 2 * H, 2 * W)."""
        (weight,) = self.combined()
        return functional.conv_transpose2d(x, weight, self.conv.bias, stride=2, padding=1)

    def combine(self) -> tuple[Tensor]:
        """Return the weights of the transposed convolution, (in, out, 4, 4)."""
        weight = self.conv.weight
        # Each row marks which of w0, w1 and w2 add up to one of the four weights along an axis. The
        # Kronecker product applies this to both axes of the 3 x 3 weights at once.
        axis = weight.new_tensor([[0, 0, 1], [0, 1, 1], [1, 1, 0], [1, 0, 0]])
        both = torch.kron(axis, axis).T.contiguous()
        swapped = weight.transpose(0, 1).flatten(2)
        return ((swapped @ both).view(*swapped.shape[:2], 4, 4),)


def has_packing() -> bool:
    """Return whether PyTorch and the processor have oneDNN's operations on packed bfloat16."""
    operations = torch.ops.mkldnn
    known = all(hasattr(operations, name) for name in _ONEDNN)
    return known and bool(operations._is_mkldnn_bf16_supported())


class PackedConv2d(Conv2d):
    """A convolution whose bfloat16 weights are laid out once, as oneDNN reads them.

    PyTorch lays weights out again at each evaluation; these are the operations that torch.compile
    uses instead. The result is the same to the last bit. Packed convolutions take 4 to 6 % off an
    evaluation of Ho's network; sums within them and PackedUpsample another 5 to 6 %, also off the
    digits' network.
    """

    packed: Any = None  # an opaque tensor

    @torch.no_grad()
    def pack(self) -> None:
        """Lay the weights out; later changes of the weights have no effect."""
        self._geometry = self.padding, self.stride, self.dilation, self.groups
        reorder = torch.ops.mkldnn._reorder_convolution_weight
        self.packed = reorder(self.weight, *self._geometry, None)

    def forward(self, x: Tensor) -> Tensor:
        """(B, in, H, W) -> (B, out, H', W')."""
        convolved: Tensor = torch.ops.mkldnn._convolution_pointwise(
            x.bfloat16(), self.packed, self.bias, *self._geometry, "none", [], ""
        )
        return convolved

    def added_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """Return `residual + self(x)`, rounded once."""
        added: Tensor = torch.ops.mkldnn._convolution_pointwise.binary(
            x.bfloat16(),
            residual.bfloat16(),
            self.packed,
            self.bias,
            *self._geometry,
            "add",
            1.0,
            None,
            [],
            None,
        )
        return added


class PackedResidualBlock(ResidualBlock):
    """A residual block whose last convolution adds the input. Sampling has no dropout."""

    conv2: PackedConv2d

    def forward(self, x: Tensor, times: Sequence[Tensor], dropout: Dropout | None = None) -> Tensor:
        """(B, inputs, H, W) -> (B, outputs, H, W)."""
        h = self.norm2(self.conv1(self.norm1(x)), times[self.number])
        return self.conv2.added_to(self.shortcut(x), h)


class PackedUpsample(FastUpsample):
    """FastUpsample with its bfloat16 weights laid out once, as PackedConv2d's are."""

    packed: Any = None  # an opaque tensor
    _geometry = (
        (1, 1),
        (0, 0),
        (2, 2),
        (1, 1),
        1,
    )  # padding, output padding, stride, dilation, groups

    @torch.no_grad()
    def pack(self) -> None:
        """Lay the weights out; later changes of the weights have no effect."""
        (weight,) = self.combined()
        reorder = torch.ops.mkldnn._reorder_convolution_transpose_weight
        self.packed = reorder(weight, *self._geometry, None)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, C, 2 * H, 2 * W)."""
        doubled: Tensor = torch.ops.mkldnn._convolution_transpose_pointwise(
            x.bfloat16(), self.packed, self.conv.bias, *self._geometry, "none", [], ""
        )
        return doubled


_FASTER: dict[type[nn.Module], type[nn.Module]] = {
    Attention: FastAttention,
    CrossAttention: FastCrossAttention,
    Norm: FastNorm,
    TextBlock: FastTextBlock,
    Upsample: FastUpsample,
}
_PACKED: dict[type[nn.Module], type[nn.Module]] = {
    Conv2d: PackedConv2d,
    FastUpsample: PackedUpsample,
    ResidualBlock: PackedResidualBlock,
}
