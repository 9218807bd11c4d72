"""Folders of the diffusers package: a UNet2DModel with its DDPMScheduler.

JSON and safetensors are read and written here directly, so the package itself isn't needed, and
nothing that is read can run code.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddpm_core.checkpoint import outline
from ddpm_core.errors import Corrupt, UserError
from ddpm_core.interop import tensors, unet2d
from ddpm_core.models.unet import UNet, UNetConfig
from ddpm_core.reading import read_object, read_tensors_and_metadata, save_tensors

WEIGHTS = "diffusion_pytorch_model.safetensors"
_PREDICTIONS = {"noise": "epsilon", "x0": "sample", "v": "v_prediction"}
# What a field or a tensor of another type than was written makes of arithmetic.
_DAMAGE = (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RuntimeError)
_NULL_CLASS = "null_class"  # in the metadata of weights that we exported


def import_folder(folder: Path | str) -> tuple[UNetConfig, dict[str, Tensor], dict[str, Any]]:
    """A pipeline's folder as network, weights (float32) and settings of the section `diffusion`.

    A network conditioned on classes that was not exported from here has no vector for "no class";
    it gets the mean of the others. Raises UserError where the folder holds another network or
    process than ours can be.
    """
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        raise UserError(f"There is no folder {folder}. Give that of a pipeline saved by diffusers.")
    scheduler = _json(folder, "scheduler", "scheduler_config.json")
    described = _json(folder, "unet", "config.json")
    try:
        settings = _settings(scheduler)
        config, groups = unet2d.to_config(described), int(described.get("norm_num_groups", 32))
    except _DAMAGE as error:
        raise Corrupt(f"A config of the network in {folder} is damaged: {error!r:.300}") from error
    given, metadata = _weights(folder)
    try:
        config, given = _with_null_class(config, given, _NULL_CLASS in metadata)
        unet = outline(config, given, str(folder))
        weights = tensors.to_weights(unet, given)
        unet2d.check_groups(unet, groups)
        return config, weights, settings
    except _DAMAGE as error:
        raise Corrupt(f"The weights in {folder} are damaged: {error!r:.300}") from error


def export_folder(
    unet: UNet, schedule_name: str, timesteps: int, prediction: str, folder: Path | str
) -> list[str]:
    """Write a folder that `diffusers.DDPMPipeline.from_pretrained` loads.

    Returns sentences on what its user must know. The folder must be new or empty. Raises UserError
    where diffusers can't express the network.
    """
    described, scheduler = unet2d.from_unet(unet), _scheduler(schedule_name, timesteps, prediction)
    folder = Path(folder).expanduser()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists already and is not empty; give a new folder.")
    building = folder.with_name(f".{folder.name}-{os.getpid()}")
    try:
        _write(unet, described, scheduler, building)
        if folder.exists():
            folder.rmdir()
        building.rename(folder)
    except OSError as error:
        raise UserError(f"Cannot write {folder}: {error.strerror}.") from error
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return _notes(unet, timesteps)


def _write(unet: UNet, described: Any, scheduler: Any, folder: Path) -> None:
    index = {
        "_class_name": "DDPMPipeline",
        "_diffusers_version": described["_diffusers_version"],
        "scheduler": ["diffusers", "DDPMScheduler"],
        "unet": ["diffusers", "UNet2DModel"],
    }
    files = {
        "model_index.json": index,
        "unet/config.json": described,
        "scheduler/scheduler_config.json": scheduler,
    }
    for name, document in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    metadata = {"format": "pt"}
    if unet.config.conditioning == "class":
        metadata[_NULL_CLASS] = str(unet.config.classes)
    save_tensors(tensors.from_weights(unet), folder / "unet" / WEIGHTS, metadata)


def _notes(unet: UNet, timesteps: int) -> list[str]:
    notes = []
    if timesteps < 1000:
        notes.append(
            f"DDPMPipeline asks for 1000 steps unless told otherwise: call it with "
            f"num_inference_steps={timesteps} or fewer."
        )
    if unet.config.conditioning == "class":
        notes.append(
            "DDPMPipeline loads this network but passes no class to it: call pipeline.unet(x, t, "
            f"class_labels=labels); label {unet.config.classes} is no class, as for guidance."
        )
    return notes


def _scheduler(name: str, timesteps: int, prediction: str) -> dict[str, Any]:
    """DDPMScheduler's config: Ho's larger variance, x0 clipped to [-1, 1]."""
    schedules = {"linear": "linear", "cosine": "squaredcos_cap_v2"}
    for given, known in ((name, schedules), (prediction, _PREDICTIONS)):
        if given not in known:
            raise UserError(f"diffusers has no {given!r}; {', '.join(known)} can be exported.")
    return {
        "_class_name": "DDPMScheduler",
        "_diffusers_version": "0.32.0",
        "beta_schedule": schedules[name],
        "beta_start": 1e-4 * 1000 / timesteps,
        "beta_end": 0.02 * 1000 / timesteps,
        "clip_sample": True,
        "clip_sample_range": 1.0,
        "num_train_timesteps": timesteps,
        "prediction_type": _PREDICTIONS[prediction],
        "variance_type": "fixed_large",
    }


def _settings(scheduler: dict[str, Any]) -> dict[str, Any]:
    """schedule, timesteps and prediction of a scheduler's config. Raises UserError."""
    timesteps = int(scheduler.get("num_train_timesteps", 1000))
    kind = scheduler.get("beta_schedule", "linear")
    predictions = {their: own for own, their in _PREDICTIONS.items()}
    prediction = scheduler.get("prediction_type", "epsilon")
    mistakes = [
        f"{field} is {scheduler[field]!r:.80}; it can't be imported"
        for field in ("trained_betas", "rescale_betas_zero_snr", "thresholding")
        if scheduler.get(field)
    ]
    if kind not in ("linear", "squaredcos_cap_v2"):
        mistakes.append(
            f"beta_schedule is {kind!r:.80}; only linear and squaredcos_cap_v2 are known"
        )
    for field, ours in (("beta_start", 1e-4), ("beta_end", 0.02)):
        given, wanted = scheduler.get(field, ours), ours * 1000 / timesteps
        if kind == "linear" and not math.isclose(given, wanted, rel_tol=1e-6):
            mistakes.append(
                f"{field} is {given!r:.80}; at {timesteps} timesteps it must be {wanted:g}"
            )
    if prediction not in predictions:
        mistakes.append(
            f"prediction_type is {prediction!r:.80}; it may be {', '.join(predictions)}"
        )
    if mistakes:
        raise UserError("This scheduler is another process than ours:\n  " + "\n  ".join(mistakes))
    schedule = "linear" if kind == "linear" else "cosine"
    return {"schedule": schedule, "timesteps": timesteps, "prediction": predictions[prediction]}


def _json(folder: Path, part: str, name: str) -> dict[str, Any]:
    """A part's config: in its subfolder, or, as in the oldest pipelines, at the top."""
    for path in (folder / part / name, folder / name):
        if path.is_file():
            return read_object(path, str(path))
    raise UserError(f"{folder} has no {part}/{name}, as a pipeline saved by diffusers has.")


def _weights(folder: Path) -> tuple[dict[str, Tensor], Mapping[str, str]]:
    for path in (folder / "unet" / WEIGHTS, folder / WEIGHTS):
        if path.is_file():
            return read_tensors_and_metadata(path)
    if any(folder.rglob("*.bin")):
        raise UserError(
            f"{folder} has its weights as .bin, a pickle, which runs code when it is read. Convert "
            "it where you trust it: DDPMPipeline.from_pretrained(folder).save_pretrained(new)."
        )
    raise UserError(f"{folder} has no unet/{WEIGHTS}.")


def _with_null_class(
    config: UNetConfig, given: dict[str, Tensor], has_null: bool
) -> tuple[UNetConfig, dict[str, Tensor]]:
    """Our networks count the vector for no class apart; others have none."""
    if config.conditioning != "class" or "class_embedding.weight" not in given:
        return config, given
    if has_null:
        return UNetConfig.from_dict({**vars(config), "classes": config.classes - 1}), given
    vectors = given["class_embedding.weight"]
    with_null = torch.cat([vectors, vectors.mean(0, keepdim=True)])
    return config, {**given, "class_embedding.weight": with_null}
