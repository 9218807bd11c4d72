"""Methods that learn the probability or the weight of timesteps while the network trains.

Each starts from the tables of a sampler and a weighting: the base probability r(t) and the base
weight w(t). No method waits for the device. Methods that evaluate the network on fixed images are
in probed.py. To add a method, add a subclass of `Adaptive` to LEARNED.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ddpm_core.diffusion.noise_levels import Context, NoiseLevels, Statistics
from ddpm_core.errors import UserError

BINS = 32  # groups of neighboring timesteps with about equal base probability
SLOTS = 64  # equal parts of a run for which the tables are recorded
_REFRESH = 50  # steps between changes of the tables of methods that average the loss
_WARMUP = 0.02  # share of the run in which they only average
_DECAY = 0.99  # of the average loss of a bin, per step in which it has a sample
_EVIDENCE = 16  # samples of a bin below which its table stays at the base


class Adaptive(NoiseLevels):
    """Noise levels that change during training, and a record of how they did.

    The record has, for each of SLOTS equal parts of the run, the mean over each bin of p / r and of
    weight / w.
    """

    adaptive: ClassVar[bool] = True

    def __init__(self, base: NoiseLevels, context: Context) -> None:
        """Start from the tables of `base`."""
        super().__init__(base.probability, base.weights)
        self.settings = context.settings
        self.base, self.base_weight = self.probability.clone(), self.weights.clone()
        self.bins = _bins(self.base)  # the bin of each timestep, int64 (T,)
        members = functional.one_hot(self.bins).to(torch.float32).T  # (K, T)
        share = members * self.base
        self.share = share / share.sum(1, keepdim=True)  # means over bins, weighted by r
        self.mass = (members * self.base).sum(1)  # base probability of each bin, (K,)
        self.trajectory = torch.ones(SLOTS, 2, len(self.mass))

    def update(self, statistics: Statistics) -> None:
        self.learn(statistics)
        slot = self.slot(statistics.step - 1)
        if slot < min(self.slot(statistics.step), SLOTS):
            self.trajectory[slot, 0] = self.share @ (self.probability / self.base)
            self.trajectory[slot, 1] = self.share @ (self.weights / self.base_weight)

    def learn(self, statistics: Statistics) -> None:
        """Change the tables after a step."""
        raise NotImplementedError

    def slot(self, step: int) -> int:
        """Return the part of the run, from 0, to which the step after `step` belongs."""
        return step * SLOTS // self.settings.steps

    def set_bins_(self, ratio: Tensor, factor: Tensor) -> None:
        """Set p prop. to r * ratio and the weight to w * factor; ratio and factor are (K,)."""
        probability = self.base * ratio[self.bins]
        self.set_tables_(probability / probability.sum(), self.base_weight * factor[self.bins])

    def state_dict(self) -> dict[str, Tensor]:
        return {**super().state_dict(), "trajectory": self.trajectory}


class SecondMoment(Adaptive):
    """p(t) prop. to the root of the mean of the last 10 squared losses of t, weight / (T p).

    1/1000 of the probability is uniform, and all of it until each timestep has 10 losses. The loss
    includes the weight w. The expectation of the gradient stays that of uniform timesteps. Nichol
    and Dhariwal (2021), "Improved denoising diffusion probabilistic models", eq. 18.
    """

    LENGTH = 10

    def __init__(self, base: NoiseLevels, context: Context) -> None:
        super().__init__(base, context)
        timesteps = len(self.base)
        # The additional last row takes the values that are not kept.
        self.history = torch.zeros(timesteps + 1, self.LENGTH)
        self.seen = torch.zeros(timesteps + 1, dtype=torch.int64)

    def learn(self, statistics: Statistics) -> None:
        t, order = statistics.t.sort(stable=True)
        losses = (self.base_weight[statistics.t] * statistics.error)[order]
        timesteps = len(self.base)
        counts = torch.zeros_like(self.seen).index_add_(0, t, torch.ones_like(t))
        # The place of each sample among those of its timestep, so that repeated timesteps in one
        # batch take different places of the history.
        place = torch.arange(len(t), device=t.device) - torch.searchsorted(t, t)
        kept = counts[t] - place <= self.LENGTH
        row = torch.where(kept, t, timesteps)
        self.history[row, (self.seen[t] + place) % self.LENGTH] = losses
        self.seen += counts
        root = self.history[:timesteps].square().mean(1).sqrt()
        learned = 0.999 * root / root.sum().clamp(min=1e-30) + 0.001 / timesteps
        complete = (self.seen[:timesteps] >= self.LENGTH).all()
        p = torch.where(complete, learned, 1.0 / timesteps)
        self.set_tables_(p, self.base_weight / (timesteps * p))

    def state_dict(self) -> dict[str, Tensor]:
        return {**super().state_dict(), "history": self.history, "seen": self.seen}


class Uncertainty(Adaptive):
    """Weight w(t) e^-u(t), where u minimizes w(t) error(t) e^-u(t) + u(t).

    e^u approaches the expected loss of a timestep, so that all timesteps contribute equally. u is
    linear between the centers of the bins and learned by Adam with a learning rate of 0.01. It is
    neither clipped nor averaged. Differs from the source in that u is a table and not a
    small network. Karras et al. (2024), "Analyzing and improving the training dynamics of diffusion
    models", eq. 21.
    """

    RATE, BETAS = 0.01, (0.9, 0.99)

    def __init__(self, base: NoiseLevels, context: Context) -> None:
        super().__init__(base, context)
        self.hats = _hats(self.bins)  # (T, K), rows sum to 1
        self.moments = torch.zeros(3, len(self.mass))  # u, and the two averages of Adam

    def learn(self, statistics: Statistics) -> None:
        hats = self.hats[statistics.t]
        loss = self.base_weight[statistics.t] * statistics.error
        u, mean, square = self.moments
        gradient = hats.T @ (1.0 - loss * (-(hats @ u)).exp()) / len(loss)
        first, second = self.BETAS
        mean.lerp_(gradient, 1 - first)
        square.lerp_(gradient.square(), 1 - second)
        scale = (1 - second**statistics.step) ** 0.5 / (1 - first**statistics.step)
        u -= self.RATE * scale * mean / (square.sqrt() + 1e-8)
        self.set_tables_(self.base, self.base_weight * (-(self.hats @ u)).exp())

    def state_dict(self) -> dict[str, Tensor]:
        return {**super().state_dict(), "uncertainty": self.moments}


class Averaging(Adaptive):
    """A method that follows the average loss of each bin, changing the tables every 50 steps.

    Averages are of the squared error of x0. Tables stay at the base for the first 2 % of the run,
    and those of a bin until it has had 16 samples.
    """

    def __init__(self, base: NoiseLevels, context: Context) -> None:
        super().__init__(base, context)
        self.per_x0 = (1.0 / context.error).to(torch.float32)
        self.averages = torch.zeros(2, len(self.mass))  # of the error and of its weight
        self.counts = torch.zeros(len(self.mass), dtype=torch.int64)

    def learn(self, statistics: Statistics) -> None:
        one_hot = functional.one_hot(self.bins[statistics.t], len(self.mass))
        counts = one_hot.sum(0)
        error = self.per_x0[statistics.t] * statistics.error
        mean = one_hot.to(error).T @ error / counts.clamp(min=1)
        rate = (1 - _DECAY) * (counts > 0)
        self.averages[0].lerp_(mean, rate)
        self.averages[1].lerp_(torch.ones_like(mean), rate)
        self.counts += counts
        if statistics.step % _REFRESH == 0 and statistics.step >= _WARMUP * self.settings.steps:
            level = self.averages[0] / self.averages[1].clamp(min=1e-30)
            self.refresh(level, self.counts >= _EVIDENCE)

    def refresh(self, level: Tensor, known: Tensor) -> None:
        """Set the tables from the average error of x0 in each bin, (K,), and where it is known."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Tensor]:
        return {**super().state_dict(), "averages": self.averages, "counts": self.counts}


class Variance(Averaging):
    """p = 0.8 q + 0.2 r with q prop. to r w sqrt(L), and weight w r / p.

    L is the average error of a bin. The expectation of the gradient stays that of the base, and its
    variance falls if the norm of a sample's gradient is in proportion to w sqrt(L), as it is for a
    squared error. p / r stays within [1/2, 2]. After Katharopoulos and Fleuret et al. (2018), "Not
    all samples are created equal", section 3, for timesteps in place of samples.
    """

    def refresh(self, level: Tensor, known: Tensor) -> None:
        # On the network's own error, whose weight is base_weight.
        own = self.share @ (self.base_weight * self.per_x0.rsqrt())
        q = own * level.sqrt()
        q = torch.where(known, q, _mean(q, self.mass * known)).clamp(min=1e-30)
        ratio = (0.8 * q / _mean(q, self.mass) + 0.2).clamp(0.5, 2.0)
        ratio = ratio / _mean(ratio, self.mass)
        self.set_bins_(ratio, 1.0 / ratio)


class WienerGate(Averaging):
    """Weight w m, where m is how many times L exceeds the error of the best linear denoiser.

    L is the average error of x0 in a bin, and that of the linear denoiser is mean_k lambda_k
    sigma^2 / (lambda_k + sigma^2), with lambda the eigenvalues of the covariance of the training
    images and sigma^2 = 1 / SNR (Wiener 1949; Milanfar et al. 2013). m is clipped to [1, 4],
    averaged over 3 neighboring bins, and follows by log m <- 0.9 log m + 0.1 log m_new. Weights are
    scaled so that the mean weight stays. Where the network is no worse than linear, the base stays.
    """

    def __init__(self, base: NoiseLevels, context: Context) -> None:
        super().__init__(base, context)
        self.linear = self.share @ context.moments.linear_error(context.snr).to(torch.float32)
        self.log_m = torch.zeros(len(self.mass))

    def refresh(self, level: Tensor, known: Tensor) -> None:
        m = torch.where(known, level / self.linear, 1.0).clamp(1.0, 4.0)
        padded = functional.pad(m[None, None], (1, 1), mode="replicate")
        smooth = functional.avg_pool1d(padded, 3, stride=1)[0, 0]
        self.log_m.lerp_(smooth.log(), 0.1)
        factor = self.log_m.exp()
        weight = self.mass * (self.share @ self.base_weight)
        self.set_bins_(torch.ones_like(factor), factor * weight.sum() / (weight * factor).sum())

    def state_dict(self) -> dict[str, Tensor]:
        return {**super().state_dict(), "log_m": self.log_m}


ORDERS: dict[str, Callable[[Tensor], Tensor]] = {
    "recorded": lambda tables: tables,
    "reversed": lambda tables: tables.flip(0),
    "last": lambda tables: tables[-1:].repeat(SLOTS, 1, 1),
    "mean": lambda tables: tables.mean(0, keepdim=True).repeat(SLOTS, 1, 1),
}


class Replay(Adaptive):
    """Follow the tables that another run recorded, whatever the loss.

    `train.timesteps.tables` names noise_levels.safetensors in a snapshot of that run. `order` is
    `recorded`, `reversed`, `last` (its final tables throughout), or `mean` (their mean). It answers
    whether an adaptive method follows the loss or is a schedule: Bengio et al. (2009), "Curriculum
    learning", compare with such fixed orders.
    """

    uses_losses = False

    def __init__(self, base: NoiseLevels, context: Context) -> None:
        super().__init__(base, context)
        tables, expected = self.settings.tables, tuple(self.trajectory.shape)
        if tables is None or tables.shape != expected:
            found = "none" if tables is None else tuple(tables.shape)
            raise UserError(
                f"train.timesteps.tables: got a record of shape {found}; must be {expected}. "
                "Record it with the same diffusion settings and sampler."
            )
        self.recorded = ORDERS[self.settings.order](tables.to(torch.float32)).clone()
        self.set_bins_(*self.recorded[0])

    def learn(self, statistics: Statistics) -> None:
        slot = self.slot(statistics.step)
        if self.slot(statistics.step - 1) < slot < SLOTS:
            self.set_bins_(*self.recorded[slot])

    def state_dict(self) -> dict[str, Tensor]:
        # A resumed run follows the record that it began with, even if the file has changed.
        return {**super().state_dict(), "recorded": self.recorded}


def _mean(values: Tensor, mass: Tensor) -> Tensor:
    """Return the mean of the values, weighted by mass; 0 if there is no mass."""
    return (mass * values).sum() / mass.sum().clamp(min=1e-30)


def _bins(probability: Tensor) -> Tensor:
    """Return the bin of each timestep, int64 (T,): at most BINS, of about equal probability."""
    probability = probability.double() / probability.double().sum()
    middle = probability.cumsum(0) - probability / 2
    bins = (middle * BINS).floor().clamp(0, BINS - 1).to(torch.int64)
    # Bins are numbered without gaps: few timesteps, or very likely ones, leave some empty.
    _, numbered = torch.unique(bins, return_inverse=True)
    return torch.as_tensor(numbered)


def _hats(bins: Tensor) -> Tensor:
    """Return linear interpolation between the centers of bins: (T, K) with rows that sum to 1."""
    t = np.arange(len(bins))
    members = functional.one_hot(bins).double().numpy()
    centers = (members * t[:, None]).sum(0) / members.sum(0)
    columns = [np.interp(t, centers, unit) for unit in np.eye(len(centers))]
    return torch.from_numpy(np.stack(columns, 1)).to(torch.float32)


LEARNED: dict[str, type[Adaptive]] = {
    "loss_second_moment": SecondMoment,
    "uncertainty": Uncertainty,
    "variance": Variance,
    "wiener_gate": WienerGate,
    "replay": Replay,
}
