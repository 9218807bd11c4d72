"""A params file: every mistake is told at once, with its path, what was given, what is allowed."""

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


def mistakes(tmp_path: Path, text: str, *overrides: str) -> str:
    file = tmp_path / "params.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(UserError) as caught:
        params.load(file, overrides)
    return str(caught.value)


def test_without_a_file_the_defaults_are_the_digits() -> None:
    loaded = params.load()
    assert loaded.prepare.source == "digits"
    assert loaded.model_copy(update={"tracking": Config().tracking}) == Config()


def test_the_checked_in_params_file_is_the_defaults() -> None:
    given = yaml.safe_load((ROOT / "params.yaml").read_text(encoding="utf-8"))
    assert params.validate(given) == Config()


def test_all_mistakes_are_told_at_once(tmp_path: Path) -> None:
    text = """
    seed: -1
    trian: {}
    prepare: {image_size: "16", resize: cropp}
    model: {channels: 0, attention: [8, x]}
    train: {stepps: 5, optimizer: {betas: [0.9, 2]}, loss: {weighting: foo}}
    sample: {checkpoints: al}
    """
    told = mistakes(tmp_path, text)
    assert told.startswith("10 mistakes in ")
    for line in (
        "seed: -1 given; greater than or equal to 0",
        "trian: unknown key; did you mean train?",
        "prepare.image_size: '16' given; a valid integer",
        "prepare.resize: 'cropp' given; 'crop', 'pad' or 'squash'",
        "model.channels: 0 given",
        "model.attention[1]: 'x' given; a valid integer",
        "train.stepps: unknown key in train; did you mean steps?",
        "train.optimizer.betas[1]: 2 given; less than 1",
        "train.loss.weighting: 'foo' given; 'uniform'",
        "sample.checkpoints: 'al' given; 'latest', 'all' or 'best', or a list",
    ):
        assert line in told


def test_what_does_not_fit_each_other_is_told_beside_what_is_wrong_by_itself(
    tmp_path: Path,
) -> None:
    file = tmp_path / "params.yaml"
    file.write_text("train: {keep: 0, microbatches: 99, ema: [0.5, 0.5], snapshot_every: 0}")
    given = ["model.heads=3", "sample.steps=6000", "diffusion.timesteps", "sample.count=x"]
    with pytest.raises(UserError, match="mistakes in") as caught:
        params.load(file, given)
    told = str(caught.value)
    for line in (
        "-S diffusion.timesteps: section.key=value is needed",
        "train.keep: 0 given",
        "train.microbatches: 99 is more than batch_size, 32",
        "train.ema: [0.5, 0.5] has a decay twice",
        "train.snapshot_every: 0 given",
        "sample.count: 'x' given",
        "sample.steps: 6000 given; there are only 1000",
        "model.heads: 3 given; it must divide",
    ):
        assert line in told
    assert told.startswith("8 mistakes in")


def test_nothing_is_told_of_what_was_left_out() -> None:
    with pytest.raises(UserError, match="mistake") as caught:
        params.load(None, ["prepare.image_size=x", "model.attention=[32]", "train.ema=[2]"])
    assert str(caught.value).startswith("2 mistakes")


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("train.optimizer.betas=[0.9]", "train.optimizer.betas[1]: absent; it is needed"),
        ("train.loss=huber", "train.loss: 'huber' given; a section with kind, weighting"),
        ("train.lr=3", "did you mean train.optimizer.lr?"),
        ("steps=3", "known here are seed"),
        ("image_size=3", "did you mean prepare.image_size?"),
        ("device=gpu", "device: 'gpu' given; auto, cpu, mps, cuda or cuda:N is needed"),
        ("train.flip='true'", "'true' given; true or false, without quotes, is needed"),
        ("train.flip=1", "train.flip: 1 given; true or false is needed"),
        ("sample.classes=bicycle", "'bicycle' given; a list, as in [bicycle], is needed"),
        ("train.ema=0.99", "train.ema: 0.99 given; a list, as in [0.99], is needed"),
        ("train.steps=0123", "'0123' given; a valid integer that does not begin with 0 is needed"),
        ("train.steps=20,000", "a valid integer without commas, as in 20_000, is needed"),
        ("train={steps: 20,000}", "train.000: unknown key in train; write a number without commas"),
        ("train.steps='5'", "'5' given; a valid integer without quotes is needed"),
        ("prepare.source=null", "prepare.source: null given; a text in quotes"),
        ("train.processes=1000000000", "given; 'auto', or less than or equal to 10000 is needed"),
        ("train.batch_size=1000000000000", "given; less than or equal to 1000000 is needed"),
        (f"tracking.experiment={'e' * 256}", "given; a text of at most 255 characters is needed"),
        ("tracking.experiment=", "'' given; a text that is not empty is needed"),
        (f"register.alias={'a' * 256}", "given; a text of at most 255 characters is needed"),
        (f"register.name={'n' * 256}", "given; a text of at most 255 characters is needed"),
        (f"train.ema={[i / 200 for i in range(1, 102)]}", "given; a list of at most 100 is needed"),
        ("train.snapshot_every=9999999h", "given; a number of steps, or a time such as"),
    ],
)
def test_a_mistake_is_told_in_words_of_the_params_file(override: str, told: str) -> None:
    with pytest.raises(UserError, match="1 mistake") as caught:
        params.load(None, [override])
    assert told in str(caught.value)


def test_the_file_is_not_blamed_for_what_an_option_gives(tmp_path: Path) -> None:
    only = mistakes(tmp_path, "train: {steps: 5}", "train.stpes=5", "trian.keep=1", "seed")
    assert only.startswith("3 mistakes:\n")
    assert only.count("(given by -S)") == 2
    both = mistakes(tmp_path, "seed: -1\ntrian: {}", "trian.keep=1", "train.optimizer.lr=x")
    assert both.startswith(f"3 mistakes in {tmp_path}/params.yaml with -S:\n")
    assert [line for line in both.splitlines() if line.endswith("(given by -S)")] == [
        "  train.optimizer.lr: 'x' given; a valid number is needed (given by -S)"
    ]
    with pytest.raises(UserError, match=r"^1 mistake:\n  workspace: .* \(given by -w\)$"):
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
def test_attention_suits_every_image_size(
    size: int, multipliers: str, chosen: tuple[int, ...]
) -> None:
    given = [f"prepare.image_size={size}", f"model.multipliers={multipliers}"]
    assert params.load(None, given).model.attention == chosen
    assert params.load(None, [*given, "model.attention=auto"]).model.attention == chosen
    assert params.load(None, [*given, "model.attention=[]"]).model.attention == ()


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("prepare.image_size=28", "a multiple of"),
        ("model.attention=[5]", "works at [16, 8, 4]; or auto"),
        ("sample.steps=2000", "there are only 1000"),
        ("train.microbatches=33", "more than batch_size, 32"),
        ("train.ema=[0.9, 0.9]", "a decay twice"),
        ("model.heads=3", "must divide the channels"),
        ("sample.classes=[cat]", "model.conditioning is not class"),
        ("sample.prompts=[a cat]", "model.conditioning is not text"),
        ("sample.guidance=3", "model.conditioning is none; 1"),
        ("sample.ema=0.5", "train.ema has [0.99]"),
        ("train.steps=true", "a valid integer"),
        ("train.steps=.nan", "a valid integer"),
        ("train.optimizer.lr=.inf", "finite"),
        ("train.steps", "section.key=value is needed"),
        ("train.steps.deep=1", "steps is a value, not a section"),
        ("train.steps=[", "not a YAML value"),
        ("train.init=3", "a text in quotes"),
    ],
)
def test_sections_that_do_not_fit_each_other_are_told(override: str, told: str) -> None:
    overrides = [override]
    if override.startswith("prepare.image_size"):
        overrides.append("model.multipliers=[1, 2, 2, 2]")
    if override.startswith("train.steps.deep"):
        overrides.insert(0, "train.steps=5")
    with pytest.raises(UserError, match=r".") as caught:
        params.load(None, overrides)
    assert told in str(caught.value)


def test_guidance_that_training_does_not_prepare_is_told_before_it() -> None:
    class_wise = ["model.conditioning=class", "sample.guidance=3"]
    assert params.load(None, class_wise).sample.guidance == 3.0
    with pytest.raises(UserError, match=r"sample.guidance: 3 given, but train.label_drop is 0; 1"):
        params.load(None, [*class_wise, "train.label_drop=0"])


def test_a_linear_schedule_of_few_steps_is_refused() -> None:
    with pytest.raises(UserError, match="schedule linear"):
        params.load(None, ["diffusion.schedule=linear", "diffusion.timesteps=20"])
    assert params.load(None, ["diffusion.schedule=linear", "diffusion.timesteps=21"])


def test_exponents_are_numbers_though_yaml_1_1_says_text(tmp_path: Path) -> None:
    file = tmp_path / "params.yaml"
    file.write_text("train: {optimizer: {lr: 1e-3}}")
    assert params.load(file, ["train.optimizer.weight_decay=1e-2"]).train.optimizer.lr == 1e-3
    assert yaml_text.value("[1e3, -2.5E-1, '1e3', 1e3x]") == [1000.0, -0.25, "1e3", "1e3x"]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"train: [", "not valid YAML"),
        (b"- 1\n- 2", "sections such as"),
        (b"seed: 1\nseed: 2", "duplicate key"),
        (b"\xff\xfe\x00", "not"),
        (b"a: !!python/object:os.system {}", "not valid YAML"),
    ],
)
def test_a_file_that_is_no_params_file_is_one_sentence(
    tmp_path: Path, content: bytes, told: str
) -> None:
    file = tmp_path / "params.yaml"
    file.write_bytes(content)
    with pytest.raises(UserError, match=told):
        params.load(file)


def test_an_absent_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file"):
        params.load(tmp_path / "absent.yaml")


def test_an_override_makes_its_section() -> None:
    loaded = params.load(None, ["train.loss.weighting=uniform", "sample.checkpoints=[5, 10]"])
    assert loaded.train.loss.weighting == "uniform"
    assert loaded.sample.checkpoints == (5, 10)


def test_dumped_settings_are_valid_and_the_same() -> None:
    loaded = params.load(None, ["sample.ema=0.99", "train.ema=[0.99, 0.9]", "seed=12345678901"])
    assert params.validate(loaded.dump()) == loaded


def test_home_in_the_tracking_uri_is_expanded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    given = params.load(None, ["tracking.uri=sqlite:///~/runs.db"])
    assert given.tracking.uri == f"sqlite:///{tmp_path}/runs.db"


def test_the_names_of_methods_are_those_that_exist() -> None:
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
def test_a_text_is_taken_as_it_stands(override: str, path: str, value: str) -> None:
    assert getattr(params.load(overrides=(override,)).prepare, path) == value


def test_an_empty_text_is_one() -> None:
    assert params.load(overrides=("tracking.uri=",)).tracking.uri == ""
    assert params.load(overrides=("train.init=null",)).train.init is None


def test_a_section_whose_settings_are_all_commented_out_is_empty(tmp_path: Path) -> None:
    file = tmp_path / "params.yaml"
    file.write_text("prepare:\n  # source: photos\ntrain:\n  optimizer:\n", encoding="utf-8")
    loaded = params.load(file, ("prepare.source=photos",))
    assert loaded.prepare.source == "photos"
    assert loaded.train == Config().train


def test_where_yaml_needs_quotes_they_are_named(tmp_path: Path) -> None:
    told = mistakes(tmp_path, "prepare:\n  background: #808080\n  classes: [0, 1]\n")
    assert "prepare.background: null given; a text in quotes, where it is null or begins" in told
    assert "prepare.classes[1]: 1 given; a text in quotes is needed" in told


def test_a_key_with_a_dot_is_told_how_a_file_has_it(tmp_path: Path) -> None:
    told = mistakes(tmp_path, "train.optimizer.lr: 3\n")
    assert (
        "train.optimizer.lr: in a file, write `train:`, below it `optimizer:`, below it `lr:`"
        in told
    )


def test_the_home_directory_may_begin_a_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        told = f"{name}: '~nobody-here/x' given; no home directory is known for ~nobody-here"
        assert told in str(caught.value)


def test_every_whole_number_has_an_upper_bound() -> None:
    """So that no slip of the finger is attempted; a high `snapshot_every` costs nothing."""

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
