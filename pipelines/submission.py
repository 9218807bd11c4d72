"""Submit a run to a KFP server, and follow it to its end."""

from __future__ import annotations

import re
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from compiling import compile_pipeline

from ddpm_core.console import Outage, say
from ddpm_core.errors import Unavailable, UserError

INTERVAL = 5.0  # seconds between two requests for the state of a run
RETRY_FOR = 600.0  # seconds that a server may be unavailable while a run is followed
UNKNOWN = "RUNTIME_STATE_UNSPECIFIED"  # also of steps omitted after a failure, which have no state
FINAL = ("SUCCEEDED", "FAILED", "SKIPPED", "CANCELED", "CANCELLED")
# The names of our steps. KFP also lists drivers, executors, loops and the run itself.
STEPS = ("prepare", "train", "plan", "sample", "evaluate", "register", "finish")
EXECUTOR = re.compile(r"executor(\(\d+\))?")  # KFP's name of the attempts of any step
PROGRESS = r"(?:[\w -]+: )?\d+/\d+ .*"  # of ddpm_core.console.progress, without its description

T = TypeVar("T")


@dataclass(frozen=True)
class Task:
    """A task of a run. `pods` are those below it, in the order of their attempts."""

    name: str
    state: str
    pods: tuple[str, ...]


class Unauthorized(UserError):
    """The server requires a token, or a different one."""


class Server:
    """A KFP server. Its methods raise UserError, or its subclass Unavailable.

    `read_token` returns the bearer token, which may change while a run is followed.
    """

    def __init__(
        self, host: str, namespace: str, read_token: Callable[[], str | None], ui: str = ""
    ) -> None:
        self.host = host if "://" in host else f"http://{host}"
        self._ui = (ui or self.host).rstrip("/")
        self._namespace, self._read_token = namespace, read_token
        self._token = read_token()
        self._client = self._translate_errors(self._connect)

    def _connect(self) -> Any:
        import kfp

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            return kfp.Client(
                host=self.host,
                ui_host=self._ui,
                namespace=self._namespace,
                existing_token=self._token,
            )

    def create(
        self,
        pipeline: Any,
        images: Mapping[str, str],
        gpu: bool,
        experiment: str,
        name: str,
        inputs: dict[str, Any],
    ) -> str:
        """Start a run of the pipeline, and return its id."""
        with tempfile.TemporaryDirectory(prefix="ddpm-submit-") as folder:
            package = Path(folder) / "ddpm.yaml"
            compile_pipeline(pipeline, package, images, gpu)
            parent = self._request(lambda: self._client.create_experiment(experiment))
            run = self._request(
                lambda: self._client.run_pipeline(
                    parent.experiment_id, name, str(package), params=inputs
                )
            )
        say(f"Submitted the run {run.run_id} in the experiment {experiment}.")
        return str(run.run_id)

    def state(self, run_id: str) -> tuple[str, list[Task]]:
        """Return the state of a run, and its tasks.

        A terminated run is CANCELED. KFP 2.17.0 calls it CANCELING, but FAILED once it has ended.
        """
        run = self._request(lambda: self._client.get_run(run_id))
        details = run.run_details.task_details if run.run_details else None
        tasks = [
            Task(
                str(one.display_name),
                str(one.state or UNKNOWN),
                tuple(child.pod_name for child in one.child_tasks or () if child.pod_name),
            )
            for one in details or ()
        ]
        state = str(run.state or "PENDING")
        if state == "FAILED" and "CANCELING" in {one.state for one in run.state_history or ()}:
            state = "CANCELED"
        return state, tasks

    def log(self, run_id: str, pod: str) -> str:
        """Return the log of a pod that has ended; empty if there is none, or none yet.

        KFP 2.17.0 has logs of ended pods only: it asks Kubernetes for one that runs by the name of
        its Argo node, and without a namespace.
        """
        path = f"/apis/v1alpha1/runs/{run_id}/nodes/{pod}/log"  # kfp's client has no method for it
        client = self._client._run_api.api_client
        options = {"auth_settings": ["Bearer"], "_return_http_data_only": True}
        try:
            response = self._request(
                lambda: client.call_api(path, "GET", _preload_content=False, **options)
            )
        except UserError:
            return ""
        return str(response.data.decode(errors="replace"))

    def progress(self, run_id: str) -> str:
        """Return the command that prints what the launcher of a run's training prints."""
        pods = f"pipeline/runid={run_id},ddpm.io/uses-api=true"
        return f"kubectl logs -n {self._namespace} -f -c main -l {pods}"

    def link(self, run_id: str) -> str:
        """Return the page of a run in KFP's UI."""
        return f"{self._ui}/#/runs/details/{run_id}"

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
    """Print each change of a step, and return the exit status."""
    known: dict[str, str] = {}
    outage, responded_at = Outage(), time.monotonic()
    while True:
        try:
            state, tasks = server.state(run_id)
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
            if line == "train: running":
                say(f"  {server.progress(run_id)}")
        if state in FINAL:
            ended = "was terminated" if state.startswith("CANCEL") else f"has {state.lower()}"
            say(f"The run {ended}. {server.link(run_id)}")
            if state == "FAILED":
                for line in causes(server, run_id, tasks):
                    say(line)
            return 0 if state == "SUCCEEDED" else 1
        time.sleep(INTERVAL)


def changes(known: dict[str, str], tasks: list[Task]) -> Iterable[str]:
    """Yield a line for each step whose states differ from `known`, and update `known`."""
    for step in STEPS:
        states = Counter(task.state.lower() for task in tasks if task.name == step)
        del states[UNKNOWN.lower()]
        counts = [f"{number} {state}" for state, number in sorted(states.items())]
        text = next(iter(states), "") if states.total() == 1 else ", ".join(counts)
        if text and known.get(step) != text:
            yield f"{step}: {text}"
            known[step] = text


def causes(server: Server, run_id: str, tasks: list[Task]) -> Iterable[str]:
    """Yield the error of each failed step from its log; KFP's server has no reason."""
    failed = [task for task in tasks if task.state == "FAILED"]
    for step in [step for step in STEPS if step in {task.name for task in failed}]:
        yield from find_errors(server, run_id, failed, step)[-1:] or [
            f"{step}: failed without an error in its log: the pod was lost or killed, or never "
            "started. `kubectl get events` in the namespace of the run shows why."
        ]


def find_errors(server: Server, run_id: str, tasks: list[Task], step: str) -> list[str]:
    """Return the messages `STEP: MESSAGE` in a log of the step, with their indented lines.

    The last message is the error; progress is left out. A sampling pod adds its first shard, as in
    `sample 8:0/2: MESSAGE`. A task's pods are its attempts, or KFP's executors, whose tasks do not
    name the step.
    """
    own = [pod for task in tasks if task.name == step for pod in task.pods]
    others = [pod for task in tasks if EXECUTOR.fullmatch(task.name) for pod in task.pods]
    start = rf"^(?:\[[\w-]+\] )?{step}(?: \d+:\d+/\d+)?: "
    message = re.compile(rf"{start}(?!{PROGRESS}).*(?:\n[ \t]+.*)*", re.MULTILINE)
    for pod in [*reversed(own), *reversed(others)]:
        if found := message.findall(server.log(run_id, pod)):
            return found
    return []
