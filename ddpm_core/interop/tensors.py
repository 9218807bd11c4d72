"""Rename the tensors of diffusers' UNet2DModel to those of UNet, and back.

The values are the same, but UNet joins linear layers with the same input into one: query, key and
value, and the projections of the time embedding for all residual blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from ddpm_core.errors import UserError
from ddpm_core.models.unet import Attention, Stage, UNet

Names = tuple[str, list[str]]  # a name in UNet, and the names in UNet2DModel that it joins
_OLD_NAMES = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}


def to_weights(unet: UNet, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the state_dict for `unet`, float32, from UNet2DModel's tensors.

    Raises UserError if tensors are missing, unknown or of the wrong shape.
    """
    left, weights, names = dict(given), {}, _their_tensors(unet)
    for name, tensor in unet.state_dict().items():
        parts = [_take(left, theirs) for theirs in names[name]]
        shapes = [tuple(part.shape[1:]) for part in parts]
        if set(shapes) == {tuple(tensor.shape[1:])} and sum(map(len, parts)) == len(tensor):
            weights[name] = torch.cat([part.float() for part in parts])
        else:
            raise UserError(
                f"{', '.join(names[name])}: got shapes {[tuple(part.shape) for part in parts]}; "
                f"must be {tuple(tensor.shape)} together, according to config.json."
            )
    if left:
        raise UserError(f"The weights contain {min(left)}, which config.json does not describe.")
    return weights


def from_weights(unet: UNet) -> dict[str, Tensor]:
    """Return UNet2DModel's tensors for the weights of `unet`, float32 on the CPU.

    The weights for parameters of `train.augment` are left out: in sampling all of these are 0.
    """
    tensors, names = {}, _their_tensors(unet)
    for name, tensor in _state(unet).items():
        theirs = names[name]
        joined = name.startswith("time_projection.")
        sizes = unet.time_sizes if joined else [len(tensor) // len(theirs)] * len(theirs)
        for their, part in zip(theirs, torch.split(tensor, sizes), strict=True):
            tensors[their] = part.detach().float().cpu().contiguous()
    return tensors


def _state(unet: UNet) -> dict[str, Tensor]:
    """Return the tensors of a network that sampling uses."""
    tensors = unet.state_dict().items()
    return {name: tensor for name, tensor in tensors if not name.startswith("augmentation.")}


def _take(left: dict[str, Tensor], name: str) -> Tensor:
    for candidate in (name, _old_name(name)):
        if candidate in left:
            return left.pop(candidate)
    raise UserError(f"{name} is missing in the weights; config.json requires it.")


def _old_name(name: str) -> str:
    """Return the name of a tensor in diffusers before version 0.15."""
    for new, old in _OLD_NAMES.items():
        name = name.replace(f".{new}.", f".{old}.")
    return name


def _their_tensors(unet: UNet) -> dict[str, list[str]]:
    """Return the names of UNet2DModel's tensors for each tensor of UNet."""
    modules = _their_modules(unet)
    names = [(name, *name.rpartition(".")) for name in _state(unet)]
    return {name: [f"{their}.{kind}" for their in modules[own]] for name, own, _, kind in names}


def _their_modules(unet: UNet) -> dict[str, list[str]]:
    """Return the names of UNet2DModel's modules for each module of UNet that has tensors."""
    names = {
        "conv_in": ["conv_in"],
        "time_embedding.linear1": ["time_embedding.linear_1"],
        "time_embedding.linear2": ["time_embedding.linear_2"],
        "condition.embedding": ["class_embedding"],
        "time_projection": [],
        "norm_out": ["conv_norm_out"],
        "conv_out": ["conv_out"],
    }
    for stage, own, block, index in _stages(unet):
        names |= _residual(f"{own}.block", f"{block}.resnets.{index}")
        names["time_projection"].append(f"{block}.resnets.{index}.time_emb_proj")
        if stage.attention is not None:
            names |= _attention(stage.attention, f"{own}.attention", f"{block}.attentions.{index}")
    return names | dict(_resampling(unet))


def _stages(unet: UNet) -> Iterator[tuple[Stage, str, str, int]]:
    """Yield each stage, its name, and the name of UNet2DModel's block with the index in it."""
    for part, theirs in (("down", "down_blocks"), ("middle", "mid_block"), ("up", "up_blocks")):
        block, index = 0, 0
        for number, layer in enumerate(unet.get_submodule(part).children()):
            if isinstance(layer, Stage):
                numbered = theirs if part == "middle" else f"{theirs}.{block}"
                yield layer, f"{part}.{number}", numbered, index
                index += 1
            else:
                block, index = block + 1, 0


def _resampling(unet: UNet) -> Iterator[Names]:
    for part, theirs in (("down", "downsamplers"), ("up", "upsamplers")):
        block = 0
        for number, layer in enumerate(unet.get_submodule(part).children()):
            if not isinstance(layer, Stage):
                yield f"{part}.{number}.conv", [f"{part}_blocks.{block}.{theirs}.0.conv"]
                block += 1


def _residual(own: str, theirs: str) -> dict[str, list[str]]:
    parts = {name: name for name in ("norm1", "conv1", "norm2", "conv2")}
    parts["shortcut"] = "conv_shortcut"
    return {f"{own}.{name}": [f"{theirs}.{their}"] for name, their in parts.items()}


def _attention(layer: Attention, own: str, theirs: str) -> dict[str, list[str]]:
    return {
        f"{own}.norm": [f"{theirs}.group_norm"],
        f"{own}.qkv": [f"{theirs}.{part}" for part in ("to_q", "to_k", "to_v")],
        f"{own}.out": [f"{theirs}.to_out.0"],
    }
