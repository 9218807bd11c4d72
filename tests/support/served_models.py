"""Register models, send requests to the server, and compute the expected images."""

from __future__ import annotations

import base64
import io
import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
from PIL import Image

from ddpm_core.checkpoint import Checkpoint
from ddpm_core.config import load as params
from ddpm_core.registry import package
from ddpm_core.registry.models import Registry
from ddpm_core.sampling.loading import load_moments
from ddpm_core.sampling.sampler import ImageSampler
from ddpm_core.tracking.run import MlflowRun
from support.mlflow_server import wait_until
from support.program import Program

OWN = {"ema": 0.9, "seed": 5, "sampler": "ddim", "steps": 5}  # the settings of a version's score

# The same request in every form that MLflow's server accepts.
SHAPES = [
    {"dataframe_split": {"columns": ["n", "seed"], "data": [[2, 9]]}},
    {"dataframe_records": [{"n": 2, "seed": 9}]},
    {"inputs": [{"n": 2, "seed": 9}]},
    {"inputs": {"n": 2, "seed": 9}},
    {"inputs": {"n": [2], "seed": [9]}},
    {"instances": [{"n": 2, "seed": 9}]},
]


def publish(
    uri: str, name: str, checkpoint: Checkpoint, folder: Path, **tags: str
) -> tuple[Registry, Any]:
    """Register a new version without an alias."""
    package.write_checkpoint(checkpoint, OWN, folder / "checkpoint")
    (folder / "README.md").write_text("# a card\n")
    registry = Registry(params.validate({"tracking": {"uri": uri}, "register": {"name": name}}))
    run = MlflowRun.open(uri, "serving", "run", None, uuid4().hex)
    model = package.upload(run.run_id, name, checkpoint.step, folder, {"step": checkpoint.step})
    return registry, registry.create(model, run.run_id, "# a card", {"step": "4", **tags})


def get(url: str) -> tuple[int, Any]:
    """Return the status and JSON of a page."""
    try:
        with urllib.request.urlopen(url, timeout=10) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def address(process: Program) -> str:
    """Return the URL of a running `ddpm serve --port 0`."""
    wait_until(lambda: "listening" in process.said() or process.wait(0), "it listens")
    return f"http://127.0.0.1:{process.said().split('port ')[1].split('.')[0]}"


def ask(url: str, body: Any) -> tuple[int, Any]:
    """Return the status, and the predictions or the error message."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    asked = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(asked, timeout=60) as response:
            return response.status, json.load(response)["predictions"]
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)["message"]


def pixels(answer: dict[str, Any]) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(answer["image"]))))


def drawn(checkpoint: Checkpoint, count: int, **settings: Any) -> np.ndarray:
    """Return the images of `ddpm sample` with the model's settings, updated by `settings`."""
    sample = checkpoint.params.sample.model_copy(update={**OWN, **settings})
    model = checkpoint.load(sample.ema, "cpu")
    diffusion, moments = checkpoint.params.diffusion, load_moments(checkpoint)
    data = checkpoint.training_data
    sampler = ImageSampler(model, data, sample, diffusion, moments=moments)
    return sampler.images(range(count))


def assert_same_images(answers: list[dict[str, Any]], expected: np.ndarray) -> None:
    """Compare up to rounding: the batch size may change the last bit of a pixel."""
    served = np.stack([pixels(answer) for answer in answers]).astype(int)
    assert np.abs(served - expected[..., 0].astype(int)).max() <= 1
