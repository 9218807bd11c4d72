"""Requests to the Kubernetes API server: as JSON, retried, and with errors for people."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import tenacity
import urllib3
import yaml
from kubernetes import client, config
from kubernetes.client.exceptions import ApiException

from ddpm_core.console import Outage, warn
from ddpm_core.errors import UserError
from ddpm_kube.backends import BACKENDS, DEFAULT, Backend
from ddpm_kube.options import AUTO

T = TypeVar("T")
Json = dict[str, Any]
Call = Callable[..., Json]

ERRORS = (ApiException, urllib3.exceptions.HTTPError, OSError, ValueError)  # of a request
TRANSIENT = (0, None, 429, 500, 502, 503, 504)  # HTTP statuses worth a retry
EXPIRED = 410  # the resource version of a watch is too old: list again
REFUSED = (401, 403)  # API servers also send these for a while after a restart
RETRY_FOR = 60.0  # seconds from the first failure; longer with more `patience`
PAUSES = (0.5, 8.0)  # seconds: the first pause, which doubles up to the longest
TIMEOUTS = (5, 30)  # seconds: to connect, and to read


class AlreadyExists(Exception):
    """An object with this name exists, or it is not the object that was meant (409)."""


class NotFound(UserError):
    """The object does not exist (404)."""


class MissingResource(UserError):
    """The cluster does not have this kind of object (404)."""


# Retries


class Retry:
    """The retry policy of every request: for a while from the first failure.

    That is RETRY_FOR or `patience` seconds, whichever is longer. With `doing`, such as "list pods",
    an outage is reported once when it starts and once when it is over. `failing` is True during an
    outage. `stopped` ends the retries early. Set `permitted` once a request was served: then
    refusals are retried too, because an API server that restarts refuses everybody for a while.
    """

    def __init__(
        self, doing: str = "", stopped: threading.Event | None = None, patience: float = 0.0
    ) -> None:
        self.permitted = self.failing = False
        self._doing, self._stopped, self._limit = doing, stopped, max(RETRY_FOR, patience)

    def __call__(self, call: Callable[[], T]) -> T:
        """Return the result of `call`, or raise its last error."""
        outage, deadline = Outage(), 0.0

        def is_over(state: tenacity.RetryCallState) -> bool:
            # Not tenacity's own limit, which includes the first attempt: that may take a minute.
            nonlocal deadline
            failed_at = state.outcome_timestamp or 0.0
            deadline = failed_at + self._limit if state.attempt_number == 1 else deadline
            stopped = self._stopped is not None and self._stopped.is_set()
            return stopped or failed_at + state.upcoming_sleep > deadline

        def report(state: tenacity.RetryCallState) -> None:
            self.failing = True
            if self._doing and state.outcome and (error := state.outcome.exception()):
                message = error_message(error)
                outage.begins(f"Cannot {self._doing} at present: {message}. Retrying.")

        policy = tenacity.Retrying(
            retry=tenacity.retry_if_exception(self._is_worth_it),
            wait=tenacity.wait_exponential(multiplier=PAUSES[0], max=PAUSES[1]),
            stop=is_over,
            before_sleep=report,
            sleep=self._sleep,
            reraise=True,
        )
        result = policy(call)
        self.failing = False
        outage.ends("The API server responds again.")
        return result

    def _sleep(self, seconds: float) -> None:
        if self._stopped is None:
            time.sleep(seconds)
        else:
            self._stopped.wait(seconds)

    def _is_worth_it(self, error: BaseException) -> bool:
        return is_transient(error) or (self.permitted and _status(error) in REFUSED)


def is_transient(error: BaseException) -> bool:
    """Return whether the same request may succeed a moment later."""
    return isinstance(error, ERRORS) and _status(error) in TRANSIENT


def request(call: Callable[[], T], doing: str, patience: float = 0.0) -> T:
    """Return the result of a request, with retries.

    Raises:
        AlreadyExists, NotFound, UserError: with the API server's message.
    """
    try:
        return Retry(doing, patience=patience)(call)
    except ERRORS as error:
        raise explained(error, doing) from error


def parse(response: Any) -> Json:
    """Return the JSON object of a response that the client did not deserialize."""
    loaded: Json = json.loads(response.data)
    return loaded


def as_json(call: Callable[..., Any]) -> Call:
    """Return a request of the client that returns the JSON object instead of the client's own."""
    return lambda *args, **kwargs: parse(call(*args, **kwargs, _preload_content=False))


def error_message(error: BaseException) -> str:
    """Return the message of the API server, or of the connection, in one line."""
    if not isinstance(error, ApiException):
        return " ".join(str(error).split()) or type(error).__name__
    try:
        message = json.loads(error.body or "")["message"]
    except (ValueError, KeyError, TypeError):
        message = f"{error.status} {error.body or error.reason or ''}"
    return " ".join(str(message).split()).rstrip(".")


def explained(error: Exception, doing: str) -> Exception:
    """Return the exception for people of an error that a retry does not solve."""
    status, message = _status(error), error_message(error)
    if status == 409:
        return AlreadyExists(message)
    # The API server sends the same codes and reasons for a missing object and a missing resource,
    # and for an exceeded quota and a missing permission. Only its words differ.
    if status == 404 and ("page not found" in message or "could not find the requested" in message):
        return MissingResource(f"Cannot {doing}: {message}.")
    if status == 404:
        return NotFound(f"Cannot {doing}: {message}.")
    if status == 403 and "exceeded quota" in message:
        return UserError(f"Cannot {doing}: the namespace's quota is exceeded: {message}.")
    if status in REFUSED and "denied the request" not in message:
        return UserError(
            f"Not allowed to {doing}: {message}. Bind the launcher's ServiceAccount to the Role "
            "ddpm-launcher (manifests/10-access.yaml)."
        )
    if "failed calling webhook" in message:
        return UserError(
            f"Cannot {doing}: {message}. The pod behind this webhook does not respond; the address "
            "contains its namespace."
        )
    return UserError(f"Cannot {doing}: {message}.")


def _status(error: BaseException) -> int | None:
    """Return the HTTP status; None of an error without a response."""
    return error.status if isinstance(error, ApiException) else None


# Jobs and pods


@dataclass(frozen=True)
class Cluster:
    """One namespace of a cluster, and the kind of jobs that train in it.

    Requests are retried for RETRY_FOR or `patience` seconds, whichever is longer.
    """

    namespace: str
    jobs: client.CustomObjectsApi
    core: client.CoreV1Api
    patience: float = 0.0
    backend: Backend = DEFAULT

    def using(self, name: str) -> Cluster:
        """Return this cluster for jobs of a backend; for AUTO the first one that is installed."""
        return self.installed()[0] if name == AUTO else replace(self, backend=BACKENDS[name])

    def installed(self) -> list[Cluster]:
        """Return this cluster for each backend that it has. Raises UserError without any."""
        found = [replace(self, backend=one) for one in BACKENDS.values() if self._serves(one)]
        if not found:
            commands = "\n  or\n".join(f"  {one.install}" for one in BACKENDS.values())
            kinds = " nor ".join(one.kind for one in BACKENDS.values())
            raise UserError(
                f"This cluster has neither {kinds}. Install a controller with\n{commands}"
            )
        return found

    def _serves(self, backend: Backend) -> bool:
        call = as_json(self.jobs.get_api_resources)
        try:
            doing = f"look for the resource {backend.kind}"
            served = self._send(doing, call, backend.group, backend.version)
        except (NotFound, MissingResource):
            return False
        return any(one["name"] == backend.plural for one in served["resources"])

    def create(self, job: Json) -> Json:
        """Create a job, and return it as the API server has it. Raises AlreadyExists, UserError.

        The request runs in a thread, so that a signal cannot interrupt it: the exception of the
        signal is raised once the response is there. Otherwise the job could come into being after
        the launcher has looked for it to delete it.
        """

        def call(*args: Any, **kwargs: Any) -> Any:
            with ThreadPoolExecutor(1) as executor:  # its end waits for the response
                create = self.jobs.create_namespaced_custom_object
                return executor.submit(create, *args, **kwargs).result()

        return self._request(f"create the {self.backend.kind}", call, *self._kind, body=job)

    def job(self, name: str) -> Json | None:
        """Return a job; None if it does not exist.

        Raises UserError; without the controller, with the command that installs it.
        """
        call = self.jobs.get_namespaced_custom_object
        return self._find(f"read the {self.backend.kind}", call, *self._kind, name)

    def all_jobs(self, labels: str) -> list[Json]:
        """Return the jobs with these labels."""
        call = self.jobs.list_namespaced_custom_object
        found = self._request(
            f"list {self.backend.kind}s", call, *self._kind, label_selector=labels
        )
        return list(found["items"])

    def own(self, name: str, owner: Json) -> Json | None:
        """Make `owner`, a pod, the owner of a job, and return the job; None if it is gone."""
        call = self.jobs.patch_namespaced_custom_object
        body = {"metadata": {"ownerReferences": [owner]}}
        return self._find(f"patch the {self.backend.kind}", call, *self._kind, name, body)

    def delete(self, job: Json) -> None:
        """Delete this job, its pods first; not one that was created with its name since."""
        call = self.jobs.delete_namespaced_custom_object
        name, uid = job["metadata"]["name"], job["metadata"].get("uid")
        body: Json = {"propagationPolicy": "Foreground"}
        if uid:
            body["preconditions"] = {"uid": uid}
        try:
            self._find(f"delete the {self.backend.kind}", call, *self._kind, name, body=body)
        except AlreadyExists:  # the precondition failed
            return

    def remove(self, job: Json) -> bool:
        """Delete a job and wait until it and its pods are gone; see `wait_until_gone`."""
        self.delete(job)
        return self.wait_until_gone(job)

    def wait_until_gone(self, job: Json) -> bool:
        """Wait until a job that is being deleted, and its pods, are gone.

        Return False, with a warning, if that takes a minute longer than the pods' grace period: a
        finalizer or a node that is down can keep them for ever.
        """
        name, uid = job["metadata"]["name"], job["metadata"].get("uid")
        limit = (self.backend.grace_seconds(job) or 30.0) + 60.0
        deadline = time.monotonic() + limit
        while time.monotonic() < deadline:
            left = self.job(name)
            if left is None or left["metadata"]["uid"] != uid:
                return True
            time.sleep(1.0)
        warn(
            f"The {self.backend.kind} {name} is still being deleted after {limit:.0f} s. To see "
            f"what blocks it: kubectl -n {self.namespace} get {self.backend.name} {name} "
            "-o jsonpath={.metadata.finalizers}"
        )
        return False

    def pod(self, name: str) -> Json | None:
        """Return a pod; None if it does not exist."""
        call = as_json(self.core.read_namespaced_pod)
        return self._find("read the pod", call, name, self.namespace)

    def pods(self, job: str) -> list[Json]:
        """Return the pods of a job."""
        call, selector = as_json(self.core.list_namespaced_pod), f"{self.backend.job_label}={job}"
        found = self._request("list pods", call, self.namespace, label_selector=selector)
        return list(found["items"])

    def _request(self, doing: str, call: Call, *args: Any, **kwargs: Any) -> Json:
        try:
            return self._send(doing, call, *args, **kwargs)
        except MissingResource as error:
            raise UserError(
                f"This cluster has no resource {self.backend.kind}: {self.backend.controller} is "
                f"not installed. Install it with\n  {self.backend.install}"
            ) from error
        except UserError as error:
            for words, advice in self.backend.advice.items():
                if words in str(error):
                    raise UserError(f"{error} {advice}") from error
            raise

    def _send(self, doing: str, call: Call, *args: Any, **kwargs: Any) -> Json:
        def send() -> Json:
            return call(*args, **kwargs, _request_timeout=TIMEOUTS)

        return request(send, doing, self.patience)

    def _find(self, doing: str, call: Call, *args: Any, **kwargs: Any) -> Json | None:
        """Return the response; None if the object does not exist."""
        try:
            return self._request(doing, call, *args, **kwargs)
        except NotFound:
            return None

    @property
    def _kind(self) -> tuple[str, str, str, str]:
        return self.backend.group, self.backend.version, self.namespace, self.backend.plural


def connect(namespace: str | None, pod_namespace: str | None, patience: float = 0.0) -> Cluster:
    """Return the cluster of this pod, if `pod_namespace` is given, else that of the kubeconfig.

    Raises UserError without a cluster, and for an invalid kubeconfig.
    """
    current = ""
    try:
        if pod_namespace is not None:
            config.load_incluster_config()
        else:
            config.load_kube_config()
            current = config.list_kube_config_contexts()[1]["context"].get("namespace", "")
    except (config.ConfigException, OSError) as error:
        raise UserError(
            f"No Kubernetes cluster is configured: {str(error).rstrip('.')}. Set KUBECONFIG, or "
            "run in a pod with a mounted ServiceAccount token."
        ) from error
    except (yaml.YAMLError, ValueError, TypeError) as error:
        raise UserError(
            f"{config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION} is not a valid kubeconfig: "
            f"{' '.join(str(error).split())}. Set KUBECONFIG to a valid one."
        ) from error
    settings = client.Configuration.get_default_copy()
    settings.retries = False  # Retry does that, and reports it
    api = client.ApiClient(settings)
    return Cluster(
        namespace or pod_namespace or current or "default",
        client.CustomObjectsApi(api),
        client.CoreV1Api(api),
        patience,
    )
