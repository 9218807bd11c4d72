"""Params files: all problems are reported together, with path, value and what is allowed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from ddpm_core import config
from ddpm_core.config import Config, yaml_text
from ddpm_core.config import load as params
from ddpm_core.errors import UserError
from ddpm_kube.options import Options

ROOT = Path(__file__).parents[2]
BOUNDS = {"maximum", "exclusiveMaximum", "enum"}  # of a JSON schema


def problems(tmp_path: Path, text: str, *overrides: str) -> str:
    file = tmp_path / "params.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(UserError) as caught:
        params.load(file, overrides)
    return str(caught.value)


def test_without_a_file_the_defaults_are_the_digits() -> None:
    loaded = params.load()
    assert loaded.prepare.source == "digits"
    assert loaded.model_copy(update={"tracking": Config().tracking}) == Config()


def test_the_checked_in_params_file_has_the_defaults() -> None:
    given = yaml.safe_load((ROOT / "params.yaml").read_text(encoding="utf-8"))
    assert params.validate(given) == Config()


def test_all_problems_are_reported_together(tmp_path: Path) -> None:
    text = """
    seed: -1
    trian: {}
    prepare: {image_size: "16", resize: cropp}
    model: {channels: 0, attention: [8, x]}
    train: {stepps: 5, optimizer: {betas: [0.9, 2]}, loss: {weighting: foo}}
    sample: {checkpoints: al}
    """
    message = problems(tmp_path, text)
    assert message.startswith("10 problems in ")
    for line in (
        "seed: got -1; must be at least 0",
        "trian: unknown key; did you mean train?",
        "prepare.image_size: got '16'; must be an integer",
        "prepare.resize: got 'cropp'; must be 'crop', 'pad' or 'squash'",
        "model.channels: got 0",
        "model.attention[1]: got 'x'; must be an integer",
        "train.stepps: unknown key in train; did you mean steps?",
        "train.optimizer.betas[1]: got 2; must be less than 1",
        "train.loss.weighting: got 'foo'; must be 'uniform'",
        "sample.checkpoints: got 'al'; must be 'latest', 'all' or 'best', or a list",
    ):
        assert line in message


def test_invalid_combinations_are_reported_too(tmp_path: Path) -> None:
    file = tmp_path / "params.yaml"
    file.write_text("train: {keep: 0, microbatches: 99, ema: [0.5, 0.5], snapshot_every: 0}")
    given = ["model.heads=3", "sample.steps=6000", "diffusion.timesteps", "sample.count=x"]
    with pytest.raises(UserError, match="problems in") as caught:
        params.load(file, given)
    message = str(caught.value)
    for line in (
        "-S diffusion.timesteps: invalid override; must be section.key=value",
        "train.keep: got 0",
        "train.microbatches: got 99; must be at most batch_size, 32",
        "train.ema: got [0.5, 0.5]; must not repeat a decay",
        "train.snapshot_every: got 0",
        "sample.count: got 'x'",
        "sample.steps: got 6000; must be at most diffusion.timesteps, 1000",
        "model.heads: got 3; must divide",
    ):
        assert line in message
    assert message.startswith("8 problems in")


def test_comparisons_with_invalid_settings_are_left_out() -> None:
    with pytest.raises(UserError, match="problem") as caught:
        params.load(None, ["prepare.image_size=x", "model.attention=[32]", "train.ema=[2]"])
    assert str(caught.value).startswith("2 problems")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.optimizer.betas=[0.9]", "train.optimizer.betas[1]: missing (required)"),
        ("train.loss=huber", "train.loss: got 'huber'; must be a section with kind, weighting"),
        ("train.lr=3", "did you mean train.optimizer.lr?"),
        ("steps=3", "known keys: seed"),
        ("image_size=3", "did you mean prepare.image_size?"),
        ("device=gpu", "device: got 'gpu'; must be auto, cpu, mps, cuda or cuda:N"),
        ("train.flip='true'", "got 'true'; must be true or false without quotes"),
        ("train.flip=1", "train.flip: got 1; must be true or false"),
        ("sample.classes=bicycle", "got 'bicycle'; must be a list, as in [bicycle]"),
        ("train.ema=0.99", "train.ema: got 0.99; must be a list, as in [0.99]"),
        ("train.steps=0123", "got '0123'; must be an integer that does not begin with 0"),
        ("train.steps=20,000", "must be an integer without commas, as in 20_000"),
        ("train={steps: 20,000}", "train.000: unknown key in train; write a number without commas"),
        ("train.steps='5'", "got '5'; must be an integer without quotes"),
        (
            "prepare.source=null",
            "prepare.source: got null; must be a text; quote a text that is null",
        ),
        ("train.processes=1000000000", "got 1000000000; must be 'auto', or at most 10000"),
        ("train.batch_size=1000000000000", "got 1000000000000; must be at most 1000000"),
        (f"tracking.experiment={'e' * 256}", "must be a text of at most 244 characters"),
        ("tracking.experiment=", "got ''; must be a text that is not empty"),
        (f"register.alias={'a' * 256}", "must be a text of at most 255 characters"),
        (f"register.name={'n' * 256}", "must be a text of at most 255 characters"),
        (f"train.ema={[i / 200 for i in range(1, 102)]}", "must be a list of at most 100"),
        ("train.snapshot_every=9999999h", "must be a number of steps, or a time such as"),
    ],
)
def test_a_problem_is_in_the_words_of_the_params_file(override: str, message: str) -> None:
    with pytest.raises(UserError, match="1 problem") as caught:
        params.load(None, [override])
    assert message in str(caught.value)


def test_problems_of_options_do_not_blame_the_file(tmp_path: Path) -> None:
    only = problems(tmp_path, "train: {steps: 5}", "train.stpes=5", "trian.keep=1", "seed")
    assert only.startswith("3 problems:\n")
    assert only.count("  -S ") == 3
    both = problems(tmp_path, "seed: -1\ntrian: {}", "trian.keep=1", "train.optimizer.lr=x")
    assert both.startswith(f"3 problems in {tmp_path}/params.yaml with -S:\n")
    assert [line for line in both.splitlines() if line.startswith("  -S")] == [
        "  -S train.optimizer.lr: got 'x'; must be a number"
    ]
    with pytest.raises(
        UserError, match=r"^1 problem:\n  -w workspace: got ''; must be a directory"
    ):
        params.load(ROOT / "params.yaml", workspace="")


@pytest.mark.parametrize(
    ("size", "multipliers", "chosen"),
    [
        (16, "[1, 2, 2]", (8,)),  # the digits
        (32, "[1, 2, 2, 2]", (16,)),  # Ho et al.
        (64, "[1, 2, 2]", (16,)),
        (128, "[1, 2, 4, 4]", (16,)),
        (128, "[1, 2, 2]", (32,)),
        (8, "[1]", (8,)),
    ],
)
def test_auto_attention_fits_every_image_size(
    size: int, multipliers: str, chosen: tuple[int, ...]
) -> None:
    given = [f"prepare.image_size={size}", f"model.multipliers={multipliers}"]
    assert params.load(None, given).model.attention == chosen
    assert params.load(None, [*given, "model.attention=auto"]).model.attention == chosen
    assert params.load(None, [*given, "model.attention=[]"]).model.attention == ()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("prepare.image_size=28", "a multiple of"),
        ("model.attention=[5]", "must be one of [16, 8, 4]"),
        ("sample.steps=2000", "at most diffusion.timesteps, 1000"),
        ("train.microbatches=33", "at most batch_size, 32"),
        ("train.ema=[0.9, 0.9]", "must not repeat a decay"),
        ("model.heads=3", "must divide the channels"),
        ("sample.classes=[cat]", "requires model.conditioning class"),
        ("sample.prompts=[a cat]", "requires model.conditioning text"),
        ("sample.guidance=3", "must be 1 (no guidance) with model.conditioning none"),
        ("sample.ema=0.5", "must be one of train.ema, [0.99]"),
        ("train.steps=true", "must be an integer"),
        ("train.steps=.nan", "must be an integer"),
        ("train.optimizer.lr=.inf", "finite"),
        ("train.steps", "must be section.key=value"),
        ("train.steps.deep=1", "steps is a value, not a section"),
        ("train.steps=[", "not a YAML value"),
        ("train.init=3", "a text in quotes"),
    ],
)
def test_invalid_combinations_name_the_settings(override: str, message: str) -> None:
    overrides = [override]
    if override.startswith("prepare.image_size"):
        overrides.append("model.multipliers=[1, 2, 2, 2]")
    if override.startswith("train.steps.deep"):
        overrides.insert(0, "train.steps=5")
    with pytest.raises(UserError, match=r".") as caught:
        params.load(None, overrides)
    assert message in str(caught.value)


def test_guidance_requires_training_with_label_drop() -> None:
    class_wise = ["model.conditioning=class", "sample.guidance=3"]
    assert params.load(None, class_wise).sample.guidance == 3.0
    with pytest.raises(
        UserError, match=r"sample.guidance: got 3.0; must be 1 .* with train.label_drop 0"
    ):
        params.load(None, [*class_wise, "train.label_drop=0"])


def test_linear_schedule_requires_enough_timesteps() -> None:
    with pytest.raises(UserError, match="schedule linear"):
        params.load(None, ["diffusion.schedule=linear", "diffusion.timesteps=20"])
    assert params.load(None, ["diffusion.schedule=linear", "diffusion.timesteps=21"])


def test_zero_terminal_snr_is_refused_with_noise_prediction() -> None:
    rescaled = "diffusion.zero_terminal_snr=true"
    with pytest.raises(UserError, match=r"diffusion\.prediction: got 'noise'; must be v, x0, edm"):
        params.load(None, [rescaled, "diffusion.prediction=noise"])
    assert params.load(None, [rescaled]).diffusion.zero_terminal_snr


def test_held_out_levels_require_held_out_images() -> None:
    held_out = "train.timesteps.adaptive=held_out"
    message = r"train\.timesteps\.adaptive: got 'held_out'; requires held-out images"
    with pytest.raises(UserError, match=message):
        params.load(None, [held_out, "prepare.holdout=0"])
    assert params.load(None, [held_out]).prepare.holdout > 0


def test_replay_requires_tables() -> None:
    replay = "train.timesteps.adaptive=replay"
    with pytest.raises(UserError, match=r"train\.timesteps\.tables: missing; required by adaptive"):
        params.load(None, [replay])
    assert params.load(None, [replay, "train.timesteps.tables=a"]).train.timesteps.tables == "a"


def test_every_problem_of_the_process_is_reported() -> None:
    given = ["schedule=linear", "timesteps=20", "prediction=noise", "zero_terminal_snr=true"]
    with pytest.raises(UserError) as error:
        params.load(None, [f"diffusion.{setting}" for setting in given])
    found = {problem.path: problem.involves for problem in error.value.problems}
    assert found == {
        "diffusion.timesteps": ("diffusion.schedule",),
        "diffusion.prediction": ("diffusion.zero_terminal_snr",),
    }


def test_guidance_interval_must_have_two_ends() -> None:
    with pytest.raises(UserError, match=r"sample\.guidance_interval: got \[3\.0, 0\.3\]; must be"):
        params.load(None, ["sample.guidance_interval=[3, 0.3]"])
    assert params.load(None, ["sample.guidance_interval=[0.3, 3]"]).sample.guidance_interval == (
        0.3,
        3.0,
    )


def test_numbers_with_exponents_are_numbers(tmp_path: Path) -> None:
    file = tmp_path / "params.yaml"
    file.write_text("train: {optimizer: {lr: 1e-3}}")
    assert params.load(file, ["train.optimizer.weight_decay=1e-2"]).train.optimizer.lr == 1e-3
    assert yaml_text.value("[1e3, -2.5E-1, '1e3', 1e3x]") == [1000.0, -0.25, "1e3", "1e3x"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"train: [", "not valid YAML"),
        (b"- 1\n- 2", "sections such as"),
        (b"seed: 1\nseed: 2", "duplicate key"),
        (b"\xff\xfe\x00", "not"),
        (b"a: !!python/object:os.system {}", "not valid YAML"),
    ],
)
def test_invalid_params_files_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "params.yaml"
    file.write_bytes(content)
    with pytest.raises(UserError, match=message):
        params.load(file)


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file"):
        params.load(tmp_path / "absent.yaml")


def test_an_override_creates_its_section() -> None:
    loaded = params.load(None, ["train.loss.weighting=uniform", "sample.checkpoints=[5, 10]"])
    assert loaded.train.loss.weighting == "uniform"
    assert loaded.sample.checkpoints == (5, 10)


def test_a_dumped_config_loads_as_the_same_config() -> None:
    loaded = params.load(None, ["sample.ema=0.99", "train.ema=[0.99, 0.9]", "seed=12345678901"])
    assert params.validate(loaded.dump()) == loaded


def test_home_in_the_tracking_uri_is_expanded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    given = params.load(None, ["tracking.uri=sqlite:///~/runs.db"])
    assert given.tracking.uri == f"sqlite:///{tmp_path}/runs.db"


def test_every_choice_has_a_described_method() -> None:
    from ddpm_core.training.methods import METHODS

    for key, choices in METHODS.items():
        *sections, name = key.split(".")
        model: type = config.Config
        for section in sections:
            model = model.model_fields[section].annotation
        assert set(get_args(model.model_fields[name].annotation)) == set(choices), key


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("prepare.background=#808080", "background", "#808080"),
        ("prepare.source=my photos #2", "source", "my photos #2"),
        ("prepare.source=2024", "source", "2024"),
        ("prepare.source='a b'", "source", "a b"),
        ("prepare.source='null'", "source", "null"),
    ],
)
def test_text_overrides_are_literal(override: str, path: str, value: str) -> None:
    assert getattr(params.load(overrides=(override,)).prepare, path) == value


def test_an_override_can_be_empty() -> None:
    assert params.load(overrides=("tracking.uri=",)).tracking.uri == ""
    assert params.load(overrides=("train.init=null",)).train.init is None


def test_a_section_with_only_comments_is_empty(tmp_path: Path) -> None:
    file = tmp_path / "params.yaml"
    file.write_text("prepare:\n  # source: photos\ntrain:\n  optimizer:\n", encoding="utf-8")
    loaded = params.load(file, ("prepare.source=photos",))
    assert loaded.prepare.source == "photos"
    assert loaded.train == Config().train


def test_missing_quotes_are_reported(tmp_path: Path) -> None:
    message = problems(tmp_path, "prepare:\n  background: #808080\n  classes: [0, 1]\n")
    assert (
        "prepare.background: got null; must be a text; quote a text that is null or begins"
        in message
    )
    assert "prepare.classes[1]: got 1; must be a text in quotes" in message


def test_a_dotted_key_is_explained(tmp_path: Path) -> None:
    message = problems(tmp_path, "train.optimizer.lr: 3\n")
    assert "train.optimizer.lr: a path is not a key" in message
    assert "in a file, write `train:`, below it `optimizer:`, below it `lr:`" in message


def test_paths_with_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for given, uri in {
        "sqlite:///~/mlflow.db": f"sqlite:///{tmp_path}/mlflow.db",
        "~/mlruns": f"{tmp_path}/mlruns",
        "file://~/mlruns": f"file://{tmp_path}/mlruns",
        "https://host/~me": "https://host/~me",
    }.items():
        assert params.load(overrides=[f"tracking.uri={given}"]).tracking.uri == uri
    settings = ("train.init", "evaluate.inception_weights", "tracking.uri")
    with pytest.raises(UserError) as caught:
        params.load(overrides=[f"{name}=~nobody-here/x" for name in settings])
    for name in settings:
        message = f"{name}: got '~nobody-here/x'; must not begin with ~nobody-here, which"
        assert message in str(caught.value)


def test_every_integer_setting_has_an_upper_bound() -> None:
    """A typo must fail at once instead of running. Only a high `snapshot_every` is harmless."""

    def unbounded(node: Any, path: str = "") -> Iterator[str]:
        if isinstance(node, dict):
            if node.get("type") == "integer" and not BOUNDS & set(node):
                yield path
            for key, item in node.items():
                yield from unbounded(item, f"{path}/{key}")
        elif isinstance(node, list):
            for item in node:
                yield from unbounded(item, path)

    found = set(unbounded(Config.model_json_schema())) | set(unbounded(Options.model_json_schema()))
    assert found == {"/$defs/Train/properties/snapshot_every/anyOf"}
