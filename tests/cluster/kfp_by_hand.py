"""The tests' backend of Kubeflow Pipelines (support.kfp_backend), with pods of the cluster."""

from __future__ import annotations

from pathlib import Path

from cluster import Document, Namespace
from support import kfp_backend
from support.kfp_pod import Failed

__all__ = ["Backend", "Failed"]


class ClusterPods:
    """Runs pods in a namespace."""

    root = "s3://mlpipeline/v2/artifacts"  # pods see it at /s3/mlpipeline/...

    def __init__(self, namespace: Namespace) -> None:
        self._namespace = namespace

    def output(self, place: str) -> str:
        return "/tmp/kfp_outputs/output_metadata.json"

    def run(self, pod: Document) -> str:
        self._namespace.apply(pod)
        try:
            return self._namespace.finished(pod["metadata"]["name"], 600)
        except AssertionError as error:
            raise Failed(str(error)) from error


class Backend(kfp_backend.Backend):
    """Runs a compiled pipeline in a namespace."""

    def __init__(
        self, namespace: Namespace, compiled: Path, account: str, claims: bool = True
    ) -> None:
        super().__init__(ClusterPods(namespace), compiled, account, claims)
