"""The compiled pipeline: the checked-in file, and KFP's own checks and limits."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from components_run import ROOT  # the next two are found by its path
from google.protobuf import json_format
from kfp import compiler, components, dsl, kubernetes
from kfp.kubernetes import kubernetes_executor_config_pb2 as platform
from kfp.pipeline_spec import pipeline_spec_pb2 as spec_pb2
from support import kfp_pod

import compiling  # isort: skip
import submission  # isort: skip
from pods import PARALLEL  # isort: skip

from components import IMAGE, LIGHT_IMAGE  # isort: skip
from components.sample import sample  # isort: skip

from ddpm_core.storage.workspace import Workspace
from ddpm_kube import steps
from ddpm_kube.record import Run

COMPILED = ROOT / "pipelines/ddpm.yaml"
COMPONENTS = {path.stem for path in (ROOT / "components").glob("[!_]*.py")}


@pytest.fixture(scope="module")
def compiled() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the spec of the pipeline, and that of the platform, from the checked-in file."""
    spec, platforms = yaml.safe_load_all(COMPILED.read_text())
    return spec, platforms["platforms"]["kubernetes"]["deploymentSpec"]["executors"]


def test_the_checked_in_file_is_up_to_date(pipeline: Any, tmp_path: Path) -> None:
    made = tmp_path / "ddpm.yaml"
    compiling.compile_pipeline(pipeline, made)
    assert made.read_text() == COMPILED.read_text(), "python pipelines/ddpm.py compile"


def test_kfp_loads_the_pipeline_and_knows_every_field(compiled: Any) -> None:
    spec, platforms = compiled
    loaded = components.load_component_from_file(str(COMPILED))
    assert loaded.pipeline_spec.pipeline_info.name == "ddpm"
    parsed = json_format.ParseDict(spec, spec_pb2.PipelineSpec())
    assert set(parsed.deployment_spec["executors"].keys()) == set(platforms)
    for executor in spec["deploymentSpec"]["executors"].values():
        kind = spec_pb2.PipelineDeploymentConfig.ExecutorSpec()
        json_format.ParseDict(executor, kind)
    for config in platforms.values():
        json_format.ParseDict(config, platform.KubernetesExecutorConfig())


def test_components_install_nothing_and_are_never_cached(compiled: Any) -> None:
    spec, platforms = compiled
    executors = spec["deploymentSpec"]["executors"]
    assert set(executors) == {f"exec-{name}" for name in COMPONENTS}
    assert set(submission.STEPS) == COMPONENTS
    assert {e["container"]["image"] for e in executors.values()} == {IMAGE, LIGHT_IMAGE}
    for executor in executors.values():
        assert "pip" not in executor["container"]["command"][2]
    for task in tasks(spec):
        assert not task.get("cachingOptions", {}).get("enableCache"), task["taskInfo"]
    for config in platforms.values():
        assert config["securityContext"] == {
            "runAsUser": "1000",
            "runAsGroup": "1000",
            "runAsNonRoot": True,
        }
        (claim,) = config["pvcMount"]
        assert (claim["constant"], claim["mountPath"]) == ("ddpm-workspace", "/workspace")
        given = {
            secret["secretName"]: [key["secretKey"] for key in secret["keyToEnv"]]
            for secret in config["secretAsEnv"]
            if secret["optional"]
        }
        assert "AWS_SESSION_TOKEN" in given.pop("ddpm-s3")
        tracks = "ddpm.io/uses-mlflow" in config["podMetadata"]["labels"]
        password = ["MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"]
        assert given == ({"ddpm-mlflow": password} if tracks else {})
        assert int(config["activeDeadlineSeconds"]) > 0


def test_workers_get_the_secrets_of_the_train_component(
    compiled: Any,
) -> None:
    _, platforms = compiled
    given = [secret["secretName"] for secret in platforms["exec-train"]["secretAsEnv"]]
    assert list(steps.job_options({}, None).optional_secrets) == given


def test_names_types_loops_and_sizes_are_within_limits(compiled: Any) -> None:
    """The limits are those of KFP's API server, of Kubernetes' labels, and of Argo in etcd."""
    spec, platforms = compiled
    label = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
    assert label.fullmatch(spec["pipelineInfo"]["name"])
    assert len(spec["pipelineInfo"]["description"]) <= 255
    for task in tasks(spec):
        assert label.fullmatch(task["taskInfo"]["name"])
        assert label.fullmatch(f"exit-hook-root-{task['taskInfo']['name']}")
    for config in platforms.values():
        for key, value in config["podMetadata"]["labels"].items():
            assert len(key) <= 63 and len(value) <= 63
    loops = [task for task in tasks(spec) if "parameterIterator" in task]
    assert [loop["iteratorPolicy"]["parallelismLimit"] for loop in loops] == [PARALLEL]
    assert not any("artifactIterator" in task for task in tasks(spec))
    known = set(spec_pb2.ParameterType.ParameterTypeEnum.keys())
    for component in [*spec["components"].values(), spec["root"]]:
        for side in ("inputDefinitions", "outputDefinitions"):
            for given in component.get(side, {}).get("parameters", {}).values():
                assert given["parameterType"] in known


def test_the_status_of_a_run_with_64_shards_keeps_updating(compiled: Any, tmp_path: Path) -> None:
    """Beyond 1 MB Argo compresses a Workflow, and KFP shows no progress until its end."""
    config = steps.make_config("sample: {shards: 64}", [], str(tmp_path))
    reference = Run(Workspace.open(config.workspace), "0" * 36).save(config)
    shards = [f"800000:{number}/64" for number in range(64)]
    parts = steps.divide(shards)
    assert 4 < len(parts) <= 20 and " ".join(parts).split() == shards
    sizes = {
        name: size_of(*compiled, name, {"settings": reference, "part": parts[-1]})
        for name in COMPONENTS
    }
    assert 10_000 < sizes["sample"] < 50_000
    tasks_of_parts = len(parts) * (sizes.pop("sample") + ITERATION)
    assert sum(sizes.values()) + tasks_of_parts + WORKFLOW < 950_000  # params may be longer


# Bytes in KFP 2.17.0 beside the tasks, from Workflows of 571 kB with 2 parts and 1.16 MB with 12.
WORKFLOW = 148_000  # the spec, and the drivers of DAGs
ITERATION = 13_500  # of each part: its turn of the loop, and its samples as an input of `evaluate`


def size_of(
    spec: dict[str, Any], platforms: dict[str, Any], name: str, given: dict[str, str]
) -> float:
    """Return about how many bytes a task of a component adds to the Workflow.

    KFP 2.17.0 stores the patch of its pod six times, and the specs that its driver gets twice, as
    JSON in JSON; everything else is a quarter of that.
    """
    component = spec["components"][f"comp-{name}"]
    label = component["executorLabel"]
    container = spec["deploymentSpec"]["executors"][label]["container"]
    inputs = component["inputDefinitions"]["parameters"]
    parameters = {key: given.get(key, "x" * 40) for key in inputs}
    place = f"s3://mlpipeline/v2/artifacts/ddpm/{'0' * 36}/{name}/{'0' * 36}"
    asked = kfp_pod.executor_input(component, parameters, {}, place, "/tmp/output.json")
    pod = kfp_pod.pod(name, container, platforms[label], asked, "pipeline-runner", True)
    pod["spec"]["containers"][0]["args"] = [*container["command"], *container["args"]]

    def stored(document: Any) -> int:
        return len(json.dumps(json.dumps(document)))

    return 1.25 * (6 * stored(pod["spec"]) + 2 * stored([component, container, platforms[label]]))


def tasks(spec: dict[str, Any]) -> list[dict[str, Any]]:
    graphs = [spec["root"], *spec["components"].values()]
    return [task for graph in graphs for task in graph.get("dag", {}).get("tasks", {}).values()]


def test_the_image_options_change_every_component(pipeline: Any, tmp_path: Path) -> None:
    made = tmp_path / "ddpm.yaml"
    compiling.compile_pipeline(
        pipeline, made, {IMAGE: "registry.local/ddpm:7", LIGHT_IMAGE: "light:7"}
    )
    spec, _ = yaml.safe_load_all(made.read_text())
    executors = spec["deploymentSpec"]["executors"].items()
    images = {name.removeprefix("exec-"): one["container"]["image"] for name, one in executors}
    light = {"prepare", "plan", "finish"}
    assert images == {
        name: "light:7" if name in light else "registry.local/ddpm:7" for name in COMPONENTS
    }
    components.load_component_from_file(str(made))


def test_the_gpu_option_adds_gpus_as_kfp_itself_writes_them(pipeline: Any, tmp_path: Path) -> None:
    made, plain = tmp_path / "ddpm.yaml", tmp_path / "plain.yaml"
    compiling.compile_pipeline(pipeline, made, gpu=True)
    spec, platforms = yaml.safe_load_all(made.read_text())
    pods = platforms["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    executors = spec["deploymentSpec"]["executors"]
    given = {n for n, e in executors.items() if "accelerator" in e["container"]["resources"]}
    assert given == {n for n, pod in pods.items() if "tolerations" in pod}
    assert given == {"exec-sample", "exec-evaluate", "exec-register"}

    @dsl.pipeline(name="plain")
    def one():
        """Request a GPU with KFP's own methods."""
        sampled = sample(settings="", part="")
        sampled.set_accelerator_type("nvidia.com/gpu").set_accelerator_limit(1)
        sampled.set_cpu_limit("8").set_memory_limit("16Gi")
        kubernetes.add_toleration(
            sampled, key="nvidia.com/gpu", operator="Exists", effect="NoSchedule"
        )

    compiler.Compiler().compile(one, str(plain))
    theirs, platform_of = yaml.safe_load_all(plain.read_text())
    wanted = theirs["deploymentSpec"]["executors"]["exec-sample"]["container"]["resources"]
    ours = executors["exec-sample"]["container"]["resources"]
    assert wanted == {name: ours[name] for name in wanted}
    kubernetes_of = platform_of["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    assert kubernetes_of["exec-sample"]["tolerations"] == pods["exec-sample"]["tolerations"]
    components.load_component_from_file(str(made))
