"""What the API server answers: late or lost, which is waited out, or no, which is a sentence."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any, TypeVar

import urllib3
from kubernetes.client.exceptions import ApiException

from ddpm_core.console import Outage
from ddpm_core.errors import UserError

T = TypeVar("T")

FAILURES = (ApiException, urllib3.exceptions.HTTPError, OSError, ValueError)  # of a question
PASSING = (0, None, 410, 429, 500, 502, 503, 504)  # 410: what was known is too old; ask anew
REFUSALS = (401, 403)  # also what API servers say to everybody for a while after a restart
PATIENCE = 60.0  # seconds that the API server may be away
PAUSES = (0.5, 8.0)  # seconds: the first pause, each twice the one before, and the longest
INSTALL = (
    "kubectl apply --server-side -k "
    '"github.com/kubeflow/training-operator.git/manifests/overlays/standalone?ref=v1.9.4"'
)


class Exists(Exception):
    """There is a job of this name already."""


class Missing(UserError):
    """What was asked for is not there."""


class Backoff:
    """How long a question is asked again: for PATIENCE from the first failure, less and less often.

    `rest(seconds)` is the pause between two attempts. `answered`: it has been, at least once; then
    a refusal is waited out too, for whoever is asked knows us.
    """

    def __init__(self, rest: Callable[[float], object]) -> None:
        self._rest, self._outage, self._pause = rest, Outage(), PAUSES[0]
        self._since: float | None = None
        self.answered = False

    def passes(self, error: Exception, told: str = "") -> bool:
        """After a pause: whether to ask again. False where waiting mends nothing, or is over.

        `told` begins the sentence that is said once; without it nothing is said.
        """
        now = time.monotonic()
        self._since = now if self._since is None else self._since
        hopeless = not passing(error) and not (self.answered and _refusal(error))
        if hopeless or now + self._pause > self._since + PATIENCE:
            return False
        if told:
            self._outage.begins(f"{told}: {said(error)}. It is tried again.")
        self._rest(self._pause)
        self._pause = min(self._pause * 2, PAUSES[1])
        return True

    def over(self) -> None:
        """It has answered."""
        self._outage.ends("The API server answers again.")
        self._pause, self._since, self.answered = PAUSES[0], None, True


def asked(call: Callable[[], T], doing: str) -> T:
    """The answer. Raises Exists, Missing or UserError with what the API server said."""
    backoff = Backoff(time.sleep)
    while True:
        try:
            answer = call()
        except FAILURES as error:
            if not backoff.passes(error, f"Cannot {doing} yet"):
                raise refused(error, doing) from error
        else:
            backoff.over()
            return answer


def plain(response: Any) -> dict[str, Any]:
    """The JSON object of an answer that was not made into a model."""
    found: dict[str, Any] = json.loads(response.data)
    return found


def passing(error: Exception) -> bool:
    """Whether the same question may be answered a moment later."""
    return not isinstance(error, ApiException) or error.status in PASSING


def _refusal(error: Exception) -> bool:
    return isinstance(error, ApiException) and error.status in REFUSALS


def said(error: Exception) -> str:
    """What the API server said, in a line."""
    if not isinstance(error, ApiException):
        return " ".join(str(error).split()) or type(error).__name__
    try:
        message = json.loads(error.body or "")["message"]
    except (ValueError, KeyError, TypeError):
        message = f"{error.status} {error.body or error.reason or ''}"
    return " ".join(str(message).split()).rstrip(".")


def refused(error: Exception, doing: str) -> Exception:
    """The sentence of an error that does not pass."""
    status, message = getattr(error, "status", None), said(error)
    if status == 409:
        return Exists(message)
    if status == 404 and ("page not found" in message or "could not find the requested" in message):
        return UserError(
            "The cluster knows no PyTorchJob: Kubeflow's Training Operator is not installed. "
            f"Install it with\n  {INSTALL}"
        )
    if status == 404:
        return Missing(f"Cannot {doing}: {message}.")
    if status == 403 and "exceeded quota" in message:
        return UserError(f"The quota of the namespace is exceeded: {message}.")
    if status in REFUSALS:
        return UserError(
            f"Not allowed to {doing}: {message}. The launcher's ServiceAccount needs the Role "
            "ddpm-launcher of manifests/."
        )
    if "failed calling webhook" in message:
        return UserError(
            f"Cannot {doing}: {message}. The Training Operator's pod does not answer; see "
            "`kubectl -n kubeflow get pods`."
        )
    return UserError(f"Cannot {doing}: {message}.")
