"""One training step: read a batch, compute the loss, reduce the gradients, update the weights.

Nothing here reads a value back from the device or writes a file, so a GPU never waits. Every random
number is keyed by the step and by the sample's place in the global batch. So the number of workers
and of microbatches changes rounding only.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from ddpm_core import rng
from ddpm_core.config import Config
from ddpm_core.data.dataset import Indices, PackedDataset
from ddpm_core.data.order import batch_indices
from ddpm_core.diffusion.losses import LOSSES
from ddpm_core.diffusion.noise_levels import Statistics
from ddpm_core.diffusion.process import q_sample
from ddpm_core.rng import Purpose
from ddpm_core.runtime.distributed import World
from ddpm_core.sampling.images import to_model
from ddpm_core.training.augment import AUGMENTATIONS
from ddpm_core.training.optim import learning_rate
from ddpm_core.training.reduction import REDUCTIONS
from ddpm_core.training.state import TrainState


@dataclass(frozen=True)
class Batch:
    """A worker's share of the global batch, on its device."""

    pixels: Tensor  # uint8 (b, H, W, C)
    condition: Tensor | None  # classes, int64 (b,), or captions, uint8 (b, 64)
    index: Tensor  # int64 (b,): places in the global batch, which key every random number


def next_batch(config: Config, data: PackedDataset, world: World, step: int) -> Batch:
    """Return this worker's share of the batch that follows step number `step`."""
    size, device = config.train.batch_size, world.device
    share = world.share(size)
    if config.train.balance == "classes":
        rows = data.balanced.indices(config.seed, step, size)
    else:
        rows = batch_indices(config.seed, len(data), step, size)
    pixels, condition = read_images(config, data, rows[share.start : share.stop], device)
    return Batch(pixels, condition, torch.arange(share.start, share.stop, device=device))


def read_images(
    config: Config, data: PackedDataset, rows: Indices, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """Return images and their conditions on a device, as in `Batch`."""
    condition = None
    if config.model.conditioning == "class":
        condition = _to_device(data.labels[rows], device)
    elif config.model.conditioning == "text" and data.captions is not None:
        condition = _to_device(data.captions[rows], device)
    return _to_device(data.take(rows), device), condition


def _to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """Copy an array to the device; a GPU copies from pinned memory while it still computes."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def step(state: TrainState, batch: Batch, stop_flag: Tensor) -> None:
    """Take one optimizer step on the global batch; sums `stop_flag` over all workers in place."""
    state.step += 1
    state.optimizer.zero_grad(set_to_none=True)
    train = state.config.train
    reduction = REDUCTIONS[train.reduction](
        state.parameters, state.world, train.microbatches, train.batch_size
    )
    # As a Python number the step would be a constant to torch.compile, which would recompile.
    at = torch.full((), state.step, dtype=torch.int64, device=state.world.device)
    errors = torch.zeros(train.batch_size, device=state.world.device)  # one per sample
    for rows in reduction.cut(len(batch.index)):
        loss = _loss(state, batch, rows, at, errors)
        reduction.add(loss, state.scaler.scale(loss))
    state.watch.mark("compute")
    loss = reduction.finish(stop_flag)
    if state.noise_levels.adaptive:
        update_noise_levels(state, errors, at)
    state.watch.mark("reduce")
    _update_weights(state, loss)
    for ema in state.emas:
        ema.update(state.step)
    state.watch.mark("optimizer")


def _loss(state: TrainState, batch: Batch, rows: Tensor, at: Tensor, errors: Tensor) -> Tensor:
    """Return the part of the global mean loss of step `at` that some rows of the batch contribute.

    For adaptive noise levels, writes the unweighted loss of each row to `errors`, float32 (B,).
    """
    config, index = state.config, batch.index[rows]
    x0 = _flipped(config, to_model(batch.pixels[rows]), index, at)
    augment = AUGMENTATIONS[config.train.augment]
    x0, parameters = augment(x0, rng.key(Purpose.AUGMENT, config.seed), index, at)
    t = _timesteps(state, index, at)
    noise = rng.normal(rng.key(Purpose.NOISE, config.seed), index, x0.shape[1:], at)
    condition = None if batch.condition is None else batch.condition[rows]
    drop = None
    if condition is not None:
        drop = _uniform(config, Purpose.LABEL_DROP, index, at) < config.train.label_drop
    dropout = _dropout(config, index, at)
    error = errors_of(state, x0, noise, t, condition, drop, dropout, parameters)
    if state.noise_levels.adaptive and state.noise_levels.uses_losses:
        errors.index_copy_(0, index, error.detach())
    return (state.noise_levels.weight(t) * error).sum() / config.train.batch_size


def errors_of(
    state: TrainState,
    x0: Tensor,
    noise: Tensor,
    t: Tensor,
    condition: Tensor | None,
    drop: Tensor | None = None,
    dropout: Any = None,
    parameters: Tensor | None = None,
) -> Tensor:
    """Return the unweighted loss of each image, float32 (b,), for x0 and noise (b, C, H, W).

    `drop`, bool (b,), says for which images the network does not see the condition; `dropout` is
    the network's dropout function; `parameters` are those of the augmentation, (b, n).
    """
    alpha_bar = state.alphas_bar[t]
    with state.execution.autocast(state.world.device):
        x = q_sample(x0, noise, alpha_bar)
        output = state.forward(x, t, condition, drop, dropout, parameters)
    wanted = state.prediction.target(x0, noise, alpha_bar)
    return LOSSES[state.config.train.loss.kind](output.float(), wanted)


def update_noise_levels(state: TrainState, errors: Tensor, at: Tensor) -> None:
    """Pass the losses of step `at` to the noise levels, the same on every worker."""
    levels = state.noise_levels
    index = torch.arange(len(errors), device=errors.device)
    if levels.uses_losses:
        # Each worker has set its own samples and left those of the others at zero.
        state.world.all_reduce_(errors)
        levels.update(Statistics(state.step, _timesteps(state, index, at), errors))
    else:  # without an exchange between the workers
        levels.update(Statistics(state.step, index[:0], errors[:0]))


def _timesteps(state: TrainState, index: Tensor, at: Tensor) -> Tensor:
    """Draw timesteps of step `at` for places in the global batch: int64 (b,)."""
    uniform = partial(_uniform, state.config, Purpose.TIMESTEP, step=at)
    return state.noise_levels.draw(uniform, index)


def _uniform(config: Config, purpose: Purpose, index: Tensor, step: Tensor) -> Tensor:
    """Draw a uniform number in [0, 1) for each sample: (b,)."""
    return rng.uniform(rng.key(purpose, config.seed), index, (), step)


def _flipped(config: Config, x0: Tensor, index: Tensor, step: Tensor) -> Tensor:
    """Mirror half of the images, drawn at random, if `train.flip` is on."""
    if not config.train.flip:
        return x0
    chosen = _uniform(config, Purpose.FLIP, index, step) < 0.5
    return torch.where(chosen[:, None, None, None], x0.flip(3), x0)


def _dropout(config: Config, index: Tensor, step: Tensor) -> Any:
    """Return the network's dropout function; its masks are keyed by layer, step and sample."""
    rate = config.model.dropout
    if rate == 0.0:
        return None
    key = rng.key(Purpose.DROPOUT, config.seed)

    def apply(x: Tensor, layer: int) -> Tensor:
        return x * rng.dropout_mask(key, index, x.shape[1:], rate, step, layer, x.dtype)

    return apply


def _update_weights(state: TrainState, loss: Tensor) -> None:
    """Clip the gradients, take the optimizer step, and add to the totals of the log row."""
    train = state.config.train
    for group in state.optimizer.param_groups:
        group["lr"] = learning_rate(train.optimizer, state.step, train.steps)
    state.scaler.unscale_(state.optimizer)
    limit = train.optimizer.clip or float("inf")
    norm = torch.nn.utils.clip_grad_norm_(state.parameters, limit)
    # fp16 may overflow in the gradients: the scaler then skips the step and lowers its scale.
    finite = loss.isfinite() & (norm.isfinite() | state.scaler.is_enabled())
    state.bad_step += torch.where((state.bad_step == 0) & ~finite, state.step, 0)
    state.scaler.step(state.optimizer)
    state.scaler.update()
    totals = state.totals
    # The sums stop at the first step that is not finite, so that the row before it can be logged.
    counted, fits = state.bad_step == 0, norm.isfinite()
    totals.loss += torch.where(counted, loss, 0.0)
    totals.grad_norm += torch.where(counted & fits, norm, 0.0)
    totals.clipped += counted & fits & (norm > limit)
    totals.skipped += counted & ~fits
    totals.steps += 1
