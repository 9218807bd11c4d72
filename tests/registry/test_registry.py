"""The champion moves only over a score that was measured in the same way, and never gets stuck."""

from __future__ import annotations

import errno
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from support.digits_workspace import digits, put_data
from support.mlflow_server import Server, free_port, put_store, shared_server
from support.models import write_checkpoint
from support.namespaces import on_small_disk

from ddpm_core.checkpoint import Checkpoint
from ddpm_core.config import Config
from ddpm_core.config import load as params
from ddpm_core.errors import UserError
from ddpm_core.evaluation import in_domain
from ddpm_core.evaluation.evaluate import evaluate
from ddpm_core.models.unet import UNet, UNetConfig
from ddpm_core.registry import card as card_of
from ddpm_core.registry import models
from ddpm_core.registry.gate import Decision
from ddpm_core.registry.models import Registry, download
from ddpm_core.registry.package import upload
from ddpm_core.registry.register import register, stale
from ddpm_core.runtime.distributed import World
from ddpm_core.sampling.run import sample
from ddpm_core.sampling.sampler import ImageSampler
from ddpm_core.scores import Row, differences
from ddpm_core.storage.workspace import RESULTS, RUN, Workspace, snapshot_key
from ddpm_core.tracking.client import connect
from ddpm_core.training.init import initial_weights

# Registered on a real server


class Project:
    """A workspace with prepared digits and checkpoints of two steps, and its registered model."""

    def __init__(self, root: Path, name: str, uri: str, seeds: tuple[int, int] = (0, 50)) -> None:
        self.workspace = Workspace.open(str(root / name))
        self.name, self.uri = name, uri
        images, labels = digits(8)
        fingerprint = put_data(self.workspace, images[:400], labels[:400], held_out=60)
        for step, seed in zip((4, 8), seeds, strict=True):
            folder = self.workspace.path(snapshot_key(step))
            classes = {"classes": list("0123456789"), "class_counts": [1] * 10}
            write_checkpoint(folder, seed=seed, step=step, fingerprint=fingerprint, **classes)

    def config(self, **sections: Any) -> Config:
        return params.validate(
            {
                "workspace": self.workspace.uri,
                "device": "cpu",
                "train": {"ema": [0.9], "milestone_every": 4},
                "sample": {"count": 40, "batch_size": 20, "steps": 4, "seed": 5},
                "evaluate": {"metrics": ["fid"]},
                "register": {"name": self.name},
                "tracking": {"uri": self.uri, "experiment": "registry"},
                **sections,
            }
        )

    def score(self, **sections: Any) -> dict[int, Row]:
        """Sample and evaluate, by a hasty classifier; the rows by step."""
        config = self.config(**sections)
        sample(config, self.workspace, World(0, 1, torch.device("cpu")))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(in_domain, "STEPS", (2, 2))
            return {row["step"]: row for row in evaluate(config, self.workspace)}

    def register(self, *rows: Row, **sections: Any) -> dict[str, Any]:
        """Register the best of these rows."""
        self.put(*rows)
        return register(self.config(**sections), self.workspace)

    def put(self, *rows: Row) -> None:
        """Write results.json with these rows."""
        self.workspace.write_json(
            RESULTS, {"rows": [Row.model_validate({**row}).with_checksum().plain() for row in rows]}
        )

    def champion(self) -> Any:
        return connect(self.uri).get_model_version_by_alias(self.name, "champion")

    def versions(self) -> list[Any]:
        return connect(self.uri).search_model_versions(f"name = '{self.name}'")

    def models(self) -> list[Any]:
        """What lies on the server for versions, and should be one's each."""
        client = connect(self.uri)
        place = client.get_experiment_by_name("registry").experiment_id
        return [m for m in client.search_logged_models([place]) if self.name in m.name]


@pytest.fixture(scope="module")
def server() -> Server:
    return shared_server().running()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The store without a server that is the default, for cases in which no server matters."""
    return put_store(tmp_path_factory.mktemp("store") / "mlflow.db")


@pytest.fixture(scope="module")
def project(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Project:
    return Project(tmp_path_factory.mktemp("registry"), "digits-by-tests", server.uri)


@pytest.fixture(scope="module")
def rows(project: Project) -> list[Row]:
    """The rows of both checkpoints, the better one first."""
    return sorted(project.score().values(), key=lambda row: row["score"])


def test_the_first_checkpoint_becomes_a_version_and_the_champion(
    project: Project, rows: list[Row]
) -> None:
    worse = rows[1]
    project.put(worse)
    assert stale(project.config(), project.workspace) == "nothing is registered yet"
    assert register_by_itself(project) == (
        f"{project.name} version 1, step {worse['step']}. Promoted: there was no champion.\n"
    )
    record, version = project.workspace.read_json("registered.json"), project.champion()
    assert (record["version"], record["promoted"]) == (version.version, True) == ("1", True)
    assert version.tags["decision"] == record["why"] == "Promoted: there was no champion."
    assert version.tags["weights"] == worse["evidence"]["weights"]
    assert float(version.tags[worse["score_name"]]) == pytest.approx(worse["score"], rel=1e-5)
    assert f"**{worse['score_name']}: {worse['score']:.4g}**" in version.description
    assert stale(project.config(), project.workspace) is None
    told = stale(project.config(register={"name": "other"}), project.workspace)
    assert told == "register.name: another one now than was registered"


def register_by_itself(project: Project) -> str:
    """Register in a process of its own; all that it says."""
    code = f"""
        from ddpm_core.config import load as params
        from ddpm_core.registry.register import register
        from ddpm_core.storage.workspace import Workspace
        given = params.validate({project.config().dump()!r})
        register(given, Workspace.open(given.workspace))
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def test_the_weights_and_settings_come_back_as_they_were_scored(
    project: Project, rows: list[Row]
) -> None:
    folder = download(project.config(), f"models:/{project.name}@champion")
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.weights_hash(checkpoint.params.sample.ema) == rows[1]["evidence"]["weights"]
    assert (checkpoint.step, checkpoint.params.sample.seed) == (rows[1]["step"], 5)


def test_a_warm_start_from_a_version_compares_the_process(project: Project) -> None:
    config = project.config(train={"init": f"models:/{project.name}@champion"})
    network = UNetConfig(8, 1, 8, (1, 2), 1, (4,))
    with pytest.raises(UserError, match=r"diffusion\.timesteps is 50 there, 1000 here"):
        initial_weights(UNet(network), config)


def test_the_same_checkpoint_makes_no_second_version(project: Project, rows: list[Row]) -> None:
    record = project.register(rows[1])
    assert (record["version"], record["promoted"]) == ("1", True)
    assert len(project.versions()) == 1


def test_a_better_checkpoint_takes_the_alias_over_and_a_worse_one_does_not(
    project: Project, rows: list[Row]
) -> None:
    assert project.register(rows[0])["promoted"]
    assert project.champion().version == "2"
    record = project.register(rows[1])
    assert not record["promoted"]
    assert "is not below" in record["why"]
    assert project.champion().version == "2"
    assert len(project.versions()) == 2


def test_with_other_evidence_the_champion_is_sampled_and_scored_as_evaluate_does(
    project: Project, rows: list[Row], capsys: pytest.CaptureFixture[str]
) -> None:
    other = {"sample": {"count": 30, "batch_size": 10, "steps": 3, "seed": 6, "sampler": "ddim"}}
    new = project.score(**other)
    champion, candidate = new[rows[0]["step"]], new[rows[1]["step"]]
    record = project.register(candidate, **other)
    assert "is sampled and scored anew" in capsys.readouterr().err
    assert "measured anew, as it differs in sampler, count" in record["why"]
    assert record["promoted"] == (candidate["score"] < champion["score"])
    old = connect(project.uri).get_model_version(project.name, "2")
    anew = json.loads(old.tags["rescored"])
    assert anew["score"] == pytest.approx(champion["score"], rel=1e-6)
    assert anew["evidence"]["weights"] == champion["evidence"]["weights"]
    assert not differences(Row.model_validate(anew), champion)


@pytest.mark.parametrize(("first", "second"), [("fid", "kid"), ("kid", "fid")])
def test_with_another_score_the_champion_is_measured_by_it_too(
    store: str, rows: list[Row], tmp_path: Path, first: str, second: str
) -> None:
    project = Project(tmp_path, f"digits-{first}-then-{second}", store)
    before, after = [project.score(evaluate={"metrics": [metric]}) for metric in (first, second)]
    good, bad = sorted(after, key=lambda step: after[step]["score"])
    assert project.register(before[bad], evaluate={"metrics": [first]})["promoted"]
    record = project.register(after[good], evaluate={"metrics": [second]})
    assert record["promoted"] and "as it differs in score" in record["why"]
    assert f"below the {after[bad]['score']:.4g} of the champion" in record["why"]
    record = project.register(after[bad], evaluate={"metrics": [second]})
    assert not record["promoted"] and record["version"] == "3"  # not that of the other score


@pytest.mark.parametrize("change", ["data", "extractor", "score"])
def test_a_champion_is_not_measured_by_what_the_candidate_was_not(
    project: Project, rows: list[Row], change: str
) -> None:
    metrics = ["kid"] if change == "score" else ["fid"]
    evidence = {**rows[1]["evidence"], "sampler": {"steps": 2}}
    if change != "score":
        evidence["data" if change == "data" else "extractor_fingerprint"] = "another"
    with pytest.raises(UserError, match=f"The {change} is now .*: run `ddpm evaluate` first") as e:
        project.register({**rows[1], "evidence": evidence}, evaluate={"metrics": metrics})
    assert "\n" not in str(e.value)


def test_a_champion_of_other_images_gives_way(store: str, rows: list[Row], tmp_path: Path) -> None:
    project = Project(tmp_path, "digits-that-grow", store)
    assert project.register(rows[0])["promoted"]
    images, labels = digits(16)
    larger = put_data(project.workspace, images[:400], labels[:400], held_out=60)
    record = project.register({**rows[1], "evidence": {**rows[1]["evidence"], "data": larger}})
    assert record["promoted"]
    assert record["why"].endswith(
        "it draws images of 8 pixels and 1 channels, the data have 16 and 1."
    )


@pytest.mark.parametrize(
    ("sampler", "told"),
    [
        ({"steps": 60}, "the checkpoint was trained with 50 timesteps: give at most as many."),
        ({"classes": ["3"]}, "was trained with model.conditioning none: leave it out, or train"),
    ],
)
def test_a_champion_that_cannot_draw_as_the_candidate_did_gives_way(
    store: str, rows: list[Row], tmp_path: Path, sampler: dict[str, Any], told: str
) -> None:
    project = Project(tmp_path, f"digits-not-by-{next(iter(sampler))}", store)
    assert project.register(rows[0])["promoted"]
    evidence = rows[1]["evidence"]
    asked = {**evidence, "sampler": {**evidence["sampler"], **sampler}}
    record = project.register({**rows[1], "evidence": asked})
    assert record["promoted"] and told in record["why"]


def test_what_copies_is_registered_but_not_promoted(
    store: str, rows: list[Row], tmp_path: Path
) -> None:
    project = Project(tmp_path, "digits-copied", store)
    record = project.register({**rows[0], "memorisation": {"verdict": "copies"}})
    assert (record["version"], record["promoted"]) == ("1", False)
    assert "copies training images" in record["why"]
    assert not connect(store).get_registered_model(project.name).aliases


@pytest.mark.parametrize(
    ("check", "verdict", "what", "fault"),
    [
        ("memorisation", "copies", "copies of training images", "copies training images"),
        (
            "collapse",
            "collapsed",
            "samples that repeat one another",
            "draws the same images repeatedly",
        ),
    ],
)
def test_a_champion_that_fails_a_check_later_is_told_and_gives_way(
    store: str, rows: list[Row], tmp_path: Path, check: str, verdict: str, what: str, fault: str
) -> None:
    project = Project(tmp_path, f"digits-found-out-{check}", store)
    assert project.register(rows[0])["promoted"]
    found_out = {**rows[0], check: {"verdict": verdict}}
    project.put(found_out)
    told = str(stale(project.config(), project.workspace))
    assert told.startswith(f"the verdict on {what}: another one now")
    record = project.register(found_out)
    assert (record["version"], record["promoted"]) == ("1", False)
    assert record["why"] == (
        f"Not promoted: it {fault}, by the {check} check. The champion, version 1, is the same "
        "network: it gives way to the next that passes this check."
    )
    assert project.champion().tags[check] == verdict
    assert stale(project.config(), project.workspace) is None
    worse = project.register(rows[1])
    assert (worse["version"], worse["promoted"]) == ("2", True)
    assert worse["why"] == f"Promoted: the champion, version 1, {fault}."


def test_a_verdict_that_comes_later_is_a_tag_and_no_second_version(
    store: str, rows: list[Row], tmp_path: Path
) -> None:
    project = Project(tmp_path, "digits-looked-at-later", store)
    unasked = {key: value for key, value in rows[0].plain().items() if key != "memorisation"}
    assert project.register(unasked)["promoted"]
    assert project.champion().tags["memorisation"] == "unknown"
    asked = {**unasked, "memorisation": {"verdict": "none"}}
    record = project.register(asked)
    assert (record["version"], record["promoted"]) == ("1", True)
    assert project.champion().tags["memorisation"] == "none"
    assert stale(project.config(), project.workspace) is None


@pytest.mark.parametrize(
    ("moment", "better_first"),
    [
        ("create", True),
        ("_make", False),
        ("promote", True),
        ("promote", False),
        ("versions", False),
    ],
)
def test_of_two_that_register_at_once_the_better_becomes_the_champion(
    store: str,
    rows: list[Row],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    moment: str,
    better_first: bool,
) -> None:
    """The second does all of its work while the first is about to take a step of its own."""
    project = Project(tmp_path, f"digits-at-once-{moment}-{better_first}", store)
    first, second = rows if better_first else rows[::-1]
    step, others = getattr(Registry, moment), []

    def meanwhile(registry: Registry, *arguments: Any) -> Any:
        if not others:
            others.append({})
            others[0] |= project.register(second)
        return step(registry, *arguments)

    monkeypatch.setattr(Registry, moment, meanwhile)
    record = project.register(first)
    champion = project.champion()
    assert champion.tags["weights"] == rows[0]["evidence"]["weights"]
    assert record["promoted"] == better_first
    assert (
        record["why"]
        == connect(store).get_model_version(project.name, record["version"]).tags["decision"]
    )
    if not better_first:
        told = "at the same time, is better" if moment == "promote" else "not below the"
        assert told in record["why"] and others[0]["promoted"]
    assert len(project.versions()) == 2


@pytest.mark.parametrize("moment", ["models.Registry.create", "register.upload"])
def test_the_same_checkpoint_makes_one_version_where_two_register_it_at_once(
    store: str, rows: list[Row], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """The second does all of its work while the first is about to take a step of its own."""
    project = Project(tmp_path, f"digits-twins-{moment[-6:]}", store)
    others: list[dict[str, Any]] = []
    step = Registry.create if moment.endswith("create") else upload

    def meanwhile(*arguments: Any) -> Any:
        if not others:
            others.append({})
            others[0] |= project.register(rows[0])
        return step(*arguments)

    monkeypatch.setattr(f"ddpm_core.registry.{moment}", meanwhile)
    record = project.register(rows[0])
    assert (record["version"], record["promoted"]) == ("1", True)
    assert others[0]["version"] == "1" and len(project.versions()) == 1
    assert [model.model_uri for model in project.models()] == [project.champion().source]


def test_a_try_that_failed_leaves_no_model_behind_and_is_not_uploaded_again(
    store: str, rows: list[Row], tmp_path: Path
) -> None:
    project = Project(tmp_path, "digits-tried-again", store)

    def out_of_order(*_: Any, **__: Any) -> None:
        raise MlflowException("Internal Server Error")

    for step, statuses in (("log_model_artifacts", "FAILED"), ("create_model_version", "READY")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(MlflowClient, step, out_of_order)
            with pytest.raises(UserError, match="cannot be used: Internal Server Error"):
                project.register(rows[0])
        [left] = project.models()
        assert str(left.status) == statuses
    assert project.register(rows[0])["promoted"]
    assert [model.model_id for model in project.models()] == [left.model_id]
    assert project.champion().source == left.model_uri


def test_a_champion_that_was_set_by_hand_is_not_moved_back(
    store: str, rows: list[Row], tmp_path: Path
) -> None:
    project = Project(tmp_path, "digits-by-hand", store)
    for one in rows[::-1]:
        project.register(one)
    connect(store).set_registered_model_alias(project.name, "champion", "1")
    assert project.register(rows[1])["promoted"]
    assert str(project.champion().version) == "1"


def test_a_version_that_was_refused_and_promoted_by_hand_says_so(
    store: str, rows: list[Row], tmp_path: Path
) -> None:
    project = Project(tmp_path, "digits-refused", store)
    for one in rows:
        project.register(one)
    connect(store).set_registered_model_alias(project.name, "champion", "2")
    record = project.register(rows[1])
    assert (record["version"], record["promoted"]) == ("2", True)
    assert record["why"] == "It is the champion: the alias was moved to it."
    assert project.champion().tags["decision"] == record["why"]


@pytest.mark.parametrize("gone", ["version", "model", "alias"])
def test_what_mlflow_has_no_longer_is_registered_again(
    store: str, rows: list[Row], tmp_path: Path, gone: str
) -> None:
    project = Project(tmp_path, f"digits-without-{gone}", store)
    project.register(rows[0])
    assert stale(project.config(), project.workspace) is None
    client = connect(store)
    if gone == "version":
        client.delete_model_version(project.name, "1")
    elif gone == "model":
        client.delete_registered_model(project.name)
    else:
        client.delete_registered_model_alias(project.name, "champion")
    told = {
        "alias": f"no version of {project.name} has the alias champion any more",
    }.get(gone, f"MLflow has no longer version 1 of {project.name}")
    assert stale(project.config(), project.workspace) == told
    assert project.register(rows[0])["promoted"]
    assert project.champion().tags["weights"] == rows[0]["evidence"]["weights"]
    assert stale(project.config(), project.workspace) is None


def test_another_store_is_told_of_settings_and_scores_too(store: str, tmp_path: Path) -> None:
    project = Project(tmp_path, "digits-moved", store)
    rows = project.score()
    uri = put_store(tmp_path / "other/mlflow.db")
    config = project.config(tracking={"uri": uri, "experiment": "registry"})
    client, run_id = connect(uri), register(config, project.workspace)["run_id"]
    run = client.get_run(run_id)
    assert run.info.run_name == "digits-moved-cafe" and run.data.tags["training"] == "cafe"
    assert run.data.params["diffusion.timesteps"] == "50"
    history = client.get_metric_history(run_id, rows[4]["score_name"])
    assert [(m.step, m.value) for m in history] == [(step, rows[step]["score"]) for step in rows]
    files = [file.path for file in client.list_artifacts(run_id, "evaluation")]
    assert "evaluation/report.html" in files


@pytest.mark.parametrize("mine", [True, False], ids=["its own", "another"])
def test_a_champion_whose_files_are_gone_gives_way_and_is_made_again(
    store: str, rows: list[Row], tmp_path: Path, mine: bool
) -> None:
    project = Project(tmp_path, f"digits-without-files-{mine}", store)
    assert project.register(rows[0])["promoted"]
    files = connect(store).get_model_version_download_uri(project.name, "1")
    shutil.rmtree(files.removeprefix("file://"))
    told = f"the files of version 1 of {project.name} are gone"
    assert stale(project.config(), project.workspace) == told
    record = project.register(rows[0] if mine else rows[1])  # the worse one
    assert record["why"] == (
        "Promoted: the champion, version 1, cannot be measured with the present evidence: its "
        "files are gone."
    )
    assert str(project.champion().version) == record["version"] == "2"
    download(project.config(), f"models:/{project.name}@champion")
    assert stale(project.config(), project.workspace) is None


def test_where_the_place_of_files_does_not_answer_the_champion_stays(
    store: str, rows: list[Row], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = Project(tmp_path, "digits-out-of-reach", store)
    assert project.register(rows[1])["promoted"]

    def away(*_: Any, **__: Any) -> None:
        raise ConnectionError("no route to host")

    monkeypatch.setattr("mlflow.artifacts.list_artifacts", away)
    assert stale(project.config(), project.workspace) is None
    with pytest.raises(UserError, match="no route to host"):
        project.register(rows[0])
    assert str(project.champion().version) == "1"


def test_a_version_of_the_same_number_in_a_newer_registry_is_another(
    store: str, rows: list[Row], tmp_path: Path
) -> None:
    project = Project(tmp_path, "digits-anew", store)
    project.register(rows[0])
    record = project.workspace.read_json("registered.json")
    connect(store).delete_registered_model(project.name)
    project.register(rows[1])
    assert str(project.champion().version) == record["version"]
    project.put(rows[0])
    project.workspace.write_json("registered.json", record)
    assert "MLflow has no longer version 1" in str(stale(project.config(), project.workspace))


@pytest.mark.parametrize("listens", [True, False])
def test_registered_stays_up_to_date_where_mlflow_does_not_answer(
    project: Project, rows: list[Row], monkeypatch: pytest.MonkeyPatch, listens: bool
) -> None:
    monkeypatch.setattr(models, "PATIENCE", 0.2)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        if listens:  # takes connections, and says nothing
            silent.listen()
        away = {"tracking": {"uri": f"http://127.0.0.1:{silent.getsockname()[1]}"}}
        record = project.register(rows[0]) | {"uri": away["tracking"]["uri"]}
        project.workspace.write_json("registered.json", record)
        assert stale(project.config(**away), project.workspace) is None


def test_a_store_that_is_gone_is_told_and_not_made(
    project: Project, rows: list[Row], tmp_path: Path
) -> None:
    store = {"tracking": {"uri": f"sqlite:///{tmp_path}/mlflow.db"}}
    record = project.register(rows[0]) | {"uri": store["tracking"]["uri"]}
    project.workspace.write_json("registered.json", record)
    assert stale(project.config(**store), project.workspace) == f"{tmp_path}/mlflow.db is gone"
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_that_goes_after_it_was_scored_blocks_nothing(
    store: str, tmp_path: Path
) -> None:
    project = Project(tmp_path, "digits-gone", store)
    rows, config = project.score(), project.config()
    best, other = sorted(rows, key=lambda step: rows[step]["score"])
    shutil.rmtree(project.workspace.path(snapshot_key(best)))
    with pytest.raises(UserError, match=rf"step {best}, is gone: run `ddpm evaluate` first"):
        register(config, project.workspace)
    for number in range(2):  # as independent jobs, which remove nothing
        sample(config, project.workspace, World(0, 1, torch.device("cpu")), (number, 2))
    evaluate(config, project.workspace)
    assert register(config, project.workspace)["step"] == other


def test_a_checkpoint_that_has_changed_since_it_was_scored_is_refused(
    project: Project, rows: list[Row]
) -> None:
    other = {**rows[0], "evidence": {**rows[0]["evidence"], "weights": "0" * 64}}
    with pytest.raises(UserError, match="has changed since it was scored"):
        project.register(other)


# What is not MLflow's


def register_on_small_disk(
    project: Project, row: Row, place: Path, size: str, before: str = "true", **sections: Any
) -> str:
    """Register in a process for which `place` is a small disk; what its error message says."""
    project.put(row)
    settings = place.with_name("params.yaml")
    new = {"register": {"name": "without-champion"}, **sections}
    settings.write_text(json.dumps(project.config(**new).dump()))
    ddpm = [sys.executable, "-m", "ddpm_core.cli", "register", "-p", str(settings)]
    script = ["sh", "-c", f"{before}; exec {shlex.join(ddpm)}"]
    done = subprocess.run(
        on_small_disk(place, size, script),
        env={**os.environ, "TMPDIR": str(place)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1 and done.stdout == ""
    return done.stderr


def test_a_full_temporary_folder_is_named_and_the_run_keeps_its_status(
    project: Project, rows: list[Row], tmp_path: Path
) -> None:
    other, place = {**rows[0], "score_name": "full"}, tmp_path / "scratch"
    told = register_on_small_disk(project, other, place, "100k")
    assert told.startswith(f"ddpm register: No space left on device: {place}/ddpm-"), told
    assert told.endswith(". Free some space there; the same command goes on.\n")
    assert told.count("\n") == 1
    run = project.workspace.read_json(RUN)["mlflow"]["run_id"]
    assert connect(project.uri).get_run(run).info.status == "FINISHED"


def test_a_store_on_a_full_disk_is_one_message(
    project: Project, rows: list[Row], tmp_path: Path
) -> None:
    put_store(tmp_path / "mlflow.db")
    other, place = {**rows[0], "score_name": "full store"}, tmp_path / "disk"
    fill = f"cp {tmp_path}/mlflow.db {place}; cat /dev/zero 2>/dev/null > {place}/fill"
    uri = f"sqlite:///{place}/mlflow.db"
    told = register_on_small_disk(project, other, place, "2m", fill, tracking={"uri": uri})
    assert told == (
        f"ddpm register: MLflow at {uri} cannot be used: the disk is full. Free some space there.\n"
    )


@pytest.mark.parametrize(
    "trouble",
    [
        OSError(errno.ENOSPC, "No space left on device", "/tmp/ddpm-register-x"),
        PermissionError(errno.EPERM, "Operation not permitted"),
        KeyError("floor"),
        torch.OutOfMemoryError("CUDA out of memory"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_is_no_trouble_of_mlflow_is_not_told_as_one(
    project: Project, rows: list[Row], monkeypatch: pytest.MonkeyPatch, trouble: Exception
) -> None:
    """Wherever it comes from: from the gate, scoring, or writing the model."""

    def fails(*_: Any) -> None:
        raise trouble

    other = {**rows[1], "score_name": "another"}
    for step in ("judge", "write_checkpoint"):
        monkeypatch.setattr(f"ddpm_core.registry.register.{step}", fails)
        with pytest.raises(type(trouble)) as told:
            project.register(other)
        assert trouble in (told.value, told.value.__cause__)
        monkeypatch.undo()
        monkeypatch.setattr("ddpm_core.registry.register.judge", lambda *_: Decision(False, ""))


def test_a_champion_too_large_for_the_memory_says_what_to_lower(
    project: Project, rows: list[Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    project.register(rows[0])
    monkeypatch.setattr(ImageSampler, "images", full)
    evidence = {**rows[1]["evidence"], "seed": 77, "sampler": {"steps": 2}}
    with pytest.raises(UserError, match=r"Out of memory with sample\.batch_size 20: lower it"):
        project.register({**rows[1], "evidence": evidence})


@pytest.mark.parametrize(
    "trouble",
    [
        MlflowException("no"),
        requests.exceptions.ReadTimeout("no"),
        ConnectionRefusedError(),
        TimeoutError(),
        socket.gaierror(-2, "Name or service not known"),
        OSError(errno.EHOSTUNREACH, "No route to host"),
        ModuleNotFoundError("No module named 'psycopg2'"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_mlflow_or_the_network_says_is_told_as_its_trouble(trouble: Exception) -> None:
    told = r"MLflow at http://\*\*\*@h cannot be used"
    with pytest.raises(UserError, match=told), models.asking("http://me:secret@h"):
        raise trouble


def test_an_address_that_is_none_is_told() -> None:
    with pytest.raises(UserError, match=r"tracking\.uri: 'http://\[x' given, which is none"):
        Registry(params.validate({"tracking": {"uri": "http://[x"}}))


# Without a server


def test_without_mlflow_registering_is_refused_in_one_sentence(
    project: Project, rows: list[Row]
) -> None:
    away = {"tracking": {"uri": f"http://127.0.0.1:{free_port()}"}}
    with pytest.raises(UserError) as refused:
        project.register(rows[0], **away)
    assert str(refused.value).endswith("cannot be used: the connection was refused.")
    with pytest.raises(UserError, match=r"tracking\.uri is empty"):
        project.register(rows[0], tracking={"uri": ""})


def test_nothing_scored_is_told(tmp_path: Path) -> None:
    workspace = Workspace.open(str(tmp_path))
    assert "run `ddpm evaluate` first" in str(stale(params.validate({}), workspace))


@pytest.mark.parametrize("alias", ["latest", "Latest", "v1", "V20"])
@pytest.mark.parametrize("name", [".", "..", "..a"])
def test_names_that_mlflow_refuses_in_the_end_are_refused_at_once(alias: str, name: str) -> None:
    with pytest.raises(UserError) as refused:
        params.validate({"register": {"alias": alias, "name": name}})
    told = str(refused.value)
    assert f"register.alias: {alias!r} given; MLflow keeps latest" in told
    assert f"register.name: {name!r} given; one that is no path of dots is needed" in told


def test_names_like_them_are_taken() -> None:
    for given in ({"alias": "vintage"}, {"alias": "v1-b"}, {"name": "v1"}, {"name": ".a..b"}):
        taken = params.validate({"register": given}).registration.model_dump()
        assert given.items() <= taken.items()


def test_a_version_with_a_long_card_has_all_of_it_among_its_files(
    store: str, rows: list[Row], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(card_of, "TEMPLATE", card_of.TEMPLATE + "a caveat\n" * 1000)
    project = Project(tmp_path, "digits-described", store)
    project.register(rows[0])
    version = project.champion()
    assert len(version.description) <= 5000 and "artifacts/README.md" in version.description
    folder = connect(store).get_model_version_download_uri(project.name, version.version)
    card = Path(folder.removeprefix("file://"), "artifacts", "README.md").read_text()
    assert card.endswith("a caveat\n" * 1000)
