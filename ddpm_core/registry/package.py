"""A version's content: a checkpoint folder, the card, this package's code, and how it is called."""

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
from ddpm_core.checkpoint import SETTINGS, Checkpoint
from ddpm_core.errors import require
from ddpm_core.registry.request import FIELDS
from ddpm_core.storage import seal
from ddpm_core.storage.files import read_object
from ddpm_core.text import masked, throughout

PACKAGE = Path(ddpm_core.__file__).parent
CHECKPOINT = "checkpoint"  # the folder's name below a model's artifacts/
CARD = "README.md"

# What an answer needs, and nothing of training, tracking or evaluation.
NEEDED = ("torch", "numpy", "pillow", "safetensors", "pydantic", "ruamel.yaml", "rich")
ANSWER = ("image", "number", "seed", "class", "sampler", "steps", "guidance")


def requirements() -> list[str]:
    """The packages of this process, pinned to releases: without a build's label such as +cpu."""
    return [f"{name}=={version(name).partition('+')[0]}" for name in NEEDED]


def write_checkpoint(checkpoint: Checkpoint, sampled: dict[str, Any], folder: Path) -> None:
    """Put the weights that were scored, and their settings, into an absent folder.

    `sampled` are the fields of params' `sample` that the score was made with: they become the
    model's own, which hold where a request says nothing. Where this run lives, and passwords in
    URIs, stay behind.
    """
    folder.mkdir(parents=True)
    settings = read_object(checkpoint.folder / SETTINGS, SETTINGS)
    settings["params"] = checkpoint.params.record()
    settings["params"]["sample"].update(sampled)
    for key in ("workspace", "tracking"):
        settings["params"].pop(key, None)
    weights = checkpoint.weights_name(sampled["ema"])
    shutil.copyfile(checkpoint.folder / weights, folder / weights)
    settings["data"]["source"] = throughout(masked, settings["data"]["source"])
    (folder / SETTINGS).write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
    seal(folder)


def model_name(name: str, step: int) -> str:
    """What a model of the registered model `name` is called in its run."""
    return f"{re.sub('[^A-Za-z0-9_-]', '-', name)}-step-{step}"


def upload(run_id: str, name: str, step: int, folder: Path, params: dict[str, Any]) -> str:
    """Log `folder` (checkpoint/ and README.md) as a model of a run; return its models:/ URI.

    The run keeps its status: `mlflow.start_run` would set it to RUNNING, and after an error to
    FAILED if the server can still be reached.
    """
    mlflow = require("mlflow", "tracking")
    client, called = mlflow.MlflowClient(), model_name(name, step)
    run = client.get_run(run_id)
    shown = {key: str(value) for key, value in {**params, **run.data.params}.items()}
    model = client.create_logged_model(run.info.experiment_id, called, run_id, params=shown)
    with code() as package:
        logged = mlflow.models.Model.log(
            artifact_path=None,
            flavor=mlflow.pyfunc,
            run_id=run_id,
            model_id=model.model_id,
            python_model=str(package / "registry" / "served.py"),
            code_paths=[str(package)],
            artifacts={CHECKPOINT: str(folder / CHECKPOINT), "card": str(folder / CARD)},
            signature=signature(),
            input_example=[{"n": 2, "seed": 1}],
            pip_requirements=requirements(),
            step=step,
        )
    return str(logged.model_uri)


def signature() -> Any:
    """`n` and what else a request may say. The types are open, so that mistakes are told by us."""
    schema = require("mlflow.types.schema", "tracking")
    models = require("mlflow.models", "tracking")
    anything = schema.AnyType()
    fields = [schema.ColSpec(anything, name, required=name == "n") for name in FIELDS]
    answer = [schema.ColSpec(anything, name, required=False) for name in ANSWER]
    return models.ModelSignature(schema.Schema(fields), schema.Schema(answer))


@contextmanager
def code() -> Iterator[Path]:
    """A copy of this package as it is now: of it what served.py imports, sources alone.

    A server of MLflow takes each file by a request of its own, so what no answer needs is left out.
    """
    with tempfile.TemporaryDirectory(prefix="ddpm-code-") as scratch:
        for file in _served_files():
            copy = Path(scratch, file)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(PACKAGE.parent / file, copy)
        yield Path(scratch, PACKAGE.name)


@functools.cache
def _served_files() -> list[Path]:
    """served.py and what of this package it imports, relative to where the package lies."""
    with tempfile.TemporaryDirectory(prefix="ddpm-code-") as alone:
        # Nothing else lies beside it there, so the finder follows no import of other packages.
        Path(alone, PACKAGE.name).symlink_to(PACKAGE)
        finder = ModuleFinder(path=[alone])
        finder.run_script(str(Path(alone, PACKAGE.name, "registry", "served.py")))
        files = [getattr(module, "__file__", None) for module in finder.modules.values()]
        # those without a file are built into Python
        return [Path(file).relative_to(alone) for file in files if file]
