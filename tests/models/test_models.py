"""The U-Net: sizes, initial weights, conditions, and equal results however it is computed."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor
from torch.nn import functional

from ddpm_core import rng
from ddpm_core.models import cpu
from ddpm_core.models.conditioning import TextEncoder
from ddpm_core.models.config import DETAILS, UNetConfig, group_count
from ddpm_core.models.cpu import CACHED, EXPLICIT_LENGTH
from ddpm_core.models.execution import prepare_model
from ddpm_core.models.init import initialise
from ddpm_core.models.layers import Conv2d, attend
from ddpm_core.models.unet import Norm, UNet, Upsample
from ddpm_core.problems import problems_of

CPU = torch.device("cpu")
needs_onednn = pytest.mark.skipif(
    not cpu.has_packing(), reason="no bfloat16 operations of oneDNN on this processor"
)
# The values of diffusers' own networks, but an eps large enough to show beside rounding.
DIFFUSERS = {"downsample_padding": 1, "flip_sin_to_cos": True, "freq_shift": 0}
DIFFUSERS |= {"norm_eps": 0.1, "norm_num_groups": 8, "attention_head_dim": 4}
SMALL = {"image_size": 8, "in_channels": 1, "channels": 8, "multipliers": (1, 2), "blocks": 1}


def config(**changes: Any) -> UNetConfig:
    return UNetConfig.from_dict(SMALL | {"attention": (4,)} | changes)


def normals(name: str, shape: tuple[int, ...]) -> Tensor:
    key = rng.key(rng.Purpose.EVALUATE, int.from_bytes(name.encode(), "big"))
    return rng.normal(key, torch.tensor([0]), shape)[0]


def uniforms(name: str, shape: tuple[int, ...]) -> Tensor:
    key = rng.key(rng.Purpose.INIT, int.from_bytes(name.encode(), "big"))
    return rng.uniform(key, torch.tensor([0]), shape)[0]


def network(**changes: Any) -> UNet:
    """A network whose weights are all random, its last layers too."""
    made = UNet(config(**changes))
    initialise(made, uniforms)
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if not weight.any():
                weight.copy_(0.2 * normals(name, tuple(weight.shape)))
    return made


def images(of: UNet, batch: int = 2) -> tuple[Tensor, Tensor]:
    made = of.config
    x = normals("images", (batch, made.in_channels, made.image_size, made.image_size))
    return x, torch.arange(batch) * 300 + 5


def text(*lines: str) -> Tensor:
    rows = [line.encode().ljust(64, b"\0") for line in lines]
    return torch.tensor([list(row) for row in rows], dtype=torch.uint8)


# Sizes


def test_hos_network_has_the_published_number_of_weights() -> None:
    made = UNetConfig(32, 3, 128, (1, 2, 2, 2), blocks=2, attention=(16,))
    assert sum(weight.numel() for weight in UNet(made).parameters()) == 35_746_307


@pytest.mark.parametrize(
    "changes",
    [
        {"channels": 20},
        {"channels": 31, "in_channels": 3},
        {"channels": 2, "multipliers": (1,), "attention": ()},
        {"image_size": 12, "multipliers": (1, 1, 3), "blocks": 2, "attention": (12, 3)},
        {"heads": 4, "attention": (8, 4)},
    ],
)
def test_output_has_the_shape_of_the_images(
    changes: dict[str, Any],
) -> None:
    made = network(**changes)
    x, t = images(made)
    output = made(x, t)
    assert output.shape == x.shape
    assert output.dtype == torch.float32
    assert output.isfinite().all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"image_size": 28, "multipliers": (1, 2, 2, 2)},
            "image_size: got 28; must be a multiple of 8",
        ),
        ({"attention": (5,)}, "attention: got 5; must be one of [8, 4]"),
        ({"heads": 3}, "heads: got 3; must divide the channels of every level, [8, 16]"),
        (
            {"channels": 0, "blocks": 0},
            "channels: got 0; must be at least 2\nblocks: got 0; must be at least 1",
        ),
        ({"blocks": "1"}, "blocks: got '1'; must be an integer"),
        ({"blocks": 2**21}, "blocks: got 2097152; must be at most 1048576"),
        ({"in_channels": 2}, "in_channels: got 2; must be 1 or 3"),
        ({"multipliers": ()}, "multipliers: got (); must be a list of at least 1"),
        (
            {"multipliers": (1, float("inf"))},
            "multipliers[1]: got inf; must be an integer, or a finite number",
        ),
        ({"dropout": 1.0}, "dropout: got 1.0; must be less than 1"),
        ({"conditioning": "sound"}, "got 'sound'; must be 'none', 'class' or 'text'"),
        ({"conditioning": "class"}, "classes: got 0; must be at least 1 with conditioning class"),
        ({"cross_attention": True}, "got true; must be false unless conditioning is text"),
        ({"multipliers": (1, 1.3)}, "multipliers: got 1.3; times channels, 8, must be an integer"),
        ({"norm_num_groups": 3}, "norm_num_groups: got 3; must divide"),
        ({"attention_head_dim": 3}, "attention_head_dim: got 3; must divide"),
        ({"norm_eps": float("nan")}, "norm_eps: got nan; must be an integer, or a finite number"),
        ({"freq_shift": 4}, "freq_shift: got 4; must be 1, or less than half of channels"),
    ],
)
def test_invalid_network_fields_are_reported(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as invalid:
        config(**changes)
    assert message in "\n".join(map(str, problems_of(invalid.value, UNetConfig)))


def test_direct_construction_checks_the_fields_too() -> None:
    with pytest.raises(ValueError, match="heads: got 3; must divide"):
        UNetConfig(8, 1, 8, (1, 2), 1, (4,), heads=3)


def test_wrong_shapes_of_images_and_conditions_are_reported() -> None:
    made = network()
    x, t = images(made)
    with pytest.raises(ValueError, match="both multiples of 2"):
        made(x[..., :7], t)
    with pytest.raises(ValueError, match="conditioning is none"):
        made(x, t, torch.zeros(2, dtype=torch.int64))


def test_a_config_survives_json() -> None:
    made = config(conditioning="class", classes=3)
    assert UNetConfig.from_dict(json.loads(json.dumps(asdict(made)))) == made
    with pytest.raises(ValidationError, match=r"depth\n.*Unexpected keyword"):
        UNetConfig.from_dict({**asdict(made), "depth": 1})


def test_config_of_an_earlier_version_keeps_its_norm_groups() -> None:
    """Earlier versions wrote configs without DETAILS and without cross-attention."""
    fields = asdict(config(channels=16))
    later = (*DETAILS, "cross_attention")
    made = UNet(UNetConfig.from_dict({n: v for n, v in fields.items() if n not in later}))
    norms = [norm for norm in made.modules() if isinstance(norm, Norm)]
    assert all(norm.num_groups == group_count(norm.num_channels) for norm in norms)
    assert {(norm.num_groups, norm.eps) for norm in norms} == {(n, 1e-6) for n in (4, 8, 12, 16)}


def test_norm_groups_have_at_least_four_channels_if_possible() -> None:
    for channels in range(1, 300):
        groups = group_count(channels)
        assert channels % groups == 0
        assert groups == 1 or channels // groups >= 4
        assert groups <= 32
    assert [group_count(channels) for channels in (20, 31, 32, 128)] == [5, 1, 8, 32]


# Timesteps


@pytest.mark.parametrize("channels", [8, 31, 32])
def test_output_depends_on_the_timestep(channels: int) -> None:
    made = network(channels=channels)
    x, _ = images(made)
    early, late = made(x, torch.tensor([3, 3])), made(x, torch.tensor([700, 700]))
    assert (early - late).abs().mean() > 0.02 * early.abs().mean()


# Initial weights


def test_constructing_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    UNet(config(conditioning="text"))
    UNet(config(conditioning="class", classes=2))
    assert torch.equal(before, torch.get_rng_state())


def test_untrained_network_predicts_zero() -> None:
    made = UNet(config())
    initialise(made, uniforms)
    x, t = images(made)
    assert not made(x, t).any()
    block = made.get_submodule("middle.1.block")
    h = normals("activations", (2, 16, 4, 4))
    times = [torch.ones(2, size) for size in made.time_sizes]
    assert torch.equal(block(h, times, None), h)


def test_initial_weights_have_the_variance_of_hos_code() -> None:
    made = UNet(config(channels=64, attention=(8, 4)))
    initialise(made, uniforms)
    state = made.state_dict()
    expected = {
        "conv_in.weight": 2 / (9 * 65),
        "down.0.attention.qkv.weight": 2 / (64 + 64),
        "time_embedding.linear1.weight": 2 / (64 + 256),
    }
    for name, variance in expected.items():
        assert state[name].var() == pytest.approx(variance, rel=0.1), name
    rows = state["time_projection.weight"].split(made.time_sizes)
    assert rows[0].var() == pytest.approx(2 / (256 + 64), rel=0.1)
    assert rows[2].var() == pytest.approx(2 / (256 + 128), rel=0.1)


def test_initial_weight_depends_on_its_name_and_shape_alone() -> None:
    small, large = UNet(config(multipliers=(1,), attention=())), UNet(config(attention=(8,)))
    initialise(small, uniforms)
    initialise(large, uniforms)
    for name in ("conv_in.weight", "down.0.block.conv1.weight", "time_embedding.linear2.weight"):
        assert torch.equal(small.state_dict()[name], large.state_dict()[name])


# Conditions


def test_dropped_classes_give_the_output_without_class() -> None:
    made = network(conditioning="class", classes=3)
    x, t = images(made)
    first, second = made(x, t, torch.tensor([0, 1])), made(x, t, torch.tensor([2, 1]))
    assert not torch.allclose(first[0], second[0], atol=1e-4)
    assert torch.allclose(first[1], second[1], atol=1e-6)
    dropped = made(x, t, torch.tensor([0, 1]), torch.tensor([True, False]))
    assert torch.allclose(dropped[0], made(x, t)[0], atol=1e-6)
    assert torch.allclose(dropped[1], first[1], atol=1e-6)


@pytest.mark.parametrize("tokens", [False, True])
def test_output_depends_on_text_order_but_not_on_padding(tokens: bool) -> None:
    made = network(conditioning="text", cross_attention=tokens)
    x, t = images(made)
    one, other = made(x, t, text("a cat", "tac a")), made(x, t, text("tac a", "tac a"))
    assert not torch.allclose(one[0], other[0], atol=1e-4)
    assert torch.allclose(one[1], other[1], atol=1e-6)
    assert not torch.allclose(made(x, t, text("é", "é")), made(x, t, text("e", "e")), atol=1e-4)


@pytest.mark.parametrize("tokens", [False, True])
def test_empty_and_dropped_texts_count_as_no_text(tokens: bool) -> None:
    made = network(conditioning="text", cross_attention=tokens)
    x, t = images(made)
    nothing = made(x, t)
    output = made(x, t, text("", "a cat"), torch.tensor([False, True]))
    assert torch.allclose(output, nothing, atol=1e-6)
    output.square().sum().backward()
    assert all(w.grad is None or w.grad.isfinite().all() for w in made.parameters())


def test_each_place_in_the_image_reads_the_bytes_it_needs() -> None:
    """Without the pooled vector, the bytes alone reach the pixels, differently at each pixel."""
    made = network(conditioning="text", cross_attention=True)
    encoder = made.condition
    assert isinstance(encoder, TextEncoder)
    with torch.no_grad():
        encoder.out.weight.zero_()
        encoder.out.bias.copy_(encoder.null)
    x, t = images(made)
    change = made(x, t, text("ab", "ab")) - made(x, t, text("ba", "ab"))
    assert change[0].abs().max() > 1e-3 and change[0].std() > 0.1 * change[0].abs().max()
    assert torch.allclose(change[1], torch.zeros_like(change[1]), atol=1e-6)


def test_untrained_cross_attention_changes_nothing() -> None:
    """So a network that was trained without it can be trained further with it."""
    plain = UNet(config(conditioning="text"))
    made = UNet(config(conditioning="text", cross_attention=True))
    for one in (plain, made):
        initialise(one, uniforms)
    common = network(conditioning="text").state_dict()
    plain.load_state_dict(common)
    assert not made.load_state_dict(common, strict=False).unexpected_keys
    x, t = images(made)
    assert torch.equal(made(x, t, text("a", "b")), plain(x, t, text("a", "b")))


@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize("conditioning", ["none", "class", "text"])
def test_every_weight_has_a_gradient(conditioning: str, tokens: bool) -> None:
    tokens = tokens and conditioning == "text"
    made = network(conditioning=conditioning, classes=2, heads=2, cross_attention=tokens)
    x, t = images(made)
    condition = {"class": torch.tensor([0, 1]), "text": text("one", "two")}.get(conditioning)
    drop = None if condition is None else torch.tensor([False, True])
    made(x, t, condition, drop).square().sum().backward()
    for name, weight in made.named_parameters():
        assert weight.grad is not None, name
        assert weight.grad.any(), name


# Dropout is passed in


def test_dropout_is_called_once_per_residual_block() -> None:
    made = network()
    x, t = images(made)
    seen: list[tuple[int, ...]] = []

    def dropout(h: Tensor, number: int) -> Tensor:
        seen.append((number, *h.shape))
        return h

    assert torch.equal(made(x, t, dropout=dropout), made(x, t))
    assert [row[0] for row in seen] == list(range(len(made.time_sizes)))
    assert [row[2] for row in seen] == made.time_sizes
    assert not torch.allclose(made(x, t, dropout=lambda h, _: 0 * h), made(x, t), atol=1e-4)


# Equal results however the network is computed


@pytest.mark.parametrize(
    "changes",
    [
        {},
        DIFFUSERS,
        {"heads": 2},
        {"conditioning": "text"},
        {"conditioning": "text", "cross_attention": True, "heads": 2},
    ],
)
def test_plain_and_optimized_networks_compute_the_same(changes: dict[str, Any]) -> None:
    given = {"conditioning": "class", "classes": 2, "in_channels": 3} | changes
    plain, trained, sampled = network(**given), network(**given), network(**given)
    x, t = images(plain)
    condition = text("one", "two") if "conditioning" in changes else torch.tensor([0, 1])
    prepare_model(trained, CPU, "fp32", training=True)
    prepare_model(sampled, CPU, "fp32")
    assert type(trained.get_submodule("middle.0.attention")) is cpu.FastAttention
    assert trained.memory_format == torch.contiguous_format
    assert sampled.memory_format == torch.channels_last
    expected = plain(x, t, condition)
    assert torch.allclose(trained(x, t, condition), expected, atol=1e-5)
    with torch.no_grad():
        assert torch.allclose(sampled(x, t, condition), expected, atol=1e-5)


def test_optimized_network_keeps_names_and_gradients() -> None:
    plain, fast = network(), network()
    prepare_model(fast, CPU, "fp32", training=True)
    assert list(fast.state_dict()) == list(plain.state_dict())
    x, t = images(plain)
    for made in (plain, fast):
        made(x, t).square().mean().backward()
    for name, weight in plain.named_parameters():
        assert torch.allclose(fast.get_parameter(name).grad, weight.grad, atol=1e-5), name


@pytest.mark.parametrize("shifted", [True, False])
@pytest.mark.parametrize("active", [True, False])
@pytest.mark.parametrize("details", [{}, {"groups": 8, "eps": 0.1}], ids=["ours", "diffusers"])
def test_fast_norm_equals_group_norm(shifted: bool, active: bool, details: dict[str, Any]) -> None:
    norm = cpu.FastNorm(24, active, **details)
    with torch.no_grad():
        norm.weight.copy_(normals("weight", (24,)))
        norm.bias.copy_(normals("bias", (24,)))
    x = 3 + normals("x", (2, 24, 5, 7))
    shift = normals("shift", (2, 24)) if shifted else None
    moved = x if shift is None else x + shift[:, :, None, None]
    expected = functional.group_norm(
        moved, details.get("groups", 6), norm.weight, norm.bias, details.get("eps", 1e-6)
    )
    expected = functional.silu(expected) if active else expected
    assert torch.allclose(norm(x, shift), expected, atol=1e-5)
    with torch.no_grad():
        output = norm(x.to(memory_format=torch.channels_last), shift)
        constant = norm(torch.ones(1, 24, 4, 4).to(memory_format=torch.channels_last))
    assert output.is_contiguous(memory_format=torch.channels_last)
    assert torch.allclose(output, expected, atol=1e-5)
    assert constant.isfinite().all()


@pytest.mark.parametrize("shifted", [True, False])
def test_fast_norm_is_accurate_far_from_zero(shifted: bool) -> None:
    norm = cpu.FastNorm(24, active=False)
    torch.nn.init.ones_(norm.weight)
    torch.nn.init.zeros_(norm.bias)
    x = 1000 + normals("x", (2, 24, 5, 7))
    shift = normals("shift", (2, 24)) if shifted else None
    moved = x.double() if shift is None else x.double() + shift[:, :, None, None]
    expected = torch.nn.functional.group_norm(moved, norm.num_groups, eps=norm.eps)
    with torch.no_grad():
        output = norm(x.to(memory_format=torch.channels_last), shift)
    assert torch.allclose(output.double(), expected, atol=1e-3)


def test_fast_norm_of_a_batch_beyond_the_cache_is_the_same() -> None:
    norm = cpu.FastNorm(24)
    x, shift = normals("x", (5, 24, 96, 96)), normals("shift", (5, 24))
    assert x.numel() > CACHED > 2 * x[0].numel()
    x = x.to(memory_format=torch.channels_last)
    with torch.no_grad():
        for shifts in (shift, None):
            alone = [
                norm(x[i : i + 1], None if shifts is None else shift[i, None]) for i in range(5)
            ]
            assert torch.equal(norm(x, shifts), torch.cat(alone))


def test_fast_upsample_equals_nearest_neighbours_and_convolution() -> None:
    plain, fast = Upsample(6), cpu.FastUpsample(6)
    with torch.no_grad():
        plain.conv.weight.copy_(normals("weight", (6, 6, 3, 3)))
        plain.conv.bias.copy_(normals("bias", (6,)))
    fast.load_state_dict(plain.state_dict())
    x = normals("x", (2, 6, 5, 7))
    expected = plain.conv(functional.interpolate(x, scale_factor=2.0, mode="nearest"))
    assert torch.equal(plain(x), expected)
    assert torch.allclose(fast(x), expected, atol=1e-5)


def test_explicit_attention_equals_scaled_dot_product_attention() -> None:
    qkv = normals("qkv", (1, EXPLICIT_LENGTH, 24))
    query, key, value = (part.view(1, -1, 2, 4).transpose(1, 2) for part in qkv.chunk(3, dim=2))
    mixed = functional.scaled_dot_product_attention(query, key, value)
    expected = mixed.transpose(1, 2).flatten(2)
    longer = torch.cat([qkv, normals("more", (1, 3, 24))], dim=1)
    visible = torch.arange(EXPLICIT_LENGTH + 3)[None] < EXPLICIT_LENGTH
    for function in (attend, cpu.attend_explicitly):
        assert torch.allclose(function(qkv.chunk(3, 2), 2), expected, atol=1e-5)
        hidden = function(longer.chunk(3, 2), 2, visible)[:, :EXPLICIT_LENGTH]
        assert torch.allclose(hidden, expected, atol=1e-5)


def test_rounding_weights_once_equals_autocast_exactly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpu, "has_packing", lambda: False)
    plain, prepared = network(), prepare_model(network(), CPU, "bf16")
    cpu.optimize(plain, training=True)  # the same layers, but float32 weights
    plain.memory_format = torch.channels_last
    x, t = images(plain)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected, output = plain(x, t), prepared(x, t)
    assert torch.equal(output, expected)
    assert output.dtype == torch.float32
    assert next(prepare_model(network(), CPU, "fp32").parameters()).dtype == torch.float32


@needs_onednn
@pytest.mark.parametrize(("stride", "padding"), [(1, 1), (2, 0), (2, 1)])
def test_packed_convolution_is_exact_and_its_sum_more_accurate(stride: int, padding: int) -> None:
    layer = Conv2d(24, 20, 3, stride, padding).bfloat16().requires_grad_(False)
    layer.weight.copy_(normals("weight", (20, 24, 3, 3)))
    layer.bias.copy_(normals("bias", (20,)))
    x = normals("x", (3, 24, 9, 9)).bfloat16().to(memory_format=torch.channels_last)
    expected = layer(x)
    onto = 10 * normals("onto", tuple(expected.shape)).bfloat16()
    exact = functional.conv2d(
        x.double(), layer.weight.double(), layer.bias.double(), stride, padding
    )
    rounded_twice = onto + expected - exact - onto
    packed = cpu.PackedConv2d(24, 20, 3, stride, padding).bfloat16()
    packed.load_state_dict(layer.state_dict())
    packed.pack()
    assert torch.equal(packed(x), expected)
    rounded_once = packed.added_to(onto, x) - exact - onto
    assert rounded_once.abs().mean() < 0.9 * rounded_twice.abs().mean()


@needs_onednn
def test_packed_upsample_is_exact() -> None:
    layer = cpu.FastUpsample(24).bfloat16().requires_grad_(False)
    layer.conv.weight.copy_(normals("weight", (24, 24, 3, 3)))
    layer.conv.bias.copy_(normals("bias", (24,)))
    x = normals("x", (3, 24, 8, 8)).bfloat16().to(memory_format=torch.channels_last)
    expected = layer(x)
    packed = cpu.PackedUpsample(24).bfloat16()
    packed.load_state_dict(layer.state_dict())
    packed.pack()
    assert torch.equal(packed(x), expected)


@needs_onednn
@pytest.mark.parametrize("details", [{}, DIFFUSERS], ids=["ours", "diffusers"])
def test_packed_network_is_as_accurate_as_autocast(details: dict[str, Any]) -> None:
    plain, prepared = network(**details), prepare_model(network(**details), CPU, "bf16")
    x, t = images(plain)
    with torch.no_grad():
        exact = plain(x, t)
        with torch.autocast("cpu", torch.bfloat16):
            usual, output = plain(x, t), prepared(x, t)
    assert (output - exact).norm() < 1.2 * (usual - exact).norm()


def test_bf16_is_close_to_fp32_and_has_gradients() -> None:
    made = network()
    x, t = images(made)
    expected = made(x, t)
    with torch.autocast("cpu", torch.bfloat16):
        output = made(x, t)
    assert (output - expected).abs().max() < 0.05 * expected.abs().max()
    output.square().mean().backward()
    assert all(weight.grad is not None for weight in made.parameters())


def test_initial_weights_do_not_depend_on_the_threads() -> None:
    one, two = UNet(config(channels=64)), UNet(config(channels=64))
    initialise(one, uniforms)
    torch.set_num_threads(2)
    try:
        initialise(two, uniforms)
    finally:
        torch.set_num_threads(1)
    for name, weight in one.state_dict().items():
        assert torch.equal(two.state_dict()[name], weight), name


@pytest.mark.slow
@pytest.mark.parametrize("optimized", [True, False])
@pytest.mark.parametrize("conditioning", ["class", "text"])
def test_torch_compile_finds_one_graph(optimized: bool, conditioning: str) -> None:
    import torch._dynamo

    made = network(conditioning=conditioning, classes=2, cross_attention=conditioning == "text")
    if optimized:
        prepare_model(made, CPU, "fp32", training=True)
    x, t = images(made)
    condition = torch.tensor([0, 1]) if conditioning == "class" else text("one", "two")
    drop = torch.tensor([True, False])
    explained = torch._dynamo.explain(made)(x, t, condition, drop)
    torch._dynamo.reset()
    assert explained.graph_break_count == 0
    assert explained.graph_count == 1
