"""The served champion: waits for a first model, draws images, and changes without a restart."""

from __future__ import annotations

import json
from typing import Any

from cluster import Namespace, wait_until

CLIENT = "ddpm-test/asks-the-champion"

# The namespace lets nobody out: whoever asks the champion is given the way to it.
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

# A chain of a few seconds: what it draws is noise.
SMALL = """
prepare: {image_size: 8, workers: 1}
model: {channels: 8, multipliers: [1, 2], blocks: 1, attention: [4]}
diffusion: {timesteps: 50}
train: {steps: 2, batch_size: 8, snapshot_every: 2, milestone_every: 2, ema: [0.9]}
sample: {count: 20, batch_size: 20, steps: 4}
evaluate: {metrics: [fid]}
tracking: {uri: "http://mlflow:5000"}
"""

# Asks without a pause while the alias moves from version 1 to 2; prints what came.
CHANGE = """
import base64, io, json, urllib.request
from mlflow import MlflowClient
from PIL import Image

def ask(path, body=None):
    request = urllib.request.Request("http://ddpm-champion:8080/" + path, body)
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)

def draw():
    [image] = ask("invocations", b'{"inputs": [{"n": 1, "seed": 7}]}')["predictions"]
    return image["image"]

first = ask("version")
images = [draw()]
MlflowClient("http://mlflow:5000").set_registered_model_alias("ddpm", "champion", "2")
while ask("version")["version"] != "2":
    images.append(draw())
images.append(draw())
sizes = {Image.open(io.BytesIO(base64.b64decode(image))).size for image in images}
kinds = sorted(set(images), key=images.index)
print(json.dumps({"first": first, "answers": len(images), "kinds": len(kinds),
                  "sizes": sorted(sizes), "changes": kinds[-1] == images[-1]}))
"""


def champion_pod(namespace: Namespace) -> dict[str, Any]:
    [pod] = namespace.list("pods", "app.kubernetes.io/name=ddpm-champion")
    return pod


def test_the_champion_draws_images_and_the_next_one_takes_over_without_a_restart(
    namespace: Namespace,
) -> None:
    namespace.apply(WAY_TO_THE_CHAMPION)
    params = {"kind": "ConfigMap", "apiVersion": "v1", "metadata": {"name": "small"}}
    namespace.apply({**params, "data": {"params.yaml": SMALL}})
    labels = {"ddpm.io/uses-mlflow": "true", CLIENT: "true"}
    pod = namespace.pod(
        "user",
        ["sleep", "1800"],
        labels=labels,
        config_maps={"small": "/etc/small"},
    )
    namespace.ready("mlflow", 300)
    waiting = "has no version with the alias"
    wait_until(
        lambda: waiting in namespace.logs(champion_pod(namespace)["metadata"]["name"]),
        "the champion says what it waits for",
        120,
    )
    assert not champion_pod(namespace)["status"]["containerStatuses"][0]["ready"]
    wait_until(lambda: namespace.phase(pod) == "Running", "the user's pod runs", 60)
    train(namespace, pod, "one")
    namespace.ready("ddpm-champion")
    before = champion_pod(namespace)
    train(namespace, pod, "two", "-S", "seed=4", "-S", "register.alias=candidate")
    told = json.loads(namespace.exec(pod, "python", "-c", CHANGE).splitlines()[-1])
    assert told["first"]["version"] == "1"
    assert told["first"]["evidence"]["count"] == 20
    assert (told["sizes"], told["kinds"], told["changes"]) == ([[8, 8]], 2, True)
    after = champion_pod(namespace)
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    assert after["status"]["containerStatuses"][0]["restartCount"] == 0


def train(namespace: Namespace, pod: str, run: str, *changed: str) -> None:
    """Register a model from nothing, in the pod."""
    command = ["ddpm", "run", "-p", "/etc/small/params.yaml", "-w", f"/tmp/{run}", *changed]
    namespace.kubectl("exec", pod, "--", *command, seconds=600)
