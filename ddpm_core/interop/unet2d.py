"""The config.json of diffusers' UNet2DModel, to and from ours.

The layout is that of google/ddpm-cifar10-32, Ho's network. What UNet2DModel can do beyond it, or
ours beyond UNet2DModel, is named and refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddpm_core.errors import UserError
from ddpm_core.models.layers import Attention
from ddpm_core.models.norms import Norm
from ddpm_core.models.unet import UNet, UNetConfig

# field of UNet2DModel: (the value of our network, diffusers' default for a file without it)
_FIXED: dict[str, tuple[Any, Any]] = {
    "act_fn": ("silu", "silu"),
    "add_attention": (True, True),
    "attn_norm_num_groups": (None, None),
    "center_input_sample": (False, False),
    "class_embed_type": (None, None),
    "downsample_padding": (0, 1),
    "downsample_type": ("conv", "conv"),
    "flip_sin_to_cos": (False, True),
    "freq_shift": (1, 0),
    "mid_block_scale_factor": (1, 1),
    "mid_block_type": ("UNetMidBlock2D", "UNetMidBlock2D"),
    "norm_eps": (1e-6, 1e-5),
    "resnet_time_scale_shift": ("default", "default"),
    "time_embedding_dim": (None, None),
    "time_embedding_type": ("positional", "positional"),
    "upsample_type": ("conv", "conv"),
}
_ATTENDS = {"DownBlock2D": False, "AttnDownBlock2D": True}
_MIRROR = {"DownBlock2D": "UpBlock2D", "AttnDownBlock2D": "AttnUpBlock2D"}


def to_config(given: Mapping[str, Any]) -> UNetConfig:
    """The network that a UNet2DModel's config.json describes. Raises UserError."""
    mistakes = [
        f"{name} is {given.get(name, default)!r:.80}; only {wanted!r} can be imported"
        for name, (wanted, default) in _FIXED.items()
        if given.get(name, default) != wanted
    ]
    down, up = list(given["down_block_types"]), list(given["up_block_types"])
    if not set(down) <= set(_ATTENDS) or up != [_MIRROR[kind] for kind in reversed(down)]:
        mistakes.append(
            f"down_block_types {down!r:.200} and up_block_types {up!r:.200}; only DownBlock2D, "
            "AttnDownBlock2D and their mirror image can be imported"
        )
    widths = [int(width) for width in given["block_out_channels"]]
    if any(width % widths[0] for width in widths):
        mistakes.append(
            f"block_out_channels {widths!r:.200}; only multiples of the first can be imported"
        )
    if given["in_channels"] != given["out_channels"]:
        mistakes.append(
            f"in_channels {given['in_channels']!r:.80}, out_channels "
            f"{given['out_channels']!r:.80}; they must be equal"
        )
    if mistakes:
        raise UserError(
            "This UNet2DModel is another network than ours:\n  " + "\n  ".join(mistakes)
        )
    return _config(given, widths, down)


def _config(given: Mapping[str, Any], widths: list[int], down: list[str]) -> UNetConfig:
    size = given["sample_size"]
    size = int(size if isinstance(size, int) else size[0])
    attention = [size // 2**i for i, kind in enumerate(down) if _ATTENDS[kind]]
    attending = [width for width, kind in zip(widths, down, strict=True) if _ATTENDS[kind]]
    classes = given.get("num_class_embeds")
    try:
        return UNetConfig(
            image_size=size,
            in_channels=int(given["in_channels"]),
            channels=widths[0],
            multipliers=tuple(width // widths[0] for width in widths),
            blocks=int(given.get("layers_per_block", 2)),
            attention=tuple(attention),
            heads=_heads(given.get("attention_head_dim", 8), [*attending, widths[-1]]),
            dropout=float(given.get("dropout", 0.0)),
            conditioning="none" if classes is None else "class",
            classes=0 if classes is None else int(classes),
        )
    except ValueError as error:
        raise UserError(f"This UNet2DModel is another network than ours: {error!s:.300}") from error


def _heads(head_dim: int | None, widths: list[int]) -> int:
    """The number of heads, if it is the same at each width that has attention."""
    if head_dim is None:
        return 1
    heads = sorted({max(1, width // head_dim) for width in widths})
    if len(heads) > 1:
        raise UserError(
            f"attention_head_dim is {head_dim}: with {sorted(set(widths))} channels that is "
            f"{heads} heads; only one number of heads for all layers can be imported."
        )
    return heads[0]


def from_unet(unet: UNet) -> dict[str, Any]:
    """The config.json of a UNet2DModel that computes what `unet` does. Raises UserError."""
    config = unet.config
    if config.conditioning == "text":
        raise UserError("A network conditioned on text can't be exported: UNet2DModel has none.")
    if config.multipliers[0] != 1:
        raise UserError(
            f"model.multipliers is {list(config.multipliers)}; UNet2DModel can express only "
            "networks whose first multiplier is 1."
        )
    attends = [size in config.attention for size in config.sizes]
    down = ["AttnDownBlock2D" if attending else "DownBlock2D" for attending in attends]
    return {
        "_class_name": "UNet2DModel",
        "_diffusers_version": "0.32.0",
        **{name: value for name, (value, _) in _FIXED.items()},
        "attention_head_dim": _head_dim(unet),
        "block_out_channels": config.widths,
        "down_block_types": down,
        "dropout": config.dropout,
        "in_channels": config.in_channels,
        "layers_per_block": config.blocks,
        "norm_num_groups": _groups(unet),
        "num_class_embeds": config.classes + 1 if config.conditioning == "class" else None,
        "out_channels": config.in_channels,
        "sample_size": config.image_size,
        "up_block_types": [_MIRROR[kind] for kind in reversed(down)],
    }


def _head_dim(unet: UNet) -> int | None:
    heads = unet.config.heads
    if heads == 1:
        return None
    layers = [module for module in unet.modules() if isinstance(module, Attention)]
    widths = sorted({layer.norm.num_channels for layer in layers})
    if len(widths) > 1:
        raise UserError(
            f"model.heads is {heads} at layers of {widths} channels; UNet2DModel has one size of a "
            "head for all layers, so this network can't be exported."
        )
    return widths[0] // heads


def _groups(unet: UNet) -> int:
    """The groups of each norm, if all have as many."""
    groups = sorted({norm.num_groups for norm in unet.modules() if isinstance(norm, Norm)})
    if len(groups) > 1:
        raise UserError(
            f"With model.channels {unet.config.channels} the layers are normed in {groups} groups; "
            "UNet2DModel has one number for all, so this network can't be exported. With a "
            "multiple of 128 each has 32."
        )
    return groups[0]


def check_groups(unet: UNet, groups: int) -> None:
    """Refuse a foreign network whose norms have other groups than our rule gives."""
    for name, module in unet.named_modules():
        if isinstance(module, Norm) and module.num_groups != groups:
            raise UserError(
                f"norm_num_groups is {groups}; layer {name} of our network has "
                f"{module.num_groups} groups for its {module.num_channels} channels, so the "
                "weights would mean something else."
            )
