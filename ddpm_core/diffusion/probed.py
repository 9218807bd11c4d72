"""Adaptive methods that evaluate the network on fixed images at fixed noise, from time to time.

The drop of the loss between two evaluations of the same images, noise and timesteps is far less
noisy than that of the training loss, whose standard error is about a fall of 1 % in 1,000 steps.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor

from ddpm_core.diffusion.adaptive import Adaptive
from ddpm_core.diffusion.noise_levels import Context, NoiseLevels, Statistics

PER_BIN = 16  # images of the probe per bin
_COST = 0.008  # share of the time of training for probes; with all else it stays below 1 %
_FORWARD = 1 / 3  # time of a forward pass per time of a training step


class Probed(Adaptive):
    """A method that learns from the losses of a probe.

    The probe has PER_BIN images per bin. `timesteps` are theirs, in the order of the bins. The
    trainer calls `observe` before the next step whenever `probe_due` is true.
    """

    images: ClassVar[Literal["train", "holdout"]] = "train"  # the split of the probe's images

    def __init__(self, base: NoiseLevels, context: Context) -> None:
        super().__init__(base, context)
        places = (torch.arange(PER_BIN, dtype=torch.float32) + 0.5) / PER_BIN
        cumulative = self.share.cumsum(1)
        last = len(self.base) - 1
        drawn = torch.searchsorted(cumulative, places.expand(len(self.mass), -1).contiguous())
        self.timesteps = drawn.clamp(max=last).flatten()  # int64 (K * PER_BIN,)
        self.previous = torch.zeros(len(self.timesteps))  # losses of the last evaluation
        cost = len(self.timesteps) * _FORWARD / self.settings.batch_size  # in steps
        self.every = max(200, round(cost / _COST))

    def probe_due(self, step: int) -> bool:
        """Return whether the probe is evaluated after a step."""
        return step % self.every == 0

    def observe(self, step: int, losses: Tensor) -> None:
        """Learn from the probe's unweighted losses after a step, float32 (K * PER_BIN,)."""
        if step > self.every:
            drop = (self.previous - losses).view(-1, PER_BIN)
            error = drop.std(1) / PER_BIN**0.5
            self.progress(drop.mean(1), error)
        self.previous.copy_(losses)

    def progress(self, drop: Tensor, error: Tensor) -> None:
        """Learn from the mean drop of the loss of each bin and its standard error, (K,) each."""
        raise NotImplementedError

    def learn(self, statistics: Statistics) -> None:
        pass

    def state_dict(self) -> dict[str, Tensor]:
        return {**super().state_dict(), "previous": self.previous}


class PairedProgress(Probed):
    """Draw more timesteps where the loss of fixed training images still falls.

    With d the mean drop of a bin and s its standard error: a = w max(0, d) d^2 / (d^2 + s^2);
    theta <- 0.9 theta + 0.3 clip(a / mean(a) - 1, -1, 1), but only the decay while the mean of w d
    is below 2 standard errors; p prop. to r clip(e^theta, 1/2, 2), and weight w sqrt(r / p), scaled
    so that its mean stays. Learning progress as a curriculum: Graves et al. (2017), "Automated
    curriculum learning for neural networks", section 3.1.
    """

    uses_losses = False

    def __init__(self, base: NoiseLevels, context: Context) -> None:
        super().__init__(base, context)
        self.theta = torch.zeros(len(self.mass))

    def progress(self, drop: Tensor, error: Tensor) -> None:
        weight = self.share @ self.base_weight
        a = weight * drop.clamp(min=0) * drop.square() / (drop.square() + error.square() + 1e-30)
        total = (self.mass * weight * drop).sum()
        noise = (self.mass * weight * error).square().sum().sqrt()
        relative = (a / (self.mass * a).sum().clamp(min=1e-30) - 1).clamp(-1, 1)
        self.theta.mul_(0.9).add_(torch.where(total > 2 * noise, 0.3 * relative, 0.0))
        ratio = self.theta.exp().clamp(0.5, 2.0)
        ratio = ratio / (self.mass * ratio).sum()
        factor = ratio.rsqrt()
        mean = (self.mass * ratio * weight * factor).sum() / (self.mass * weight).sum()
        self.set_bins_(ratio, factor / mean)

    def state_dict(self) -> dict[str, Tensor]:
        return {**super().state_dict(), "theta": self.theta}


class HeldOut(PairedProgress):
    """Draw more timesteps where the loss of fixed held-out images still falls.

    As `paired_progress`, with images that training never sees: on few images the training loss at
    little noise falls by memorizing them. After Graves et al. (2017), "Automated curriculum
    learning for neural networks", section 3.
    """

    images = "holdout"


class Kim(Probed):
    """Learn a Beta distribution of timesteps by policy gradient, from the drop of the probe's loss.

    The reward is the drop, over one step, of the probe's weighted loss in units of its running
    scale, less its running mean; it moves ln(a) and ln(b) along the mean of grad ln Beta((t + 1/2)
    / T; a, b) over the timesteps of that step, plus 0.01 times the gradient of the entropy. p is
    0.9 of that distribution and 0.1 uniform; weights stay. Kim et al. (2025), "Adaptive non-uniform
    timestep sampling for accelerating diffusion model training", algorithm 1, in a cheap form: the
    source's policy is a network that sees x0, and its reward is measured at selected timesteps.
    """

    RATE, ENTROPY = 0.1, 0.01

    def __init__(self, base: NoiseLevels, context: Context) -> None:
        super().__init__(base, context)
        timesteps = len(self.base)
        self.places = (torch.arange(timesteps, dtype=torch.float32) + 0.5) / timesteps
        self.policy = torch.zeros(2)  # ln a, ln b
        self.score = torch.zeros(2)  # of the last step
        self.scale = torch.zeros(3)  # running mean, mean square and weight of the rewards
        # Each reward takes two evaluations.
        self.every *= 2

    def probe_due(self, step: int) -> bool:
        return step % self.every in (0, 1) and step >= self.every

    def learn(self, statistics: Statistics) -> None:
        a, b = self.policy.exp()
        x = self.places[statistics.t]
        both = torch.digamma(a + b)
        self.score[0] = a * (x.log().mean() - torch.digamma(a) + both)
        self.score[1] = b * ((1 - x).log().mean() - torch.digamma(b) + both)

    def observe(self, step: int, losses: Tensor) -> None:
        if step % self.every == 1:
            self.reward((self.base_weight[self.timesteps] * (self.previous - losses)).mean())
        self.previous.copy_(losses)

    def reward(self, drop: Tensor) -> None:
        """Take a policy-gradient step with the drop of the weighted loss, ()."""
        self.scale.lerp_(torch.stack([drop, drop.square(), torch.ones_like(drop)]), 0.1)
        mean, square = self.scale[:2] / self.scale[2]
        advantage = (drop - mean) / (square - mean.square()).clamp(min=0).sqrt().clamp(min=1e-12)
        a, b = self.policy.exp()
        common = (a + b - 2) * torch.polygamma(1, a + b)
        entropy = torch.stack(
            [
                a * (common - (a - 1) * torch.polygamma(1, a)),
                b * (common - (b - 1) * torch.polygamma(1, b)),
            ]
        )
        size = self.settings.batch_size**0.5  # the mean score has a deviation of about 1 / size
        step = self.RATE * (advantage.clamp(-3, 3) * self.score * size + self.ENTROPY * entropy)
        self.policy.add_(step).clamp_(-2.0, 3.0)
        a, b = self.policy.exp()
        density = (a - 1) * self.places.log() + (b - 1) * (1 - self.places).log()
        p = self.base * (density - density.max()).exp()
        self.set_tables_(0.9 * p / p.sum() + 0.1 * self.base, self.base_weight)

    def state_dict(self) -> dict[str, Tensor]:
        learned = {"policy": self.policy, "score": self.score, "scale": self.scale}
        return {**super().state_dict(), **learned}


PROBED: dict[str, type[Probed]] = {
    "paired_progress": PairedProgress,
    "held_out": HeldOut,
    "kim": Kim,
}
