"""The served champion waits for a model, generates images, and changes without a restart."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster import Namespace, wait_until
from support.models import write_checkpoint
from support.served_models import publish

CLIENT = "ddpm-test/asks-the-champion"

# The namespace denies all egress, so clients of the champion need a policy.
WAY_TO_THE_CHAMPION = {
    "apiVersion": "networking.k8s.io/v1",
    "kind": "NetworkPolicy",
    "metadata": {"name": "asks-the-champion"},
    "spec": {
        "podSelector": {"matchLabels": {CLIENT: "true"}},
        "policyTypes": ["Egress"],
        "egress": [
            {
                "to": [
                    {"podSelector": {"matchLabels": {"app.kubernetes.io/name": "ddpm-champion"}}}
                ],
                "ports": [{"port": 8080}],
            }
        ],
    },
}

# Sends requests without a pause until version 2 responds; prints the first version and results.
CHANGE = """
import base64, io, json, socket, time, urllib.request
from PIL import Image

def ask(path, body=None):
    request = urllib.request.Request("http://ddpm-champion:8080/" + path, body)
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response)

def draw():
    [image] = ask("invocations", b'{"inputs": [{"n": 1, "seed": 7}]}')["predictions"]
    return image["image"]

def reached():
    try:
        socket.create_connection(("ddpm-champion", 8080), timeout=5).close()
    except OSError:
        return False
    return True

# The Service has an endpoint some moments after the pod is ready.
deadline = time.monotonic() + 90
while not reached() and time.monotonic() < deadline:
    time.sleep(0.5)

images = [draw()]
print(json.dumps(ask("version")), flush=True)
while ask("version")["version"] != "2":
    images.append(draw())
images.append(draw())
sizes = {Image.open(io.BytesIO(base64.b64decode(image))).size for image in images}
kinds = sorted(set(images), key=images.index)
print(json.dumps({"kinds": len(kinds), "changed": kinds[-1] == images[-1], "sizes": sorted(sizes)}))
"""


@contextlib.contextmanager
def forwarded(namespace: Namespace, service: str, port: int) -> Iterator[str]:
    """Forward a port of a Service, and yield its local address."""
    command = ["kubectl", "-n", namespace.name, "port-forward", f"service/{service}", f":{port}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()  # Forwarding from 127.0.0.1:PORT -> ...
        yield f"http://{line.split()[2]}"
    finally:
        process.terminate()
        process.wait()


@contextlib.contextmanager
def asking(namespace: Namespace, pod: str) -> Iterator[Iterator[str]]:
    """Run CHANGE in a pod, and yield the lines that it prints."""
    command = ["kubectl", "-n", namespace.name, "exec", pod, "--", "python", "-c", CHANGE]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield iter(process.stdout.readline, "")
        assert process.wait() == 0


def champion_pod(namespace: Namespace) -> dict[str, Any]:
    [pod] = namespace.list("pods", "app.kubernetes.io/name=ddpm-champion")
    return pod


def test_the_champion_is_replaced_without_a_restart(
    namespace: Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "120")  # MLflow may be slow
    namespace.apply(WAY_TO_THE_CHAMPION)
    pod = namespace.pod("client", ["sleep", "3600"], labels={CLIENT: "true"})
    namespace.ready("ddpm-mlflow", 300)
    wait_until(lambda: namespace.phase(pod) == "Running", "the client runs", 180)
    wait_until(
        lambda: (
            "has no version with the alias"
            in namespace.logs(champion_pod(namespace)["metadata"]["name"])
        ),
        "the champion prints what it waits for",
        240,
    )
    assert not champion_pod(namespace)["status"]["containerStatuses"][0]["ready"]
    with forwarded(namespace, "ddpm-mlflow", 5000) as uri:
        versions = []
        for number in (1, 2):
            checkpoint = write_checkpoint(tmp_path / f"step-{number}", seed=number)
            package = tmp_path / f"package-{number}"
            registry, version = publish(uri, "ddpm", checkpoint, package)
            versions.append(version)
        registry.promote(versions[0])
        namespace.ready("ddpm-champion", 300)
        before = champion_pod(namespace)
        with asking(namespace, pod) as answers:
            assert json.loads(next(answers))["version"] == "1"
            registry.promote(versions[1])
            result = json.loads(next(answers))
    assert result == {"kinds": 2, "changed": True, "sizes": [[8, 8]]}
    after = champion_pod(namespace)
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    assert after["status"]["containerStatuses"][0]["restartCount"] == 0
