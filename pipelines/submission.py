"""A run on a KFP server: submitted, and followed to its end."""

from __future__ import annotations

import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from compiling import compiled

from ddpm_core.console import Outage, say
from ddpm_core.errors import UserError

INTERVAL = 5.0  # seconds between two looks
PATIENCE = 600.0  # seconds that a server may be away while a run is followed
ENDED = ("SUCCEEDED", "FAILED", "SKIPPED", "CANCELED", "CANCELLED")

T = TypeVar("T")


class Away(UserError):
    """A server that does not answer, or has a trouble of its own."""


class Unknown(UserError):
    """A server that wants a token, or another one."""


class Server:
    """A KFP server. Its methods raise UserError: Away where nothing answers.

    `token` reads the bearer token, which may be another one an hour later.
    """

    def __init__(self, host: str, namespace: str, token: Callable[[], str | None]) -> None:
        self.host = host if "://" in host else f"http://{host}"
        self._namespace, self._read = namespace, token
        self._token = token()
        self._client = self._answer(self._connect)

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
        """Start a run of the pipeline; its id."""
        with tempfile.TemporaryDirectory(prefix="ddpm-submit-") as folder:
            package = Path(folder) / "ddpm.yaml"
            compiled(pipeline, package, image, gpu)
            place = self._ask(lambda: self._client.create_experiment(experiment))
            run = self._ask(
                lambda: self._client.run_pipeline(
                    place.experiment_id, name, str(package), params=inputs
                )
            )
        say(f"Run {run.run_id} of the experiment {experiment} is submitted.")
        return str(run.run_id)

    def look(self, run_id: str) -> tuple[str, dict[str, tuple[str, str]], str]:
        """The run's state, state and error of each task by its name, and the run's own error."""
        run = self._ask(lambda: self._client.get_run(run_id))
        details = run.run_details.task_details if run.run_details else None
        tasks = {}
        for task in details or ():
            error = task.error.message if task.error else ""
            tasks[f"{task.display_name} {task.task_id}"] = (str(task.state or "PENDING"), error)
        return str(run.state or "PENDING"), tasks, run.error.message if run.error else ""

    def _ask(self, question: Callable[[], T]) -> T:
        """The answer; with the present token where the one before is no longer valid."""
        try:
            return self._answer(question)
        except Unknown:
            if (token := self._read()) == self._token:
                raise
            self._token = token
            self._client = self._answer(self._connect)
            return self._answer(question)

    def _answer(self, question: Callable[[], T]) -> T:
        from kfp_server_api import ApiException
        from urllib3.exceptions import HTTPError

        try:
            return question()
        except ApiException as error:
            told = f"({error.status}): {' '.join(str(error.body or error.reason).split())[:300]}"
            if error.status == 429 or (error.status or 0) >= 500:
                raise Away(f"KFP at {self.host} is not ready {told}.") from error
            refusal = f"KFP at {self.host} refuses {told}"
            if error.status == 401:
                raise Unknown(f"{refusal} Give a token by --token-file or $KFP_TOKEN.") from error
            raise UserError(refusal) from error
        except ValueError as error:  # what kfp's client says of an answer that it can't use
            raise UserError(f"KFP at {self.host}: {error}") from error
        except (HTTPError, OSError) as error:
            raise Away(
                f"No KFP server answers at {self.host}: forward its port with `kubectl "
                "port-forward -n kubeflow svc/ml-pipeline 8888` and give --host "
                "http://localhost:8888, or name another one."
            ) from error


def follow(server: Server, run_id: str) -> int:
    """Tell each change of a task until the run has ended; the exit status."""
    known: dict[str, str] = {}
    outage, away_since = Outage(), time.monotonic()
    while True:
        try:
            state, tasks, error = server.look(run_id)
        except Away as away:
            outage.begins(f"{away} Trying again for {PATIENCE:.0f} s; the run goes on meanwhile.")
            if time.monotonic() - away_since > PATIENCE:
                raise
            time.sleep(INTERVAL)
            continue
        outage.ends(f"KFP at {server.host} answers again.")
        away_since = time.monotonic()
        for line in changes(known, tasks):
            say(line)
        if state in ENDED:
            say(f"The run has {state.lower()}." + (f" {error}" if error else ""))
            return 0 if state == "SUCCEEDED" else 1
        time.sleep(INTERVAL)


def changes(known: dict[str, str], tasks: dict[str, tuple[str, str]]) -> Iterable[str]:
    """A line for each task whose state is another than `known`, which is brought up to date."""
    for key, (state, error) in tasks.items():
        name = key.rpartition(" ")[0]
        if known.get(key) != state and not name.endswith("-driver"):
            yield f"{name}: {state.lower()}" + (f": {error}" if error else "")
        known[key] = state
