"""Random changes of the training images, on their device, inside the training step.

Every draw is keyed by the step and by the place of the image in the global batch, and each image is
changed by itself. So the number of workers and of microbatches changes nothing, and a resumed run
continues with the same changes. `train.flip` comes first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional

from ddpm_core import rng
from ddpm_core.rng import Key

# (images x0, key, places in the global batch, step) -> (images, parameters or None)
Augmentation = Callable[[Tensor, Key, Tensor, Tensor], tuple[Tensor, Tensor | None]]

CHANCE = 0.12  # of each transform of `edm`
_GEOMETRY = 8  # of the parameters of `edm`; the others describe colors
_BRIGHTNESS, _CONTRAST = 0.2, 0.5  # standard deviations; of contrast in powers of 2
_SCALE, _SHIFT = 0.2, 1 / 8  # standard deviations, in powers of 2 and in widths of the image


def none(x0: Tensor, key: Key, index: Tensor, step: Tensor) -> tuple[Tensor, None]:
    """No changes."""
    return x0, None


def crop(x0: Tensor, key: Key, index: Tensor, step: Tensor) -> tuple[Tensor, None]:
    """Random resized crops: a part of each image, enlarged to the full size (bilinear).

    Its share of the area is uniform from 0.6 to 1, the ratio of width to height from 3/4 to 4/3
    uniform in its logarithm, and its place uniform. Generated images look cropped, too.

    Szegedy et al. (2015), section 6, as RandomResizedCrop(scale=(0.6, 1)) of torchvision. That
    rounds the part to whole pixels, and where a ratio does not fit into the image it draws area and
    ratio again, so that large parts are rarer; here, only ratios that fit are drawn.
    """
    area, ratio, left, top = rng.uniform(key, index, (4,), step).unbind(1)
    area = 1.0 - 0.4 * area
    widest = (-area.log()).clamp(max=math.log(4 / 3))
    stretch = (widest * (ratio - 0.5)).exp()
    width, height = area.sqrt() * stretch, area.sqrt() / stretch
    zero = torch.zeros_like(width)
    rows = [width, zero, (2 * left - 1) * (1 - width), zero, height, (2 * top - 1) * (1 - height)]
    return _resampled(x0, torch.stack(rows, 1).view(-1, 2, 3), "bilinear"), None


def edm(x0: Tensor, key: Key, index: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
    """Geometric and color transforms whose parameters condition the network, so none leak.

    Each transform applies with a chance of 0.12. Its parameters are in brackets; n ~ N(0, 1):

        y-flip, in half of the cases [1]
        scaling by 2^(0.2 n) [n]
        rotation by r, uniform in a circle [cos r - 1, sin r]
        anisotropy: 2^(0.2 n) along the uniform direction a, 2^(-0.2 n) across [n cos a, n sin a]
        translation by n / 8 of the width and n' / 8 of the height [n, n']
        brightness + 0.2 n, of values in [-1, 1] [n]
        contrast times 2^(0.5 n) [n]
        inverted luma, in half of the cases [1]
        rotation of the hue by h, uniform in a circle [cos h - 1, sin h]
        saturation times 2^n [n]

    Parameters of transforms that do not apply are 0, as all are in sampling. If all are 0, the
    image is the same to the last bit. Gray images have no hue and saturation.

    Karras et al. (2022), table 6 (F.2), has the geometric ones. Those of color, with these
    strengths, are from Karras et al. (2020), "Training generative adversarial networks with limited
    data", appendix B. The table also has an x-flip of every other image, with a parameter:
    `train.flip` takes its place, without one, so that generated images are mirrored as often. Here,
    images are resampled bicubically and continue as their mirror image beyond the edges; there,
    with a wavelet filter.
    """
    on = (rng.uniform(key, index, (10,), step) < CHANCE).to(x0.dtype).unbind(1)
    coin, coin2, *turns = rng.uniform(key, index, (5,), step, stream=1).unbind(1)
    r, a, h = ((2.0 * turn - 1.0) * math.pi for turn in turns)
    n = rng.normal(key, index, (7,), step, stream=2).unbind(1)
    flip, luma = on[0] * (coin < 0.5), on[7] * (coin2 < 0.5)
    scale, stretch, x, y = on[1] * n[0], on[3] * n[1], on[4] * n[2], on[4] * n[3]
    colored = float(x0.shape[1] == 3)
    r, h, saturation = on[2] * r, on[8] * h * colored, on[9] * n[6] * colored
    brightness, contrast = on[5] * n[4], on[6] * n[5]
    geometry = [flip, scale, r.cos() - 1, r.sin(), stretch * a.cos(), stretch * a.sin(), x, y]
    color = [brightness, contrast, luma, h.cos() - 1, h.sin(), saturation]
    parameters = torch.stack([*geometry, *color], 1)
    moved = _resampled(x0, _inverse(flip, scale, r, stretch, a, x, y), "bicubic")
    x0 = torch.where(_any(parameters[:, :_GEOMETRY]), moved, x0)
    recolored = _recolored(x0, brightness, contrast, luma, h, saturation)
    return torch.where(_any(parameters[:, _GEOMETRY:]), recolored, x0), parameters


AUGMENTATIONS: Mapping[str, Augmentation] = {"none": none, "crop": crop, "edm": edm}
PARAMETERS = {"edm": 14}  # per image, of the augmentations that have any


def _any(parameters: Tensor) -> Tensor:
    """Return for which images a parameter is not 0, bool (n, 1, 1, 1)."""
    return (parameters != 0).any(1)[:, None, None, None]


def _inverse(
    flip: Tensor, scale: Tensor, r: Tensor, stretch: Tensor, a: Tensor, x: Tensor, y: Tensor
) -> Tensor:
    """Return the matrices (n, 2, 3) from places after all transforms to those before them.

    Its arguments are those of `edm`, each (n,). The first transform comes last here.
    """
    smaller, narrower = (-_SCALE * scale).exp2(), (-_SCALE * stretch).exp2()
    matrix = _diagonal(smaller, smaller * (1 - 2 * flip))
    # The y-axis points down, so this turns the image counterclockwise.
    matrix = _product(matrix, _rotation(r))
    for factor in (_rotation(a), _diagonal(narrower, 1 / narrower), _rotation(-a)):
        matrix = _product(matrix, factor)
    # Places are from -1 to 1, twice the width.
    shift = torch.stack([x, y], 1)[:, :, None] * (-2 * _SHIFT)
    return torch.cat([matrix, _product(matrix, shift)], 2)


def _rotation(angle: Tensor) -> Tensor:
    cosine, sine = angle.cos(), angle.sin()
    return torch.stack([cosine, -sine, sine, cosine], 1).view(-1, 2, 2)


def _diagonal(x: Tensor, y: Tensor) -> Tensor:
    return torch.diag_embed(torch.stack([x, y], 1))


def _product(one: Tensor, other: Tensor) -> Tensor:
    """Return the products of matrices (n, 2, 2) and (n, 2, m), whose bits do not depend on n."""
    return one[:, :, :1] * other[:, :1] + one[:, :, 1:] * other[:, 1:]


def _resampled(x0: Tensor, matrices: Tensor, mode: str) -> Tensor:
    """Return images (n, C, H, H) whose places (x, y) show the places M (x, y, 1) of `x0`.

    `matrices` are (n, 2, 3). The centers of the outer pixels are at -1 + 1 / H and 1 - 1 / H.
    """
    size = x0.shape[-1]
    places = (2 * torch.arange(size, device=x0.device) + 1) / size - 1
    # Not by matrix products, whose bits could depend on n.
    along_x, along_y, offset = matrices[:, None, None].unbind(4)
    grid = along_x * places[:, None] + along_y * places[:, None, None] + offset
    return functional.grid_sample(x0, grid, mode, "reflection", align_corners=False)


def _recolored(
    x0: Tensor, brightness: Tensor, contrast: Tensor, luma: Tensor, h: Tensor, saturation: Tensor
) -> Tensor:
    """Return images with other colors; the other arguments are those of `edm`, each (n,).

    The luma is the mean of the channels, which hue and saturation leave as it is.
    """
    parts = torch.stack([brightness, contrast, luma, h, saturation])[..., None, None, None]
    brightness, contrast, luma, h, saturation = parts
    gray, factor = x0.mean(1, keepdim=True), (_CONTRAST * contrast).exp2()
    light = (gray + _BRIGHTNESS * brightness) * factor * (1 - 2 * luma)
    if x0.shape[1] == 1:
        return light
    rest = x0 - gray
    # Rodrigues' formula for the axis (1, 1, 1) / sqrt(3), to which `rest` is orthogonal.
    across = (rest.roll(1, 1) - rest.roll(-1, 1)) / math.sqrt(3)
    return light + (rest * h.cos() + across * h.sin()) * factor * saturation.exp2()
