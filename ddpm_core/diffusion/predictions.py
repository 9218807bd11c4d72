"""Predictions: what a network learns to output, and the x0 that an output implies.

`alpha_bar` is as in process.py. To add a prediction, add a class to PREDICTIONS.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from ddpm_core.diffusion.moments import Moments
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


class EdmPrediction:
    """Predict the F of EDM: x0 = c_skip x / sqrt(alpha_bar) + c_out F.

    With sigma^2 = (1 - alpha_bar) / alpha_bar and the variance s^2 of the data,
    c_skip = s^2 / (sigma^2 + s^2) and c_out = sigma s / sqrt(sigma^2 + s^2). F has the same
    variance at every noise level; its squared error is SNR + 1 / s^2 times that of x0. For s = 1 it
    is -v. Karras et al. (2022), "Elucidating the design space", table 1; s^2 is `Moments.variance`,
    about the one mean of all values, which is not subtracted from the images.

    Two things differ: the input of the network is x_t, which for s = 1 is their c_in x, and its
    noise level is the timestep instead of c_noise.
    """

    def __init__(self, moments: Moments) -> None:
        self._variance = moments.variance

    def target(self, x0: Tensor, noise: Tensor, alpha_bar: Tensor) -> Tensor:
        signal, sigma = scales(alpha_bar, x0)
        sum_ = self._variance * signal**2 + sigma**2
        return (sigma * x0 - self._variance * signal * noise) / (self._variance * sum_).sqrt()

    def to_x0(self, output: Tensor, x: Tensor, alpha_bar: Tensor) -> Tensor:
        signal, sigma = scales(alpha_bar, x)
        sum_ = self._variance * signal**2 + sigma**2
        skip = self._variance * signal / sum_
        return skip * x + sigma * (self._variance / sum_).sqrt() * output

    def error(self, snr: Tensor) -> Tensor:
        return snr + 1.0 / self._variance


class WienerPrediction:
    """Predict the error of the best linear denoiser: x0 = linear(x) + c_out F.

    With sigma^2 = (1 - alpha_bar) / alpha_bar, the mean m of the data, and the eigenvalues l_k and
    eigenvectors u_k of its covariance,

        linear(x) = m + sum_k l_k / (l_k + sigma^2) u_k u_k^T (x / sqrt(alpha_bar) - m),
        c_out = sqrt(mean_k l_k sigma^2 / (l_k + sigma^2)), its root mean squared error.

    A network that outputs 0, as a new one does, is this denoiser. The squared error of F is
    1 / c_out^2 times that of x0. The filter of Wiener (1949), "Extrapolation, interpolation, and
    smoothing of stationary time series", in place of the scalar c_skip of Karras et al. (2022),
    "Elucidating the design space", table 1; the network's input and noise level stay as they are.
    """

    def __init__(self, moments: Moments) -> None:
        self._moments = moments

    def target(self, x0: Tensor, noise: Tensor, alpha_bar: Tensor) -> Tensor:
        # (x0 - linear) / c_out would be 0 / 0 without noise. With z = u^T (x - signal m) it equals
        # this sum, which divides by nothing that vanishes.
        signal, sigma = scales(alpha_bar, x0)
        moments, (mean, variances) = self._moments, self._tables(x0)
        sum_ = variances * signal**2 + sigma**2
        away = x0 - mean
        z = moments.coordinates(signal * away + sigma * noise)
        unlike_v = signal * sigma * moments.images((1.0 - variances) / sum_ * z)
        return (sigma * away - signal * noise + unlike_v) / _scale(variances, sum_)

    def to_x0(self, output: Tensor, x: Tensor, alpha_bar: Tensor) -> Tensor:
        signal, sigma = scales(alpha_bar, x)
        moments, (mean, variances) = self._moments, self._tables(x)
        sum_ = variances * signal**2 + sigma**2
        z = moments.coordinates(x - signal * mean)
        linear = mean + moments.images(variances * signal / sum_ * z)
        return linear + sigma * _scale(variances, sum_) * output

    def error(self, snr: Tensor) -> Tensor:
        return 1.0 / self._moments.linear_error(snr)

    def _tables(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self._moments.mean.to(x.dtype), self._moments.variances.to(x.dtype)


def _scale(variances: Tensor, sum_: Tensor) -> Tensor:
    """Return c_out of WienerPrediction, divided by sqrt(1 - alpha_bar): at least 1 at x_0."""
    return (variances / sum_).mean((-3, -2, -1), keepdim=True).sqrt()


# Predictions that depend on the moments of the training images.
WITH_MOMENTS: dict[str, Callable[[Moments], Prediction]] = {
    "edm": EdmPrediction,
    "wiener": WienerPrediction,
}
PREDICTIONS: dict[str, Callable[..., Prediction]] = {
    "noise": NoisePrediction,
    "x0": X0Prediction,
    "v": VPrediction,
    **WITH_MOMENTS,
}


def make_prediction(name: str, moments: Moments | None = None) -> Prediction:
    """Return a prediction of PREDICTIONS.

    Args:
        moments: Of the training images, on the device of the network; required by the predictions
            in WITH_MOMENTS.

    Raises:
        ValueError: The name is unknown, or the prediction requires moments.
    """
    make = lookup(PREDICTIONS, name, "prediction")
    if name not in WITH_MOMENTS:
        return make()
    if moments is None:
        raise ValueError(f"prediction: got {name!r}, which requires moments of the images.")
    return make(moments)
