"""Convert the config.json of diffusers' UNet2DModel to and from UNetConfig.

Supports networks of the plain blocks, with and without attention. Anything else is reported by the
name of its field.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from ddpm_core.errors import Problem, UserError, got
from ddpm_core.interop.fields import Fields
from ddpm_core.models.config import UNetConfig
from ddpm_core.models.unet import Norm, UNet
from ddpm_core.problems import problems_of

# Fields with the same name and meaning in both.
_SAME = ("downsample_padding", "flip_sin_to_cos", "freq_shift", "norm_eps")
FIELDS = Fields(
    classes=("UNet2DModel",),
    carried={
        "sample_size": None,
        "in_channels": 3,
        "out_channels": 3,
        "block_out_channels": (224, 448, 672, 896),
        "layers_per_block": 2,
        "down_block_types": ("DownBlock2D", *["AttnDownBlock2D"] * 3),
        "up_block_types": (*["AttnUpBlock2D"] * 3, "UpBlock2D"),
        "attention_head_dim": 8,
        "norm_num_groups": 32,
        "dropout": 0.0,
        "num_class_embeds": None,
        "downsample_padding": 1,
        "flip_sin_to_cos": True,
        "freq_shift": 0,
        "norm_eps": 1e-5,
    },
    fixed={
        "act_fn": ("silu", "swish"),
        "add_attention": (True,),
        "attn_norm_num_groups": (None,),
        "center_input_sample": (False,),
        "class_embed_type": (None,),
        "downsample_type": ("conv",),
        "mid_block_scale_factor": (1,),
        "mid_block_type": ("UNetMidBlock2D",),
        "resnet_time_scale_shift": ("default",),
        "time_embedding_dim": (None,),
        "time_embedding_type": ("positional",),
        "upsample_type": ("conv",),
    },
    # The first is for a different type of time embedding. The others are settings of EMAModel,
    # which writes them into the config of the network that it averages.
    ignored=(
        "num_train_timesteps",
        *("decay", "inv_gamma", "min_decay", "optimization_step", "power"),
        *("update_after_step", "use_ema_warmup"),
    ),
)
_DOWN = {"DownBlock2D": False, "AttnDownBlock2D": True}  # whether the block has attention
_UP = {"UpBlock2D": False, "AttnUpBlock2D": True}


def to_config(given: Mapping[str, Any]) -> UNetConfig:
    """Return the network that a UNet2DModel's config.json describes.

    Raises UserError, which lists all problems, if ddpm does not support the network.
    """
    values, problems = FIELDS.read(given)
    if values:
        problems += _problems(values)
    if not problems:
        try:
            return _config(values)
        except ValidationError as error:
            problems = problems_of(error, UNetConfig)
    raise UserError("Unsupported UNet2DModel:", problems)


def _problems(values: Mapping[str, Any]) -> list[Problem]:
    problems = []
    size = values["sample_size"]
    if not isinstance(size, int) and (not isinstance(size, list | tuple) or len(set(size)) != 1):
        problems.append(Problem("sample_size", got(size), "must be a number or equal numbers"))
    channels = (values["in_channels"], values["out_channels"])
    if channels not in ((1, 1), (3, 3)):
        path = "in_channels, out_channels"
        problems.append(Problem(path, got(channels), "must be both 1 or both 3"))
    for field, known in (("down_block_types", _DOWN), ("up_block_types", _UP)):
        if unsupported := [kind for kind in values[field] if kind not in known]:
            expected = f"must be {' or '.join(known)}"
            problems.append(Problem(field, got(unsupported[0]), expected))
    lists = ("block_out_channels", "down_block_types", "up_block_types")
    lengths = [len(values[field]) for field in lists]
    if len(set(lengths)) > 1:
        problems.append(Problem(", ".join(lists), f"got lengths {lengths}", "must be equal"))
    if values["norm_num_groups"] is None:
        problems.append(Problem("norm_num_groups", got(None), "must be a number"))
    return problems


def _config(values: Mapping[str, Any]) -> UNetConfig:
    size = values["sample_size"]
    size = size if isinstance(size, int) else size[0]
    widths = values["block_out_channels"]
    classes = values["num_class_embeds"]
    down = [_DOWN[kind] for kind in values["down_block_types"]]
    up = [_UP[kind] for kind in reversed(values["up_block_types"])]
    fields = dict(
        image_size=size,
        in_channels=values["in_channels"],
        channels=widths[0],
        multipliers=tuple(_ratio(width, widths[0]) for width in widths),
        blocks=values["layers_per_block"],
        attention=tuple(size // 2**level for level, attends in enumerate(down) if attends),
        dropout=values["dropout"],
        conditioning="none" if classes is None else "class",
        classes=0 if classes is None else classes,
        norm_num_groups=values["norm_num_groups"],
        attention_head_dim=values["attention_head_dim"],
        attention_up=(
            None if up == down else tuple(level for level, attends in enumerate(up) if attends)
        ),
        **{name: values[name] for name in _SAME},
    )
    return UNetConfig.from_dict(fields).with_equal_heads()


def _ratio(width: int, first: int) -> int | float:
    return width // first if width % first == 0 else width / first


def from_unet(unet: UNet) -> dict[str, Any]:
    """Return the config.json of a UNet2DModel that computes the same as `unet`.

    Raises UserError if there is none.
    """
    config = unet.config
    if config.conditioning == "text":
        raise UserError(
            "model.conditioning: got text; must be none or class for the network to be exported."
        )
    if config.multipliers[0] != 1:
        raise UserError(
            f"model.multipliers: got {list(config.multipliers)}; the first must be 1 for the "
            "network to be exported."
        )
    down, up = config.attends
    shift, half = config.freq_shift, config.channels // 2
    return {
        "_class_name": "UNet2DModel",
        "_diffusers_version": "0.32.0",
        **FIELDS.defaults,
        **{name: getattr(config, name) for name in _SAME},
        "attention_head_dim": _head_dim(config),
        "block_out_channels": config.widths,
        "down_block_types": ["AttnDownBlock2D" if attends else "DownBlock2D" for attends in down],
        "dropout": config.dropout,
        # With one frequency, UNet2DModel would divide 0 by 0 for a shift of 1.
        "freq_shift": 0 if shift == half else shift,
        "in_channels": config.in_channels,
        "layers_per_block": config.blocks,
        "norm_num_groups": _groups(unet),
        "num_class_embeds": config.classes + 1 if config.conditioning == "class" else None,
        "out_channels": config.in_channels,
        "sample_size": config.image_size,
        "up_block_types": ["AttnUpBlock2D" if attends else "UpBlock2D" for attends in up[::-1]],
    }


def _head_dim(config: UNetConfig) -> int | None:
    if config.attention_head_dim is not None or config.heads == 1:
        return config.attention_head_dim
    widths = config.attention_widths
    if len(widths) > 1:
        raise UserError(
            f"model.heads: got {config.heads}, for layers of {widths} channels; must be 1 for the "
            "network to be exported, because UNet2DModel has one head size for all layers."
        )
    return widths[0] // config.heads


def _groups(unet: UNet) -> int:
    """Return the number of groups that all norms have. Raises UserError if it differs."""
    groups = sorted({norm.num_groups for norm in unet.modules() if isinstance(norm, Norm)})
    if len(groups) > 1:
        raise UserError(
            f"The norms of this network, which an earlier version of ddpm made, have {groups} "
            "groups. It cannot be exported, because UNet2DModel has one number for all norms. "
            "Train the network again: this version uses one number."
        )
    return groups[0]
