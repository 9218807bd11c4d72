"""Advice for errors that have their usual cause in the pod in which a program runs."""

from __future__ import annotations

import os

from ddpm_core.storage.base import Refused

VOLUME = (
    "If this is a volume that belongs to root, mount it once in a pod with an fsGroup "
    '(docs/kubeflow.md, "First use of a claim").'
)
KEYS = (
    "In a pod the keys come from the Secret ddpm-s3, or from the Secrets of the job's option "
    "`secrets`."
)


def advice(error: BaseException | None) -> str:
    """Return what to do about an error, or the first of its causes with such advice; else ""."""
    while error is not None and "KUBERNETES_SERVICE_HOST" in os.environ:
        if isinstance(error, Refused):
            return KEYS
        if isinstance(error, PermissionError):
            return VOLUME
        error = error.__cause__
    return ""
