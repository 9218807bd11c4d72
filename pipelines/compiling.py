"""Compile the pipeline for KFP, with other images and with GPUs if requested."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pods import USES

GPU = "nvidia.com/gpu"


def compile_pipeline(
    pipeline: Any, target: Path, images: Mapping[str, str] | None = None, gpu: bool = False
) -> None:
    """Write the compiled pipeline, always the same text for the same input.

    `images` maps images of the components to those that replace them. `gpu` gives a GPU to each pod
    that uses one; those of the PyTorchJob's workers are an input of the pipeline, and their image
    is that of the pod that starts them.
    """
    from kfp import compiler

    compiler.Compiler().compile(pipeline, str(target))
    other = {old: new for old, new in (images or {}).items() if new != old}
    if other or gpu:
        spec, platform = yaml.safe_load_all(target.read_text(encoding="utf-8"))
        executors = spec["deploymentSpec"]["executors"]
        on_cluster = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
        for name, executor in executors.items():
            container = executor["container"]
            container["image"] = other.get(container["image"], container["image"])
            if gpu and f"{USES}gpu" in on_cluster[name]["podMetadata"]["labels"]:
                give_gpu(executor["container"], on_cluster[name])
        target.write_text(yaml.safe_dump_all([spec, platform]), encoding="utf-8")


def give_gpu(container: dict[str, Any], pod: dict[str, Any]) -> None:
    """Add a GPU, the memory of a CUDA process, and the cores to compile a network."""
    container["resources"] |= {
        "accelerator": {"count": "1", "resourceCount": "1", "resourceType": GPU, "type": GPU},
        "cpuLimit": 8.0,
        "resourceCpuLimit": "8",
        "memoryLimit": 17.179869184,
        "resourceMemoryLimit": "16Gi",
    }
    container["env"].append({"name": "TORCHINDUCTOR_COMPILE_THREADS", "value": "8"})
    pod["tolerations"] = [{"key": GPU, "operator": "Exists", "effect": "NoSchedule"}]
