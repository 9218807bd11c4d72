"""Networks convert to diffusers and back; unsupported fields are reported by name."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DDIMScheduler, DDPMPipeline, DDPMScheduler, UNet2DModel
from diffusers.training_utils import EMAModel
from safetensors.torch import load_file, save_file
from torch import Tensor

from ddpm_core import rng
from ddpm_core.config import Diffusion
from ddpm_core.config import load as params
from ddpm_core.config.template import PRESETS, presets
from ddpm_core.diffusion.process import make_schedule
from ddpm_core.errors import UserError, got
from ddpm_core.interop import scheduler, tensors, unet2d
from ddpm_core.interop.checkpoints import import_checkpoint
from ddpm_core.interop.diffusers import WEIGHTS, Imported, export_folder, import_folder
from ddpm_core.interop.fields import Fields
from ddpm_core.models.config import UNetConfig
from ddpm_core.models.unet import UNet
from ddpm_core.training.dry_run import expected_images
from ddpm_core.training.init import network_config

PLAIN, ATTENDING = "DownBlock2D", "AttnDownBlock2D"


def normals(name: str, shape: tuple[int, ...]) -> Tensor:
    key = rng.key(rng.Purpose.INIT, int.from_bytes(name.encode(), "big"))
    return rng.normal(key, torch.tensor([0]), shape)[0]


def randomised(network: Any) -> Any:
    """Set every weight to random numbers, so that a lost or swapped one changes the output."""
    with torch.no_grad():
        for name, weight in network.named_parameters():
            spread = (2.0 / max(1, weight[0].numel())) ** 0.5 if weight.ndim > 1 else 0.1
            around = 1.0 if "norm" in name and name.endswith("weight") else 0.0
            weight.copy_(around + spread * normals(name, tuple(weight.shape)))
    return network.eval()


def ours(**changes: Any) -> UNet:
    settings = {"image_size": 8, "in_channels": 3, "channels": 32, "multipliers": (1, 1)}
    settings |= {"blocks": 1, "attention": (4,), "norm_num_groups": 8}
    return randomised(UNet(UNetConfig(**settings | changes)))


def theirs(down: tuple[str, ...] = (PLAIN, ATTENDING), **changes: Any) -> UNet2DModel:
    """Return a small UNet2DModel with diffusers' defaults, its way up mirroring its way down."""
    settings = {
        "sample_size": 8,
        "block_out_channels": (32,) * len(down),
        "layers_per_block": 1,
        "down_block_types": down,
        "up_block_types": tuple(kind.replace("Down", "Up") for kind in down[::-1]),
    }
    return randomised(UNet2DModel(**settings | changes))


# The five fields as google/ddpm-cifar10-32 has them, and its single attention head.
HO = {"downsample_padding": 0, "flip_sin_to_cos": False, "freq_shift": 1, "norm_eps": 1e-6}
HO |= {"attention_head_dim": None}


def saved(network: UNet2DModel, folder: Path, **settings: Any) -> Path:
    DDPMPipeline(network, DDPMScheduler(**settings)).save_pretrained(folder)
    return folder


def built(found: Imported) -> UNet:
    network = UNet(found.network).eval()
    network.load_state_dict(found.weights)
    return network


def difference(own: UNet, their: UNet2DModel, **labels: Tensor) -> float:
    """Return the largest difference of the outputs, in training and in sampling."""
    config = own.config
    shape = (2, config.in_channels, config.image_size, config.image_size)
    x, t = 0.1 * normals("images", shape), torch.tensor([7, 900])
    with torch.no_grad():
        wanted = their(x, t, class_labels=labels.get("theirs")).sample
        sampled = own(x, t, labels.get("ours"))
    assert 0.1 < wanted.std() < 100
    trained = own(x, t, labels.get("ours")).detach()
    return float(torch.stack([sampled - wanted, trained - wanted]).abs().max())


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


# Imported and exported networks compute the same as diffusers


@pytest.mark.parametrize(
    "their",
    [
        # The training example of diffusers, with a quarter of its channels and four of its levels.
        lambda: theirs(
            (PLAIN, PLAIN, ATTENDING, PLAIN),
            block_out_channels=(32, 64, 128, 128),
            layers_per_block=2,
        ),
        # UNet2DModel's defaults: attention at levels of several widths, one size of a head.
        lambda: theirs((PLAIN, ATTENDING, ATTENDING), block_out_channels=(32, 64, 96)),
        lambda: theirs(block_out_channels=(32, 48), norm_num_groups=16),  # not a whole multiple
        lambda: theirs(up_block_types=("UpBlock2D", "AttnUpBlock2D")),  # up does not mirror down
        lambda: theirs((PLAIN,), in_channels=1, out_channels=1, dropout=0.25, norm_eps=0.1),
        lambda: theirs(
            block_out_channels=(28, 28), norm_num_groups=4, attention_head_dim=7, freq_shift=0.5
        ),
        lambda: theirs(act_fn="swish", **{**HO, "attention_head_dim": 16}),
        lambda: theirs(block_out_channels=(33, 33), norm_num_groups=3, attention_head_dim=None),
        lambda: theirs(sample_size=(8, 8), **HO),
    ],
    ids=["example", "defaults", "widths", "sides", "eps", "shift", "heads", "odd", "ho"],
)
def test_import_and_export_keep_the_output(tmp_path: Path, their: Any) -> None:
    their = their()
    own = built(import_folder(saved(their, tmp_path / "in")))
    assert difference(own, their) < 1e-4
    export_folder(
        own, Diffusion(schedule="linear", timesteps=1000, prediction="noise"), tmp_path / "out"
    )
    back = UNet2DModel.from_pretrained(tmp_path / "out" / "unet").eval()
    assert difference(own, back) < 1e-4
    for name, tensor in their.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor), name
    for name in HO.keys() - {"attention_head_dim"} | {"norm_num_groups"}:
        assert back.config[name] == their.config[name]


def test_export_leaves_out_weights_for_augmentation(tmp_path: Path) -> None:
    own = ours(augmentation=14, attention=(8, 4), multipliers=(1, 2))
    export_folder(own, Diffusion(schedule="linear", prediction="noise"), tmp_path / "out")
    back = UNet2DModel.from_pretrained(tmp_path / "out" / "unet").eval()
    assert difference(own, back) < 1e-4
    assert import_folder(tmp_path / "out").network.augmentation == 0


def test_google_ddpm_cifar10_32_has_the_published_weight_count() -> None:
    down = (PLAIN, ATTENDING, PLAIN, PLAIN)
    widths, given = (128, 256, 256, 256), HO | {"sample_size": 32, "layers_per_block": 2}
    with torch.device("meta"):
        their = UNet2DModel(
            block_out_channels=widths,
            down_block_types=down,
            up_block_types=("UpBlock2D", "UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
            **given,
        )
    own = UNet(unet2d.to_config(dict(their.config)), device="meta")
    assert sum(weight.numel() for weight in own.parameters()) == 35_746_307


def test_old_layouts_and_names_of_diffusers_are_read(tmp_path: Path) -> None:
    their = theirs()
    folder = saved(their, tmp_path)
    weights = load_file(folder / "unet" / WEIGHTS)
    for new, old in (
        ("to_q", "query"),
        ("to_k", "key"),
        ("to_v", "value"),
        ("to_out.0", "proj_attn"),
    ):
        weights = {name.replace(f".{new}.", f".{old}."): part for name, part in weights.items()}
    save_file(weights, folder / WEIGHTS)
    (folder / "unet" / WEIGHTS).unlink()
    (folder / "unet/config.json").rename(folder / "config.json")
    (folder / "scheduler/scheduler_config.json").rename(folder / "scheduler_config.json")
    assert difference(built(import_folder(folder)), their) < 1e-4


def test_imported_network_gets_a_mean_vector_for_no_class(tmp_path: Path) -> None:
    their = theirs(num_class_embeds=5)
    own = built(import_folder(saved(their, tmp_path)))
    labels = torch.tensor([4, 0])
    assert own.config.classes == 5
    assert difference(own, their, ours=labels, theirs=labels) < 1e-4
    vectors = own.state_dict()["condition.embedding.weight"]
    assert torch.allclose(vectors[5], vectors[:5].mean(0))


LINEAR_100 = {"num_train_timesteps": 100, "beta_start": 1e-3, "beta_end": 0.2}
COSINE = {"beta_schedule": "squaredcos_cap_v2"}


@pytest.mark.parametrize(
    ("given", "settings", "variance"),
    [
        ({}, ("linear", 1000, "noise"), "small"),
        (COSINE | {"prediction_type": "sample"}, ("cosine", 1000, "x0"), "small"),
        (LINEAR_100 | {"prediction_type": "v_prediction"}, ("linear", 100, "v"), "small"),
        ({"variance_type": "fixed_large"}, ("linear", 1000, "noise"), "large"),
    ],
)
def test_process_is_read_from_the_scheduler(
    tmp_path: Path, given: dict[str, Any], settings: tuple[str, int, str], variance: str
) -> None:
    DDPMScheduler(**given).save_pretrained(tmp_path)
    read = scheduler.to_settings(json.loads((tmp_path / "scheduler_config.json").read_text()))
    names = ("schedule", "timesteps", "prediction")
    assert read == (dict(zip(names, settings, strict=True)), {"variance": variance})
    process = Diffusion.model_validate(read[0])
    back = DDPMScheduler.from_config(scheduler.from_diffusion(process, variance))
    assert torch.allclose(back.betas, DDPMScheduler(**given).betas)
    assert back.config.variance_type == DDPMScheduler(**given).config.variance_type


# Folders of diffusers and accelerate


def bare(their: UNet2DModel, folder: Path) -> Path:
    their.save_pretrained(folder / "bare")
    return folder / "bare"


def half(their: UNet2DModel, folder: Path) -> Path:
    DDPMPipeline(their, DDPMScheduler()).save_pretrained(folder, variant="fp16")
    return folder


def shards(their: UNet2DModel, folder: Path) -> Path:
    their.save_pretrained(folder, max_shard_size="200KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return folder


def half_shards(their: UNet2DModel, folder: Path) -> Path:
    their.save_pretrained(folder / "unet", variant="fp16", max_shard_size="200KB")
    return folder


def part_of_a_pipeline(their: UNet2DModel, folder: Path) -> Path:
    return saved(their, folder) / "unet"


def training_example(their: UNet2DModel, folder: Path) -> Path:
    """Save a checkpoint as train_unconditional.py --use_ema does: its average is imported."""
    part = folder / "checkpoint-500"
    EMAModel(their.parameters(), model_cls=UNet2DModel, model_config=their.config).save_pretrained(
        part / "unet_ema"
    )
    theirs(norm_eps=0.5).save_pretrained(part / "unet")
    (part / "optimizer.bin").write_bytes(b"a pickle")
    return part


def save_state(their: UNet2DModel, folder: Path) -> Path:
    """Save a checkpoint as accelerate does without hooks, in the folder of the pipeline."""
    part = saved(their, folder) / "checkpoint-500"
    part.mkdir()
    save_file(their.state_dict(), part / "model.safetensors")
    return part


@pytest.mark.parametrize(
    "save",
    [bare, half, shards, half_shards, part_of_a_pipeline, training_example, save_state],
    ids=lambda save: save.__name__,
)
def test_every_kind_of_folder_can_be_imported(tmp_path: Path, save: Any) -> None:
    their = theirs()
    with_scheduler = save in (half, part_of_a_pipeline, save_state)
    found = import_folder(save(their, tmp_path))
    assert difference(built(found), their) < (0.01 if save in (half, half_shards) else 1e-4)
    assert bool(found.diffusion) == with_scheduler


def test_ambiguous_variants_and_missing_shards_are_reported(tmp_path: Path) -> None:
    folder = shards(theirs(), tmp_path / "shards")
    gone = sorted(folder.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(UserError, match=gone.name):
        import_folder(folder)
    for variant in ("fp16", "bf16"):
        theirs().save_pretrained(tmp_path / "both", variant=variant)
    with pytest.raises(UserError, match=r"model\.bf16\.safetensors, .*Keep one"):
        import_folder(tmp_path / "both")


def test_shard_outside_the_folder_is_not_read(tmp_path: Path) -> None:
    folder = shards(theirs(), tmp_path / "shards")
    edit(folder / f"{WEIGHTS}.index.json", weight_map={"conv_in.weight": "../secret.safetensors"})
    with pytest.raises(UserError, match="a file outside it"):
        import_folder(folder)


def test_import_without_scheduler_requires_the_process(tmp_path: Path) -> None:
    folder = bare(theirs(), tmp_path)
    with pytest.raises(UserError, match=r"--schedule, --prediction as the network was trained"):
        import_checkpoint(folder, tmp_path / "out", {"timesteps": 500})
    given = {"schedule": "cosine", "timesteps": 500, "prediction": "x0"}
    import_checkpoint(folder, tmp_path / "out", given)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["params"]["diffusion"] == {**given, "zero_terminal_snr": False}
    folder = saved(theirs(), tmp_path / "pipeline")
    with pytest.raises(UserError, match=r"--schedule: got cosine; the scheduler .* has linear"):
        import_checkpoint(folder, tmp_path / "other", given)


# Exported networks


@pytest.mark.parametrize("preset", [None, *presets()])
def test_networks_of_all_presets_are_exported_unchanged(tmp_path: Path, preset: str | None) -> None:
    config = params.load(PRESETS / f"{preset}.yaml" if preset else None)
    whole = UNet(network_config(config, expected_images(config)), device="meta")
    with torch.device("meta"):
        their = UNet2DModel(**constructor(unet2d.from_unet(whole)))
    tensors.to_weights(whole, their.state_dict())  # all of its tensors, in their shapes

    sections = config.dump()
    sections["model"] |= {"channels": 16, "attention": [2]}
    sections["prepare"] |= {"image_size": 8}
    small = params.validate(sections)
    own = randomised(UNet(network_config(small, expected_images(small))))
    process = config.diffusion
    if process.uses_moments:  # diffusers has no such predictions: trained with v for it
        process = process.model_copy(update={"prediction": "v"})
    export_folder(own, process, tmp_path / "new")
    pipeline = DDPMPipeline.from_pretrained(tmp_path / "new")
    classes = own.config.classes
    labels = {"ours": torch.tensor([1, 0]), "theirs": torch.tensor([1, 0])} if classes else {}
    assert difference(own, pipeline.unet.eval(), **labels) < 1e-4
    alphas_bar = make_schedule(process.schedule, process.timesteps).alphas_bar.float()
    assert torch.allclose(pipeline.scheduler.alphas_cumprod, alphas_bar, rtol=1e-4, atol=1e-8)


def constructor(described: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in described.items() if not name.startswith("_")}


def test_exported_pipeline_draws_images(tmp_path: Path) -> None:
    export_folder(
        ours(in_channels=1, dropout=0.1),
        Diffusion(schedule="cosine", timesteps=100, prediction="v"),
        tmp_path / "new",
    )
    pipeline = DDPMPipeline.from_pretrained(tmp_path / "new")
    assert pipeline.scheduler.config.prediction_type == "v_prediction"
    pipeline.set_progress_bar_config(disable=True)
    assert pipeline(batch_size=2, num_inference_steps=2, output_type="np").images.shape[0] == 2


def test_export_and_import_keep_every_weight(tmp_path: Path) -> None:
    own = ours(conditioning="class", classes=3, heads=4)
    export_folder(
        own,
        Diffusion(schedule="cosine", timesteps=1000, prediction="x0"),
        tmp_path / "new",
        "small",
    )
    found = import_folder(tmp_path / "new")
    assert found.network == own.config
    assert found.diffusion == {"schedule": "cosine", "timesteps": 1000, "prediction": "x0"}
    assert found.sample == {"variance": "small"}
    for name, weight in own.state_dict().items():
        assert torch.equal(found.weights[name], weight), name


def test_class_conditional_export_explains_its_labels(tmp_path: Path) -> None:
    own = ours(conditioning="class", classes=3)
    notes = export_folder(
        own, Diffusion(schedule="linear", timesteps=500, prediction="noise"), tmp_path
    )
    their = DDPMPipeline.from_pretrained(tmp_path).unet.eval()
    assert difference(own, their, ours=torch.tensor([2, 0]), theirs=torch.tensor([2, 0])) < 1e-4
    assert difference(own, their, theirs=torch.tensor([3, 3])) < 1e-4  # 3: no class
    assert "num_inference_steps=500" in notes[0]
    assert 'Label 3 means "no class"' in notes[1]


# Unsupported networks are reported, and nothing is written


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"norm_num_groups": None, "multipliers": (1, 2)},
            r"earlier version of ddpm made, have \[8, 16, 24, 32\] groups",
        ),
        ({"multipliers": (1, 2), "heads": 2, "attention": (8,)}, "heads: got 2, for layers of"),
        ({"multipliers": (2, 2)}, "the first must be 1"),
        ({"conditioning": "text"}, "conditioning: got text; must be none or class"),
    ],
)
def test_unsupported_networks_are_not_exported(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        export_folder(
            ours(**changes),
            Diffusion(schedule="linear", timesteps=1000, prediction="noise"),
            tmp_path / "new",
        )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("fields", "kinds"),
    [(unet2d.FIELDS, [UNet2DModel]), (scheduler.FIELDS, [DDPMScheduler, DDIMScheduler])],
)
def test_every_field_of_diffusers_is_known_with_its_default(fields: Fields, kinds: Any) -> None:
    known = {**fields.carried, **fields.defaults}
    for kind in kinds:
        signature = inspect.signature(kind.__init__).parameters
        for name, parameter in list(signature.items())[1:]:
            assert name in fields.names, f"{kind.__name__}.{name}"
            assert name in fields.ignored or known[name] == parameter.default, name


@pytest.mark.parametrize(
    ("fields", "read"),
    [(unet2d.FIELDS, unet2d.to_config), (scheduler.FIELDS, scheduler.to_settings)],
)
def test_unsupported_fields_are_reported_by_name(fields: Fields, read: Any) -> None:
    usable = {**fields.defaults, "new_field": None}
    if "sample_size" in fields.carried:
        usable["sample_size"] = 8
    read(usable)
    for name in (*fields.fixed, "new_field"):
        other = not usable[name] if isinstance(usable[name], bool) else "another"
        with pytest.raises(UserError, match=rf"\n  {name}: {got(other)};"):
            read(usable | {name: other})
    with pytest.raises(UserError, match="_class_name: got 'Other'; must be"):
        read(usable | {"_class_name": "Other"})


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        ("unet/config.json", {"sample_size": [32, 64]}, r"sample_size: got \[32, 64\]"),
        ("unet/config.json", {"sample_size": None}, "sample_size: got null"),
        ("unet/config.json", {"sample_size": 7}, "multiple of 2"),
        ("unet/config.json", {"norm_num_groups": 5}, "norm_num_groups: got 5"),
        ("unet/config.json", {"downsample_padding": 2}, "downsample_padding: got 2"),
        ("unet/config.json", {"freq_shift": 16}, "freq_shift: got 16"),
        ("unet/config.json", {"attention_head_dim": 24}, "head_dim: got 24"),
        ("unet/config.json", {"in_channels": 4, "out_channels": 4}, r"out_channels: got \(4, 4\)"),
        ("unet/config.json", {"block_out_channels": [32, 64]}, "shape"),
        ("unet/config.json", {"block_out_channels": None}, "damaged"),
        ("unet/config.json", {"layers_per_block": 1.5}, "blocks: got 1.5; must be an integer"),
        ("unet/config.json", {"attention_head_dim": 0}, "attention_head_dim: got 0"),
        ("scheduler/scheduler_config.json", {"num_train_timesteps": 999.5}, "damaged"),
        ("unet/config.json", {"num_class_embeds": 3}, "class_embedding.weight is missing"),
        ("unet/config.json", {"up_block_types": ["UpBlock2D"]}, r"lengths \[2, 2, 1\]"),
        (
            "unet/config.json",
            {"up_block_types": ["SkipUpBlock2D", "UpBlock2D"]},
            "up_block_types: got 'SkipUpBlock2D'",
        ),
        ("scheduler/scheduler_config.json", {"beta_end": 0.012}, "beta_end: got 0.012"),
        ("scheduler/scheduler_config.json", {"prediction_type": "flow"}, "'flow'"),
        (
            "scheduler/scheduler_config.json",
            {"variance_type": "learned"},
            "variance_type: got 'l",
        ),
        ("scheduler/scheduler_config.json", {"clip_sample": False}, "clip_sample: got false"),
    ],
)
def test_unsupported_values_are_reported_by_field(
    tmp_path: Path, file: str, changes: dict[str, Any], message: str
) -> None:
    folder = saved(theirs(), tmp_path)
    edit(folder / file, **changes)
    with pytest.raises(UserError, match=message):
        import_folder(folder)


def test_pickles_are_never_read(tmp_path: Path) -> None:
    folder = tmp_path / "pipeline"
    DDPMPipeline(theirs(), DDPMScheduler()).save_pretrained(folder, safe_serialization=False)
    with pytest.raises(UserError, match="a pickle, which can run code"):
        import_folder(folder)


def test_damaged_and_missing_files_are_reported(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not an existing folder"):
        import_folder(tmp_path / "absent")
    (tmp_path / "checkpoint-500").mkdir()
    with pytest.raises(UserError, match="It has checkpoint-500, which can be imported"):
        import_folder(tmp_path)
    folder = saved(theirs(), tmp_path / "pipeline")
    (folder / "unet" / WEIGHTS).write_bytes(b"\x00" * 64)
    with pytest.raises(UserError, match="is damaged"):
        import_folder(folder)
    (folder / "unet/config.json").write_text("{")
    with pytest.raises(UserError, match="is not valid JSON"):
        import_folder(folder)
