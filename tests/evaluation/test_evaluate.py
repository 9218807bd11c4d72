"""The verb evaluate, with samples and data in a workspace."""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.digits_workspace import HELD_OUT, digits, make_config, put_samples
from support.digits_workspace import put_snapshot as snapshot
from support.evaluated import Run, in_haste
from support.mlflow_server import put_store

from ddpm_core.errors import UserError
from ddpm_core.evaluation.plots import draw
from ddpm_core.scores import Row
from ddpm_core.storage.workspace import METRICS, RUN, samples_key, snapshot_key

PLOTS = (
    "FID_vs_TrainingSteps.png",
    "FID_vs_TrainingSteps_First25.png",
    "IS_vs_TrainingSteps.png",
    "IS_vs_TrainingSteps_First25.png",
    "KID_vs_TrainingSteps.png",
    "PrecisionRecall_vs_TrainingSteps.png",
)


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with three scored checkpoints, to be copied."""
    run = Run(tmp_path_factory.mktemp("scored"))
    run.put_data()
    for step, noise in ((200, 60), (400, 20), (600, 5)):
        run.put_samples(step, noise, shards=2)
    run.evaluate()
    return Path(run.config.workspace).parent


@pytest.fixture
def hasty() -> Iterator[None]:
    with in_haste():
        yield


@pytest.fixture
def run(scored: Path, tmp_path: Path, hasty: None) -> Run:
    shutil.copytree(scored, tmp_path, dirs_exist_ok=True)
    return Run(tmp_path)


def test_every_promised_file_is_written(run: Run) -> None:
    folder = run.workspace.path("evaluation")
    for name in PLOTS:
        with Image.open(folder / name) as image:
            assert image.size == (960, 576)
    lines = list(csv.DictReader((folder / "evaluation_results.csv").open()))
    assert [line["step"] for line in lines] == ["200", "400", "600"]
    assert {line["score_name"] for line in lines} == {"fd_in_domain_100"}
    best = list(csv.DictReader((folder / "best_scores.csv").open()))
    assert [line["best"] for line in best] == ["lowest distance", "highest IS"]
    assert best[0]["step"] == "600" and best[0]["name"] == "fd_in_domain_100"
    assert (folder / "report.html").read_text().startswith("<!doctype html>")


def test_metrics_json_has_numbers_of_the_best_checkpoint(run: Run) -> None:
    metrics = json.loads(run.workspace.path(METRICS).read_text())
    assert all(isinstance(value, int | float) for value in metrics.values())
    assert metrics["best_step"] == 600 and metrics["checkpoints"] == 3
    assert metrics["fd_in_domain_100"] == run.results()["best"]["score"]
    # These samples are training images with a little noise: nearer than held-out ones.
    assert metrics["floor_fd_in_domain_100"] > metrics["fd_in_domain_100"]


def test_cleaner_samples_score_better_in_every_metric(run: Run) -> None:
    rows = run.results()["rows"]
    for metric in ("score", "fd_pixel_pca", "kid_mean"):
        values = [row[metric] for row in rows]
        assert values == sorted(values, reverse=True), metric
    for metric in ("precision", "coverage"):
        assert rows[0][metric] < rows[-1][metric], metric


def test_every_score_has_its_evidence(run: Run) -> None:
    for row in run.results()["rows"]:
        evidence = row["evidence"]
        assert evidence["count"] == 100 and evidence["reference_count"] == 1797 - HELD_OUT
        for key in ("data", "holdout_data", "extractor_fingerprint", "weights", "samples", "train"):
            assert len(evidence[key]) >= 16, key
        assert evidence["extractor"] == "in_domain" and evidence["extractor_accuracy"] > 0.9
        assert evidence["sampler"]["sampler"] == "dpmpp" and evidence["seed"] == 1
        assert row["memorisation"]["count"] == 100


def test_copies_of_training_images_are_reported(run: Run) -> None:
    # These samples are training images with a little noise.
    rows = run.results()["rows"]
    assert rows[-1]["memorisation"]["verdict"] == "copies"
    assert (
        "but it copies training images" in run.workspace.path("evaluation/report.html").read_text()
    )


def test_the_number_of_shards_changes_no_score(run: Run) -> None:
    before = run.results()["rows"][1]
    shutil.rmtree(run.workspace.path(samples_key(400)))
    run.put_samples(400, 20, shards=5)
    after = run.evaluate()[400]
    assert after["key"] != before["key"]
    for metric in ("score", "kid_mean", "is_mean", "precision", "coverage"):
        assert after[metric] == before[metric], metric


def test_rows_that_are_up_to_date_are_not_measured_again(run: Run) -> None:
    assert run.stale() is None
    before, times = run.results(), run.row_times()
    run.evaluate()
    assert run.results() == before and run.row_times() == times


def test_only_changed_samples_are_measured_again(run: Run) -> None:
    run.put_samples(400, 30)
    assert run.stale() == "the samples of step 400 are new"
    before, times = run.results()["rows"], run.row_times()
    rows = run.evaluate()
    assert run.row_times()[0::2] == times[0::2] and run.row_times()[1] != times[1]
    assert rows[400]["score"] > before[1]["score"]
    assert rows[600].plain() == before[2]


def test_interrupted_evaluation_keeps_its_rows(run: Run) -> None:
    times = run.row_times()
    run.workspace.storage.remove("evaluation/results.json")
    run.workspace.storage.remove("evaluation/rows/step-00000600.json")
    assert run.stale() == "nothing is scored yet"
    run.evaluate()
    assert run.row_times()[:2] == times[:2]


@pytest.mark.parametrize(
    ("section", "reason"),
    [
        ({"neighbours": 3}, "the settings of evaluate have changed"),
        ({"metrics": ("fid",)}, "the settings of evaluate have changed"),
    ],
)
def test_changed_settings_make_scores_stale(run: Run, section: dict[str, Any], reason: str) -> None:
    changed = run.config.evaluate.model_copy(update=section)
    assert run.stale(run.config.model_copy(update={"evaluate": changed})) == reason


def test_missing_files_and_samples_make_scores_stale(run: Run) -> None:
    run.put_samples(800, 3)
    assert run.stale() == "the samples of step 800 are not scored yet"
    shutil.rmtree(run.workspace.path(samples_key(800)))
    shutil.rmtree(run.workspace.path(samples_key(200)))
    assert run.stale() == "the samples or the checkpoint of step 200 are missing"
    run.workspace.path("evaluation/report.html").unlink()
    assert run.stale() == "evaluation/report.html is missing"


def test_checkpoint_without_samples_is_an_unscored_row(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    snapshot(run.workspace, 800)
    row = run.evaluate()[800]
    assert row["score"] is None and "no complete samples" in row["problem"]
    assert "step 800 is not scored" in capsys.readouterr().err
    table = run.workspace.path("evaluation/evaluation_results.csv").read_text()
    assert "no complete samples" in table.splitlines()[-1]
    assert "no complete samples" in run.workspace.path("evaluation/report.html").read_text()
    assert run.results()["best"]["step"] == 600
    assert run.stale() is None


@pytest.mark.parametrize(
    ("checkpoints", "rows"), [("latest", [200, 400, 600, 900]), ("best", [200, 400, 600])]
)
def test_unselected_checkpoints_get_no_row(run: Run, checkpoints: str, rows: list[int]) -> None:
    for step in (800, 900):
        snapshot(run.workspace, step)
    sample = run.config.sample.model_copy(update={"checkpoints": checkpoints})
    run.config = run.config.model_copy(update={"sample": sample})
    assert list(run.evaluate()) == rows


def test_samples_without_a_checkpoint_are_not_ranked(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(run.workspace.path(snapshot_key(600)))
    assert run.stale() == "the samples or the checkpoint of step 600 are missing"
    assert list(run.evaluate()) == [200, 400]
    assert "Skipping the samples of step 600: its checkpoint is missing" in capsys.readouterr().err
    assert run.results()["best"]["step"] == 400
    assert run.stale() is None


def test_samples_of_other_weights_are_not_ranked(run: Run) -> None:
    kept = run.workspace.read_json(f"{samples_key(400)}/manifest.json")["weights"]
    for step, weights in ((400, kept), (600, "0" * 64)):
        files = {"ema-0.9.safetensors": {"size": 1, "sha256": weights}}
        run.workspace.write_json(f"{snapshot_key(step)}/manifest.json", {"files": files})
    assert run.stale() == "the samples or the checkpoint of step 600 are missing"
    assert (
        "weights that the checkpoint does not have: run `ddpm sample`"
        in run.evaluate()[600]["problem"]
    )
    assert run.results()["best"]["step"] == 400
    assert run.stale() is None


def test_selected_step_without_a_checkpoint_is_an_unscored_row(run: Run) -> None:
    run.config = make_config(
        run.workspace.path("").parent,
        prepare={"image_size": 8},
        sample={"checkpoints": [600, 5000]},
    )
    assert run.evaluate()[5000]["score"] is None


@pytest.mark.parametrize("damage", ["cut", "changed", "gone", "not json", "not a manifest"])
def test_corrupt_samples_do_not_stop_the_evaluation(run: Run, damage: str) -> None:
    folder = run.put_samples(600, 7)
    shard, manifest = folder / "shard-000-of-001.npy", folder / "manifest.json"
    content = shard.read_bytes()
    if damage == "cut":
        shard.write_bytes(content[:100])
    elif damage == "changed":
        shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif damage == "gone":
        shard.unlink()
    else:
        manifest.write_text("{" if damage == "not json" else '{"samples_fingerprint": "x"}')
    rows = run.evaluate()
    assert rows[600]["score"] is None and "\n" not in rows[600]["problem"]
    assert rows[400]["score"] is not None
    assert run.results()["best"]["step"] == 400


def test_samples_of_other_data_or_shape_get_a_problem(run: Run) -> None:
    data = run.workspace.read_json("data/manifest.json")["fingerprint"]
    put_samples(run.workspace, 400, run.images[:50], "another")
    put_samples(run.workspace, 600, digits(16)[0][:50], data)
    rows = run.evaluate()
    assert "trained on the data another, but the prepared data are" in rows[400]["problem"]
    assert "(16, 16, 1); the prepared images are uint8 of shape (8, 8, 1)" in rows[600]["problem"]


def test_one_sample_is_too_few(run: Run) -> None:
    run.put_samples(600, 5, count=1)
    problem = run.evaluate()[600]["problem"]
    assert problem == "It has 1 sample; a score requires at least 2."


def test_different_image_counts_are_not_ranked_together(run: Run) -> None:
    run.put_samples(600, 5, count=150)
    rows = run.evaluate()
    assert rows[600]["score_name"] == "fd_in_domain_150"
    assert rows[600]["score"] < rows[400]["score"]
    assert run.results()["best"]["step"] == 400
    report = run.workspace.path("evaluation/report.html").read_text()
    assert "Step 600: measured with a different number of images" in report


def test_few_held_out_images_are_compared_at_equal_counts(run: Run) -> None:
    run.put_samples(600, 5, count=400)
    row = run.evaluate()[600]
    assert row["floor_count"] == HELD_OUT and row["score_name"] == "fd_in_domain_400"
    assert row["at_floor"]["fd"] > row["fd"]  # fewer images, more bias


def test_small_image_counts_give_a_warning(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run.put_samples(800, 3)
    capsys.readouterr()
    run.evaluate()
    assert "Below 10,000 images they are biased upwards" in capsys.readouterr().err


def test_corrupt_reference_is_measured_again(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    (file,) = run.workspace.path("evaluation/reference").glob("in_domain-*/features.safetensors")
    file.write_bytes(file.read_bytes()[:-100])
    before = run.results()["rows"][2]
    run.workspace.storage.remove("evaluation/rows/step-00000600.json")
    capsys.readouterr()
    assert run.evaluate()[600]["score"] == before["score"]
    assert "measured again" in capsys.readouterr().err


def test_the_reference_is_measured_once(run: Run) -> None:
    def times() -> list[int]:
        folder = run.workspace.path("evaluation/reference")
        return sorted(path.stat().st_mtime_ns for path in folder.rglob("*.safetensors"))

    before = times()
    run.put_samples(800, 3)
    run.evaluate()
    assert times() == before and len(before) == 3


@pytest.mark.usefixtures("hasty")
def test_new_data_give_a_new_reference_and_extractor(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.put_data(images=run.images[:400], labels=run.labels[:400])
    run.images = np.roll(run.images, 1, axis=2)
    run.put_samples(200, 10, count=30)
    first = run.evaluate(metrics=("fid",))[200]
    run.put_data(images=255 - run.images[:400], labels=run.labels[:400])
    assert "train and sample again" in run_problem(run)
    run.put_samples(200, 10, count=30)
    second = run.evaluate(metrics=("fid",))[200]
    assert second["evidence"]["data"] != first["evidence"]["data"]
    assert second["evidence"]["extractor_fingerprint"] != first["evidence"]["extractor_fingerprint"]
    names = [p.name.split("-")[0] for p in run.workspace.path("evaluation/reference").iterdir()]
    assert sorted(names) == ["in_domain", "pixel_pca"]  # the old ones are removed


def run_problem(run: Run) -> str:
    with pytest.raises(UserError) as caught:
        run.evaluate(metrics=("fid",))
    return str(caught.value)


def test_unselected_metrics_are_none(run: Run) -> None:
    row = run.evaluate(metrics=("kid",))[600]
    assert row["score_name"] == "kid_in_domain_100" and row["score"] == row["kid_mean"]
    assert row["memorisation"] is None
    for metric in (
        "fd",
        "is_mean",
        "precision",
        "density",
        "kid_std",
    ):  # 100 samples give no deviation
        assert row[metric] is None, metric
    images = draw([Row.model_validate(row)])
    assert set(images) == set(PLOTS)  # DVC expects all of them
    assert all(len(image) > 1000 for image in images.values())


@pytest.mark.usefixtures("hasty")
def test_colour_images_of_one_class_without_held_out_images(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.images = np.repeat(digits(8)[0][:300], 3, axis=3)
    run.labels = np.zeros(300, np.int64)
    run.put_data(held_out=0, classes=())
    run.images = run.images[:50].repeat(20, axis=0)
    run.put_samples(200, 20, count=40)
    row = run.evaluate()[200]
    assert row["score"] > 0 and row["is_mean"] is None  # it learned rotations, not classes
    assert row["floor"] is None and row["memorisation"]["verdict"] == "unknown"
    assert row["evidence"]["extractor_accuracy"] is None
    report = run.workspace.path("evaluation/report.html").read_text()
    assert "there are no held-out images" in report


def test_missing_samples_or_data_name_the_next_step(tmp_path: Path) -> None:
    run = Run(tmp_path)
    with pytest.raises(UserError, match="Run `ddpm sample`"):
        run.evaluate()
    put_samples(run.workspace, 200, run.images[:5], "x")
    with pytest.raises(UserError, match="Run `ddpm sample`"):
        run.evaluate()
    snapshot(run.workspace, 200)
    with pytest.raises(UserError, match="Run `ddpm prepare`"):
        run.evaluate()


@pytest.mark.usefixtures("hasty")
def test_mlflow_has_each_score_at_its_checkpoints_step(tmp_path: Path) -> None:
    uri = put_store(tmp_path / "mlflow.db")
    run = Run(tmp_path, tracking={"uri": uri})
    run.put_data(images=run.images[:550], labels=run.labels[:550])
    for step in (200, 400):
        run.put_samples(step, step / 20)
    rows = run.evaluate()
    run.evaluate()
    from ddpm_core.tracking.client import connect

    client, run_id = connect(uri), run.workspace.read_json(RUN)["mlflow"]["run_id"]
    history = client.get_metric_history(run_id, "fd_in_domain_100")
    assert [(m.step, m.value) for m in history] == [(s, rows[s]["score"]) for s in rows]
    names = {file.path for file in client.list_artifacts(run_id, "evaluation")}
    assert "evaluation/report.html" in names


@pytest.mark.usefixtures("hasty")
def test_deleted_mlflow_run_is_recreated_with_earlier_scores(tmp_path: Path) -> None:
    from ddpm_core.tracking.client import connect

    uri = put_store(tmp_path / "mlflow.db")
    run = Run(tmp_path, tracking={"uri": uri})
    run.put_data(images=run.images[:550], labels=run.labels[:550])
    runs = []
    for step in (200, 400):
        run.put_samples(step, step / 20)
        rows = run.evaluate()
        runs.append(run.workspace.read_json(RUN)["mlflow"]["run_id"])
        connect(uri).delete_run(runs[-1])
    assert runs[0] != runs[1]
    made = connect(uri).get_run(runs[1])
    assert made.info.run_name == "run-01234567"
    assert made.data.tags["training"] == "0123456789abcdef"
    assert made.data.params["prepare.image_size"] == "8"
    history = connect(uri).get_metric_history(runs[1], "fd_in_domain_100")
    assert sorted((m.step, m.value) for m in history) == [(s, rows[s]["score"]) for s in rows]


@pytest.mark.usefixtures("hasty")
def test_other_sampler_settings_get_their_own_mlflow_run(tmp_path: Path) -> None:
    from ddpm_core.tracking.client import connect
    from ddpm_core.tracking.run import PARENT

    uri = put_store(tmp_path / "mlflow.db")
    run = Run(tmp_path, tracking={"uri": uri, "experiment": "otherwise"})
    run.put_data(images=run.images[:550], labels=run.labels[:550])
    scores = {}
    for steps in (4, 9, 4):
        run.put_samples(200, steps, sampler={"sampler": "ddim", "steps": steps})
        scores[steps] = run.evaluate()[200]["score"]
    client = connect(uri)
    place = client.get_experiment_by_name("otherwise").experiment_id
    mine = run.workspace.read_json(RUN)["mlflow"]["run_id"]
    below = client.search_runs([place], f"tags.`{PARENT}` = '{mine}'")
    assert [one.info.run_name for one in below] == ["ddim, 9 steps, 100 images, seed 1"]
    assert below[0].data.params["sampler.steps"] == "9"
    for run_id, steps in ((mine, 4), (below[0].info.run_id, 9)):
        history = client.get_metric_history(run_id, "fd_in_domain_100")
        assert [(m.step, m.value) for m in history] == [(200, scores[steps])]
        assert "evaluation/report.html" in {
            file.path for file in client.list_artifacts(run_id, "evaluation")
        }


def test_freshness_is_imported_without_torch() -> None:
    """Jobs that wait for scores stay small."""
    code = "import ddpm_core.evaluation.freshness, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
