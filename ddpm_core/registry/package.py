"""The content of a version: checkpoint and other files, code, requirements and signature."""

from __future__ import annotations

import functools
import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from modulefinder import ModuleFinder
from pathlib import Path
from typing import Any

import ddpm_core
from ddpm_core.checkpoint import GUIDE, MOMENTS, SETTINGS, Checkpoint
from ddpm_core.errors import require
from ddpm_core.registry.request import FIELDS
from ddpm_core.storage import seal
from ddpm_core.storage.files import read_object, save_tensors
from ddpm_core.text import masked, throughout

PACKAGE = Path(ddpm_core.__file__).parent
CHECKPOINT = "checkpoint"  # the name of its folder in a model's artifacts/
CARD = "README.md"
SCORES = "scores.json"  # the row of results.json: scores and their evidence
DIFFUSERS = "diffusers"  # the folder that diffusers loads

# The packages that serving needs; nothing for training, tracking or evaluation.
PACKAGES = ("torch", "numpy", "pillow", "safetensors", "pydantic", "ruamel.yaml", "rich")
OUTPUTS = ("image", "number", "seed", "class", "sampler", "steps", "guidance")


def requirements() -> list[str]:
    """Return the installed versions as pins, without build labels such as +cpu."""
    return [f"{name}=={version(name).partition('+')[0]}" for name in PACKAGES]


def write_checkpoint(checkpoint: Checkpoint, sampled: dict[str, Any], folder: Path) -> None:
    """Write the scored weights, what drawing with them requires, and their settings to a folder.

    Leaves out the locations of this run, and masks passwords in URIs.

    Args:
        checkpoint: The checkpoint to copy, with its guide if the samples had one.
        sampled: The settings of params' `sample` that the score was measured with. They become the
            defaults for requests.
        folder: An empty folder, created if it is missing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    settings = read_object(checkpoint.folder / SETTINGS, SETTINGS)
    settings["params"] = checkpoint.params.record()
    settings["params"]["sample"].update(sampled)
    for key in ("workspace", "tracking"):
        settings["params"].pop(key, None)
    ema = sampled["ema"]
    _write_weights(checkpoint, ema, folder / checkpoint.weights_name(ema))
    if checkpoint.params.diffusion.uses_moments:
        shutil.copyfile(checkpoint.folder / MOMENTS, folder / MOMENTS)
    settings["data"]["source"] = throughout(masked, settings["data"]["source"])
    sample = settings["params"]["sample"]
    if checkpoint.guide is not None:
        _write_weights(checkpoint.guide, ema, folder / GUIDE)
        # As a number, the guide is valid whatever the params of the run select.
        sample["guide"] = checkpoint.guide.step
    elif GUIDE in checkpoint.checksums:  # the checkpoint is that of a version
        shutil.copyfile(checkpoint.folder / GUIDE, folder / GUIDE)
    if checkpoint.guide is not None or checkpoint.reconstructs(ema):
        # Whether the guide and the width are possible depends on the step.
        sample["checkpoints"] = [checkpoint.step]
    (folder / SETTINGS).write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
    seal(folder)


def _write_weights(checkpoint: Checkpoint, ema: float | str, file: Path) -> None:
    """Copy the file of some weights, or save the reconstructed ones."""
    if checkpoint.reconstructs(ema):
        save_tensors(checkpoint.tensors(ema), file)
    else:
        shutil.copyfile(checkpoint.folder / checkpoint.weights_name(ema), file)


def model_name(name: str, step: int) -> str:
    """Return the name, within a run, of a model of the registered model `name`."""
    return f"{re.sub('[^A-Za-z0-9_-]', '-', name)}-step-{step}"


def upload(run_id: str, name: str, step: int, folder: Path, params: dict[str, Any]) -> str:
    """Log the content of `folder` as a model of a run; return its models:/ URI.

    Does not use `mlflow.start_run`, which would set the run's status to RUNNING, or to FAILED after
    an error.
    """
    mlflow = require("mlflow", "tracking")
    client = mlflow.MlflowClient()
    run = client.get_run(run_id)
    model = client.create_logged_model(
        run.info.experiment_id,
        model_name(name, step),
        run_id,
        params={key: str(value) for key, value in {**params, **run.data.params}.items()},
    )
    with code() as package:
        logged = mlflow.models.Model.log(
            artifact_path=None,
            flavor=mlflow.pyfunc,
            run_id=run_id,
            model_id=model.model_id,
            python_model=str(package / "registry" / "served.py"),
            code_paths=[str(package)],
            artifacts={path.name: str(path) for path in sorted(folder.iterdir())},
            signature=signature(),
            input_example=[{"n": 2, "seed": 1}],
            pip_requirements=requirements(),
            step=step,
        )
    return str(logged.model_uri)


def signature() -> Any:
    """Return the signature of requests. Its types are open, so that our own validation decides."""
    schema = require("mlflow.types.schema", "tracking")
    models = require("mlflow.models", "tracking")
    anything = schema.AnyType()
    inputs = [schema.ColSpec(anything, name, required=name == "n") for name in FIELDS]
    outputs = [schema.ColSpec(anything, name, required=False) for name in OUTPUTS]
    return models.ModelSignature(schema.Schema(inputs), schema.Schema(outputs))


@contextmanager
def code() -> Iterator[Path]:
    """Yield a copy of the modules of this package that served.py imports.

    The upload to a server takes one request per file, so nothing else is copied.
    """
    with tempfile.TemporaryDirectory(prefix="ddpm-code-") as scratch:
        for file in _served_files():
            copy = Path(scratch, file)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(PACKAGE.parent / file, copy)
        yield Path(scratch, PACKAGE.name)


@functools.cache
def _served_files() -> list[Path]:
    """Return served.py and the modules that it imports, relative to the package's parent."""
    with tempfile.TemporaryDirectory(prefix="ddpm-code-") as alone:
        # The link is alone in its folder, so the finder cannot follow imports of other packages.
        Path(alone, PACKAGE.name).symlink_to(PACKAGE)
        finder = ModuleFinder(path=[alone])
        finder.run_script(str(Path(alone, PACKAGE.name, "registry", "served.py")))
        files = [getattr(module, "__file__", None) for module in finder.modules.values()]
        # Modules without a file are built into Python.
        return [Path(file).relative_to(alone) for file in files if file]
