"""Read Kubernetes documents, check them against the API's models, and find their pods."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes.client
import yaml
from kubeflow.training import models

Document = dict[str, Any]
ROOT = Path(__file__).parents[2]
PLATFORM = ROOT / "manifests"
JOBS = PLATFORM / "jobs"
OVERLAYS = ROOT / "overlays"

_PLAIN = {"str": str, "int": int, "float": (int, float), "bool": bool, "datetime": str}
_SUFFIX = {"m": 1e-3, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


@functools.cache
def read(folder: Path) -> list[Document]:
    """Return all documents that `kubectl apply -f FOLDER` applies, in its order."""
    return [
        document
        for file in sorted(folder.glob("*.yaml"))
        for document in yaml.safe_load_all(file.read_text(encoding="utf-8"))
    ]


def named(documents: list[Document], kind: str) -> dict[str, Document]:
    return {d["metadata"]["name"]: d for d in documents if d["kind"] == kind}


def executors() -> dict[str, Document]:
    """Return what the compiled pipeline sets for the pods of each of its tasks, by component."""
    _, platforms = yaml.safe_load_all((ROOT / "pipelines/ddpm.yaml").read_text(encoding="utf-8"))
    found: dict[str, Document] = platforms["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    return found


def mistakes(document: Document) -> list[str]:
    """Return the unknown fields, missing fields and wrong types of a document."""
    version = document.get("apiVersion", "")
    group, _, number = version.rpartition("/")
    prefix = "KubeflowOrg" if group == "kubeflow.org" else ""
    name = f"{prefix}{number[:1].upper()}{number[1:]}{document.get('kind')}"
    return list(_mistakes(document, name, f"{document.get('kind')}"))


def mistakes_in_pod(job_template: Document) -> list[str]:
    """Return the mistakes of a Job's template within an object that has no model here."""
    return list(_mistakes(job_template, "V1JobTemplateSpec", "template"))


def _mistakes(value: Any, kind: str, where: str) -> Iterator[str]:
    if match := re.fullmatch(r"list\[(.+)\]", kind):
        if not isinstance(value, list):
            yield f"{where}: must be a list, got {value!r:.60}"
            return
        for number, item in enumerate(value):
            yield from _mistakes(item, match[1], f"{where}[{number}]")
    elif match := re.fullmatch(r"dict\(str, (.+)\)", kind):
        if not isinstance(value, dict):
            yield f"{where}: must have fields, got {value!r:.60}"
            return
        for key, item in value.items():
            yield from _mistakes(item, match[1], f"{where}.{key}")
    elif kind in _PLAIN:
        wrong = isinstance(value, bool) and kind != "bool"
        if wrong or not isinstance(value, _PLAIN[kind]):
            yield f"{where}: must be {kind}, got {value!r:.60}"
    elif kind != "object":
        yield from _of_model(value, kind, where)


def _of_model(value: Any, kind: str, where: str) -> Iterator[str]:
    model = getattr(kubernetes.client, kind, None) or getattr(models, kind, None)
    if model is None or not isinstance(value, dict):
        yield f"{where}: unknown kind {kind}" if model is None else f"{where}: must have fields"
        return
    attributes = {given: name for name, given in model.attribute_map.items()}
    for key, item in value.items():
        if key not in attributes:
            yield f"{where}.{key}: {kind} has no such field"
        else:
            yield from _mistakes(item, model.openapi_types[attributes[key]], f"{where}.{key}")
    try:
        model(**{name: value.get(given) for given, name in attributes.items()})
    except ValueError as error:
        yield f"{where}: {error}"


def templates(document: Document) -> list[tuple[Document, int]]:
    """Return the pod templates of a workload, each with its number of parallel pods."""
    spec = document.get("spec", {})
    if document["kind"] == "PyTorchJob":
        return [(r["template"], r.get("replicas", 1)) for r in spec["pytorchReplicaSpecs"].values()]
    if document["kind"] == "TrainingRuntime":
        jobs = spec["template"]["spec"]["replicatedJobs"]
        return [(one["template"]["spec"]["template"], 1) for one in jobs]
    if document["kind"] in ("Deployment", "Job"):
        return [(spec["template"], spec.get("replicas", spec.get("parallelism", 1)))]
    return []


def containers(template: Document) -> list[Document]:
    return [*template["spec"].get("initContainers", []), *template["spec"]["containers"]]


def quantity(text: object) -> float:
    """Return `100m`, `2` or `512Mi` as a number."""
    match = re.fullmatch(r"([\d.]+)(\D*)", str(text))
    assert match, text
    return float(match[1]) * (_SUFFIX[match[2]] if match[2] else 1)


def requested(template: Document, resource: str, kind: str = "requests") -> float:
    """Return what a pod requests: the sum of its containers, or the largest init container."""
    each = [
        [quantity(c["resources"][kind].get(resource, 0)) for c in template["spec"].get(part, [])]
        for part in ("initContainers", "containers")
    ]
    return max([sum(each[1]), *each[0]])
