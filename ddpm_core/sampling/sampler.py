"""Images from a network: image i depends on the weights, the settings, the seed and i alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ddpm_core import rng
from ddpm_core.config import Diffusion, Sample
from ddpm_core.diffusion.process import make_schedule
from ddpm_core.diffusion.samplers import SamplerSettings, sample
from ddpm_core.errors import UserError
from ddpm_core.models.execution import prepare_model
from ddpm_core.models.unet import UNet
from ddpm_core.rng import Purpose
from ddpm_core.runtime.device import autocast, choose_precision
from ddpm_core.sampling.conditions import Conditions
from ddpm_core.sampling.halves import in_halves
from ddpm_core.sampling.images import Pixels, to_pixels
from ddpm_core.sampling.plan import must_suit


class ImageSampler:
    """Draws numbered images from a network.

    `data` is the checkpoint's record of what it was trained on: classes, how many images each
    had, and captions, which conditional images follow unless others are asked for. `compiled` is
    for many batches of one size. Raises UserError where the network cannot draw by the settings,
    or draws values that are not finite.
    """

    def __init__(
        self,
        model: UNet,
        data: dict[str, Any],
        settings: Sample,
        diffusion: Diffusion,
        compiled: bool = False,
    ) -> None:
        must_suit(settings, model.config.conditioning, diffusion.timesteps)
        self._settings = settings
        self._prediction = diffusion.prediction
        self._schedule = make_schedule(diffusion.schedule, diffusion.timesteps)
        self._device = next(model.parameters()).device
        self._sampler = SamplerSettings(
            settings.sampler, settings.steps, settings.spacing, settings.eta, settings.variance
        )
        self._conditions = Conditions(model.config.conditioning, data, settings)
        self._precision = choose_precision(settings.precision, self._device)
        self._shape = (model.config.in_channels, model.config.image_size, model.config.image_size)
        network = prepare_model(model, self._device, self._precision)
        self._network: Callable[..., Tensor] = torch.compile(network) if compiled else network

    def images(
        self, indices: Sequence[int], on_step: Callable[[int], None] | None = None
    ) -> Pixels:
        """uint8 (n, H, W, C), the images of these numbers, in one batch.

        `on_step(i)` is called after each step, on a CPU once for each half of the batch; an
        exception that it raises ends the drawing.
        """
        index = torch.as_tensor(list(indices), dtype=torch.int64, device=self._device)
        draw = partial(self._draw, on_step=on_step)
        pixels: Pixels = in_halves(draw, index).cpu().numpy()
        return pixels

    @torch.inference_mode()
    def _draw(self, index: Tensor, on_step: Callable[[int], None] | None = None) -> Tensor:
        """uint8 (n, H, W, C), the images of the numbers `index` (n,)."""
        condition = self._conditions.take(index.cpu())
        if condition is not None:
            condition = condition.to(self._device)
        key = rng.key(Purpose.SAMPLE, self._settings.seed)
        finite = torch.ones(len(index), dtype=torch.bool, device=self._device)

        def network(x: Tensor, t: Tensor) -> Tensor:
            output = self._guided(x, t, condition)
            # Clipping would turn an infinite output into a black or white image.
            finite.logical_and_(output.isfinite().flatten(1).all(1))
            return output

        with autocast(self._precision, self._device):
            x0 = sample(
                network,
                self._schedule,
                self._prediction,
                self._sampler,
                lambda step: rng.normal(key, index, self._shape, step),
                on_step,
            )
        if bad := int((~finite).sum()):
            raise UserError(
                f"{bad} of {len(index)} images are not finite, drawn with sample.precision "
                f"{self._precision} and sample.guidance {self._settings.guidance:g}. Every output "
                "of the network must be finite. Use sample.precision fp32 and guidance 1; if the "
                "images are still not finite, use another checkpoint."
            )
        return to_pixels(x0)

    def _guided(self, x: Tensor, t: Tensor, condition: Tensor | None) -> Tensor:
        """The network's output; with guidance g, u + g (c - u) (Ho & Salimans 2022, eq. 6)."""
        scale = self._settings.guidance
        if condition is None or scale == 1.0:
            return self._network(x, t, condition).float()
        drop = torch.arange(2 * len(x), device=x.device) >= len(x)
        both = self._network(torch.cat([x, x]), torch.cat([t, t]), torch.cat([condition] * 2), drop)
        conditional, unconditional = both.float().chunk(2)
        return torch.lerp(unconditional, conditional, scale)
