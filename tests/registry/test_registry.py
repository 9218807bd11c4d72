"""`ddpm register` against a real server: versions, the champion, races, and errors."""

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
from mlflow.protos.databricks_pb2 import PERMISSION_DENIED
from support.digits_workspace import digits, put_data
from support.evaluated import in_haste
from support.mlflow_server import Server, free_port, put_store, shared_server
from support.models import write_checkpoint
from support.namespaces import on_small_disk

from ddpm_core.checkpoint import Checkpoint
from ddpm_core.config import Config
from ddpm_core.config import load as params
from ddpm_core.errors import Unavailable, UserError
from ddpm_core.evaluation.evaluate import evaluate
from ddpm_core.models.config import UNetConfig
from ddpm_core.models.unet import UNet
from ddpm_core.registry import card as card_of
from ddpm_core.registry import models
from ddpm_core.registry.freshness import Registration, stale
from ddpm_core.registry.gate import Decision
from ddpm_core.registry.models import Registry, download
from ddpm_core.registry.package import upload
from ddpm_core.registry.register import register
from ddpm_core.runtime.distributed import World
from ddpm_core.sampling.run import sample
from ddpm_core.sampling.sampler import ImageSampler
from ddpm_core.scores import Row, differences
from ddpm_core.storage.workspace import RESULTS, RUN, Workspace, snapshot_key
from ddpm_core.tracking.client import connect
from ddpm_core.training.init import initial_weights

# With a server


class Project:
    """A workspace with digits, checkpoints of two steps, and the name of a registered model."""

    def __init__(self, root: Path, name: str, uri: str, seeds: tuple[int, int] = (0, 50)) -> None:
        self.workspace = Workspace.open(str(root / name))
        self.name, self.uri = name, uri
        images, labels = digits(8)
        fingerprint = put_data(self.workspace, images[:400], labels[:400], held_out=60)
        for step, seed in zip((4, 8), seeds, strict=True):
            folder = self.workspace.path(snapshot_key(step))
            classes = {"classes": list("0123456789"), "class_counts": [1] * 10}
            facts = {"fingerprint": fingerprint, **classes}
            write_checkpoint(folder, seed=seed, step=step, groups=4, **facts)

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
        """Sample and evaluate, with a hardly trained classifier; return the rows by step."""
        config = self.config(**sections)
        sample(config, self.workspace, World(0, 1, torch.device("cpu")))
        with in_haste():
            return {row["step"]: row for row in evaluate(config, self.workspace)}

    def register(self, *rows: Row, **sections: Any) -> Registration:
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
        """Return the uploaded models on the server; each should belong to one version."""
        client = connect(self.uri)
        place = client.get_experiment_by_name("registry").experiment_id
        return [m for m in client.search_logged_models([place]) if self.name in m.name]


@pytest.fixture(scope="module")
def server() -> Server:
    return shared_server().running()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The URI of a SQLite store, for tests that need no server."""
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
    message = stale(project.config(register={"name": "other"}), project.workspace)
    assert message == "changed since the last registration: register.name"


def register_by_itself(project: Project) -> str:
    """Register in a separate process; return its output."""
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


def test_a_version_has_the_weights_and_settings_of_its_score(
    project: Project, rows: list[Row]
) -> None:
    folder = download(project.config(), f"models:/{project.name}@champion")
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.weights_hash(checkpoint.params.sample.ema) == rows[1]["evidence"]["weights"]
    assert (checkpoint.step, checkpoint.params.sample.seed) == (rows[1]["step"], 5)


def test_a_warm_start_from_a_version_compares_the_process(project: Project) -> None:
    config = project.config(train={"init": f"models:/{project.name}@champion"})
    network = UNetConfig(8, 1, 8, (1, 2), 1, (4,))
    with pytest.raises(
        UserError, match=r"diffusion\.timesteps is 50 in train.init, 1000 in this run"
    ):
        initial_weights(UNet(network), config)


def test_the_same_checkpoint_makes_no_second_version(project: Project, rows: list[Row]) -> None:
    record = project.register(rows[1])
    assert (record.version, record.promoted) == ("1", True)
    assert len(project.versions()) == 1


def test_only_a_better_checkpoint_takes_the_alias(project: Project, rows: list[Row]) -> None:
    assert project.register(rows[0]).promoted
    assert project.champion().version == "2"
    record = project.register(rows[1])
    assert not record.promoted
    assert "is not below" in record.why
    assert project.champion().version == "2"
    assert len(project.versions()) == 2


def test_a_champion_with_other_evidence_is_scored_like_evaluate(
    project: Project, rows: list[Row], capsys: pytest.CaptureFixture[str]
) -> None:
    other = {"sample": {"count": 30, "batch_size": 10, "steps": 3, "seed": 6, "sampler": "ddim"}}
    new = project.score(**other)
    champion, candidate = new[rows[0]["step"]], new[rows[1]["step"]]
    record = project.register(candidate, **other)
    assert "sampling and scoring the champion, version 2, again" in capsys.readouterr().err
    assert "measured again, because it differs in sampler, count" in record.why
    assert record.promoted == (candidate["score"] < champion["score"])
    old = connect(project.uri).get_model_version(project.name, "2")
    rescored = json.loads(old.tags["rescored"])
    assert rescored["score"] == pytest.approx(champion["score"], rel=1e-6)
    assert rescored["evidence"]["weights"] == champion["evidence"]["weights"]
    assert not differences(Row.model_validate(rescored), champion)


def test_a_champion_is_measured_by_the_candidates_metric(store: str, tmp_path: Path) -> None:
    project = Project(tmp_path, "digits-fid-then-kid", store)
    before, after = [project.score(evaluate={"metrics": [metric]}) for metric in ("fid", "kid")]
    good, bad = sorted(after, key=lambda step: after[step]["score"])
    assert project.register(before[bad], evaluate={"metrics": ["fid"]}).promoted
    record = project.register(after[good], evaluate={"metrics": ["kid"]})
    assert record.promoted and "because it differs in score" in record.why
    assert f"below the {after[bad]['score']:.4g} of the champion" in record.why
    record = project.register(after[bad], evaluate={"metrics": ["kid"]})
    assert not record.promoted and record.version == "3"  # not the version with the other metric


@pytest.mark.parametrize("change", ["data", "extractor", "score"])
def test_a_champion_is_not_measured_by_changed_evidence(
    project: Project, rows: list[Row], change: str
) -> None:
    metrics = ["kid"] if change == "score" else ["fid"]
    evidence = {**rows[1]["evidence"], "sampler": {"steps": 2}}
    if change != "score":
        evidence["data" if change == "data" else "extractor_fingerprint"] = "another"
    with pytest.raises(UserError, match=f"The {change} is now .*. Run `ddpm evaluate`") as e:
        project.register({**rows[1], "evidence": evidence}, evaluate={"metrics": metrics})
    assert "\n" not in str(e.value)


def test_a_champion_for_images_of_another_size_is_replaced(
    store: str, rows: list[Row], tmp_path: Path
) -> None:
    project = Project(tmp_path, "digits-that-grow", store)
    assert project.register(rows[0]).promoted
    images, labels = digits(16)
    larger = put_data(project.workspace, images[:400], labels[:400], held_out=60)
    record = project.register({**rows[1], "evidence": {**rows[1]["evidence"], "data": larger}})
    assert record.promoted
    assert record.why.endswith(
        "it draws images of 8 pixels and 1 channels, the data have 16 and 1."
    )


@pytest.mark.parametrize(
    ("sampler", "message"),
    [
        ({"steps": 60}, "sample.steps: got 60; must be at most diffusion.timesteps, 50"),
        (
            {"classes": ["3"]},
            "sample.classes: got ['3']; requires model.conditioning class; it is none",
        ),
    ],
)
def test_a_champion_without_the_candidates_sampling_is_replaced(
    store: str, rows: list[Row], tmp_path: Path, sampler: dict[str, Any], message: str
) -> None:
    project = Project(tmp_path, f"digits-not-by-{next(iter(sampler))}", store)
    assert project.register(rows[0]).promoted
    evidence = rows[1]["evidence"]
    sampled = {**evidence, "sampler": {**evidence["sampler"], **sampler}}
    record = project.register({**rows[1], "evidence": sampled})
    assert record.promoted and message in record.why


def test_a_model_that_copies_is_registered_but_not_promoted(
    store: str, rows: list[Row], tmp_path: Path
) -> None:
    project = Project(tmp_path, "digits-copied", store)
    record = project.register({**rows[0], "memorisation": {"verdict": "copies"}})
    assert (record.version, record.promoted) == ("1", False)
    assert "copies training images" in record.why
    assert not connect(store).get_registered_model(project.name).aliases


@pytest.mark.parametrize(
    ("check", "verdict", "what", "fault"),
    [
        ("memorisation", "copies", "copies of training images", "copies training images"),
        (
            "collapse",
            "collapsed",
            "repeated samples",
            "draws the same images repeatedly",
        ),
    ],
)
def test_a_champion_that_fails_a_later_check_is_replaced(
    store: str, rows: list[Row], tmp_path: Path, check: str, verdict: str, what: str, fault: str
) -> None:
    project = Project(tmp_path, f"digits-found-out-{check}", store)
    assert project.register(rows[0]).promoted
    found_out = {**rows[0], check: {"verdict": verdict}}
    project.put(found_out)
    message = str(stale(project.config(), project.workspace))
    assert message.startswith(f"changed since the last registration: the verdict on {what}")
    record = project.register(found_out)
    assert (record.version, record.promoted) == ("1", False)
    assert record.why == (
        f"Not promoted: it {fault}, by the {check} check. The champion, version 1, is the same "
        "network. The next version that passes this check replaces it."
    )
    assert project.champion().tags[check] == verdict
    assert stale(project.config(), project.workspace) is None
    worse = project.register(rows[1])
    assert (worse.version, worse.promoted) == ("2", True)
    assert worse.why == f"Promoted: the champion, version 1, {fault}."


def test_a_later_verdict_becomes_a_tag_and_no_second_version(
    store: str, rows: list[Row], tmp_path: Path
) -> None:
    project = Project(tmp_path, "digits-looked-at-later", store)
    unchecked = {key: value for key, value in rows[0].plain().items() if key != "memorisation"}
    assert project.register(unchecked).promoted
    assert project.champion().tags["memorisation"] == "unknown"
    checked = {**unchecked, "memorisation": {"verdict": "none"}}
    record = project.register(checked)
    assert (record.version, record.promoted) == ("1", True)
    assert project.champion().tags["memorisation"] == "none"
    assert stale(project.config(), project.workspace) is None


@pytest.mark.parametrize(
    ("moment", "better_first"),
    [
        ("create", True),
        ("_create_model", False),
        ("promote", True),
        ("promote", False),
    ],
)
def test_the_better_of_two_concurrent_registrations_wins(
    store: str,
    rows: list[Row],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    moment: str,
    better_first: bool,
) -> None:
    """The second registers from start to end just before a certain step of the first."""
    project = Project(tmp_path, f"digits-at-once-{moment}-{better_first}", store)
    first, second = rows if better_first else rows[::-1]
    step = getattr(Registry, moment)
    others: list[Registration | None] = []

    def meanwhile(registry: Registry, *arguments: Any) -> Any:
        if not others:
            others.append(None)  # before the second, which also calls this
            others[0] = project.register(second)
        return step(registry, *arguments)

    monkeypatch.setattr(Registry, moment, meanwhile)
    record = project.register(first)
    champion = project.champion()
    assert champion.tags["weights"] == rows[0]["evidence"]["weights"]
    assert record.promoted == better_first
    assert (
        record.why
        == connect(store).get_model_version(project.name, record.version).tags["decision"]
    )
    if not better_first:
        message = "at the same time, is better" if moment == "promote" else "not below the"
        assert message in record.why and others[0] and others[0].promoted
    assert len(project.versions()) == 2


@pytest.mark.parametrize("moment", ["models.Registry.create", "register.upload"])
def test_concurrent_registrations_of_one_checkpoint_make_one(
    store: str, rows: list[Row], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """The second registers from start to end just before a certain step of the first."""
    project = Project(tmp_path, f"digits-twins-{moment[-6:]}", store)
    others: list[Registration | None] = []
    step = Registry.create if moment.endswith("create") else upload

    def meanwhile(*arguments: Any) -> Any:
        if not others:
            others.append(None)  # before the second, which also calls this
            others[0] = project.register(rows[0])
        return step(*arguments)

    monkeypatch.setattr(f"ddpm_core.registry.{moment}", meanwhile)
    record = project.register(rows[0])
    assert (record.version, record.promoted) == ("1", True)
    assert others[0] and others[0].version == "1" and len(project.versions()) == 1
    assert [model.model_uri for model in project.models()] == [project.champion().source]


def test_a_failed_attempt_leaves_no_model_and_no_second_upload(
    store: str, rows: list[Row], tmp_path: Path
) -> None:
    project = Project(tmp_path, "digits-tried-again", store)

    def out_of_order(*_: Any, **__: Any) -> None:
        raise MlflowException("Internal Server Error")

    for step, statuses in (("log_model_artifacts", "FAILED"), ("create_model_version", "READY")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(MlflowClient, step, out_of_order)
            with pytest.raises(Unavailable, match="is unavailable: Internal Server Error"):
                project.register(rows[0])
        [left] = project.models()
        assert str(left.status) == statuses
    assert project.register(rows[0]).promoted
    assert [model.model_id for model in project.models()] == [left.model_id]
    assert project.champion().source == left.model_uri


def test_an_alias_that_was_set_by_hand_is_not_moved_back(
    store: str, rows: list[Row], tmp_path: Path
) -> None:
    project = Project(tmp_path, "digits-by-hand", store)
    for one in rows[::-1]:
        project.register(one)
    connect(store).set_registered_model_alias(project.name, "champion", "1")
    assert project.register(rows[1]).promoted
    assert str(project.champion().version) == "1"


def test_a_version_promoted_by_hand_says_so(store: str, rows: list[Row], tmp_path: Path) -> None:
    project = Project(tmp_path, "digits-refused", store)
    for one in rows:
        project.register(one)
    connect(store).set_registered_model_alias(project.name, "champion", "2")
    record = project.register(rows[1])
    assert (record.version, record.promoted) == ("2", True)
    assert record.why == "It is the champion: the alias was moved to it."
    assert project.champion().tags["decision"] == record.why


@pytest.mark.parametrize("gone", ["version", "model", "alias"])
def test_what_mlflow_has_lost_is_registered_again(
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
    message = {
        "alias": f"no version of {project.name} has the alias champion any more",
    }.get(gone, f"MLflow no longer has version 1 of {project.name}")
    assert stale(project.config(), project.workspace) == message
    assert project.register(rows[0]).promoted
    assert project.champion().tags["weights"] == rows[0]["evidence"]["weights"]
    assert stale(project.config(), project.workspace) is None


def test_a_new_store_gets_settings_and_scores_too(store: str, tmp_path: Path) -> None:
    project = Project(tmp_path, "digits-moved", store)
    rows = project.score()
    uri = put_store(tmp_path / "other/mlflow.db")
    config = project.config(tracking={"uri": uri, "experiment": "registry"})
    client, run_id = connect(uri), register(config, project.workspace).run_id
    run = client.get_run(run_id)
    assert run.info.run_name == "digits-moved-cafe" and run.data.tags["training"] == "cafe"
    assert run.data.params["diffusion.timesteps"] == "50"
    history = client.get_metric_history(run_id, rows[4]["score_name"])
    assert [(m.step, m.value) for m in history] == [(step, rows[step]["score"]) for step in rows]
    files = [file.path for file in client.list_artifacts(run_id, "evaluation")]
    assert "evaluation/report.html" in files


@pytest.mark.parametrize("mine", [True, False], ids=["own", "other"])
def test_a_champion_without_files_is_replaced(
    store: str, rows: list[Row], tmp_path: Path, mine: bool
) -> None:
    project = Project(tmp_path, f"digits-without-files-{mine}", store)
    assert project.register(rows[0]).promoted
    files = connect(store).get_model_version_download_uri(project.name, "1")
    shutil.rmtree(files.removeprefix("file://"))
    message = f"the files of version 1 of {project.name} are gone"
    assert stale(project.config(), project.workspace) == message
    record = project.register(rows[0] if mine else rows[1])  # the worse one
    assert record.why == (
        "Promoted: the champion, version 1, cannot be measured with the present evidence: its "
        "files are gone."
    )
    assert str(project.champion().version) == record.version == "2"
    download(project.config(), f"models:/{project.name}@champion")
    assert stale(project.config(), project.workspace) is None


def test_a_champion_stays_while_its_storage_is_unavailable(
    store: str, rows: list[Row], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = Project(tmp_path, "digits-out-of-reach", store)
    assert project.register(rows[1]).promoted

    def away(*_: Any, **__: Any) -> None:
        raise ConnectionError("no route to host")

    monkeypatch.setattr("mlflow.artifacts.list_artifacts", away)
    assert stale(project.config(), project.workspace) is None
    with pytest.raises(UserError, match="no route to host"):
        project.register(rows[0])
    assert str(project.champion().version) == "1"


def test_an_equal_version_number_in_a_new_registry_is_noticed(
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
    assert "MLflow no longer has version 1" in str(stale(project.config(), project.workspace))


@pytest.mark.parametrize("listens", [True, False])
def test_register_is_up_to_date_while_mlflow_is_unavailable(
    project: Project, rows: list[Row], monkeypatch: pytest.MonkeyPatch, listens: bool
) -> None:
    monkeypatch.setattr(models, "CHECK_TIMEOUT", 0.2)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        if listens:  # accepts connections and never responds
            silent.listen()
        away = {"tracking": {"uri": f"http://127.0.0.1:{silent.getsockname()[1]}"}}
        record = project.register(rows[0]).model_dump() | {"uri": away["tracking"]["uri"]}
        project.workspace.write_json("registered.json", record)
        assert stale(project.config(**away), project.workspace) is None


def test_a_missing_store_is_reported_and_not_created(
    project: Project, rows: list[Row], tmp_path: Path
) -> None:
    store = {"tracking": {"uri": f"sqlite:///{tmp_path}/mlflow.db"}}
    record = project.register(rows[0]).model_dump() | {"uri": store["tracking"]["uri"]}
    project.workspace.write_json("registered.json", record)
    assert stale(project.config(**store), project.workspace) == f"{tmp_path}/mlflow.db is gone"
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_deleted_after_scoring_blocks_nothing(store: str, tmp_path: Path) -> None:
    project = Project(tmp_path, "digits-gone", store)
    rows, config = project.score(), project.config()
    best, other = sorted(rows, key=lambda step: rows[step]["score"])
    shutil.rmtree(project.workspace.path(snapshot_key(best)))
    with pytest.raises(UserError, match=rf"step {best}, is gone. .* Run `ddpm evaluate`"):
        register(config, project.workspace)
    for number in range(2):  # as independent jobs, which delete nothing
        sample(config, project.workspace, World(0, 1, torch.device("cpu")), (number, 2))
    evaluate(config, project.workspace)
    assert register(config, project.workspace).step == other


def test_a_checkpoint_changed_after_scoring_is_rejected(project: Project, rows: list[Row]) -> None:
    other = {**rows[0], "evidence": {**rows[0]["evidence"], "weights": "0" * 64}}
    with pytest.raises(UserError, match="has changed since it was scored"):
        project.register(other)


# Errors of this machine, of MLflow and of the network


def register_on_small_disk(
    project: Project, row: Row, place: Path, size: str, before: str = "true", **sections: Any
) -> str:
    """Register in a process for which `place` is a small disk; return its error message."""
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


@pytest.mark.slow
def test_a_full_temporary_folder_is_named_in_the_error(
    project: Project, rows: list[Row], tmp_path: Path
) -> None:
    other, place = {**rows[0], "score_name": "full"}, tmp_path / "scratch"
    message = register_on_small_disk(project, other, place, "100k")
    assert message.startswith(f"ddpm register: No space left on device: {place}/ddpm-"), message
    assert message.endswith(". Free some space there, then run the same command again.\n")
    assert message.count("\n") == 1
    run = project.workspace.read_json(RUN)["mlflow"]["run_id"]
    assert connect(project.uri).get_run(run).info.status == "FINISHED"


@pytest.mark.slow
def test_a_store_on_a_full_disk_is_one_message(
    project: Project, rows: list[Row], tmp_path: Path
) -> None:
    put_store(tmp_path / "mlflow.db")
    other, place = {**rows[0], "score_name": "full store"}, tmp_path / "disk"
    fill = f"cp {tmp_path}/mlflow.db {place}; cat /dev/zero 2>/dev/null > {place}/fill"
    uri = f"sqlite:///{place}/mlflow.db"
    message = register_on_small_disk(project, other, place, "2m", fill, tracking={"uri": uri})
    assert message == (
        f"ddpm register: MLflow at {uri} is unavailable: the disk is full. Free some space there.\n"
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
def test_errors_of_this_machine_are_not_blamed_on_mlflow(
    project: Project, rows: list[Row], monkeypatch: pytest.MonkeyPatch, trouble: Exception
) -> None:
    """Errors may come from the gate, from scoring, or from writing the model."""

    def fails(*_: Any) -> None:
        raise trouble

    other = {**rows[1], "score_name": "another"}
    for step in ("judge", "write_checkpoint"):
        monkeypatch.setattr(f"ddpm_core.registry.register.{step}", fails)
        with pytest.raises(type(trouble)) as raised:
            project.register(other)
        assert trouble in (raised.value, raised.value.__cause__)
        monkeypatch.undo()
        monkeypatch.setattr("ddpm_core.registry.register.judge", lambda *_: Decision(False, ""))


def test_out_of_memory_for_a_champion_says_what_to_lower(
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
def test_errors_of_mlflow_or_the_network_name_mlflow(trouble: Exception) -> None:
    message = r"MLflow at http://\*\*\*@h is unavailable"
    away = models.mlflow_errors("http://me:secret@h")
    with pytest.raises(UserError, match=message) as raised, away:
        raise trouble
    assert isinstance(raised.value, Unavailable) != isinstance(trouble, ModuleNotFoundError)


def test_a_refusal_of_mlflow_is_not_an_outage() -> None:
    refusal = MlflowException("no password", error_code=PERMISSION_DENIED)
    with pytest.raises(UserError, match="no password") as raised, models.mlflow_errors("http://h"):
        raise refusal
    assert not isinstance(raised.value, Unavailable)


def test_an_invalid_tracking_uri_is_an_error() -> None:
    with pytest.raises(
        UserError, match=r"tracking\.uri: got 'http://\[x', which is not a valid URI"
    ):
        Registry(params.validate({"tracking": {"uri": "http://[x"}}))


# Without a server


def test_registering_without_mlflow_is_an_error(project: Project, rows: list[Row]) -> None:
    away = {"tracking": {"uri": f"http://127.0.0.1:{free_port()}"}}
    with pytest.raises(Unavailable) as raised:
        project.register(rows[0], **away)
    assert str(raised.value).endswith("is unavailable: the connection was refused.")
    with pytest.raises(UserError, match=r"tracking\.uri is empty"):
        project.register(rows[0], tracking={"uri": ""})


def test_stale_says_that_nothing_is_scored(tmp_path: Path) -> None:
    workspace = Workspace.open(str(tmp_path))
    assert "Run `ddpm evaluate`." in str(stale(params.validate({}), workspace))


@pytest.mark.parametrize("alias", ["latest", "Latest", "v1", "V20"])
@pytest.mark.parametrize("name", [".", "..", "..a"])
def test_names_that_mlflow_rejects_late_are_rejected_at_once(alias: str, name: str) -> None:
    with pytest.raises(UserError) as raised:
        params.validate({"register": {"alias": alias, "name": name}})
    message = str(raised.value)
    assert f"register.alias: got {alias!r}; must not be latest" in message
    assert f"register.name: got {name!r}; must not be . or begin with .." in message


def test_names_similar_to_reserved_ones_are_valid() -> None:
    for given in ({"alias": "vintage"}, {"alias": "v1-b"}, {"name": "v1"}, {"name": ".a..b"}):
        taken = params.validate({"register": given}).registration.model_dump()
        assert given.items() <= taken.items()


def test_a_long_card_is_complete_in_the_files_of_a_version(
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
