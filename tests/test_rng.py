"""Every draw is a pure function of purpose, seed, stream, step, sample and element."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from scipy import stats
from support.program import GPU
from torch import Tensor

import ddpm_core
from ddpm_core import rng
from ddpm_core.rng import Purpose

KEY = rng.key(Purpose.NOISE, 0)
DRAWS: dict[str, Callable[..., Tensor]] = {
    "bits": lambda key, sample, elements, **k: rng.bits(key, sample, elements, **k),
    "uniform": lambda key, sample, elements, **k: rng.uniform(key, sample, (elements,), **k),
    "normal": lambda key, sample, elements, **k: rng.normal(key, sample, (elements,), **k),
    "dropout": lambda key, sample, elements, step=0, stream=0: rng.dropout_mask(
        key, sample, (elements,), 0.5, step, stream, torch.float32
    ),
}
every_draw = pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)


def correlation(a: Tensor, b: Tensor) -> float:
    """Return the correlation in standard errors; one in two million exceeds 5."""
    pair = torch.stack((a.flatten().double(), b.flatten().double()))
    return float(torch.corrcoef(pair)[0, 1]) * a.numel() ** 0.5


# The published generator


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ("00000000" * 4, "00000000" * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff" * 4, "ffffffff" * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            "243f6a8885a308d313198a2e03707344",
            "a4093822299f31d0",
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_matches_the_vectors_of_its_authors(counter: str, key: str, expected: str) -> None:
    words = [int(counter[i : i + 8], 16) for i in range(0, 32, 8)]
    c0, c1, c2, c3 = (torch.tensor([[word]]) for word in words)
    drawn = rng.philox((c0, c1, c2, c3), (int(key[:8], 16), int(key[8:], 16)))
    assert " ".join(f"{int(word):08x}" for word in drawn) == expected


def test_draws_never_change() -> None:
    drawn = rng.bits(rng.key(Purpose.NOISE, 7), torch.tensor([3]), 5, step=11, stream=2)
    assert drawn.tolist() == [[2824048145, 570362040, 3130915342, 68706314, 4063999373]]


# Draws do not depend on the batch, the device or other draws


@every_draw
def test_a_subset_equals_the_same_part_of_a_larger_draw(
    draw: Callable[..., Tensor],
) -> None:
    together = draw(KEY, torch.arange(37), 101, step=5)
    for chosen in ([0], [36], [1, 2, 30], list(range(0, 37, 3))):
        for elements in (1, 2, 3, 4, 5, 50, 101):
            alone = draw(KEY, torch.tensor(chosen), elements, step=5)
            assert torch.equal(alone, together[chosen, :elements])


@every_draw
def test_step_may_be_a_number_or_a_tensor(
    draw: Callable[..., Tensor],
) -> None:
    sample = torch.tensor([4, 5, 6])
    number = draw(KEY, sample, 9, step=12)
    assert torch.equal(draw(KEY, sample, 9, step=torch.tensor(12)), number)
    assert torch.equal(draw(KEY, sample, 9, step=torch.tensor([12, 12, 12])), number)
    mixed = draw(KEY, sample, 9, step=torch.tensor([1, 12, 3]))
    assert torch.equal(mixed[1], number[1])
    assert not torch.equal(mixed[0], number[0])


@pytest.mark.cuda
@every_draw
def test_cpu_and_gpu_draw_the_same_bits(draw: Callable[..., Tensor]) -> None:
    sample = torch.arange(256)
    there = draw(KEY, sample.to(GPU), 999, step=torch.tensor(3, device=GPU))
    assert torch.equal(there.cpu(), draw(KEY, sample, 999, step=3))


def test_global_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    for draw in DRAWS.values():
        draw(KEY, torch.arange(4), 10)
    rng.permutation(KEY, 10, 0)
    assert torch.equal(before, torch.get_rng_state())


def test_no_other_generator_is_used_in_the_package() -> None:
    other = re.compile(
        r"torch\.(rand|normal|bernoulli|multinomial|poisson|manual_seed|seed)\w*\b"
        r"|\.(normal_|uniform_|random_|bernoulli_|exponential_|log_normal_|cauchy_|geometric_)\("
        r"|\btorch\.Generator|\bnp\.random|\bnumpy\.random|default_rng|RandomState"
        r"|^\s*(import|from) (random|secrets)\b"
        r"|\bF\.\w*dropout\w*\(|functional\.\w*dropout|\bnn\.\w*Dropout"
        r"|\b(xavier|kaiming|trunc_normal|orthogonal)_\w*\(",
        re.MULTILINE,
    )
    package = Path(ddpm_core.__file__).parent
    programs = package / "registry" / "readme.py"  # of model cards, for other packages
    found = [
        f"{path.relative_to(package)}: {match.group()}"
        for path in sorted({*package.rglob("*.py")} - {programs})
        for match in other.finditer(path.read_text(encoding="utf-8"))
    ]
    assert found == []


# Every part of the address matters


@every_draw
def test_every_part_of_the_address_changes_the_draw(
    draw: Callable[..., Tensor],
) -> None:
    sample = torch.arange(16)
    drawn = [
        draw(KEY, sample, 256),
        draw(rng.key(Purpose.SAMPLE, 0), sample, 256),
        draw(rng.key(Purpose.NOISE, 1), sample, 256),
        draw(KEY, sample, 256, stream=1),
        draw(KEY, sample, 256, step=1),
        draw(KEY, sample + 16, 256),
        draw(KEY, sample, 512)[:, 256:],
    ]
    for i, a in enumerate(drawn):
        for b in drawn[:i]:
            assert abs(correlation(a, b)) < 5


def test_all_bits_of_a_seed_count() -> None:
    seeds = [0, 1, 2**31, 2**32, 2**32 + 1, 2**63 - 1, 2**64, -1]
    drawn = {
        tuple(rng.bits(rng.key(Purpose.NOISE, s), torch.tensor([0]), 4)[0].tolist()) for s in seeds
    }
    assert len(drawn) == len(seeds)


def test_addresses_outside_the_counter_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"stream: got -1"):
        rng.bits(KEY, torch.tensor([0]), 1, stream=-1)
    with pytest.raises(ValueError, match=r"step: got 4294967296"):
        rng.bits(KEY, torch.tensor([0]), 1, step=2**32)


# Distributions


def test_uniforms_are_uniform_and_below_one() -> None:
    drawn = rng.uniform(KEY, torch.arange(500), (2000,))
    assert drawn.dtype == torch.float32
    assert float(drawn.min()) >= 0.0 and float(drawn.max()) < 1.0
    assert stats.kstest(drawn.flatten().double().numpy(), "uniform").pvalue > 1e-3


def test_normals_have_normal_moments_distribution_and_tails() -> None:
    drawn = rng.normal(KEY, torch.arange(1000), (2, 1000)).flatten().double().numpy()
    assert abs(drawn.mean()) < 5 * 2e6**-0.5
    assert abs(drawn.var() - 1) < 5 * (2 / 2e6) ** 0.5
    assert abs(stats.skew(drawn)) < 5 * (6 / 2e6) ** 0.5
    assert abs(stats.kurtosis(drawn)) < 5 * (24 / 2e6) ** 0.5
    assert stats.kstest(drawn, "norm").pvalue > 1e-3
    expected = 2e6 * 2 * stats.norm.sf(4.0)
    assert abs((abs(drawn) > 4).sum() - expected) < 5 * expected**0.5


def test_the_two_numbers_of_a_pair_are_independent() -> None:
    drawn = rng.normal(KEY, torch.arange(1000), (400,)).view(-1, 4)
    for i in range(4):
        for j in range(i):
            assert abs(correlation(drawn[:, i], drawn[:, j])) < 5
            assert abs(correlation(drawn[:, i] ** 2, drawn[:, j] ** 2)) < 5
    angle = torch.atan2(drawn[:, 1], drawn[:, 0]).double().numpy()
    assert stats.kstest(angle, stats.uniform(-torch.pi, 2 * torch.pi).cdf).pvalue > 1e-3


def test_normals_are_finite_for_every_extreme_word() -> None:
    words = torch.tensor(
        [[0, 1, 2, 255, 2**24, 2**31 - 1, 2**31, 2**32 - 129, 2**32 - 2, 2**32 - 1]]
    )
    radius = rng._radius(words)
    exact = (-2 * (((words + 0.5).double() / 2**32).log())).clamp(min=0).sqrt()
    assert torch.isfinite(radius).all()
    assert torch.allclose(radius.double(), exact, atol=3e-4)
    cosine, sine = rng._direction(words)
    assert torch.allclose(cosine**2 + sine**2, torch.ones(1, 10), atol=1e-6)


@every_draw
def test_neighbouring_addresses_are_uncorrelated(
    draw: Callable[..., Tensor],
) -> None:
    sample = torch.arange(1000)
    drawn = draw(KEY, sample, 100)
    for distance in (1, 2, 3, 4, 8, 32):
        assert abs(correlation(drawn[distance:], drawn[:-distance])) < 5
        assert abs(correlation(drawn[:, distance:], drawn[:, :-distance])) < 5
        assert abs(correlation(drawn, draw(KEY, sample, 100, step=distance))) < 5
        assert abs(correlation(drawn, draw(KEY, sample, 100, stream=distance))) < 5
        other = rng.key(Purpose.NOISE, distance)
        assert abs(correlation(drawn, draw(other, sample, 100))) < 5


@every_draw
def test_one_element_varies_over_samples_and_steps(
    draw: Callable[..., Tensor],
) -> None:
    wide = draw(KEY, torch.tensor([0]), 40_000).double()
    tall = draw(KEY, torch.arange(40_000), 1).double()
    long = draw(KEY, torch.zeros(40_000, dtype=torch.int64), 1, step=torch.arange(40_000)).double()
    for other in (tall, long):
        error = (2 * float(wide.var()) / 40_000) ** 0.5
        assert abs(float(wide.mean() - other.mean())) < 5 * error
        assert float(other.var() / wide.var()) == pytest.approx(1.0, abs=0.05)


# The order of an epoch


@pytest.mark.parametrize("n", [1, 2, 3, 10, 1001])
def test_permutation_has_every_element_once(n: int) -> None:
    assert torch.equal(rng.permutation(KEY, n, 0).sort().values, torch.arange(n))


def test_epochs_and_seeds_have_different_permutations() -> None:
    orders = [
        rng.permutation(rng.key(Purpose.ORDER, s), 1000, e) for s in (0, 1) for e in (0, 1, 2)
    ]
    for i, a in enumerate(orders):
        for b in orders[:i]:
            assert abs(correlation(a, b)) < 5


def test_all_permutations_of_four_are_equally_likely() -> None:
    counts: dict[tuple[int, ...], int] = {}
    for epoch in range(2400):
        order = tuple(rng.permutation(KEY, 4, epoch).tolist())
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 24
    assert stats.chisquare(list(counts.values())).pvalue > 1e-3


# Dropout


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 0.9])
def test_dropout_mask_has_its_rate_and_keeps_the_mean(rate: float) -> None:
    mask = rng.dropout_mask(KEY, torch.arange(64), (8, 16, 16), rate, 3, 1, torch.float32)
    assert mask.shape == (64, 8, 16, 16)
    dropped = float((mask == 0).double().mean())
    assert abs(dropped - rate) <= 5 * (rate * (1 - rate) / mask.numel()) ** 0.5
    assert torch.allclose(mask[mask != 0], torch.tensor(1 / (1 - rate)))


def test_every_sample_and_element_is_dropped_at_the_rate() -> None:
    mask = rng.dropout_mask(KEY, torch.arange(2000), (2000,), 0.1, 0, 0, torch.float32) == 0
    for axis in (0, 1):
        counts = mask.sum(axis).double().numpy()
        statistic = ((counts - 200) ** 2 / 180).sum()
        assert 1e-4 < stats.chi2(2000).cdf(statistic) < 1 - 1e-4


def test_dropout_mask_has_the_requested_dtype() -> None:
    mask = rng.dropout_mask(KEY, torch.arange(2), (4,), 0.5, 0, 0, torch.bfloat16)
    assert mask.dtype == torch.bfloat16


def test_dropout_rate_of_one_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"rate: got 1.0"):
        rng.dropout_mask(KEY, torch.arange(2), (4,), 1.0, 0, 0, torch.float32)
