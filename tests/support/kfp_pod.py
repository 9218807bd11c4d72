"""A task's pod as KFP creates it, and what KFP's launcher does in it.

The driver makes a patch of executor and platform spec, Argo a pod of that (backend/src/v2, driver
and compiler/argocompiler, in kubeflow/pipelines). The pod's command is the launcher: it puts the
ExecutorInput into the executor's command, runs it, and takes from files what came out. Here it is a
few lines of Python; all else is the compiled file's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

MARK = "KFP-LAUNCHER "

# The launcher: creates the folders of outputs, runs the command, and prints what it wrote.
LAUNCHER = """
import hashlib, json, pathlib, subprocess, sys
given, *command = sys.argv[1:]
outputs = json.loads(given)["outputs"]
uris = {name: a["artifacts"][0]["uri"] for name, a in outputs.get("artifacts", {}).items()}
paths = {name: pathlib.Path(uri.replace("s3://", "/s3/")) for name, uri in uris.items()}
for path in [*paths.values(), pathlib.Path(outputs["outputFile"])]:
    path.parent.mkdir(parents=True, exist_ok=True)
status = subprocess.run(command).returncode
if status:
    sys.exit(status)
written = json.loads(pathlib.Path(outputs["outputFile"]).read_text())
sizes = {name: path.stat().st_size for name, path in paths.items() if path.is_file()}
print("KFP-LAUNCHER " + json.dumps({"output": written, "sizes": sizes}), flush=True)
"""

Document = dict[str, Any]
Values = dict[str, Any]


class Failed(AssertionError):
    """A task's pod ended with another status than 0."""


class Lost(Failed):
    """A task's pod disappeared, or was killed."""


class Pods(Protocol):
    """Where pods run."""

    root: str  # of the pipeline's artifacts

    def output(self, place: str) -> str:
        """Return the file in which a task with outputs below `place` lists them."""
        ...

    def run(self, pod: Document) -> str:
        """Run a pod, and return its log. Raises Failed with the log, or Lost."""
        ...


class LocalPods:
    """Runs pods as processes of this machine. As in KFP's pods, the umask is 0.

    `messages` has the termination message of each component's last pod.
    """

    def __init__(self, folder: Path) -> None:
        self.root = str(folder / "artifacts")
        self._message = folder / "termination-log"
        self.messages: dict[str, str] = {}

    def output(self, place: str) -> str:
        return f"{place}/output_metadata.json"

    def run(self, pod: Document) -> str:
        (main,) = pod["spec"]["containers"]
        given = {one["name"]: one["value"] for one in main["env"] if "value" in one}
        self._message.write_text("")
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = {"PATH": path, "DDPM_TERMINATION_LOG": str(self._message)}
        done = subprocess.run(
            [*main["command"], *main["args"]],
            env={**os.environ, **given, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            umask=0,
            check=False,
        )
        self.messages[pod["metadata"]["name"].rpartition("-")[0]] = self._message.read_text()
        if done.returncode:
            raise Failed(done.stdout)
        return done.stdout


@dataclass(frozen=True)
class Outputs:
    parameters: Values = field(default_factory=dict)
    artifacts: dict[str, list[Values]] = field(default_factory=dict)


def pod(
    name: str, container: Document, config: Document, given: str, account: str, claims: bool
) -> Document:
    """Return the pod of a task as Argo creates it; without `claims` it mounts no volume."""
    security, resources = config["securityContext"], container["resources"]
    volumes, mounts = _volumes(config, claims)
    command = [*container["command"], *container["args"]]
    main = {
        "name": "main",
        "image": container["image"],
        "imagePullPolicy": config["imagePullPolicy"],
        "command": ["python3", "-c", LAUNCHER, given],
        "args": [part.replace("{{$}}", given) for part in command],
        "env": [
            _of_pod("KFP_POD_NAME", "metadata.name"),
            _of_pod("KFP_POD_UID", "metadata.uid"),
            *container.get("env", []),
            *_secrets(config),
        ],
        "resources": {
            kind: {
                "cpu": resources[f"resourceCpu{kind[:-1].capitalize()}"],
                "memory": resources[f"resourceMemory{kind[:-1].capitalize()}"],
            }
            for kind in ("requests", "limits")
        },
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"},
            "runAsNonRoot": security["runAsNonRoot"],
            "runAsUser": int(security["runAsUser"]),
            "runAsGroup": int(security["runAsGroup"]),
        },
        "volumeMounts": mounts,
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": config["podMetadata"]["labels"]},
        "spec": {
            "restartPolicy": "Never",
            "serviceAccountName": account,
            "activeDeadlineSeconds": int(config["activeDeadlineSeconds"]),
            "containers": [main],
            "volumes": volumes,
        },
    }


def executor_input(
    spec: Document, parameters: Values, artifacts: Values, place: str, output: str
) -> str:
    """Return the ExecutorInput of a task with outputs below `place`, as JSON."""
    definitions = spec.get("outputDefinitions", {})
    made = {
        name: {"artifacts": [
            {"name": name, "type": one["artifactType"], "uri": f"{place}/{name}", "metadata": {}}
        ]}
        for name, one in definitions.get("artifacts", {}).items()
    }  # fmt: skip
    inputs = {
        name: {"outputFile": f"/tmp/kfp/outputs/{name}"}
        for name in definitions.get("parameters", {})
    }
    return json.dumps(
        {
            "inputs": {
                "parameterValues": parameters,
                "artifacts": {name: {"artifacts": some} for name, some in artifacts.items()},
            },
            "outputs": {"parameters": inputs, "artifacts": made, "outputFile": output},
        }
    )


def outputs(
    spec: Document, written: Document, given: str, place: str
) -> tuple[Outputs, dict[str, int]]:
    """Return the outputs of a task. Fails, like the launcher, for artifacts outside the root."""
    made = {}
    for name, asked in json.loads(given)["outputs"]["artifacts"].items():
        (answer,) = written["output"]["artifacts"][name]["artifacts"]
        (wanted,) = asked["artifacts"]
        assert answer["uri"] == wanted["uri"] == f"{place}/{name}"
        assert "custom_path" not in answer
        made[name] = [{**wanted, "metadata": answer["metadata"]}]
    assert set(written["sizes"]) == set(made), "an artifact without its file"
    parameters = written["output"].get("parameterValues", {})
    assert set(parameters) == set(spec.get("outputDefinitions", {}).get("parameters", {}))
    return Outputs(parameters, made), written["sizes"]


def _volumes(config: Document, claims: bool) -> tuple[list[Document], list[Document]]:
    """Return the volumes that KFP adds to every pod, and those of the platform's spec."""
    volumes: list[Document] = [{"name": "s3-scratch", "emptyDir": {}}]
    mounts: list[Document] = [{"name": "s3-scratch", "mountPath": "/s3"}]
    for one in config["emptyDirMounts"]:
        medium = {"medium": one["medium"]} if "medium" in one else {}
        volumes.append({"name": one["volumeName"], "emptyDir": medium})
        mounts.append({"name": one["volumeName"], "mountPath": one["mountPath"]})
    for one in config["configMapAsVolume"]:
        source = {"name": one["configMapName"], "optional": one["optional"]}
        volumes.append({"name": one["configMapName"], "configMap": source})
        mounts.append({"name": one["configMapName"], "mountPath": one["mountPath"]})
    for one in config["pvcMount"] if claims else ():
        claim = {"claimName": one["constant"]}
        volumes.append({"name": one["constant"], "persistentVolumeClaim": claim})
        mounts.append({"name": one["constant"], "mountPath": one["mountPath"]})
    return volumes, mounts


def _secrets(config: Document) -> list[Document]:
    return [
        {
            "name": key["envVar"],
            "valueFrom": {
                "secretKeyRef": {
                    "name": one["secretName"],
                    "key": key["secretKey"],
                    "optional": one["optional"],
                }
            },
        }
        for one in config["secretAsEnv"]
        for key in one["keyToEnv"]
    ]


def _of_pod(name: str, path: str) -> Document:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
