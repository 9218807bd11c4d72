"""One `kubectl apply` sets up the platform: restricted, and with only the network that is used."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator

import pytest
from cluster import KubectlFailed, Namespace, wait_until

# Tries until each target is as expected: policies take effect some seconds after a pod has started.
# A closed target must be closed three times in a row.
PROBE = """
import socket, sys, time
deadline = time.monotonic() + 90
def reached(host, port):
    try:
        socket.create_connection((host, int(port)), timeout=2).close()
    except OSError as error:
        print(host, port, error, flush=True)
        return False
    return True
for target in sys.argv[1:]:
    wanted, host, port = target.split(",")
    right = 0
    while right < (1 if wanted == "open" else 3):
        right = right + 1 if reached(host, port) == (wanted == "open") else 0
        if not right:
            if time.monotonic() > deadline:
                sys.exit(f"{host}:{port} is not {wanted}")
            time.sleep(0.5)
print("as expected")
"""
ASK = """
import sys, urllib.error, urllib.request
try:
    print(urllib.request.urlopen(sys.argv[1], timeout=20).status)
except urllib.error.HTTPError as error:
    print(error.status)
"""
# Prints MLflow's responses to requests with several host names.
CLIENT = """
import http.client, json, pathlib, time
words = pathlib.Path("/etc/resolv.conf").read_text().split()
place = next(word for word in words if ".svc." in word)
statuses = {}
for host in ("ddpm-mlflow:5000", f"ddpm-mlflow.{place.split('.')[0]}.svc:5000", "evil:5000"):
    for attempt in range(60):
        try:
            connection = http.client.HTTPConnection("ddpm-mlflow", 5000, timeout=10)
            connection.request("POST", "/api/2.0/mlflow/experiments/search", '{"max_results": 1}',
                               {"Host": host, "Content-Type": "application/json"})
            statuses[host] = connection.getresponse().status
            break
        except OSError as error:
            print(error, flush=True)
            time.sleep(1)
print(json.dumps(statuses))
"""
# Compiles and loads a C library, as Triton does before it compiles a network for a GPU.
BUILD = """
import ctypes, pathlib, subprocess
source, library = pathlib.Path("/tmp/seven.c"), "/tmp/seven.so"
source.write_text("#include <stdlib.h>\\nint seven(void) { return abs(-7); }")
subprocess.run(["gcc", "-O3", "-shared", "-fPIC", source, "-o", library], check=True)
print(ctypes.CDLL(library).seven())
"""


@pytest.fixture(scope="module")
def outside() -> Iterator[Namespace]:
    """Create a second namespace, in which a policy restricts a single pod."""
    made = Namespace(f"ddpm-test-outside-{secrets.token_hex(3)}")
    made.create(platform=False)
    made.apply(
        {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": {"name": "closed"},
            "spec": {"podSelector": {"matchLabels": {"closed": "yes"}}, "policyTypes": ["Egress"]},
        }
    )
    yield made
    made.delete()


def probe(place: Namespace, name: str, targets: list[str], **labels: str) -> None:
    place.pod(name, ["python", "-c", PROBE, *targets], labels=labels, memory="256Mi")


def test_everything_is_ready_except_the_waiting_champion(namespace: Namespace) -> None:
    namespace.ready("ddpm-mlflow", 300)
    champion = wait_until(lambda: started(namespace, "ddpm-champion"), "the champion starts", 300)
    assert status(namespace, champion, "http://127.0.0.1:8080/health") == 200
    assert status(namespace, champion, "http://127.0.0.1:8080/ready") == 503
    [pod] = namespace.list("pods", "app.kubernetes.io/name=ddpm-champion")
    assert [c["restartCount"] for c in pod["status"]["containerStatuses"]] == [0]
    assert {c["type"]: c["status"] for c in pod["status"]["conditions"]}["Ready"] == "False"
    claims = {c["metadata"]["name"]: c["status"]["phase"] for c in namespace.list("pvc")}
    # A StorageClass with WaitForFirstConsumer binds the workspace with the first job.
    assert claims["ddpm-mlflow"] == "Bound" and set(claims) == {"ddpm-mlflow", "ddpm-workspace"}


def started(namespace: Namespace, name: str) -> str:
    """Return the pod of a Deployment whose startup probe has passed; empty without one."""
    for pod in namespace.list("pods", f"app.kubernetes.io/name={name}"):
        if all(c.get("started") for c in pod["status"].get("containerStatuses", [{}])):
            return str(pod["metadata"]["name"])
    return ""


def status(namespace: Namespace, pod: str, url: str) -> int:
    return int(namespace.exec(pod, "python", "-c", ASK, url))


def test_pods_reach_only_what_their_labels_open(namespace: Namespace, outside: Namespace) -> None:
    namespace.ready("ddpm-mlflow", 300)
    server = "kubernetes.default.svc.cluster.local"
    mlflow, api = "ddpm-mlflow,5000", f"{server},443"
    far = f"ddpm-mlflow.{namespace.name}.svc.cluster.local,5000"
    champion_pod = wait_until(
        lambda: started(namespace, "ddpm-champion"), "the champion starts", 300
    )
    [found] = [p for p in namespace.list("pods") if p["metadata"]["name"] == champion_pod]
    # Its Service has no endpoint until it is ready.
    champion = f"{found['status']['podIP']},8080"
    probe(outside, "control", [f"closed,{champion}"], closed="yes")
    probe(outside, "stranger", [f"open,{champion}", f"closed,{far}"])
    tracks = {"ddpm.io/uses-mlflow": "true"}
    probe(namespace, "tracker", [f"open,{mlflow}", f"closed,{api}", f"closed,{champion}"], **tracks)
    probe(namespace, "nobody", [f"closed,{mlflow}", f"closed,{api}", f"closed,{champion}"])
    probe(
        namespace, "launcher", [f"open,{api}", f"closed,{mlflow}"], **{"ddpm.io/uses-api": "true"}
    )
    ended = ("Succeeded", "Failed")
    wait_until(lambda: outside.phase("control") in ended, "the control ends", 150)
    if outside.phase("control") == "Failed":
        pytest.skip("this cluster's network plugin enforces no NetworkPolicy")
    outside.finished("stranger", 150)
    for name in ("tracker", "nobody", "launcher"):
        namespace.finished(name, 150)


def test_mlflow_accepts_the_name_of_its_service(namespace: Namespace) -> None:
    """It refuses other host names, against DNS rebinding."""
    namespace.ready("ddpm-mlflow", 300)
    uses = {"ddpm.io/uses-mlflow": "true"}
    printed = namespace.run("client", command=["python", "-c", CLIENT], labels=uses, memory="256Mi")
    statuses = json.loads(printed.splitlines()[-1])
    assert statuses == {
        "ddpm-mlflow:5000": 200,
        f"ddpm-mlflow.{namespace.name}.svc:5000": 200,
        "evil:5000": 403,
    }


def test_a_pod_can_compile_and_load_a_c_library(namespace: Namespace) -> None:
    assert namespace.run("compiler", command=["python", "-c", BUILD]).strip() == "7"


def test_unrestricted_pods_are_refused(namespace: Namespace) -> None:
    with pytest.raises(KubectlFailed, match="violates PodSecurity"):
        namespace.kubectl("run", "root", "--image=ddpm:dev", "--restart=Never")
