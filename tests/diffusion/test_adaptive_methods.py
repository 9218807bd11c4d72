"""Adaptive methods follow their formulas, keep their promised expectation, and can be replayed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.apart import RECORD, set_up
from support.moments import some_moments
from support.program import Program
from torch import Tensor

from ddpm_core import rng
from ddpm_core.diffusion.adaptive import BINS, LEARNED, SLOTS, Adaptive, WienerGate
from ddpm_core.diffusion.noise_levels import NoiseLevelSettings, Statistics
from ddpm_core.diffusion.objective import make_noise_levels
from ddpm_core.diffusion.predictions import make_prediction
from ddpm_core.diffusion.probed import PROBED, Kim, Probed
from ddpm_core.diffusion.process import make_schedule
from ddpm_core.errors import UserError

T, BATCH = 200, 64
SCHEDULE = make_schedule("cosine", T)
MOMENTS = some_moments()
# A loss that depends on the timestep, as that of a network in training does.
ERROR = (0.05 + (torch.arange(T) / T - 0.3).square()).float()


def make(method: str, prediction: str = "v", **settings: Any) -> Adaptive:
    chosen = NoiseLevelSettings(
        **{
            "weighting": "min_snr",
            "adaptive": method,
            "steps": 400,
            "batch_size": BATCH,
            "moments": MOMENTS,
            "tables": torch.ones(SLOTS, 2, BINS),
            **settings,
        }
    )
    levels = make_noise_levels(chosen, SCHEDULE, make_prediction(prediction))
    assert isinstance(levels, Adaptive)
    return levels


def train(levels: Adaptive, steps: int, error: Tensor = ERROR, begin: int = 0) -> None:
    """Take steps in which each sample's loss is that of its timestep, with noise."""
    key = rng.key(rng.Purpose.TIMESTEP, 1)
    places = torch.arange(BATCH)
    for step in range(begin + 1, begin + steps + 1):
        t = levels.draw(lambda index, step=step: rng.uniform(key, index, (), step), places)
        spread = 0.5 + rng.uniform(rng.key(rng.Purpose.NOISE, 1), places, (), step)
        levels.update(Statistics(step, t, error[t] * spread))
        if isinstance(levels, Probed) and levels.probe_due(step):
            levels.observe(step, error[levels.timesteps] * 0.9**step)


def bin_ratio(levels: Adaptive) -> Tensor:
    return levels.share @ (levels.probability / levels.base)


@pytest.mark.parametrize("prediction", ["noise", "x0", "v"])
@pytest.mark.parametrize("method", ["loss_second_moment", "variance"])
def test_importance_weights_keep_the_expected_gradient(method: str, prediction: str) -> None:
    levels = make(method, prediction)
    train(levels, 300)
    p, w = levels.probability.double(), levels.weights.double()
    assert (p / levels.base - 1).abs().max() > 0.2, "the method changed nothing"
    base = levels.base.double() * levels.base_weight
    assert torch.allclose(p / p.sum() * w, base, rtol=1e-4)
    # The same by drawing: gradients that depend on the timestep, within five standard errors.
    key, many = rng.key(rng.Purpose.TIMESTEP, 2), torch.arange(200_000)
    t = levels.draw(lambda index: rng.uniform(key, index, ()), many)
    gradient = torch.sin(torch.arange(T) / 20.0)
    drawn = levels.weight(t) * gradient[t]
    expected = float((base * gradient).sum())
    assert float(drawn.mean()) == pytest.approx(expected, abs=5 * float(drawn.std()) / 447)


def test_second_moment_keeps_the_last_ten_losses_of_a_timestep() -> None:
    levels = make("loss_second_moment", weighting="uniform")
    t = torch.cat([torch.arange(T).repeat(12), torch.tensor([7, 7, 7])])
    levels.update(Statistics(1, t, torch.ones(len(t))))
    losses = torch.tensor([3.0, 4.0, 5.0])
    levels.update(Statistics(2, torch.tensor([7, 7, 7]), losses))
    history = levels.state_dict()["history"]
    assert sorted(history[7].tolist()) == [1.0] * 7 + [3.0, 4.0, 5.0]
    assert torch.equal(history[8], torch.ones(10))
    root = torch.ones(T)
    root[7] = ((7 + 9 + 16 + 25) / 10) ** 0.5
    expected = 0.999 * root / root.sum() + 0.001 / T
    assert torch.allclose(levels.probability, expected, rtol=1e-5)


def test_second_moment_is_uniform_until_all_histories_are_full() -> None:
    levels = make("loss_second_moment")
    train(levels, 5)
    assert torch.allclose(levels.probability, levels.base)


@pytest.mark.slow
def test_uncertainty_makes_all_timesteps_contribute_equally() -> None:
    levels = make("uncertainty", weighting="uniform", prediction="x0")
    error = torch.full((T,), 0.5)
    error[T // 2 :] = 2.0
    train(levels, 1500, error)
    contribution = levels.weights * error
    assert torch.allclose(contribution[:60], torch.ones(60), atol=0.1)
    assert torch.allclose(contribution[-60:], torch.ones(60), atol=0.1)


def test_variance_draws_more_where_the_error_is_large() -> None:
    levels = make("variance", weighting="uniform", prediction="x0")
    error = torch.full((T,), 0.25)
    error[T // 2 :] = 1.0
    train(levels, 400, error)
    # q is in proportion to the roots 0.5 and 1, with mean 0.75: p/r = 0.8 q + 0.2.
    ratio = bin_ratio(levels)
    assert float(ratio[:10].mean()) == pytest.approx(0.8 * 0.5 / 0.75 + 0.2, abs=0.05)
    assert float(ratio[-10:].mean()) == pytest.approx(0.8 * 1.0 / 0.75 + 0.2, abs=0.05)


@pytest.mark.slow
def test_wiener_gate_weighs_what_is_worse_than_linear() -> None:
    levels = make("wiener_gate", weighting="uniform", prediction="x0", steps=3000)
    assert isinstance(levels, WienerGate)
    sigma2 = (1 / SCHEDULE.snr)[:, None]
    variances = MOMENTS.variances.double().flatten()
    linear = (variances * sigma2 / (variances + sigma2)).mean(1).float()
    error = torch.where(torch.arange(T) < T // 2, linear * 0.5, linear * 2.0)
    train(levels, 3000, error)
    factor = levels.share @ (levels.weights / levels.base_weight)
    # m is 1 below and 2 above, so that weights keep their mean at 2/3 and 4/3.
    assert float(factor[:10].mean()) == pytest.approx(2 / 3, abs=0.05)
    assert float(factor[-10:].mean()) == pytest.approx(4 / 3, abs=0.05)
    assert float(levels.weights.mean()) == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("method", ["paired_progress", "held_out"])
def test_paired_progress_draws_more_where_the_loss_falls(method: str) -> None:
    levels = make(method, weighting="uniform", steps=100_000)
    assert isinstance(levels, Probed)
    falls = (levels.timesteps >= T // 2).float()
    noise = rng.normal(rng.key(rng.Purpose.NOISE, 3), torch.arange(len(falls)), ())
    for round_ in range(1, 20):
        losses = 10 - round_ * falls + 0.1 * torch.sin(noise * round_)
        levels.observe(round_ * levels.every, losses)
    ratio = bin_ratio(levels)
    assert float(ratio[-10:].mean()) > 1.3 > 0.8 > float(ratio[:10].mean())
    assert float(ratio.max() / ratio.min()) <= 4.0001
    weight = levels.share @ levels.weights
    assert float((levels.mass * ratio * weight).sum()) == pytest.approx(1.0, abs=0.02)


def test_paired_progress_stays_at_the_base_without_evidence() -> None:
    levels = make("paired_progress")
    assert isinstance(levels, Probed)
    for round_ in range(1, 20):
        key = rng.key(rng.Purpose.NOISE, round_)
        losses = 1 + rng.normal(key, torch.arange(len(levels.timesteps)), ())
        levels.observe(round_ * levels.every, losses)
    assert (bin_ratio(levels) - 1).abs().max() < 0.35


def test_kim_moves_towards_rewarded_timesteps() -> None:
    levels = make("kim", weighting="uniform", steps=100_000)
    assert isinstance(levels, Kim)
    key, places = rng.key(rng.Purpose.TIMESTEP, 3), torch.arange(BATCH)
    for step in range(400):
        t = levels.draw(lambda index, step=step: rng.uniform(key, index, (), step), places)
        levels.learn(Statistics(step, t, torch.ones(BATCH)))
        levels.reward(t.float().mean() / T)  # a loss that falls the more, the later the timesteps
    ratio = bin_ratio(levels)
    assert float(ratio[-8:].mean()) > 1.5 > 0.7 > float(ratio[:8].mean())


def test_score_of_kim_is_the_gradient_of_the_log_density() -> None:
    levels = make("kim")
    assert isinstance(levels, Kim)
    levels.policy.copy_(torch.tensor([0.3, 0.7]))
    t = torch.arange(0, T, 7)
    levels.learn(Statistics(1, t, torch.ones(len(t))))
    policy = levels.policy.double().requires_grad_()
    density = torch.distributions.Beta(*policy.exp()).log_prob(levels.places[t].double()).mean()
    (gradient,) = torch.autograd.grad(density, policy)
    assert torch.allclose(levels.score.double(), gradient, atol=1e-5)


# State


@pytest.mark.parametrize("method", [*LEARNED, *PROBED])
def test_resumed_method_continues_bit_by_bit(method: str) -> None:
    whole, first, second = make(method), make(method), make(method)
    steps = 2 * whole.every + 10 if isinstance(whole, Probed) else 120
    train(whole, 2 * steps)
    train(first, steps)
    second.load_state_dict({name: tensor.clone() for name, tensor in first.state_dict().items()})
    train(second, steps, begin=steps)
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, second.state_dict()[name]), name


@pytest.mark.parametrize("method", [*LEARNED, *PROBED])
@pytest.mark.parametrize("timesteps", [2, 21, 1000])
def test_tables_stay_valid_for_any_number_of_timesteps(method: str, timesteps: int) -> None:
    schedule, v = make_schedule("cosine", timesteps), make_prediction("v")
    base = make_noise_levels(NoiseLevelSettings(weighting="min_snr"), schedule, v)
    probe = NoiseLevelSettings(
        weighting="min_snr", adaptive="variance", steps=300, batch_size=BATCH, moments=MOMENTS
    )
    bins = make_noise_levels(probe, schedule, v).state_dict()["trajectory"].shape[2]
    assert bins == min(timesteps, BINS)
    tables = torch.full((SLOTS, 2, bins), 1.5)
    settings = {**vars(probe), "adaptive": method, "tables": tables}
    levels = make_noise_levels(NoiseLevelSettings(**settings), schedule, v)
    assert isinstance(levels, Adaptive)
    train(levels, 300, torch.linspace(0.1, 1.0, timesteps))
    assert torch.isfinite(levels.weights).all() and bool((levels.weights > 0).all())
    assert bool((levels.probability > 0).all())
    assert float(levels.probability.sum()) == pytest.approx(1.0, abs=1e-3)
    assert levels.weights.shape == base.weights.shape


@pytest.mark.parametrize("order", ["recorded", "reversed", "last", "mean"])
def test_replay_follows_the_record_of_another_run(order: str) -> None:
    recorded = make("variance")
    train(recorded, 400)
    tables = recorded.state_dict()["trajectory"]
    assert (tables[40] != tables[0]).any()
    levels = make("replay", tables=tables, order=order)
    seen = []
    for step in range(1, 401):
        seen.append(bin_ratio(levels))
        levels.update(Statistics(step, torch.zeros(1, dtype=torch.int64), torch.ones(1)))
    expected = {
        "recorded": tables,
        "reversed": tables.flip(0),
        "last": tables[-1:].repeat(SLOTS, 1, 1),
        "mean": tables.mean(0, keepdim=True).repeat(SLOTS, 1, 1),
    }[order]
    for step in (0, 100, 399):
        assert torch.allclose(seen[step], expected[step * SLOTS // 400, 0], atol=1e-3)


def test_replay_of_a_record_with_other_bins_is_refused() -> None:
    message = r"got a record of shape \(64, 2, 3\); must be \(64, 2, 32\)"
    with pytest.raises(UserError, match=message):
        make("replay", tables=torch.ones(SLOTS, 2, 3))


@pytest.mark.parametrize("method", PROBED)
def test_probes_cost_at_most_a_hundredth_of_training(method: str) -> None:
    for batch_size in (16, 64, 256):
        levels = make(method, batch_size=batch_size)
        assert isinstance(levels, Probed)
        due = sum(levels.probe_due(step) for step in range(1, 10 * levels.every + 1))
        forward = due * len(levels.timesteps) / 3
        assert forward <= 0.0085 * 10 * levels.every * batch_size


def run_on_a_device(folder: Path, arguments: tuple[str, ...], output: Path) -> None:
    """Take 60 steps of every method on the emulated device, which records each wait for it."""
    device = set_up()
    places, error = torch.arange(BATCH, device=device), ERROR.to(device)
    key = rng.key(rng.Purpose.TIMESTEP, 1)
    for method in (*LEARNED, *PROBED):
        levels = make(method).to(device)
        assert isinstance(levels, Adaptive)
        for step in range(1, 61):  # the tables of some methods change at step 50
            at = torch.full((), step, dtype=torch.int64, device=device)
            t = levels.draw(lambda index, at=at: rng.uniform(key, index, (), at), places)
            levels.update(Statistics(step, t, error[t]))
        if isinstance(levels, Probed):
            for step in (levels.every, levels.every + 1, 2 * levels.every, 2 * levels.every + 1):
                levels.observe(step, error[levels.timesteps] / step)
        assert not RECORD.waits, (method, RECORD.waits)


@pytest.mark.slow
def test_no_method_waits_for_the_device(tmp_path: Path) -> None:
    program = Program(tmp_path / "none", (), run_on_a_device)
    assert (program.ended(), program.returncode) == ("", 0)


@pytest.mark.parametrize("method", ["paired_progress", "held_out", "replay"])
def test_methods_without_losses_learn_from_none(method: str) -> None:
    """Training passes them no samples, which saves an exchange between the workers per step."""
    levels, same = make(method), make(method)
    none = torch.zeros(0, dtype=torch.int64)
    assert not levels.uses_losses
    train(same, 30)
    for step in range(1, 31):
        levels.update(Statistics(step, none, none.float()))
    for name, table in levels.state_dict().items():
        assert torch.equal(table, same.state_dict()[name]), name
