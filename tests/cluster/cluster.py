"""Namespaces for tests in the cluster of KUBECONFIG, through kubectl."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
IMAGE = os.environ.get("DDPM_IMAGE", "ddpm:dev")
LIGHT_IMAGE = os.environ.get("DDPM_LIGHT_IMAGE", "ddpm-light:dev")
# A command for containers that runs `ddpm` as a child: nothing inside a container can kill or stop
# its first process.
BELOW = "import subprocess, sys; sys.exit(subprocess.call(['ddpm', *sys.argv[1:]]))"

Document = dict[str, Any]

# What Pod Security `restricted` requires of a pod and its container, and a read-only root.
POD_SECURITY = {
    "runAsNonRoot": True,
    "runAsUser": 1000,
    "runAsGroup": 1000,
    "fsGroup": 1000,
    "seccompProfile": {"type": "RuntimeDefault"},
}
CONTAINER_SECURITY = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}


class KubectlFailed(AssertionError):
    """kubectl failed; the text is its error message."""


def kubectl(*arguments: str, given: str | None = None, seconds: float = 120) -> str:
    """Run kubectl, and return its output. Raises KubectlFailed."""
    done = subprocess.run(
        ["kubectl", *arguments], input=given, capture_output=True, text=True, timeout=seconds
    )
    if done.returncode:
        raise KubectlFailed(f"kubectl {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def documents(*paths: Path) -> list[Document]:
    """Return the documents of YAML files, and of the YAML files directly in folders, in order."""
    files = [f for p in paths for f in (sorted(p.glob("*.yaml")) if p.is_dir() else [p])]
    return [d for f in files for d in yaml.safe_load_all(f.read_text(encoding="utf-8")) if d]


def with_images(given: Iterable[Document]) -> str:
    """Return documents as YAML, with the images under test in place of those of manifests/."""
    text = yaml.safe_dump_all(given).replace("ddpm:dev", IMAGE)
    return text.replace("ddpm-light:dev", LIGHT_IMAGE)


def wait_until(
    condition: Callable[[], Any], what: str | Callable[[], str], seconds: float, pause: float = 1.0
) -> Any:
    """Call `condition` until it returns a true value, and return that. Retries failed kubectl."""
    deadline, rest, trouble = time.monotonic() + seconds, threading.Event(), ""
    while True:
        try:
            if answer := condition():
                return answer
            trouble = ""
        except (KubectlFailed, subprocess.TimeoutExpired) as error:
            trouble = f" ({error})"
        if time.monotonic() > deadline:
            shown = what() if callable(what) else what
            raise AssertionError(f"{shown}: not within {seconds:.0f} s{trouble}")
        rest.wait(pause)


def applied(text: str, *more: str) -> str:
    """Run `kubectl apply`, again if the API server or a webhook is busy; return its output."""
    asked = ("apply", *more, "-f", "-")
    return str(wait_until(lambda: kubectl(*asked, given=text), "documents are applied", 120))


def has(resource: str) -> bool:
    """Return whether the cluster has a kind of objects."""
    return bool(kubectl("get", "crd", resource, "--ignore-not-found", "-o", "name").strip())


class Namespace:
    """A namespace with the platform of `manifests/`, deleted after the tests that use it."""

    def __init__(self, name: str) -> None:
        self.name = name

    # -- creation and deletion

    def create(self, platform: bool = True) -> None:
        """Create the namespace of manifests/, and with `platform` everything else in manifests/."""
        everything = documents(ROOT / "manifests")
        (own,) = [d for d in everything if d["kind"] == "Namespace"]
        own["metadata"]["name"] = self.name
        applied(yaml.safe_dump(own))
        # A controller creates the default account a moment after the namespace. Until then the API
        # server refuses pods without an account of their own.
        wait_until(lambda: self.exists("serviceaccount", "default"), "the default account", 120)
        if platform:
            self.apply(d for d in everything if d["kind"] != "Namespace")

    def delete(self, wait: bool = False) -> None:
        kubectl("delete", "namespace", self.name, "--ignore-not-found", f"--wait={wait}".lower())

    # -- objects

    def kubectl(self, *arguments: str, given: str | None = None, seconds: float = 120) -> str:
        return kubectl("--namespace", self.name, *arguments, given=given, seconds=seconds)

    def apply(self, wanted: Iterable[Document] | Document) -> None:
        """Apply documents in this namespace, with the image under test."""
        given = [wanted] if isinstance(wanted, dict) else list(wanted)
        for document in given:
            document.get("metadata", {}).pop("namespace", None)
            for subject in document.get("subjects", []):
                subject["namespace"] = self.name
        applied(with_images(given), "--namespace", self.name)

    def get(self, kind: str, name: str) -> Document:
        return dict(json.loads(self.kubectl("get", kind, name, "-o", "json")))

    def list(self, kind: str, selector: str = "") -> list[Document]:
        listed = self.kubectl("get", kind, "-o", "json", *(["-l", selector] if selector else []))
        return list(json.loads(listed)["items"])

    def exists(self, kind: str, name: str) -> bool:
        return bool(self.kubectl("get", kind, name, "--ignore-not-found", "-o", "name").strip())

    # -- pods

    def pod(
        self,
        name: str,
        command: list[str] | None = None,
        args: list[str] | None = None,
        *,
        env: Mapping[str, str] | None = None,
        secret: str | None = None,
        labels: Mapping[str, str] | None = None,
        account: str | None = None,
        claims: Mapping[str, str] | None = None,
        config_maps: Mapping[str, str] | None = None,
        memory: str = "1500Mi",
        restart: str = "Never",
    ) -> str:
        """Start a pod of our image under `restricted`; command None: `ddpm` with the args.

        `claims` and `config_maps` say which PersistentVolumeClaim or ConfigMap is mounted at
        which path; `secret` is put into the environment.
        """
        volumes: list[Document] = [
            {"name": "tmp", "emptyDir": {}},
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "64Mi"}},
        ]
        mounts = [{"name": "tmp", "mountPath": "/tmp"}, {"name": "shm", "mountPath": "/dev/shm"}]
        for claim, path in (claims or {}).items():
            volumes.append({"name": claim, "persistentVolumeClaim": {"claimName": claim}})
            mounts.append({"name": claim, "mountPath": path})
        for config_map, path in (config_maps or {}).items():
            volumes.append({"name": config_map, "configMap": {"name": config_map}})
            mounts.append({"name": config_map, "mountPath": path})
        container: Document = {
            "name": "main",
            "image": IMAGE,
            "imagePullPolicy": "IfNotPresent",
            "env": [{"name": key, "value": value} for key, value in (env or {}).items()],
            "resources": {
                "requests": {"cpu": "50m", "memory": "256Mi"},
                "limits": {"cpu": "2", "memory": memory},
            },
            "securityContext": CONTAINER_SECURITY,
            "volumeMounts": mounts,
        }
        container |= {"command": command} if command else {}
        container |= {"args": args} if args else {}
        container |= {"envFrom": [{"secretRef": {"name": secret}}]} if secret else {}
        spec: Document = {
            "restartPolicy": restart,
            "securityContext": POD_SECURITY,
            "automountServiceAccountToken": account is not None,
            "containers": [container],
            "volumes": volumes,
            "terminationGracePeriodSeconds": 5,
        }
        spec |= {"serviceAccountName": account} if account else {}
        meta = {"name": name, "labels": dict(labels or {})}
        self.apply({"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec})
        return name

    def phase(self, pod: str) -> str:
        return str(self.get("pod", pod)["status"].get("phase"))

    def finished(self, pod: str, seconds: float = 300) -> str:
        """Wait until a pod has succeeded, and return its log."""
        ended = ("Succeeded", "Failed")
        wait_until(lambda: self.phase(pod) in ended, f"pod {pod} ends", seconds)
        log = self.logs(pod)
        assert self.phase(pod) == "Succeeded", f"pod {pod} failed:\n{log}"
        return log

    def run(self, name: str, seconds: float = 300, **options: Any) -> str:
        """Start a pod, wait until it has succeeded, and return its log."""
        return self.finished(self.pod(name, **options), seconds)

    def logs(self, pod: str, *more: str) -> str:
        return self.kubectl("logs", pod, "--all-containers", *more)

    def exec(self, pod: str, *command: str) -> str:
        return self.kubectl("exec", pod, "--", *command)

    def ready(self, deployment: str, seconds: float = 180) -> None:
        """Wait until all pods of a Deployment are ready."""

        def holds() -> bool:
            found = self.get("deployment", deployment)
            wanted, status = found["spec"]["replicas"], found["status"]
            seen = status.get("observedGeneration", 0) >= found["metadata"]["generation"]
            return bool(seen and status.get("readyReplicas", 0) == wanted)

        wait_until(holds, f"deployment {deployment} is ready", seconds)

    # -- diagnosis

    def explain(self, lines: int = 40) -> str:
        """Return events, the state of each pod, and the end of its logs."""
        sections = [self._asked("get", self._kinds(), "-o", "wide")]
        sections.append(self._asked("get", "events", "--sort-by=.lastTimestamp"))
        for pod in self._asked("get", "pods", "-o", "name").split():
            log = self._asked(
                "logs", pod, "--all-containers", "--prefix", f"--tail={lines}", "--ignore-errors"
            )
            sections.append(f"--- {pod}\n{log}")
        return "\n".join(sections)

    def _kinds(self) -> str:
        more = ("trainjobs.trainer.kubeflow.org", "workloads.kueue.x-k8s.io")
        return ",".join(["pods,jobs,pytorchjobs", *filter(has, more)])

    def _asked(self, *arguments: str) -> str:
        try:
            return self.kubectl(*arguments)
        except (KubectlFailed, subprocess.TimeoutExpired) as error:
            return str(error)
