"""Draw numbered images: image i depends on the weights, the settings, the seed and i alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddpm_core import rng
from ddpm_core.checkpoint import TrainingData
from ddpm_core.config import Diffusion, Sample
from ddpm_core.data.captions import encode
from ddpm_core.diffusion.editing import Noise, Original, edit
from ddpm_core.diffusion.moments import Moments
from ddpm_core.diffusion.predictions import make_prediction
from ddpm_core.diffusion.process import make_schedule
from ddpm_core.diffusion.samplers import SamplerSettings, sample
from ddpm_core.errors import NotFinite, UserError
from ddpm_core.models.execution import prepare_model
from ddpm_core.models.unet import UNet
from ddpm_core.rng import Purpose
from ddpm_core.runtime.device import autocast, choose_precision
from ddpm_core.sampling.images import Pixels, to_pixels
from ddpm_core.sampling.noise import BatchNoise, Origin
from ddpm_core.sampling.plan import must_suit

# Called with the timestep of an evaluation, the noisy images and the estimate of x0.
Seen = Callable[[int, Tensor, Tensor], None]


class OnStep(Protocol):
    """A callback after each step of a batch; see `ImageSampler.batch`."""

    def __call__(self, step: int, rows: Tensor, preview: Callable[[], Pixels], /) -> None: ...


class ImageSampler:
    """Draws numbered images from a network.

    Args:
        model: The trained network. It is changed in place for sampling.
        data: The data that the network was trained on. Its frequencies of classes or captions
            apply unless `settings` names classes or prompts.
        compiled: Whether to compile the network, which pays for many batches of one size.
        moments: Of the training images (see loading.py), if the prediction uses them.
        guide: An earlier network of the same run, which guidance leads away from. Changed like
            `model`.

    Raises:
        UserError: The network cannot draw with these settings.
    """

    def __init__(
        self,
        model: UNet,
        data: TrainingData,
        settings: Sample,
        diffusion: Diffusion,
        compiled: bool = False,
        moments: Moments | None = None,
        guide: UNet | None = None,
    ) -> None:
        must_suit(settings, model.config.conditioning, diffusion.timesteps)
        self._settings = settings
        self._schedule = make_schedule(
            diffusion.schedule, diffusion.timesteps, diffusion.zero_terminal_snr
        )
        self._device = next(model.parameters()).device
        moments = moments and moments.to(self._device)
        self._prediction = make_prediction(diffusion.prediction, moments)
        self._sampler = SamplerSettings(
            settings.sampler, settings.steps, settings.spacing, settings.eta, settings.variance
        )
        self._conditions = Conditions(model.config.conditioning, data, settings)
        self._precision = choose_precision(settings.precision, self._device)
        self._shape = (model.config.in_channels, model.config.image_size, model.config.image_size)
        self._network = self._prepared(model, compiled)
        self._guide = guide and self._prepared(guide, compiled)

    def _prepared(self, model: UNet, compiled: bool) -> Callable[..., Tensor]:
        network = prepare_model(model, self._device, self._precision)
        return torch.compile(network) if compiled else network

    def images(self, indices: Sequence[int], original: Original | None = None) -> Pixels:
        """Return the images with these numbers, uint8 (n, H, W, C), drawn in one batch.

        Image i starts from row i of `original`, if that is given. Raises UserError if an output of
        the network is not finite.
        """
        numbers = list(indices)  # raises MemoryError at once if there are far too many
        origins = [Origin(self._settings.seed, number) for number in numbers]
        return self.batch(origins, self.conditions(numbers), original)

    def batch(
        self,
        origins: Sequence[Origin],
        condition: Tensor | None,
        original: Original | None = None,
        on_step: OnStep | None = None,
    ) -> Pixels:
        """Return images of any seeds, uint8 (n, H, W, C), drawn in one batch.

        Args:
            origins: Where the noise of each image comes from.
            condition: The condition of each image, as in `Conditions.take`.
            original: As in `images`.
            on_step: Called as on_step(i, rows, preview) after step i; on a CPU once for each half
                of the batch. `preview()` returns the images `rows` as the network predicts them at
                that step. An exception that `on_step` raises stops the drawing.

        Raises:
            UserError: An output of the network is not finite.
        """

        def part(rows: Tensor) -> Tensor:
            noise = BatchNoise([origins[row] for row in rows.tolist()], self._shape, self._device)
            on_device = rows.to(self._device)
            own = None if condition is None else condition.to(self._device)[on_device]
            start = original and original.take(on_device)
            if on_step is None:
                return self.draw(noise, own, start)
            estimate: Tensor

            def see(t: int, x: Tensor, x0: Tensor) -> None:
                nonlocal estimate
                estimate = x0

            def report(step: int) -> None:
                on_step(step, rows, lambda: to_pixels(estimate).cpu().numpy())

            return self.draw(noise, own, start, report, see)

        rows = torch.arange(len(origins))  # on the CPU: reading them must not wait for the device
        pixels: Pixels = in_halves(part, rows, self._device).cpu().numpy()
        return pixels

    def noise(self, indices: Sequence[int]) -> BatchNoise:
        """Return the noise of images."""
        origins = [Origin(self._settings.seed, index) for index in indices]
        return BatchNoise(origins, self._shape, self._device)

    def conditions(self, indices: Sequence[int]) -> Tensor | None:
        """Return the conditions of images (see Conditions.take), on the device of the network."""
        condition = self._conditions.take(torch.as_tensor(list(indices), dtype=torch.int64))
        return None if condition is None else condition.to(self._device)

    @torch.inference_mode()
    def draw(
        self,
        noise: Noise,
        condition: Tensor | None,
        original: Original | None = None,
        on_step: Callable[[int], None] | None = None,
        seen: Seen | None = None,
    ) -> Tensor:
        """Return images for some noise and conditions, uint8 (n, H, W, C).

        Args:
            noise: As in `editing.edit`.
            condition: Class numbers or texts, as in `Conditions.take`.
            original: As in `images`.
            on_step: Called as on_step(i) after step i.
            seen: Called at each evaluation of the network; see Seen.

        Raises:
            UserError: An output of the network is not finite.
        """
        count = len(noise(0))
        finite = torch.ones(count, dtype=torch.bool, device=self._device)

        def network(x: Tensor, t: Tensor) -> Tensor:
            output = self._guided(x, t, condition)
            # Checked here because clipping would turn an infinite output into a black or white
            # image. The result stays on the device: reading it at each step would make it wait.
            finite.logical_and_(output.isfinite().flatten(1).all(1))
            if seen is not None:
                alpha_bar = self._schedule.alphas_bar[int(t[0])]
                seen(int(t[0]), x, self._prediction.to_x0(output, x, alpha_bar))
            return output

        settings, prediction = self._sampler, self._prediction
        with autocast(self._precision, self._device):
            if original is None:
                x0 = sample(network, self._schedule, prediction, settings, noise, on_step)
            else:
                x0 = edit(network, self._schedule, prediction, settings, noise, original, on_step)
        if bad := int((~finite).sum()):
            raise NotFinite(
                f"{bad} of {count} images are not finite, drawn with sample.precision "
                f"{self._precision} and sample.guidance {self._settings.guidance:g}. Every output "
                "of the network must be finite. Use sample.precision fp32 and guidance 1; if the "
                "images are still not finite, use another checkpoint."
            )
        return to_pixels(x0)

    def _guided(self, x: Tensor, t: Tensor, condition: Tensor | None) -> Tensor:
        """Return the network's output; with guidance g, u + g (c - u), (B, C, H, W).

        c and u are the outputs with and without the condition (Ho & Salimans 2022, eq. 6), or with
        a guide that of the network and that of the guide (Karras et al. 2024, "Guiding a diffusion
        model with a bad version of itself", eq. 5). x0 depends linearly on the output, so it is
        guided in the same way.
        """
        scale = self._scale(t)
        if self._guide is not None and scale != 1.0:
            worse = self._guide(x, t, condition).float()
            return torch.lerp(worse, self._network(x, t, condition).float(), scale)
        if condition is None or scale == 1.0:
            return self._network(x, t, condition).float()
        # One evaluation of a batch of twice the size is faster than two.
        drop = torch.arange(2 * len(x), device=x.device) >= len(x)
        both = self._network(torch.cat([x, x]), torch.cat([t, t]), torch.cat([condition] * 2), drop)
        conditional, unconditional = both.float().chunk(2)
        return torch.lerp(unconditional, conditional, scale)

    def _scale(self, t: Tensor) -> float:
        """Return the scale of the guidance at timesteps t (n,), all equal; 1: none."""
        interval = self._settings.guidance_interval
        if interval is None or self._settings.guidance == 1.0:
            return self._settings.guidance
        # Reading t waits for the device, but outside the interval it saves half of the work.
        sigma = float(self._schedule.noise_to_signal[int(t[0])])
        return self._settings.guidance if interval[0] <= sigma <= interval[1] else 1.0


class Conditions:
    """The class or text of each image: a table of conditions, and the row that image i takes.

    The classes or prompts of the settings (`sample.classes`, `sample.prompts`) are taken in turn.
    Without them, each image draws one, with its frequency in the training data. The row depends on
    the seed and i alone.

    Raises UserError if a class is unknown, or a text is required and there is none.
    """

    def __init__(self, conditioning: str, data: TrainingData, settings: Sample) -> None:
        self._key = rng.key(Purpose.SAMPLE_CONDITION, settings.seed)
        self._counts: list[int] | None = None
        self._table: Tensor | None = None
        if conditioning == "class":
            names = list(data.classes)
            self._counts = None if settings.classes else _class_frequencies(data)
            self._table = torch.tensor(_class_numbers(names, settings.classes or tuple(names)))
        elif conditioning == "text":
            texts = settings.prompts or [text for text, _ in data.captions]
            if not texts:
                raise UserError(
                    "sample.prompts: missing (required, because the checkpoint has no captions)."
                )
            self._counts = None if settings.prompts else [count for _, count in data.captions]
            self._table = _encoded(tuple(texts))

    def take(self, index: Tensor) -> Tensor | None:
        """Return the conditions of images `index`, int64 (n,).

        Class numbers are int64 (n,), texts uint8 (n, 64). None: the network has no condition.
        """
        return None if self._table is None else self._table[self._row(index)]

    def labels(self, indices: Sequence[int]) -> NDArray[np.int64] | None:
        """Return the class number of each image, (n,), or None if there are no classes."""
        if self._table is None or self._table.dim() > 1:
            return None
        taken: NDArray[np.int64] = self._table[self._row(torch.as_tensor(indices))].numpy()
        return taken

    def _row(self, index: Tensor) -> Tensor:
        if self._counts is None:
            return index % len(self._table if self._table is not None else index)
        # Row i has the numbers of [0, total) between edge i - 1 and edge i. The clamp is for a draw
        # that rounding puts on the last edge.
        edges = torch.cumsum(torch.tensor(self._counts, dtype=torch.float64), 0)
        drawn = rng.uniform(self._key, index, ()).double() * edges[-1]
        return torch.searchsorted(edges, drawn, right=True).clamp(max=len(edges) - 1)


@lru_cache(maxsize=4)  # a batch of many requests needs the captions of the model for each of them
def _encoded(texts: tuple[str, ...]) -> Tensor:
    return torch.from_numpy(encode(texts))


def _class_frequencies(data: TrainingData) -> list[int]:
    """Return how often training drew each class, relative to the others."""
    if data.balance == "classes":
        return [min(count, 1) for count in data.class_counts]
    return data.class_counts


def _class_numbers(names: list[str], wanted: Sequence[str]) -> list[int]:
    unknown = [name for name in wanted if name not in names]
    if unknown:
        raise UserError(f"sample.classes: got {unknown[0]!r}; must be one of {', '.join(names)}.")
    return [names.index(name) for name in wanted]


def in_halves(work: Callable[[Tensor], Tensor], rows: Tensor, device: torch.device | str) -> Tensor:
    """Return `work(rows)`; if it runs on a CPU, computed in two halves side by side.

    `work` must treat each of the rows (n,) separately. Each half gets half of PyTorch's threads.
    Settings of a thread, such as autocast or `no_grad`, must be made inside `work`.

    An evaluation of a network is a thousand operations, some too small to share between threads.
    Two halves that share no operation never wait for each other: they take 7 % less processor time
    for Ho's network on 8 images, and 20 % less for that of the demo on 250. On one thread, halves
    would take 5 to 15 % more, so a batch stays in one piece there, and where the number of threads
    is odd.
    """
    threads = torch.get_num_threads()
    if torch.device(device).type != "cpu" or threads % 2 or len(rows) == 1:
        return work(rows)

    def half(rows: Tensor) -> Tensor:
        # The first call in a new thread sets it to the program's number; later calls can change it.
        torch.get_num_threads()
        torch.set_num_threads(threads // 2)
        return work(rows)

    try:
        with ThreadPoolExecutor(2) as pool:
            return torch.cat(list(pool.map(half, rows.tensor_split(2))))
    finally:
        # set_num_threads in `half` also changed the number for threads that start later.
        torch.set_num_threads(threads)
