"""Stateless random numbers: every draw is a pure function of its address.

    value = f(purpose, seed, stream, step, sample, element)

Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") turns a counter
into four random words. So there is no state to save or restore, and no draw depends on the number
of workers, the division of a batch or earlier draws. All operations are on integers or are exactly
rounded float32 ones, so CPU and GPU agree to the last bit. The exception is a compiler that fuses
multiplications with additions, which changes the last bit of a normal.

This module is the only source of randomness in ddpm_core.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
Words = tuple[Tensor, Tensor, Tensor, Tensor]
Word = int | Tensor


class Purpose(StrEnum):
    """The use of a draw. Draws for different purposes are independent under the same seed."""

    INIT = "init"
    ORDER = "order"
    TIMESTEP = "timestep"
    NOISE = "noise"
    FLIP = "flip"
    AUGMENT = "augment"
    BALANCE = "balance"
    LABEL_DROP = "label drop"
    DROPOUT = "dropout"
    SAMPLE = "sample"
    SAMPLE_CONDITION = "sample condition"
    EVALUATE = "evaluate"
    PROBE = "probe"
    VALIDATION = "validation"


@dataclass(frozen=True)
class Key:
    """128 bits that represent a purpose and a seed, as words in [0, 2^32).

    The words are numbers, or int64 tensors (n, 1) with a key for each sample.

    Attributes:
        philox: The key of the cipher.
        mask: XORed into the step and the stream of the counter.
    """

    philox: tuple[Word, Word]
    mask: tuple[Word, Word]


def key(purpose: Purpose, seed: int) -> Key:
    """Return the key of a purpose and a seed, any integer: all of its bits count."""
    digest = hashlib.blake2b(f"{purpose}:{seed}".encode(), digest_size=16).digest()
    words = [int.from_bytes(digest[i : i + 4], "little") for i in range(0, 16, 4)]
    return Key((words[0], words[1]), (words[2], words[3]))


def keys(purpose: Purpose, seeds: Sequence[int], device: torch.device) -> Key:
    """Return the keys of n samples that have different seeds: row i draws with `seeds[i]`."""
    single = [key(purpose, seed) for seed in seeds]
    words = torch.tensor([[*one.philox, *one.mask] for one in single], device=device)
    k0, k1, m0, m1 = words.T.unsqueeze(-1)
    return Key((k0, k1), (m0, m1))


def philox(counter: Words, key: tuple[Word, Word]) -> Words:
    """Apply Philox4x32-10: four int64 tensors of words in [0, 2^32) to four of random words.

    The tensors broadcast together. A signed 64-bit product overflows, but has the same bits as the
    unsigned one; the mask after each shift removes the copies of the sign bit.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    # Each round multiplies two words. The high half of a product is mixed with a word of the other
    # pair and with the key; the low half becomes a word as it is. The low halves keep their upper
    # bits for now: the next round only XORs them into a word that is masked afterwards.
    for _ in range(_ROUNDS):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0 = _xor(product1 >> 32, c1).bitwise_xor_(k0).bitwise_and_(WORD)
        c2 = _xor(product0 >> 32, c3).bitwise_xor_(k1).bitwise_and_(WORD)
        c1, c3 = product1, product0
        k0, k1 = (k0 + _WEYL[0]) & WORD, (k1 + _WEYL[1]) & WORD
    return c0, c1 & WORD, c2, c3 & WORD


def bits(
    key: Key, sample: Tensor, elements: int, step: int | Tensor = 0, stream: int = 0
) -> Tensor:
    """Draw random words, int64 (n, elements), each in [0, 2^32), on the device of `sample`.

    Row i depends on sample[i] alone, and its first m elements are the same for every `elements`.

    Args:
        sample: int64 (n,), the index of each sample, such as its place in the global batch.
        step: The training or sampling step: a number, or a tensor (1,) or (n,).
        stream: Any further distinction, such as the number of a layer.

    Raises:
        ValueError: `step` or `stream` is not in [0, 2^32).
    """
    words = _words(key, sample, -(-elements // 4), step, stream)
    return torch.stack(words, dim=-1).flatten(1)[:, :elements]


def uniform(
    key: Key, sample: Tensor, shape: Sequence[int], step: int | Tensor = 0, stream: int = 0
) -> Tensor:
    """Draw uniform numbers in [0, 1), float32 (n, *shape), multiples of 2^-24.

    The arguments are those of `bits`.
    """
    words = bits(key, sample, math.prod(shape), step, stream)
    # 24 bits are all that float32 holds exactly. With more, the largest would be rounded up to 1.
    return ((words >> 8).to(torch.float32) * 2.0**-24).view(len(sample), *shape)


def normal(
    key: Key, sample: Tensor, shape: Sequence[int], step: int | Tensor = 0, stream: int = 0
) -> Tensor:
    """Draw standard normal numbers, float32 (n, *shape), by the method of Box and Muller (1958).

    The arguments are those of `bits`. Numbers are always finite: at most 6.77 in magnitude, which
    one draw in 2^33 reaches.
    """
    elements = math.prod(shape)
    w0, w1, w2, w3 = _words(key, sample, -(-elements // 4), step, stream)
    radius = _radius(torch.stack((w0, w2), dim=-1))
    cosine, sine = _direction(torch.stack((w1, w3), dim=-1))
    pairs = torch.stack((cosine.mul_(radius), sine.mul_(radius)), dim=-1)
    return pairs.flatten(1)[:, :elements].reshape(len(sample), *shape)


def permutation(key: Key, n: int, epoch: int, stream: int = 0) -> Tensor:
    """Draw a random order of 0..n-1, int64 (n,) on the CPU, a different one for each epoch.

    `stream` is as in `bits`. Sorts by 62 random bits per element; elements with equal bits keep
    their order.
    """
    words = bits(key, torch.zeros(1, dtype=torch.int64), 2 * n, epoch, stream).view(n, 2)
    # 32 + 30 bits: with more, the number would not be a non-negative int64.
    return torch.argsort((words[:, 0] << 30) ^ (words[:, 1] >> 2), stable=True)


def dropout_mask(
    key: Key,
    sample: Tensor,
    shape: Sequence[int],
    rate: float,
    step: int | Tensor,
    stream: int,
    dtype: torch.dtype,
) -> Tensor:
    """Draw a mask (n, *shape) of `dtype`: 0 with probability `rate`, otherwise 1 / (1 - rate).

    The other arguments are those of `bits`. Philox yields 64 bits per sample, which a 32-bit
    multiply-and-shift hash spreads over the elements. That is good enough for a mask, at a fraction
    of the cost. Raises ValueError unless `rate` is in [0, 1).
    """
    if not 0.0 <= rate < 1.0:
        raise ValueError(f"rate: got {rate}; must be at least 0 and less than 1.")
    first, second, *_ = (_signed(w) for w in _words(key, sample, 1, step, stream))
    elements = torch.arange(math.prod(shape), dtype=torch.int32, device=sample.device)
    hashed = _mix(_mix(elements, 0x7FEB352D), 0x5846CA6B) ^ first
    # The multipliers are odd, which makes every step a bijection. int32 wraps around like unsigned
    # numbers, but is compared with its sign: so the threshold, rate x 2^32, is shifted by 2^31.
    hashed = _mix(hashed, 0x2C1B3C6D).bitwise_xor_(second).mul_(_WEYL[0] - 2**32)
    keep = hashed >= round(rate * 2**32) - 2**31
    return keep.to(dtype).mul_(1.0 / (1.0 - rate)).view(len(sample), *shape)


def _words(key: Key, sample: Tensor, blocks: int, step: int | Tensor, stream: int) -> Words:
    """Return four tensors (n, blocks) of random words; block b has the elements 4b to 4b+3."""
    for name, number in (("step", step), ("stream", stream)):
        if isinstance(number, int) and not 0 <= number <= WORD:
            raise ValueError(f"{name}: got {number}; must be at least 0 and less than 2^32.")
    device = sample.device
    block = torch.arange(blocks, dtype=torch.int64, device=device).view(1, -1)
    if isinstance(step, Tensor):
        steps = step.to(device).view(-1, 1)
    else:
        steps = torch.full((1, 1), step, dtype=torch.int64, device=device)
    streams = stream ^ key.mask[1]
    if isinstance(streams, int):
        streams = torch.full((1, 1), streams, dtype=torch.int64, device=device)
    return philox((block, sample.view(-1, 1), steps ^ key.mask[0], streams), key.philox)


def _xor(fresh: Tensor, other: Tensor) -> Tensor:
    """Return `fresh ^ other`, in the memory of `fresh` if the result fits there."""
    if all(b in (a, 1) for a, b in zip(fresh.shape, other.shape, strict=True)):
        return fresh.bitwise_xor_(other)
    return fresh ^ other


def _radius(words: Tensor) -> Tensor:
    """Return sqrt(-2 ln u), float32, for u = (word + 1/2) / 2^32 in (0, 1].

    The logarithm is computed here, because those of CPU and GPU round differently: u = m 2^e with
    m in [sqrt(1/2), sqrt(2)), and ln m = 2 artanh s, s = (m - 1) / (m + 1), |s| < 0.172, by its
    series up to s^9.
    """
    u = words.to(torch.float32).add_(0.5).mul_(2.0**-32)
    # The bits of a float32 are its exponent followed by its mantissa. Subtracting the bits of
    # sqrt(1/2) makes every exponent begin at m = sqrt(1/2) instead of 1. So m is around 1, where
    # the series converges fastest.
    root_half = 0x3F3504F3  # the bits of sqrt(1/2)
    pattern = u.view(torch.int32) - root_half
    exponent = pattern >> 23
    m = pattern.bitwise_and_(0x7FFFFF).add_(root_half).view(torch.float32)
    s = (m - 1.0).div_(m + 1.0)
    series = _polynomial(s * s, (1.0, 1 / 3, 1 / 5, 1 / 7, 1 / 9))
    log = series.mul_(s).mul_(2.0).add_(exponent.to(torch.float32).mul_(math.log(2.0)))
    # The largest words are rounded to u = 1, where the logarithm must not come out above 0.
    return log.mul_(-2.0).clamp_(min=0.0).sqrt_()


def _direction(words: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of a uniform angle, float32.

    30 bits of a word place the angle in a quarter of the circle. Of the two other bits, one swaps
    the coordinates and one negates them, which reaches all four quarters.
    """
    angle = (words & 0x3FFFFFFF).sub_(2**29).to(torch.float32).add_(0.5).mul_(math.pi / 2**31)
    square = angle * angle
    cosine = _polynomial(square, (1.0, -1 / 2, 1 / 24, -1 / 720, 1 / 40320))
    sine = _polynomial(square, (1.0, -1 / 6, 1 / 120, -1 / 5040, 1 / 362880)).mul_(angle)
    sign = ((words >> 30) & 2).to(torch.float32).neg_().add_(1.0)  # 1 or -1, from the top bit
    cosine.mul_(sign)
    sine.mul_(sign)
    swap = (words & 0x40000000) != 0
    return torch.where(swap, sine, cosine), torch.where(swap, cosine, sine)


def _polynomial(x: Tensor, coefficients: Sequence[float]) -> Tensor:
    """Return c0 + c1 x + c2 x^2 + ... by Horner's rule, with every operation rounded separately."""
    *rest, last = coefficients
    total = x * last
    for coefficient in reversed(rest[1:]):
        total.add_(coefficient).mul_(x)
    return total.add_(rest[0])


def _signed(words: Tensor) -> Tensor:
    """Return words in [0, 2^32) as int32 with the same bits."""
    return (words - ((words & 0x80000000) << 1)).to(torch.int32)


def _mix(x: Tensor, multiplier: int) -> Tensor:
    """Apply one bijective round to int32: x ^= x >> 15 (unsigned), then times an odd number."""
    return ((x >> 15).bitwise_and_(0x1FFFF)).bitwise_xor_(x).mul_(multiplier)
