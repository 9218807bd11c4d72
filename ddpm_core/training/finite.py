"""Values that are not finite: found before they reach a snapshot, and explained."""

from __future__ import annotations

import torch

from ddpm_core.config import Config
from ddpm_core.training.state import TrainState

SMALLEST_SCALE = 2.0**-14  # of fp16's loss: it begins at 2^16 and is halved at each skipped step


def problem(state: TrainState) -> str:
    """Return what is not finite since the run began, or ""; waits for the device."""
    if bad := int(state.bad_step):
        return f"The loss of step {bad} is not finite"
    if state.scaler.is_enabled() and state.scaler.get_scale() < SMALLEST_SCALE:
        return f"The gradients of step {state.step} are not finite, however small the loss scale"
    return ""


def weights_problem(state: TrainState) -> str:
    """Return that the weights, their averages or the optimizer are not finite, or ""."""
    kept = [*state.model.state_dict().values()]
    kept += [tensor for ema in state.emas for tensor in ema.tensors.values()]
    kept += [tensor for values in state.optimizer.state.values() for tensor in values.values()]
    floats = [t for t in kept if t.is_floating_point() and t.device.type == state.world.device.type]
    largest = torch._foreach_norm(floats, float("inf"))  # NaN where a tensor has one
    if bool(torch.stack(largest).isfinite().all()):
        return ""
    return f"The weights after step {state.step} are not finite"


def explanation(state: TrainState, start: int, source: str) -> str:
    """Return the likely causes of a problem, and what to do, as sentences.

    `start` is the step that this process began at, with the weights of `source` ("": a new
    network). No update of this process can have spoiled the first loss after it.
    """
    config, precision = state.config, state.execution.precision
    coarse = "" if precision == "fp32" else f"precision {precision} is too coarse"
    if int(state.bad_step) != start + 1:
        return f"Likely causes: {_listed([*_optimizer_causes(config), coarse])}."
    if not source:
        causes = [coarse, "train.reduction exact" * (config.train.reduction == "exact")]
        return f"Likely causes: {_listed([*causes, 'the settings of the network (model)'])}."
    return (
        f"It is the first step with the weights of {source}, so train.optimizer.lr is not the "
        f"cause. Likely causes: {_listed(['these weights are too large', coarse])}. "
        f"{'Resume from an earlier one: --from-step.' if start else 'Use another train.init.'}"
    )


def _optimizer_causes(config: Config) -> list[str]:
    optimizer = config.train.optimizer
    off = "clipping is off (train.optimizer.clip 0)" * (optimizer.clip == 0.0)
    return [
        f"train.optimizer.lr {optimizer.lr:g} is too high",
        f"train.optimizer.warmup {optimizer.warmup} is too short",
        off,
    ]


def _listed(causes: list[str]) -> str:
    """The causes that are not empty, as an enumeration."""
    *most, last = filter(None, causes)
    return f"{', '.join(most)} or {last}" if most else last
