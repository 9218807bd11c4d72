"""The part of run.json about MLflow: the run of this workspace, and what was not sent to it yet."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field

from ddpm_core.errors import UserError
from ddpm_core.storage.files import Schema
from ddpm_core.storage.workspace import RUN, Workspace

Entry = list[Any]  # [the name of a method of MlflowRun, *its arguments], plain data


def _entries(value: object) -> object:
    """Drop what cannot be an entry, so that a file edited by hand keeps its valid entries."""
    if not isinstance(value, list):
        return value
    return [e for e in value if isinstance(e, list) and len(e) > 1 and isinstance(e[0], str)]


class RunRecord(Schema):
    """The MLflow run of a workspace. Empty fields are not written."""

    model_config = ConfigDict(frozen=True)

    uri: str = ""  # of the server, without passwords
    workspace: str = ""  # the workspace that wrote the record
    token: Annotated[str, Field(pattern="^[0-9A-Za-z]*$")] = ""  # a tag of the run, see MlflowRun
    run_id: str = ""
    training: str = ""  # the fingerprint of the training
    behind: bool = False  # whether rows of log.jsonl, or the end of the run, are not sent yet
    unsent: Annotated[list[Entry], BeforeValidator(_entries)] = Field(default_factory=list)


class _RunFile(Schema):
    mlflow: RunRecord = RunRecord()


def read_record(workspace: Workspace) -> RunRecord:
    """Return the record of a workspace; an empty one if run.json is missing or invalid."""
    found = workspace.read_model(RUN, _RunFile)
    return found.mlflow if found else RunRecord()


def write_record(workspace: Workspace, record: RunRecord) -> None:
    """Replace the record in run.json, unless it is the same. The other keys stay."""
    run = workspace.read_json(RUN)
    mlflow = {key: value for key, value in record.model_dump().items() if value}
    if run.get("mlflow") != mlflow:
        workspace.write_json(RUN, {**run, "mlflow": mlflow})


def copied_from(workspace: Workspace) -> str:
    """Return the workspace that this one is a copy of, or "".

    run.json names the workspace that wrote it. If that still exists with the same MLflow run, this
    one is a copy; otherwise it was moved, or is mounted elsewhere.
    """
    record = read_record(workspace)
    writer = record.workspace
    if writer in ("", workspace.uri):
        return ""
    if writer.startswith("s3://") and not workspace.uri.startswith("s3://"):
        return ""  # do not contact S3 for a workspace that does not use it
    try:
        if not writer.startswith("s3://") and Path(writer).samefile(workspace.uri):
            return ""
        other = read_record(Workspace.open(writer))
    except (OSError, ValueError, UserError):
        return ""
    return writer if record.token and other.token == record.token else ""
