"""Run a compiled pipeline like Kubeflow Pipelines 2.17.0, but without it.

The inputs of a task are resolved from the DAG: loops, conditions and exit handlers too. What is no
kinder than the real backend:

- Only a pod that disappears is retried, not one that fails. A later attempt is killed
  backoffMaxDuration after the start of the first one; after that time nothing is retried.
- An exit handler gets COMPLETE, FAILED or RUNNING (for whatever has not ended), and no error.
"""

from __future__ import annotations

import json
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from support import kfp_pod
from support.kfp_pod import Document, Failed, Lost, Outputs, Pods, Values


@dataclass(frozen=True)
class Scope:
    """The inputs of a DAG, and the outputs of its tasks so far."""

    parameters: Values
    artifacts: dict[str, list[Values]]
    outputs: dict[str, Outputs] = field(default_factory=dict)


@dataclass(frozen=True)
class Ran:
    """A pod that succeeded."""

    pod: str
    log: str
    outputs: Outputs
    sizes: dict[str, int]


class Backend:
    """Runs a compiled pipeline once; `ran` has the outputs of each component's pods, in order."""

    def __init__(
        self,
        pods: Pods,
        compiled: Path,
        account: str = "",
        claims: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`claims`: whether pods mount the volumes of the compiled file."""
        self._pods, self._places, self._clock = pods, (account, claims), clock
        spec, platforms = yaml.safe_load_all(compiled.read_text(encoding="utf-8"))
        self._spec = spec
        self._platforms = platforms["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
        self.run_id = str(uuid.uuid4())
        self.root = f"{pods.root}/{spec['pipelineInfo']['name']}/{self.run_id}"
        self.ran: dict[str, list[Ran]] = {}
        self._states: dict[str, str] = {}
        self._lock = threading.Lock()

    def run(self, **inputs: Any) -> None:
        """Run the pipeline. Raises Failed if a task fails, after the exit handler has run."""
        root = self._spec["root"]
        scope = Scope(_with_defaults(root, inputs), {})
        self._dag(root, scope)

    # -- the driver

    def _dag(self, component: Document, scope: Scope) -> Outputs:
        """Run the tasks of a DAG in order; exit handlers last, even if a task failed."""
        tasks = component["dag"]["tasks"]
        failure: Failed | None = None
        for name in _ordered(tasks):
            last = tasks[name].get("triggerPolicy", {}).get("strategy")
            if failure and last != "ALL_UPSTREAM_TASKS_COMPLETED":
                continue
            try:
                scope.outputs[name] = self._task(tasks[name], scope)
                self._states[name] = "COMPLETE"
            except Failed as error:
                failure = error
                self._states[name] = "RUNNING" if isinstance(error, Lost) else "FAILED"
        if failure:
            raise failure
        selected = component["dag"].get("outputs", {}).get("artifacts", {})
        return Outputs(artifacts={
            key: [a for s in one["artifactSelectors"] for a in _selected(scope, s)]
            for key, one in selected.items()
        })  # fmt: skip

    def _task(self, task: Document, scope: Scope) -> Outputs:
        if not _holds(task, parameters := self._parameters(task, scope)):
            return Outputs()
        artifacts = {
            name: _artifacts(given, scope)
            for name, given in task.get("inputs", {}).get("artifacts", {}).items()
        }
        component = self._spec["components"][task["componentRef"]["name"]]
        iterator = task.get("parameterIterator")
        if iterator is None:
            return self._component(task, component, parameters, artifacts)
        items = parameters[iterator["items"]["inputParameter"]]
        with ThreadPoolExecutor(task["iteratorPolicy"]["parallelismLimit"]) as pool:
            done = list(
                pool.map(
                    lambda item: self._component(
                        task, component, {**parameters, iterator["itemInput"]: item}, artifacts
                    ),
                    items,
                )
            )
        keys = {key for one in done for key in one.artifacts}
        return Outputs(artifacts={k: [a for one in done for a in one.artifacts[k]] for k in keys})

    def _component(
        self, task: Document, component: Document, parameters: Values, artifacts: Values
    ) -> Outputs:
        given = _with_defaults(component, parameters)
        if "dag" in component:
            return self._dag(component, Scope(given, artifacts))
        policy, started = task.get("retryPolicy", {}), self._clock()
        longest, attempts = _seconds(policy), int(policy.get("maxRetryCount", 0)) + 1
        name, left = task["componentRef"]["name"], longest
        for attempt in range(1, attempts + 1):
            try:
                limit = left if attempt > 1 else float("inf")
                return self._execute(name, component, given, artifacts, limit)
            except Lost:
                left = longest - (self._clock() - started)
                if attempt == attempts or left <= 0:
                    raise
        raise AssertionError("unreachable")

    def _parameters(self, task: Document, scope: Scope) -> Values:
        given = task.get("inputs", {}).get("parameters", {})
        return {name: self._parameter(one, scope) for name, one in given.items()}

    def _parameter(self, given: Document, scope: Scope) -> Any:
        assert "parameterExpressionSelector" not in given
        if "componentInputParameter" in given:
            return scope.parameters[given["componentInputParameter"]]
        if "taskOutputParameter" in given:
            of = given["taskOutputParameter"]
            return scope.outputs[of["producerTask"]].parameters[of["outputParameterKey"]]
        if "taskFinalStatus" in given:
            task = given["taskFinalStatus"]["producerTask"]
            return {"state": self._states[task], "pipelineTaskName": task, "error": {}}
        constant = given["runtimeValue"]["constant"]
        known = {"{{$.pipeline_job_uuid}}": self.run_id}
        assert "{{" not in str(constant) or constant in known
        return known.get(constant, constant) if isinstance(constant, str) else constant

    # -- a task's pod

    def _execute(
        self, component: str, spec: Document, parameters: Values, artifacts: Values, limit: float
    ) -> Outputs:
        """Run one attempt of a task, whose pod is killed after `limit` seconds."""
        label, name = spec["executorLabel"], component.removeprefix("comp-")
        container = self._spec["deploymentSpec"]["executors"][label]["container"]
        place = f"{self.root}/{name}/{uuid.uuid4()}"
        given = kfp_pod.executor_input(spec, parameters, artifacts, place, self._pods.output(place))
        pod = kfp_pod.pod(
            f"{name}-{uuid.uuid4().hex[:8]}",
            container,
            self._platforms[label],
            given,
            *self._places,
        )
        pod["spec"]["activeDeadlineSeconds"] = min(pod["spec"]["activeDeadlineSeconds"], limit)
        log = self._pods.run(pod)
        (printed,) = (line for line in log.splitlines() if line.startswith(kfp_pod.MARK))
        written = json.loads(printed.removeprefix(kfp_pod.MARK))
        outputs = kfp_pod.outputs(spec, written, given, place)
        ran = Ran(pod["metadata"]["name"], log, *outputs)
        with self._lock:
            self.ran.setdefault(name, []).append(ran)
        return ran.outputs


def _seconds(policy: Document) -> float:
    """Return the time after which nothing is retried; 0 means that there is no limit."""
    return float(policy.get("backoffMaxDuration", "0s").removesuffix("s")) or float("inf")


def _ordered(tasks: Mapping[str, Document]) -> Iterable[str]:
    """Return the names of tasks, each after those that it depends on."""
    left = dict(tasks)
    while left:
        ready = [n for n, t in left.items() if not set(t.get("dependentTasks", ())) & set(left)]
        assert ready, f"a circle: {sorted(left)}"
        for name in ready:
            del left[name]
            yield name


def _holds(task: Document, parameters: Values) -> bool:
    """Return whether the task's condition holds, in the form of our pipeline."""
    condition = task.get("triggerPolicy", {}).get("condition")
    if condition is None:
        return True
    pattern = r"inputs\.parameter_values\['([^']+)'\] == '([^']*)'"
    match = re.fullmatch(pattern, " ".join(condition.split()))
    assert match, condition
    return bool(parameters[match[1]] == match[2])


def _artifacts(given: Document, scope: Scope) -> list[Values]:
    if "componentInputArtifact" in given:
        return scope.artifacts[given["componentInputArtifact"]]
    of = given["taskOutputArtifact"]
    return scope.outputs[of["producerTask"]].artifacts[of["outputArtifactKey"]]


def _selected(scope: Scope, selector: Document) -> list[Values]:
    return scope.outputs[selector["producerSubtask"]].artifacts[selector["outputArtifactKey"]]


def _with_defaults(component: Document, given: Values) -> Values:
    known = component.get("inputDefinitions", {}).get("parameters", {})
    assert set(given) <= set(known), set(given) - set(known)
    defaults = {n: one["defaultValue"] for n, one in known.items() if "defaultValue" in one}
    return {**defaults, **given}
