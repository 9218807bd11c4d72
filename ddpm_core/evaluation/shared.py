"""One in-domain extractor for all runs of a data set: kept in MLflow, copied to the workspace.

Scores in features of different extractors don't compare, so the first run that needs one trains
and publishes it, and every other run takes that.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from ddpm_core.config import Config
from ddpm_core.config.results import EXTRACTORS
from ddpm_core.console import say, warn
from ddpm_core.data.dataset import PackedDataset
from ddpm_core.errors import Corrupt, UserError
from ddpm_core.evaluation import in_domain
from ddpm_core.evaluation.features import Extractor
from ddpm_core.evaluation.frozen import load, read_facts, save_extractor
from ddpm_core.evaluation.in_domain import InDomain
from ddpm_core.storage.files import Count, Schema
from ddpm_core.storage.workspace import EVALUATION, Workspace
from ddpm_core.text import masked, throughout
from ddpm_core.tracking.client import connect, find_experiment, retrying
from ddpm_core.tracking.errors import is_transient, reason

FOLDER = f"{EVALUATION}/extractor"
NOTE = f"{EVALUATION}/extractor-shared.json"  # which extractor is known to be in which MLflow
ACCURACY = f"{EVALUATION}/extractor-accuracy.json"
TAG = "ddpm.extractor_for"

T = TypeVar("T")


class Accuracy(Schema):
    """What an extractor is right on, of held-out images that it was not measured on at first."""

    extractor: str
    holdout_fingerprint: str
    accuracy: float | None
    holdout_count: Count


class Away(Exception):
    """MLflow cannot be used now; says why."""


def open_in_domain(
    config: Config,
    workspace: Workspace,
    train: PackedDataset,
    holdout: PackedDataset,
    device: torch.device,
) -> Extractor:
    """The extractor of these data: the workspace's, else MLflow's, else a new one.

    One that was made while MLflow was away gives way to MLflow's, or is published, once it is back.
    Of several runs that publish at once each asks again afterwards, and all take the first.
    """
    own = _own(workspace, train.fingerprint)
    uri = config.tracking.uri
    if not own or (uri and throughout(masked, workspace.read_json(NOTE)) != _noted(uri, own)):
        found, away = _fetch_into(config, workspace, train.fingerprint)
        if not found and not own:
            with workspace.storage.new_folder(FOLDER) as folder:
                save_extractor(in_domain.train_extractor(train, holdout), folder)
        if not found and not away and _publish(config, workspace, train.fingerprint):
            _fetch_into(config, workspace, train.fingerprint)
    trained, fingerprint = load(workspace.path(FOLDER))
    return _on(holdout, workspace, trained, fingerprint).extractor(fingerprint, device)


def _on(
    holdout: PackedDataset, workspace: Workspace, trained: InDomain, fingerprint: str
) -> InDomain:
    """The network with its accuracy on these held-out images; that of others says nothing of it.

    The weights are those of the training images alone, so they stay when the held-out ones change,
    and other runs that share them may hold out others. What was measured is kept.
    """
    if trained.facts.get("holdout_fingerprint") == holdout.fingerprint:
        return trained
    of = {"extractor": fingerprint, "holdout_fingerprint": holdout.fingerprint}
    known = workspace.read_json(ACCURACY, Accuracy)
    if not known or {name: known[name] for name in of} != of:
        turned = trained.facts["task"] == "rotations"
        found = in_domain.accuracy(trained.network, holdout, turned)
        known = {**of, "accuracy": found, "holdout_count": len(holdout)}
        workspace.write_json(ACCURACY, known)
    told = {name: value for name, value in known.items() if name != "extractor"}
    return replace(trained, facts={**trained.facts, **told})


def fetch_extractor(config: Config, data_fingerprint: str, folder: Path) -> bool:
    """Copy MLflow's extractor of these data into an empty folder; False if it has none.

    Of several whole ones the first that was finished counts, so that all who ask agree, as far as
    the clocks of those who publish do: one that is still being sent comes after what was seen
    meanwhile, whenever it was begun. Raises Away.
    """

    def fetch(client: Any) -> bool:
        # Earlier versions put extractors among the training runs.
        names = (extractors_experiment(config), config.tracking.experiment)
        found = [client.get_experiment_by_name(name) for name in names]
        places = [one.experiment_id for one in found if one and one.lifecycle_stage == "active"]
        if not places:
            return False
        query = f"tags.`{TAG}` = '{data_fingerprint}' AND attributes.status = 'FINISHED'"
        order = ["attributes.end_time ASC", "attributes.run_id ASC"]
        for run in client.search_runs(places, query, max_results=100, order_by=order):
            if not client.list_artifacts(run.info.run_id, "extractor"):  # removed since
                continue
            # A download that is given up may still write there.
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
                path = Path(client.download_artifacts(run.info.run_id, "extractor", scratch))
                if _fits(path, data_fingerprint):
                    shutil.copytree(path, folder, dirs_exist_ok=True)
                    return True
        return False

    return _with_client(config, fetch)


def publish_extractor(config: Config, data_fingerprint: str, folder: Path) -> None:
    """Put an extractor's folder into a run tagged with its data. Raises Away."""

    def publish(client: Any) -> None:
        experiment = find_experiment(client, config.tracking.uri, extractors_experiment(config))
        # The end comes last: a run that has one has its files and the tag.
        run = client.create_run(experiment, run_name=f"extractor-{data_fingerprint[:8]}")
        for path in sorted(folder.iterdir()):
            client.log_artifact(run.info.run_id, str(path), "extractor")
        client.set_tag(run.info.run_id, TAG, data_fingerprint)
        client.set_terminated(run.info.run_id)

    _with_client(config, publish)


def _own(workspace: Workspace, data_fingerprint: str) -> dict[str, Any]:
    """The facts of the workspace's extractor if it is whole and of these data; else none."""
    path = workspace.path(FOLDER)
    return read_facts(path) if _fits(path, data_fingerprint) else {}


def _fits(folder: Path, data_fingerprint: str) -> bool:
    if not folder.is_dir():
        return False
    try:
        facts = read_facts(folder)
    except Corrupt as error:
        warn(f"{error} It is not used.")
        return False
    return (facts.get("data_fingerprint"), facts.get("recipe")) == (
        data_fingerprint,
        in_domain.RECIPE,
    )


def _fetch_into(config: Config, workspace: Workspace, data: str) -> tuple[bool, bool]:
    """Put MLflow's extractor into the workspace: (there was one, MLflow is away)."""
    if not config.tracking.uri:
        return False, True
    with tempfile.TemporaryDirectory() as scratch:
        fetched = Path(scratch)
        try:
            if not fetch_extractor(config, data, fetched):
                return False, False
        except Away as error:
            warn(f"MLflow cannot be asked for this data set's extractor: {error}")
            return False, True
        if read_facts(fetched)["sha256"] != _own(workspace, data).get("sha256"):
            with workspace.storage.new_folder(FOLDER) as folder:
                shutil.copytree(
                    fetched, folder, ignore=shutil.ignore_patterns("manifest*"), dirs_exist_ok=True
                )
            say("evaluate: MLflow has an extractor of these data; its features are used.")
    _note(config, workspace)
    return True, False


def _publish(config: Config, workspace: Workspace, data: str) -> bool:
    """Put the workspace's extractor into MLflow; whether it is there."""
    try:
        publish_extractor(config, data, workspace.path(FOLDER))
    except Away as error:
        warn(f"The extractor of these data is not in MLflow yet: {error}")
        return False
    return True


def _note(config: Config, workspace: Workspace) -> None:
    workspace.write_json(NOTE, _noted(config.tracking.uri, read_facts(workspace.path(FOLDER))))


def _noted(uri: str, facts: dict[str, Any]) -> dict[str, str]:
    """Which server has, or was asked for, which extractor."""
    return {"uri": masked(uri), "sha256": facts["sha256"]}


def extractors_experiment(config: Config) -> str:
    """Return the name of the experiment of extractors, which the UI lists beside the runs'."""
    return f"{config.tracking.experiment}{EXTRACTORS}"


def _with_client(config: Config, action: Callable[[Any], T]) -> T:
    """Call `action` with a client, under MLflow's retry policy. Raises Away."""
    try:
        return retrying()(lambda: action(connect(config.tracking.uri)))
    except UserError as error:
        raise Away(str(error)) from error
    except Exception as error:  # whatever the network or the server raises
        if not is_transient(error):
            raise
        raise Away(reason(error)) from error
