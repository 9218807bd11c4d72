"""README.md of a folder to pass on: the model card with Hugging Face's metadata.

Hugging Face reads the YAML at the top of a README.md: https://huggingface.co/docs/hub/model-cards
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import yaml

from ddpm_core.checkpoint import Checkpoint
from ddpm_core.interop.onnx import output_of
from ddpm_core.models.conditioning import TEXT_BYTES
from ddpm_core.registry.card import write_card
from ddpm_core.scores import SPACES, Row, named_metrics
from ddpm_core.text import shown, throughout

LICENSE = """\
# No license is set, because it depends on your training images and on you. Add one, for example:
# license: cc-by-4.0
"""
# Data sets with a name on the Hugging Face Hub, by `prepare.source`.
HUB_DATA = {"cifar10": "uoft-cs/cifar10"}
TASKS = {"none": "unconditional-image-generation", "text": "text-to-image"}  # names on the Hub
LIBRARIES = {"diffusers": "diffusers", "onnx": "onnx"}


@dataclass(frozen=True)
class Model:
    """A model to write in some format.

    Attributes:
        name: Its name, as in the registry.
        checkpoint: Its settings, weights and what drawing with them requires.
        sampled: The settings of `sample` that its images were drawn with; `ema` selects weights.
        row: Its scores with their evidence, or None.
        grid: A PNG of its images, or None.
    """

    name: str
    checkpoint: Checkpoint
    sampled: dict[str, Any]
    row: Row | None = None
    grid: bytes | None = None


def write_readme(model: Model, kind: str) -> str:
    """Return the README.md of a model that is written as `kind`, a name in formats.FORMATS."""
    text = yaml.safe_dump(metadata(model, kind), sort_keys=False, allow_unicode=True, width=100)
    caveats = []
    if model.row and kind != "safetensors":
        caveats = [
            "The scores are those of images that ddpm draws with the sampler above. Other "
            "samplers, such as the one under Use, give other images and other scores."
        ]
    has_grid = model.grid is not None
    card = write_card(model.name, model.checkpoint, model.row, use(model, kind), caveats, has_grid)
    return f"---\n{text}{LICENSE}---\n\n{card}"


def metadata(model: Model, kind: str) -> dict[str, Any]:
    """Return the metadata without a license, which the user adds."""
    params = model.checkpoint.params
    conditioning = params.model.conditioning
    task = TASKS.get(conditioning)
    tags = ["ddpm", "diffusion", "image-generation", *([task] if task else ["class-conditional"])]
    fields: dict[str, Any] = {"library_name": LIBRARIES.get(kind), "pipeline_tag": task}
    fields["tags"] = tags
    if data := HUB_DATA.get(params.prepare.source):
        fields["datasets"] = [data]
    if model.row:
        results = [_results(model.checkpoint, model.row)]
        fields["model-index"] = [{"name": model.name, "results": results}]
    return {name: value for name, value in fields.items() if value is not None}


def _results(checkpoint: Checkpoint, row: Row) -> dict[str, Any]:
    """Return the scores as an entry of `model-index`, under their full names.

    A score is called fid only if it is one (see scores.metric_name).
    """
    data = throughout(shown, checkpoint.training_data.model_dump())
    uri = str(data["source"].get("uri") or "images")
    space = SPACES.get(row.evidence.space, row.evidence.extractor)
    measured = {
        name: (value, "principal components of the pixels" if "pixel_pca" in name else space)
        for name, value in named_metrics(row).items()
        if not name.startswith(("memorisation", "repeats"))
    }
    return {
        "task": {"type": TASKS.get(checkpoint.params.model.conditioning, "image-generation")},
        "dataset": {"name": uri, "type": "custom", "revision": row.evidence.data},
        "metrics": [
            {"type": name, "value": value, "name": f"{name} ({features})"}
            for name, (value, features) in measured.items()
        ],
    }


# How to use each format


def use(model: Model, kind: str) -> str:
    """Return the section Use, with a program to be run in the folder."""
    if kind == "safetensors":
        return SAFETENSORS
    conditioning = model.checkpoint.params.model.conditioning
    classes = model.checkpoint.network.classes
    if kind == "diffusers":
        timesteps = model.checkpoint.params.diffusion.timesteps
        template = DIFFUSERS_BY_CLASS if conditioning == "class" else DIFFUSERS
        return template.format(timesteps=timesteps, last=classes - 1, none=classes)
    prediction = output_of(model.checkpoint.params.diffusion)
    inputs = {"none": "", "class": BY_CLASS.format(last=classes - 1, none=classes), "text": BY_TEXT}
    example = {"none": "", "class": "np.arange(4) % {}", "text": "text_bytes"}[conditioning]
    example = example.format(classes)
    given = f', "condition": {example}' if example else ""
    text = TEXT_EXAMPLE if conditioning == "text" else ""
    meaning, x0 = X0[prediction]
    return ONNX.format(meaning=meaning, x0=x0, inputs=inputs[conditioning], given=given, text=text)


DIFFUSERS = """\
In this folder, or with the name of its repository in place of the dot:
```python
from diffusers import DiffusionPipeline

pipeline = DiffusionPipeline.from_pretrained(".")
images = pipeline(batch_size=4, num_inference_steps={timesteps}).images
```
{timesteps} steps are those of the training; fewer are faster and less exact."""

DIFFUSERS_BY_CLASS = """\
`DiffusionPipeline` loads this folder, but passes no class to the network. Labels 0 to {last} are \
the classes below Data, in this order; label {none} means "no class". In this folder, or with the \
name of its repository in place of the dot:
```python
import torch
from diffusers import DiffusionPipeline

pipeline = DiffusionPipeline.from_pretrained(".")
unet, scheduler = pipeline.unet, pipeline.scheduler
labels = torch.arange(4) % {none}
size = unet.config.sample_size
x = torch.randn(len(labels), unet.config.in_channels, size, size)
scheduler.set_timesteps({timesteps})
for t in scheduler.timesteps:
    with torch.no_grad():
        output = unet(x, t, class_labels=labels).sample
    x = scheduler.step(output, t, x).prev_sample
pixels = (x / 2 + 0.5).clamp(0, 1).permute(0, 2, 3, 1).numpy()
images = pipeline.numpy_to_pil(pixels)
```
{timesteps} steps are those of the training; fewer are faster and less exact."""

SAFETENSORS = """\
The weights are those of ddpm's network, and `config.json` describes it. To train them further, \
set `train.init` to this folder. To draw images, in this folder:
```python
import base64
from pathlib import Path

from ddpm_core.registry.serving import Served

model = Served(Path.cwd())
for image in model.images(model.tasks([{"n": 4, "seed": 1}])):
    Path(f"{image['number']}.png").write_bytes(base64.b64decode(image["image"]))
```"""

X0 = {
    "noise": ("the noise in `x`", "(x - np.sqrt(1 - a) * output) / np.sqrt(a)"),
    "x0": ("the image without noise", "output"),
    "v": (
        "the velocity, `sqrt(a) * noise - sqrt(1 - a) * image`",
        "np.sqrt(a) * x - np.sqrt(1 - a) * output",
    ),
}
BY_CLASS = """
- `condition`: int64 (batch), 0 to {last} for the classes below Data, in this order; {none} means \
"no class"\
"""
BY_TEXT = f"""
- `condition`: uint8 (batch, {TEXT_BYTES}), a text as UTF-8, cut or padded with zeros; zeros alone \
mean "no text"\
"""
TEXT_EXAMPLE = f"""\
text = "a text".encode()[:{TEXT_BYTES}].ljust({TEXT_BYTES}, b"\\0")
text_bytes = np.tile(np.frombuffer(text, np.uint8), (4, 1))
"""

ONNX = """\
`model.onnx` is the network, for any number of images:
- `x`: float32 (batch, channels, size, size), noisy images, of values from -1 to 1 without the noise
- `t`: int64 (batch), their timesteps{inputs}
- `output`: float32, the shape of `x`: {meaning}, where `a` is `alphas_cumprod[t]`

`config.json` contains `alphas_cumprod`, the share of the image in the variance of `x`. To draw \
images (DDIM, Song et al. 2021), in this folder:
```python
import json

import numpy as np
import onnxruntime

config = json.load(open("config.json"))
alphas = np.array([*config["alphas_cumprod"], 1.0])  # the last: an image without noise
network = onnxruntime.InferenceSession("model.onnx")
size, channels = config["image_size"], config["channels"]
x = np.random.default_rng(1).standard_normal((4, channels, size, size)).astype(np.float32)
{text}steps = np.linspace(len(alphas) - 2, 0, min(50, len(alphas) - 1)).round().astype(int)
for t, following in zip(steps, [*steps[1:], -1]):
    given = {{"x": x, "t": np.full(4, t){given}}}
    output, a, b = network.run(None, given)[0], alphas[t], alphas[following]
    x0 = ({x0}).clip(-1, 1)
    noise = (x - np.sqrt(a) * x0) / np.sqrt(1 - a)
    x = (np.sqrt(b) * x0 + np.sqrt(1 - b) * noise).astype(np.float32)
images = ((x + 1) * 127.5).round().astype(np.uint8)  # (4, channels, size, size)
```"""
