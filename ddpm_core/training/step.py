"""One optimizer step on the global batch.

Nothing here reads a value back from the device or writes a file, so that a GPU never waits. Every
random number is keyed by the step and the sample's place in the global batch: how the batch is cut
over workers and microbatches changes rounding, nothing else.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ddpm_core import rng
from ddpm_core.config import Config
from ddpm_core.diffusion.losses import LOSSES
from ddpm_core.diffusion.noise_levels import Statistics
from ddpm_core.diffusion.process import q_sample, target
from ddpm_core.rng import Purpose
from ddpm_core.sampling.images import to_model
from ddpm_core.training.batches import Batch
from ddpm_core.training.optim import learning_rate
from ddpm_core.training.reduction import REDUCTIONS
from ddpm_core.training.state import TrainState


def step(state: TrainState, batch: Batch, stop_wish: Tensor) -> None:
    """One optimizer step on the global batch; `stop_wish` is summed over all workers on the way."""
    state.step += 1
    state.optimizer.zero_grad(set_to_none=True)
    train = state.config.train
    reduction = REDUCTIONS[train.reduction](
        state.parameters, state.world, train.microbatches, train.batch_size
    )
    # A tensor: to a compiled network a number is a constant, and another one compiles it anew.
    at = torch.full((), state.step, dtype=torch.int64, device=state.world.device)
    errors = torch.zeros(train.batch_size, device=state.world.device)  # of each of all samples
    for rows in reduction.cut(len(batch.index)):
        loss = _loss(state, batch, rows, at, errors)
        reduction.add(loss, state.scaler.scale(loss))
    state.watch.mark("compute")
    loss = reduction.finish(stop_wish)
    if state.noise_levels.adaptive:
        _learn(state, errors, at)
    state.watch.mark("reduce")
    _update(state, loss)
    for ema in state.emas:
        ema.update(state.step)
    state.watch.mark("optimizer")


def _loss(state: TrainState, batch: Batch, rows: Tensor, at: Tensor, errors: Tensor) -> Tensor:
    """The share of some rows of the batch in the global mean loss of step `at`.

    Adaptive noise levels find the rows' errors, without their weights, in `errors`, float32 (B,).
    """
    config, index = state.config, batch.index[rows]
    x0 = _flipped(config, to_model(batch.pixels[rows]), index, at)
    t = state.noise_levels.draw(_uniform(config, Purpose.TIMESTEP, index, at))
    noise = rng.normal(rng.key(Purpose.NOISE, config.seed), index, x0.shape[1:], at)
    alpha_bar = state.alphas_bar[t]
    condition = None if batch.condition is None else batch.condition[rows]
    drop = None
    if condition is not None:
        drop = _uniform(config, Purpose.LABEL_DROP, index, at) < config.train.label_drop
    with state.execution.autocast(state.world.device):
        output = state.forward(
            q_sample(x0, noise, alpha_bar), t, condition, drop, _dropout(config, index, at)
        )
    wanted = target(config.diffusion.prediction, x0, noise, alpha_bar)
    error = LOSSES[config.train.loss.kind](output.float(), wanted)
    if state.noise_levels.adaptive:
        errors.index_copy_(0, index, error.detach())
    return (state.noise_levels.weight(t) * error).sum() / config.train.batch_size


def _learn(state: TrainState, errors: Tensor, at: Tensor) -> None:
    """Tell the noise levels what step `at` learned; the same on every worker."""
    state.world.all_reduce_(errors)  # each sample is one worker's, and zero with the others
    everyone = torch.arange(len(errors), device=errors.device)
    t = state.noise_levels.draw(_uniform(state.config, Purpose.TIMESTEP, everyone, at))
    state.noise_levels.update(Statistics(t, errors))


def _uniform(config: Config, purpose: Purpose, index: Tensor, step: Tensor) -> Tensor:
    return rng.uniform(rng.key(purpose, config.seed), index, (), step)


def _flipped(config: Config, x0: Tensor, index: Tensor, step: Tensor) -> Tensor:
    if not config.train.flip:
        return x0
    chosen = _uniform(config, Purpose.FLIP, index, step) < 0.5
    return torch.where(chosen[:, None, None, None], x0.flip(3), x0)


def _dropout(config: Config, index: Tensor, step: Tensor) -> Any:
    """Dropout of the network's layers, keyed by layer, step and place in the global batch."""
    rate = config.model.dropout
    if rate == 0.0:
        return None
    key = rng.key(Purpose.DROPOUT, config.seed)

    def apply(x: Tensor, layer: int) -> Tensor:
        return x * rng.dropout_mask(key, index, x.shape[1:], rate, step, layer, x.dtype)

    return apply


def _update(state: TrainState, loss: Tensor) -> None:
    """Clip, and step the optimizer, at the rate of this step."""
    train = state.config.train
    for group in state.optimizer.param_groups:
        group["lr"] = learning_rate(train.optimizer, state.step, train.steps)
    state.scaler.unscale_(state.optimizer)
    limit = train.optimizer.clip or float("inf")
    norm = torch.nn.utils.clip_grad_norm_(state.parameters, limit)
    finite = loss.isfinite() & (norm.isfinite() | state.scaler.is_enabled())
    state.bad_step += torch.where((state.bad_step == 0) & ~finite, state.step, 0)
    state.scaler.step(state.optimizer)
    state.scaler.update()
    totals = state.totals
    # The sums end before the first step that is not finite, so that its row can still be written.
    counted, fits = state.bad_step == 0, norm.isfinite()
    totals.loss += torch.where(counted, loss, 0.0)
    totals.grad_norm += torch.where(counted & fits, norm, 0.0)
    totals.clipped += counted & fits & (norm > limit)
    totals.skipped += counted & ~fits
    totals.steps += 1
