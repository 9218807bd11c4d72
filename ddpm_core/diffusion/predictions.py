"""Predictions: what a network learns to output, and the x0 that an output implies.

`alpha_bar` is as in process.py. To add a prediction, add a class to PREDICTIONS.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ddpm_core.diffusion.process import SMALLEST, lookup, scales


class Prediction(Protocol):
    """What a network predicts. One object is made for a training run or a sampler.

    Images are (B, C, H, W); results have their shape and dtype.
    """

    def target(self, x0: Tensor, noise: Tensor, alpha_bar: Tensor) -> Tensor:
        """Return the correct output for q_sample(x0, noise, alpha_bar)."""

    def to_x0(self, output: Tensor, x: Tensor, alpha_bar: Tensor) -> Tensor:
        """Return the x0 that an output implies for x = x_t."""

    def error(self, snr: Tensor) -> Tensor:
        """Return the squared error of the output per unit of squared error of x0.

        Maps signal-to-noise ratios, float64 (T,), to float64 (T,).
        """


class NoisePrediction:
    """Predict the noise: x0 = (x - sqrt(1 - alpha_bar) out) / sqrt(alpha_bar).

    Ho et al. (2020), eq. 15. Its squared error is SNR times that of x0.
    """

    def target(self, x0: Tensor, noise: Tensor, alpha_bar: Tensor) -> Tensor:
        return noise

    def to_x0(self, output: Tensor, x: Tensor, alpha_bar: Tensor) -> Tensor:
        signal, sigma = scales(alpha_bar, x)
        return (x - sigma * output) / signal.clamp(min=SMALLEST)

    def error(self, snr: Tensor) -> Tensor:
        return snr


class X0Prediction:
    """Predict the clean image: x0 = out (Ho et al. 2020, section 3.2)."""

    def target(self, x0: Tensor, noise: Tensor, alpha_bar: Tensor) -> Tensor:
        return x0

    def to_x0(self, output: Tensor, x: Tensor, alpha_bar: Tensor) -> Tensor:
        return output

    def error(self, snr: Tensor) -> Tensor:
        return torch.ones_like(snr)


class VPrediction:
    """Predict the velocity v = sqrt(alpha_bar) noise - sqrt(1 - alpha_bar) x0.

    x0 = sqrt(alpha_bar) x - sqrt(1 - alpha_bar) out. Salimans and Ho (2022), "Progressive
    distillation", appendix D. Its squared error is SNR + 1 times that of x0.
    """

    def target(self, x0: Tensor, noise: Tensor, alpha_bar: Tensor) -> Tensor:
        signal, sigma = scales(alpha_bar, x0)
        return signal * noise - sigma * x0

    def to_x0(self, output: Tensor, x: Tensor, alpha_bar: Tensor) -> Tensor:
        signal, sigma = scales(alpha_bar, x)
        return signal * x - sigma * output

    def error(self, snr: Tensor) -> Tensor:
        return snr + 1.0


PREDICTIONS: dict[str, type[Prediction]] = {
    "noise": NoisePrediction,
    "x0": X0Prediction,
    "v": VPrediction,
}


def make_prediction(name: str) -> Prediction:
    """Return a prediction of PREDICTIONS. Raises ValueError, which lists the choices."""
    return lookup(PREDICTIONS, name, "prediction")()
