"""Submit a run to a KFP server, and follow it to its end."""

from __future__ import annotations

import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from compiling import compile_pipeline

from ddpm_core.console import Outage, say
from ddpm_core.errors import UserError

INTERVAL = 5.0  # seconds between two requests for the state of a run
RETRY_FOR = 600.0  # seconds that a server may be unavailable while a run is followed
FINAL = ("SUCCEEDED", "FAILED", "SKIPPED", "CANCELED", "CANCELLED")

T = TypeVar("T")


class Unavailable(UserError):
    """The server does not respond, or reports an internal problem."""


class Unauthorized(UserError):
    """The server requires a token, or a different one."""


class Server:
    """A KFP server. Its methods raise UserError, or its subclass Unavailable.

    `read_token` returns the bearer token, which may change while a run is followed.
    """

    def __init__(self, host: str, namespace: str, read_token: Callable[[], str | None]) -> None:
        self.host = host if "://" in host else f"http://{host}"
        self._namespace, self._read_token = namespace, read_token
        self._token = read_token()
        self._client = self._translate_errors(self._connect)

    def _connect(self) -> Any:
        import kfp

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            return kfp.Client(host=self.host, namespace=self._namespace, existing_token=self._token)

    def create(
        self,
        pipeline: Any,
        image: str | None,
        gpu: bool,
        experiment: str,
        name: str,
        inputs: dict[str, Any],
    ) -> str:
        """Start a run of the pipeline, and return its id."""
        with tempfile.TemporaryDirectory(prefix="ddpm-submit-") as folder:
            package = Path(folder) / "ddpm.yaml"
            compile_pipeline(pipeline, package, image, gpu)
            parent = self._request(lambda: self._client.create_experiment(experiment))
            run = self._request(
                lambda: self._client.run_pipeline(
                    parent.experiment_id, name, str(package), params=inputs
                )
            )
        say(f"Submitted the run {run.run_id} in the experiment {experiment}.")
        return str(run.run_id)

    def state(self, run_id: str) -> tuple[str, dict[str, tuple[str, str]], str]:
        """Return the run's state, the state and error of each task by name, and the run's error."""
        run = self._request(lambda: self._client.get_run(run_id))
        details = run.run_details.task_details if run.run_details else None
        tasks = {}
        for task in details or ():
            error = task.error.message if task.error else ""
            tasks[f"{task.display_name} {task.task_id}"] = (str(task.state or "PENDING"), error)
        return str(run.state or "PENDING"), tasks, run.error.message if run.error else ""

    def _request(self, call: Callable[[], T]) -> T:
        """Return the result of a request; read the token again if it has expired."""
        try:
            return self._translate_errors(call)
        except Unauthorized:
            if (token := self._read_token()) == self._token:
                raise
            self._token = token
            self._client = self._translate_errors(self._connect)
            return self._translate_errors(call)

    def _translate_errors(self, call: Callable[[], T]) -> T:
        from kfp_server_api import ApiException
        from urllib3.exceptions import HTTPError

        try:
            return call()
        except ApiException as error:
            details = f"({error.status}): {' '.join(str(error.body or error.reason).split())[:300]}"
            if error.status == 429 or (error.status or 0) >= 500:
                raise Unavailable(f"KFP at {self.host} is not ready {details}.") from error
            refusal = f"KFP at {self.host} refuses the request {details}"
            if error.status == 401:
                raise Unauthorized(
                    f"{refusal}. Set a token with --token-file or $KFP_TOKEN."
                ) from error
            raise UserError(refusal) from error
        except ValueError as error:  # kfp's client cannot read the response
            raise UserError(f"KFP at {self.host}: {error}") from error
        except (HTTPError, OSError) as error:
            raise Unavailable(
                f"No KFP server responds at {self.host}. Forward its port with `kubectl "
                "port-forward -n kubeflow svc/ml-pipeline 8888` and set --host "
                "http://localhost:8888, or set the address of another server."
            ) from error


def follow(server: Server, run_id: str) -> int:
    """Print each change of a task until the run has ended, and return the exit status."""
    known: dict[str, str] = {}
    outage, responded_at = Outage(), time.monotonic()
    while True:
        try:
            state, tasks, error = server.state(run_id)
        except Unavailable as problem:
            outage.begins(f"{problem} Retrying for {RETRY_FOR:.0f} s; the run continues meanwhile.")
            if time.monotonic() - responded_at > RETRY_FOR:
                raise
            time.sleep(INTERVAL)
            continue
        outage.ends(f"KFP at {server.host} responds again.")
        responded_at = time.monotonic()
        for line in changes(known, tasks):
            say(line)
        if state in FINAL:
            say(f"The run has {state.lower()}." + (f" {error}" if error else ""))
            return 0 if state == "SUCCEEDED" else 1
        time.sleep(INTERVAL)


def changes(known: dict[str, str], tasks: dict[str, tuple[str, str]]) -> Iterable[str]:
    """Yield a line for each task whose state differs from `known`, and update `known`."""
    for key, (state, error) in tasks.items():
        name = key.rpartition(" ")[0]
        if known.get(key) != state and not name.endswith("-driver"):
            yield f"{name}: {state.lower()}" + (f": {error}" if error else "")
        known[key] = state
