"""Whether the registered version is up to date with the scores. Imports no torch."""

from __future__ import annotations

from pydantic import ConfigDict

from ddpm_core.config import Config
from ddpm_core.errors import UserError
from ddpm_core.registry.gate import verdicts, version_key
from ddpm_core.registry.models import missing
from ddpm_core.scores import Row, best, must_be_unchanged, read_rows
from ddpm_core.storage.files import Count, Schema
from ddpm_core.storage.workspace import REGISTERED, Workspace
from ddpm_core.text import masked, throughout


class Registration(Schema):
    """The content of registered.json: a version, and the score that it was registered with.

    An earlier version of ddpm may have written fewer fields.
    """

    model_config = ConfigDict(frozen=True)

    version: str
    promoted: bool
    why: str = ""
    name: str = ""
    alias: str = ""
    uri: str = ""  # of MLflow, without passwords
    run_id: str = ""
    step: Count = 0
    score: float = 0.0
    # As in gate.version_key and gate.verdicts.
    weights: str = ""
    score_name: str = ""
    evidence_key: str = ""
    memorisation: str = ""
    collapse: str = ""


# What a difference in these fields of registered.json means. Any other one is the score.
_MEANINGS = {
    "name": "register.name",
    "alias": "register.alias",
    "uri": "tracking.uri",
    "memorisation": "the verdict on copies of training images",
    "collapse": "the verdict on repeated samples",
}


def stale(config: Config, workspace: Workspace) -> str | None:
    """Return why `register` has work to do, or None if it is up to date.

    If MLflow is unavailable, registered.json alone decides.
    """
    if not config.tracking.uri:
        return "tracking.uri is empty, but registered models are stored in MLflow"
    try:
        row = best_row(workspace)
    except UserError as error:
        return str(error)
    registration = read_registration(workspace)
    if registration is None:
        return "nothing is registered yet"
    current = {
        "name": config.registration.name,
        "alias": config.registration.alias,
        "uri": masked(config.tracking.uri),
        **version_key(row),
        **verdicts(row),
    }
    changes = [
        _MEANINGS.get(key, "the best checkpoint or its score")
        for key, value in current.items()
        if getattr(registration, key) != value
    ]
    if changes:
        return f"changed since the last registration: {', '.join(dict.fromkeys(changes))}"
    return missing(
        config.tracking.uri,
        registration.name,
        registration.version,
        registration.weights,
        registration.alias if registration.promoted else None,
    )


def read_registration(workspace: Workspace) -> Registration | None:
    """Return the content of registered.json, or None if it is missing or invalid."""
    found = workspace.read_model(REGISTERED, Registration)
    return found and Registration.model_validate(throughout(masked, found.model_dump()))


def best_row(workspace: Workspace) -> Row:
    """Return the row of the best checkpoint in results.json.

    Raises:
        UserError: there is none, or a score was changed.
    """
    results = read_rows(workspace)
    must_be_unchanged(results.rows)
    row = best(results.rows, results.sample)
    if row is None:
        raise UserError(f"{workspace.uri} has no checkpoint with a score.", run=("evaluate",))
    return row
