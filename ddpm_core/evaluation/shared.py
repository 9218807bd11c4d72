"""One in-domain extractor for all runs on a data set, shared through MLflow.

Scores with different extractors cannot be compared. So the first run that needs an extractor
trains and publishes it, and every other run copies that one into its workspace.
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
from ddpm_core.evaluation.freshness import EXTRACTOR
from ddpm_core.evaluation.in_domain import (
    Facts,
    InDomain,
    load_extractor,
    read_facts,
    save_extractor,
)
from ddpm_core.storage.files import Count, Schema
from ddpm_core.storage.workspace import EVALUATION, Workspace
from ddpm_core.text import masked, throughout
from ddpm_core.tracking.client import connect, find_experiment, retrying
from ddpm_core.tracking.errors import is_transient, reason

SHARED = f"{EVALUATION}/extractor-shared.json"  # which MLflow server has which extractor
ACCURACY = f"{EVALUATION}/extractor-accuracy.json"
TAG = "ddpm.extractor_for"  # of an MLflow run: the fingerprint of the data

T = TypeVar("T")


class Accuracy(Schema):
    """The accuracy of an extractor on held-out images other than those of its training run."""

    extractor: str
    holdout_fingerprint: str
    accuracy: float | None
    holdout_count: Count


class Unavailable(Exception):
    """MLflow cannot be used now, with the reason."""


def open_in_domain(
    config: Config,
    workspace: Workspace,
    train: PackedDataset,
    holdout: PackedDataset,
    device: torch.device,
) -> Extractor:
    """Return the extractor for these data: from the workspace, else from MLflow, else a new one.

    An extractor that was trained while MLflow was unavailable is replaced by MLflow's, or
    published, once MLflow is available. If several runs publish at the same time, each looks
    again afterwards, and all of them use the first one.
    """
    own = _own(workspace, train.fingerprint)
    uri = config.tracking.uri
    # Ask MLflow once per server and extractor; SHARED records that this was done.
    shared = throughout(masked, workspace.read_json(SHARED))
    if own is None or (uri and shared != _record(uri, own)):
        found, unavailable = _fetch_into(config, workspace, train.fingerprint)
        if not found and own is None:
            with workspace.storage.new_folder(EXTRACTOR) as folder:
                save_extractor(in_domain.train_extractor(train, holdout), folder)
        # Another run may have published first, so look again after publishing.
        if not found and not unavailable and _publish(config, workspace, train.fingerprint):
            _fetch_into(config, workspace, train.fingerprint)
    trained, fingerprint = load_extractor(workspace.path(EXTRACTOR))
    trained = _with_accuracy(holdout, workspace, trained, fingerprint)
    return trained.extractor(fingerprint, device)


def _with_accuracy(
    holdout: PackedDataset, workspace: Workspace, trained: InDomain, fingerprint: str
) -> InDomain:
    """Return the network with its accuracy on these held-out images, measured if necessary.

    The weights depend on the training images only. So they stay the same when the held-out images
    change, and runs with other held-out images share them.
    """
    if trained.facts.holdout_fingerprint == holdout.fingerprint:
        return trained
    wanted = (fingerprint, holdout.fingerprint)
    known = workspace.read_model(ACCURACY, Accuracy)
    if known is None or (known.extractor, known.holdout_fingerprint) != wanted:
        rotated = trained.facts.task == "rotations"
        known = Accuracy(
            extractor=fingerprint,
            holdout_fingerprint=holdout.fingerprint,
            accuracy=in_domain.accuracy(trained.network, holdout, rotated),
            holdout_count=len(holdout),
        )
        workspace.write_json(ACCURACY, known.model_dump())
    changed = known.model_dump(exclude={"extractor"})
    return replace(trained, facts=trained.facts.model_copy(update=changed))


def fetch_extractor(config: Config, data_fingerprint: str, folder: Path) -> bool:
    """Copy MLflow's extractor for these data into an empty folder; return False if it has none.

    Of several complete ones the first that was finished counts, so that all runs agree (if the
    clocks of the publishers do). One that is still being uploaded finishes later, whenever it was
    started. Raises Unavailable.
    """

    def fetch(client: Any) -> bool:
        # Earlier versions published extractors in the experiment of the training runs.
        names = (extractors_experiment(config), config.tracking.experiment)
        found = [client.get_experiment_by_name(name) for name in names]
        places = [one.experiment_id for one in found if one and one.lifecycle_stage == "active"]
        if not places:
            return False
        query = f"tags.`{TAG}` = '{data_fingerprint}' AND attributes.status = 'FINISHED'"
        order = ["attributes.end_time ASC", "attributes.run_id ASC"]
        for run in client.search_runs(places, query, max_results=100, order_by=order):
            if not client.list_artifacts(run.info.run_id, "extractor"):  # deleted
                continue
            # A download that timed out may still be writing there.
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
                path = Path(client.download_artifacts(run.info.run_id, "extractor", scratch))
                if _fits(path, data_fingerprint):
                    shutil.copytree(path, folder, dirs_exist_ok=True)
                    return True
        return False

    return _with_client(config, fetch)


def publish_extractor(config: Config, data_fingerprint: str, folder: Path) -> None:
    """Upload an extractor's folder to a new run, tagged with its data. Raises Unavailable."""

    def publish(client: Any) -> None:
        experiment = find_experiment(client, config.tracking.uri, extractors_experiment(config))
        # Terminate the run last: a finished run then has all files and the tag.
        run = client.create_run(experiment, run_name=f"extractor-{data_fingerprint[:8]}")
        for path in sorted(folder.iterdir()):
            client.log_artifact(run.info.run_id, str(path), "extractor")
        client.set_tag(run.info.run_id, TAG, data_fingerprint)
        client.set_terminated(run.info.run_id)

    _with_client(config, publish)


def _own(workspace: Workspace, data_fingerprint: str) -> Facts | None:
    """Return the facts of the workspace's extractor; None if there is none for these data."""
    path = workspace.path(EXTRACTOR)
    return read_facts(path) if _fits(path, data_fingerprint) else None


def _fits(folder: Path, data_fingerprint: str) -> bool:
    if not folder.is_dir():
        return False
    try:
        facts = read_facts(folder)
    except Corrupt as error:
        warn(f"{error} Ignoring it.")
        return False
    return (facts.data_fingerprint, facts.recipe) == (data_fingerprint, in_domain.RECIPE)


def _fetch_into(config: Config, workspace: Workspace, data: str) -> tuple[bool, bool]:
    """Copy MLflow's extractor into the workspace; return (found, MLflow is unavailable)."""
    if not config.tracking.uri:
        return False, True
    with tempfile.TemporaryDirectory() as scratch:
        fetched = Path(scratch)
        try:
            if not fetch_extractor(config, data, fetched):
                return False, False
        except Unavailable as error:
            warn(f"Looking up this data set's extractor in MLflow failed: {error}")
            return False, True
        own = _own(workspace, data)
        if own is None or read_facts(fetched).sha256 != own.sha256:
            with workspace.storage.new_folder(EXTRACTOR) as folder:
                shutil.copytree(
                    fetched, folder, ignore=shutil.ignore_patterns("manifest*"), dirs_exist_ok=True
                )
            say("evaluate: using the extractor for these data from MLflow.")
    facts = read_facts(workspace.path(EXTRACTOR))
    workspace.write_json(SHARED, _record(config.tracking.uri, facts))
    return True, False


def _publish(config: Config, workspace: Workspace, data: str) -> bool:
    """Upload the workspace's extractor to MLflow; return whether that worked."""
    try:
        publish_extractor(config, data, workspace.path(EXTRACTOR))
    except Unavailable as error:
        warn(f"Uploading this data set's extractor to MLflow failed: {error}")
        return False
    return True


def _record(uri: str, facts: Facts) -> dict[str, str]:
    """Return the content of SHARED: this server has this extractor."""
    return {"uri": masked(uri), "sha256": facts.sha256}


def extractors_experiment(config: Config) -> str:
    """Return the name of the experiment of extractors, which the UI lists beside the runs'."""
    return f"{config.tracking.experiment}{EXTRACTORS}"


def _with_client(config: Config, action: Callable[[Any], T]) -> T:
    """Call `action` with a client, under MLflow's retry policy. Raises Unavailable."""
    try:
        return retrying()(lambda: action(connect(config.tracking.uri)))
    except UserError as error:
        raise Unavailable(str(error)) from error
    except Exception as error:  # whatever the network or the server raises
        if not is_transient(error):
            raise
        raise Unavailable(reason(error)) from error
