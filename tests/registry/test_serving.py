"""A version in `mlflow models serve`: images, invalid requests, and its content."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.mlflow_server import QUIET, Server, answers, free_port, shared_server, wait_until
from support.models import CLASSES, write_checkpoint
from support.served_models import SHAPES, ask, assert_same_images, drawn, publish

from ddpm_core.checkpoint import Checkpoint
from ddpm_core.config import Config
from ddpm_core.config import load as params
from ddpm_core.errors import UserError
from ddpm_core.registry import package, request
from ddpm_core.registry.models import download


@pytest.fixture(scope="module")
def server() -> Server:
    return shared_server().running()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    source = {"uri": "https://me:secret@host/shapes.zip"}
    return write_checkpoint(tmp_path_factory.mktemp("model") / "step", "class", source=source)


@pytest.fixture(scope="module")
def name(server: Server, checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A registered model whose version 1 is the champion."""
    name = "served.by-tests"
    registry, version = publish(server.uri, name, checkpoint, tmp_path_factory.mktemp("package"))
    registry.promote(version)
    return name


@pytest.fixture(scope="module")
def url(server: Server, name: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`mlflow models serve` in another folder, where this project is not installed."""
    folder = tmp_path_factory.mktemp("elsewhere")
    binaries = environment_without_us(folder / "venv")
    port = free_port()
    command = [str(binaries / "python"), "-m", "mlflow", "models", "serve", "--port", str(port)]
    command += ["-m", f"models:/{name}@champion", "--env-manager", "local", "--host", "127.0.0.1"]
    environment = {**os.environ, **QUIET, "MLFLOW_TRACKING_URI": server.uri}
    environment["PATH"] = f"{binaries}{os.pathsep}{environment['PATH']}"
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True
        )
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until(
            lambda: answers(f"{url}/ping") or process.poll() is not None, "the model serves", 120
        )
        assert process.poll() is None, (folder / "log").read_text()
        yield f"{url}/invocations"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def environment_without_us(folder: Path) -> Path:
    """Create a virtual environment with our packages but without this project; return its bin/.

    A .pth file adds the packages to the path. Python does not read .pth files from there, so the
    one that leads to our sources has no effect.
    """
    venv.create(folder, symlinks=True)
    binaries = folder / "bin"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = folder / "lib" / version / "site-packages"
    (site / "packages.pth").write_text(sysconfig.get_path("purelib") + "\n")
    script = binaries / "uvicorn"
    script.write_text(f"#!{binaries}/python\nfrom uvicorn.main import main\nmain()\n")
    script.chmod(0o755)
    importing = [str(binaries / "python"), "-c", "import ddpm_core"]
    failed = subprocess.run(importing, cwd=folder, capture_output=True, text=True, check=False)
    assert "No module named 'ddpm_core'" in failed.stderr
    return binaries


# With MLflow's server, without this project


@pytest.mark.slow
def test_a_seed_draws_the_same_images_as_sampling(url: str, checkpoint: Checkpoint) -> None:
    status, predictions = ask(url, {"dataframe_records": [{"n": 5}]})
    assert status == 200
    assert_same_images(predictions, drawn(checkpoint, 5))
    assert [answer["number"] for answer in predictions] == list(range(5))
    assert {answer["sampler"] for answer in predictions} == {"ddim"}


@pytest.mark.slow
def test_all_forms_of_a_request_get_the_same_response(url: str) -> None:
    results = [ask(url, body) for body in SHAPES]
    assert all(result == results[0] for result in results)
    assert results[0][0] == 200
    assert len(results[0][1]) == 2


@pytest.mark.slow
def test_classes_samplers_and_arrays_are_supported(url: str, checkpoint: Checkpoint) -> None:
    rows = [
        {"n": 2, "class": "square", "format": "array"},
        {"n": 1, "class": 0, "sampler": "ddpm", "steps": 3, "guidance": 2},
        {"n": 1, "class": "7", "first": 3},
    ]
    status, predictions = ask(url, {"dataframe_records": rows})
    assert status == 200, predictions
    assert [answer["class"] for answer in predictions] == ["square", "square", "circle", "7"]
    array = np.array(predictions[0]["image"])
    assert array.shape == (8, 8, 1)
    assert np.abs(array - drawn(checkpoint, 2, classes=("square",))[0].astype(int)).max() <= 1
    expected = drawn(checkpoint, 1, classes=("circle",), sampler="ddpm", steps=3, guidance=2.0)
    assert_same_images(predictions[2:3], expected)
    assert_same_images(predictions[3:], drawn(checkpoint, 4, classes=("7",))[3:])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"n": 0}, "n: got 0; must be at least 1"),
        ({"n": 257}, "n: got 257; must be at most 256"),
        ({"n": 1.5}, "n: got 1.5; must be an integer"),
        ({"n": "x"}, "n: got 'x'; must be an integer"),
        ({"n": 1, "class": "triangle"}, "class: got 'triangle'; must be one of circle, square, 7"),
        ({"n": 1, "class": 3}, "or a number from 0 to 2"),
        ({"n": 1, "prompt": "a cat"}, "prompt: got ['a cat']; requires model.conditioning text"),
        ({"n": 1, "sampler": "euler"}, "got 'euler'; must be 'ddpm', 'ddim', 'dpmpp' or 'heun'"),
        ({"n": 1, "steps": 51}, "steps: got 51; must be at most diffusion.timesteps, 50"),
        ({"n": 1, "guidance": -1}, "guidance: got -1; must be at least 0"),
        ({"n": 1, "seed": -1}, "seed: got -1; must be at least 0"),
        ({"n": 1, "format": "jpeg"}, "format: got 'jpeg'; must be 'png' or 'array'"),
        ({"n": float("inf")}, "n: got inf; must be an integer"),
        ({"n": [1, 2]}, "n: got [1, 2]; must be an integer"),
        (
            {"n": 1, "seed": 1e300},
            "seed: got 1e+300; must be an integer; floats of 2^53 or more are not exact",
        ),
        ({"n": 1, "guidance": 10**400}, "guidance: got 1000"),
        ({"n": 1, "class": "x" * 9000}, "xxx...; must be one of circle, square, 7"),
        ({"seed": 1}, "missing inputs ['n']"),
    ],
)
def test_an_invalid_request_gets_a_short_message(
    url: str, row: dict[str, Any], expected: str
) -> None:
    status, message = ask(url, {"dataframe_records": [row]})
    assert status == 400
    assert expected in message and len(message) < 500
    assert "Traceback" not in message


@pytest.mark.slow
def test_a_large_seed_is_never_rounded(url: str) -> None:
    seed = 2**53 + 1
    status, predictions = ask(url, {"dataframe_records": [{"n": 1, "seed": seed}]})
    assert (status, predictions[0]["seed"]) == (200, seed)
    status, message = ask(url, {"dataframe_records": [{"n": 1, "seed": seed}, {"n": 1}]})
    assert (status, "send an integer in every row" in message) == (400, True), message


@pytest.mark.slow
def test_the_image_limit_holds_for_all_rows_together(url: str) -> None:
    status, message = ask(url, {"dataframe_records": [{"n": 200}, {"n": 57}]})
    assert (status, "asks for 257 images" in message) == (400, True)


def test_a_version_is_downloaded_without_secrets_or_paths(server: Server, name: str) -> None:
    config = params.validate({"tracking": {"uri": server.uri}})
    folder = download(config, f"models:/{name}@champion")
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "ema-0.9.safetensors",
        "manifest.json",
    ]
    again = Checkpoint.open(download(config, f"models:/{name}/1"))
    assert again.params.sample.steps == 5
    settings = (folder / "config.json").read_text()
    assert "tracking" not in json.loads(settings)["params"]
    assert "https://***@host/shapes.zip" in settings
    with pytest.raises(UserError, match="is unavailable"):
        download(config, "models:/none@champion")


@pytest.mark.slow
def test_a_version_contains_only_the_code_that_it_imports(tmp_path: Path) -> None:
    with package.code() as folder:
        shutil.copytree(folder, tmp_path / folder.name)
    carried = [path.relative_to(tmp_path) for path in tmp_path.rglob("*.py")]
    names = [".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in carried]
    assert "ddpm_core.sampling.sampler" in names
    for unneeded in ("ddpm_core.training", "ddpm_core.evaluation", "ddpm_core.cli"):
        assert unneeded not in names
    # Each module must be importable without any other module of ours.
    script = f"import importlib as i\nfor name in {names}: i.import_module(name)\n"
    script += "import sys\nprint({m.__file__ for n, m in sys.modules.items() if 'ddpm' in n})"
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert str(Path(package.__file__).parents[1]) not in done.stdout


# Requests, without a server


def test_omitted_fields_take_the_models_settings(checkpoint: Checkpoint) -> None:
    row = {"n": 3.0, "seed": None, "class": float("nan")}
    task = request.resolve(request.parse(row), checkpoint.params, CLASSES)
    assert (task.numbers, task.format) == (range(3), "png")
    assert task.settings == checkpoint.params.sample


def test_a_text_model_takes_prompts_and_no_classes(tmp_path: Path) -> None:
    config = write_checkpoint(tmp_path / "texts", "text").params
    asked = request.parse({"n": 1, "prompt": "a red circle"})
    assert request.resolve(asked, config, CLASSES).settings.prompts == ("a red circle",)
    with pytest.raises(UserError, match=r"requires model\.conditioning class; it is text"):
        request.resolve(request.parse({"n": 1, "class": "circle"}), config, CLASSES)


def test_guidance_is_rejected_by_a_model_without_it(tmp_path: Path) -> None:
    config = write_checkpoint(tmp_path / "plain").params
    assert (
        request.resolve(request.parse({"n": 1, "guidance": 1}), config, []).settings.guidance == 1
    )
    with pytest.raises(UserError, match=r"guidance: got 2.0; must be 1 \(no guidance\)"):
        request.resolve(request.parse({"n": 1, "guidance": 2}), config, [])


def test_every_invalid_field_of_a_row_is_named() -> None:
    with pytest.raises(UserError, match=r"^3 problems in the request:") as invalid:
        request.parse({"n": 0, "steps": True, "class": []})
    assert [problem.path for problem in invalid.value.problems] == ["n", "class", "steps"]


def test_the_first_unknown_fields_of_a_row_are_named() -> None:
    with pytest.raises(UserError, match=r"known keys: n, seed, ") as many:
        request.parse({"n": 1} | {f"{number}-field" * 1000: 1 for number in range(9)})
    assert [problem.path[:7] for problem in many.value.problems] == [
        "0-field",
        "1-field",
        "2-field",
    ]
    assert len(str(many.value)) < 700


@pytest.mark.parametrize(("size", "count"), [(8, 256), (128, 256), (256, 64), (4096, 1)])
def test_the_pixels_of_a_response_are_limited(size: int, count: int) -> None:
    def tasks(n: int) -> list[request.Task]:
        return [request.resolve(request.parse({"n": 1}), Config(), [])] * n

    request.check_size(tasks(count), size**2, None)
    with pytest.raises(UserError, match=f"asks for {count + 1} images; 1 to {count} images"):
        request.check_size(tasks(count + 1), size**2, None)


def test_requirements_are_pinned_to_releases() -> None:
    pinned = package.requirements()
    assert all(item.count("==") == 1 and "+" not in item for item in pinned)
    assert {item.partition("==")[0] for item in pinned} >= {"torch", "numpy", "safetensors"}
