"""Write a network as an ONNX file, which runs without PyTorch."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from torch import Tensor, nn

from ddpm_core.config import Diffusion
from ddpm_core.diffusion.predictions import Prediction
from ddpm_core.errors import require
from ddpm_core.models.conditioning import TEXT_BYTES
from ddpm_core.models.config import UNetConfig
from ddpm_core.models.unet import UNet

INPUTS = ("x", "t", "condition")  # the arguments of UNet.forward; the last one with a condition
OUTPUT = "output"
# The sizes of the example that the exporter traces. It would make a batch of 1 a constant.
_BATCH = 2


class X0Network(nn.Module):
    """A network together with its prediction: the output is x0, the image without noise.

    Other programs have no predictions that depend on moments of the training images. Here the
    moments are constants of the network.
    """

    def __init__(self, unet: UNet, prediction: Prediction, alphas_bar: Tensor) -> None:
        """Args: alphas_bar: (T,), of the schedule."""
        super().__init__()
        self.unet = unet
        self._prediction = prediction
        self.register_buffer("alphas_bar", alphas_bar)

    def forward(self, x: Tensor, t: Tensor, condition: Tensor | None = None) -> Tensor:
        """Return x0 (B, C, H, W); the arguments are those of `UNet.forward`."""
        alpha_bar: Tensor = self.get_buffer("alphas_bar")[t]
        return self._prediction.to_x0(self.unet(x, t, condition), x, alpha_bar)


def export_network(network: nn.Module, config: UNetConfig, file: Path) -> None:
    """Write a network, in eval mode and on the CPU, with any number of images as its batch.

    The inputs are those of `UNet.forward`, with its shapes and dtypes. The number of the classes
    means "no class", and an empty text "no text".

    Args:
        network: A UNet or an X0Network.
        config: Of the UNet.
        file: The new file.

    Raises:
        UserError: PyTorch's exporter is not installed.
        OSError: The file cannot be written.
    """
    for package in ("onnx", "onnxscript"):
        require(package, "onnx")
    given = dict(zip(INPUTS, _example(config), strict=False))
    batch = torch.export.Dim("batch")
    with warnings.catch_warnings():  # about names of axes; that of the batch is the same for all
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            network,
            tuple(given.values()),
            input_names=list(given),
            output_names=[OUTPUT],
            dynamic_shapes={name: {0: batch} for name in given},
            dynamo=True,
            verbose=False,
        )
        assert program is not None
        program.save(file)


def output_of(diffusion: Diffusion) -> str:
    """Return the prediction that an exported network outputs."""
    return "x0" if diffusion.uses_moments else diffusion.prediction


def _example(config: UNetConfig) -> list[Tensor]:
    size = config.image_size
    example = [torch.zeros(_BATCH, config.in_channels, size, size), torch.arange(_BATCH)]
    if config.conditioning == "class":
        example.append(torch.zeros(_BATCH, dtype=torch.int64))
    if config.conditioning == "text":
        example.append(torch.full((_BATCH, TEXT_BYTES), ord("a"), dtype=torch.uint8))
    return example
