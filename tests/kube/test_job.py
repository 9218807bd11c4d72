"""The PyTorchJob of a training: its fields, its name, and which options are refused."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.documents import JOBS, mistakes, named, read

from ddpm_core.config import load as params
from ddpm_core.errors import UserError
from ddpm_core.text import masked
from ddpm_core.training.identity import identity
from ddpm_kube import cli, options
from ddpm_kube.job import PARAMS, RUN_ID, SPEC_HASH, build
from ddpm_kube.manifests import load
from ddpm_kube.spec import JobSpec, job_name, label_value

ROOT = Path(__file__).parents[2]
MOUNTED = {"volumes": [{"claim": "ddpm-workspace", "path": "/workspace"}]}
Settings = dict[str, Any]


def spec(settings: tuple[str, ...] = (), run_id: str = "run-1", **given: Any) -> JobSpec:
    config = params.load(None, ("tracking.uri=http://mlflow:5000", *settings), "/workspace/run")
    return JobSpec(config, options.read({**MOUNTED, **given}), run_id, "ddpm", "ddpm:dev")


def pod_of(job: Settings) -> Settings:
    return dict(job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"])


def container_of(job: Settings) -> Settings:
    return dict(pod_of(job)["spec"]["containers"][0])


def environment_of(job: Settings) -> dict[str, str]:
    return {one["name"]: one["value"] for one in container_of(job)["env"]}


def refused(*settings: str, **given: Any) -> str:
    with pytest.raises(UserError) as caught:
        spec(settings, **given)
    return str(caught.value)


# The one definition


def flat(value: Any, path: str = "") -> dict[str, Any]:
    """Return the leaves of a document by path; items of a list are named by name or key."""
    if isinstance(value, dict):
        pairs: Any = value.items()
    elif isinstance(value, list) and all(isinstance(item, dict) for item in value):
        pairs = [(item.get("name") or item.get("key") or n, item) for n, item in enumerate(value)]
    else:
        return {path: value}
    found: dict[str, Any] = {}
    for key, item in pairs:
        found |= flat(item, f"{path}/{key}" if path else str(key))
    return found


POD = "spec/pytorchReplicaSpecs/Worker/template"
MAIN = f"{POD}/spec/containers/pytorch"


def test_a_job_differs_from_the_manifest_only_as_listed() -> None:
    """The defaults of the options are those of manifests/jobs/20-train.yaml, with these exceptions.

    The manifest is a step of a chain: it waits for `prepare`, takes params and workspace from a
    ConfigMap and a claim, and its pods fit on one node with two cores.
    """
    manifest = named(list(read(JOBS)), "PyTorchJob")["ddpm-train"]
    assert manifest == load("train.yaml")
    optional = {"optional_secrets": ["ddpm-s3", "ddpm-mlflow"]}
    built, template = flat(build(spec(**optional))), flat(manifest)
    different = {key for key in built | template if built.get(key) != template.get(key)}
    expected = {
        "metadata/name",
        "metadata/annotations/ddpm.io/spec-hash",
        "spec/elasticPolicy/rdzvId",
        # Where the run, its params and its workspace come from
        "metadata/labels/ddpm.io/run-id",
        "metadata/labels/app.kubernetes.io/managed-by",
        f"{POD}/metadata/labels/ddpm.io/run-id",
        f"{POD}/metadata/annotations/ddpm.io/params",
        f"{POD}/spec/volumes/params",
        f"{POD}/spec/volumes/workspace",
        f"{POD}/spec/initContainers/wait",
        f"{MAIN}/args",
        f"{MAIN}/env/DDPM_WORKSPACE",
        f"{MAIN}/volumeMounts/workspace",
        # Sizes
        "spec/elasticPolicy/maxReplicas",
        "spec/pytorchReplicaSpecs/Worker/replicas",
        f"{MAIN}/resources",
        # Set for any image, or by the launcher only
        f"{MAIN}/env/HOME",
        f"{MAIN}/env/PYTHONUNBUFFERED",
        f"{MAIN}/env/TORCHINDUCTOR_COMPILE_THREADS",
        f"{MAIN}/env/DDPM_LOG_RECORDS",
    }
    claims = (f"{POD}/spec/volumes/claim-", f"{MAIN}/volumeMounts/claim-")
    rest = {key for key in different if not key.startswith((*expected, *claims))}
    assert rest == set()
    assert all(any(key.startswith(one) for key in different) for one in expected)


def test_the_manifest_and_the_job_are_valid_for_the_api() -> None:
    assert mistakes(load("train.yaml")) == []
    assert mistakes(build(spec(gpu=2, secrets=["a"], tolerations=[{"key": "a"}]))) == []


# Fields


def test_the_workers_get_the_settings_that_were_given(tmp_path: Path) -> None:
    made = spec(("train.steps=77", "model.channels=16"))
    file = tmp_path / "params.yaml"
    file.write_text(pod_of(build(made))["metadata"]["annotations"][PARAMS])
    assert params.load(file) == made.config
    (volume,) = [v for v in pod_of(build(made))["spec"]["volumes"] if v["name"] == "params"]
    (item,) = volume["downwardAPI"]["items"]
    assert item["fieldRef"]["fieldPath"] == f"metadata.annotations['{PARAMS}']"
    (mount,) = [m for m in container_of(build(made))["volumeMounts"] if m["name"] == "params"]
    assert f"{mount['mountPath']}/{item['path']}" == container_of(build(made))["args"][-1]


@pytest.mark.parametrize(
    ("gpu", "device", "expected"),
    [(0, "auto", "auto"), (0, "cpu", "cpu"), (1, "auto", "cuda"), (1, "cuda", "cuda")],
)
def test_a_worker_with_a_gpu_must_see_it(gpu: int, device: str, expected: str) -> None:
    made = spec((f"device={device}",), gpu=gpu)
    given = params.load_text(made.params, "the workers' params")
    assert given == made.config.model_copy(update={"device": expected})
    assert identity(given, "data") == identity(made.config, "data")  # it is the same run


def test_the_first_example_of_the_docs_prints_a_job(tmp_path: Path) -> None:
    kubeconfig = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "mine",
        "contexts": [
            {"name": "mine", "context": {"cluster": "far", "user": "me", "namespace": "ddpm"}}
        ],
        "clusters": [{"name": "far", "cluster": {"server": "https://127.0.0.1:1"}}],
        "users": [{"name": "me", "user": {"token": "t"}}],
    }
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(kubeconfig))
    shutil.copy(ROOT / "params.yaml", tmp_path)
    docs = (ROOT / "docs/launcher.md").read_text(encoding="utf-8")
    example = docs.partition("    ddpm jobs train")[2].partition("\n    ddpm")[0]
    given = shlex.split(example.replace("\\\n", ""))
    command = [sys.executable, "-m", "ddpm_core.cli", "jobs", "train", *given, "--dry-run"]
    environment = {**os.environ, "KUBECONFIG": str(tmp_path / "kubeconfig")}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    job = yaml.safe_load(done.stdout)
    assert container_of(job)["image"] == "registry/ddpm:1"
    assert job["metadata"]["namespace"] == "ddpm"


def test_the_elastic_policy_sets_what_torchrun_guesses_wrong() -> None:
    job = build(spec(min_replicas=2, max_replicas=4, processes=3, max_restarts=7))
    policy = job["spec"]["elasticPolicy"]
    assert (policy["minReplicas"], policy["maxReplicas"]) == (2, 4)
    assert (job["spec"]["nprocPerNode"], policy["maxRestarts"]) == ("3", 7)
    assert "nProcPerNode" not in policy  # the operator refuses both
    assert policy["rdzvId"] == job["metadata"]["name"]
    assert list(job["spec"]["pytorchReplicaSpecs"]) == ["Worker"]
    assert job["spec"]["pytorchReplicaSpecs"]["Worker"]["restartPolicy"] == "OnFailure"
    assert job["spec"]["runPolicy"]["cleanPodPolicy"] == "Running"
    assert job["spec"]["runPolicy"]["schedulingPolicy"] == {"minAvailable": 2}
    assert environment_of(job)["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"


def test_every_option_reaches_the_pods() -> None:
    job = build(
        spec(
            ("device=cuda",),
            cpu=2,
            cpu_limit="4",
            memory="8Gi",
            gpu=2,
            shm="1Gi",
            tmp="128Mi",
            secrets=["needed"],
            optional_secrets=["ddpm-s3"],
            env={"NCCL_DEBUG": "INFO"},
            runtime_class="nvidia",
            node_selector={"pool": "gpu"},
            tolerations=[{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
            image_pull_secrets=["registry"],
            labels={"team": "a"},
            service_account="trainer",
            shutdown_seconds=100,
            grace_seconds=200,
            deadline_seconds=3600,
            backoff_limit=4,
            queue="gpus",
        )
    )
    pod, container = pod_of(job)["spec"], container_of(job)
    gpus = {"nvidia.com/gpu": "2"}
    assert container["resources"]["requests"] == {
        "cpu": "2",
        "memory": "8Gi",
        "ephemeral-storage": "128Mi",
        **gpus,
    }
    assert container["resources"]["limits"] == {
        "cpu": "4",
        "memory": "8Gi",
        "ephemeral-storage": "128Mi",
        **gpus,
    }
    assert container["envFrom"] == [
        {"secretRef": {"name": "needed", "optional": False}},
        {"secretRef": {"name": "ddpm-s3", "optional": True}},
    ]
    assert environment_of(job)["NCCL_DEBUG"] == "INFO"
    assert environment_of(job)["OMP_NUM_THREADS"] == "2"  # 4 cores, 2 processes
    assert environment_of(job)["TORCHINDUCTOR_COMPILE_THREADS"] == "2"
    # That guards NCCL's watchdog: what ends a hung collective is the process group's timeout.
    assert "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC" not in environment_of(job)
    assert environment_of(job)["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "100"
    assert pod["terminationGracePeriodSeconds"] == 200
    assert pod["runtimeClassName"] == "nvidia"
    assert pod["nodeSelector"] == {"pool": "gpu"}
    assert pod["tolerations"][0]["key"] == "nvidia.com/gpu"
    assert pod["imagePullSecrets"] == [{"name": "registry"}]
    assert pod["serviceAccountName"] == "trainer"
    assert {"medium": "Memory", "sizeLimit": "1Gi"} in [v.get("emptyDir") for v in pod["volumes"]]
    assert job["spec"]["nprocPerNode"] == "2"  # one a GPU
    assert job["spec"]["runPolicy"]["activeDeadlineSeconds"] == 3600
    assert job["spec"]["runPolicy"]["backoffLimit"] == 4
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpus"
    assert pod_of(job)["metadata"]["labels"]["team"] == "a"


@pytest.mark.parametrize(
    ("given", "cpu", "memory", "shm"),
    [
        ({}, "500m", "2Gi", "128Mi"),
        ({"gpu": 1}, "4", "16Gi", "128Mi"),
        ({"gpu": 2}, "4", "16Gi", "1Gi"),
        ({"gpu": 2, "cpu": 1, "memory": "8Gi", "shm": "2Gi"}, "1", "8Gi", "2Gi"),
        ({"gpu": 1, "cpu_limit": "2"}, "2", "16Gi", "128Mi"),
    ],
)
def test_defaults_of_cpu_memory_and_shm_follow_the_gpus(
    given: Settings, cpu: str, memory: str, shm: str
) -> None:
    job = build(spec(**given))
    requests = container_of(job)["resources"]["requests"]
    assert (requests["cpu"], requests["memory"]) == (cpu, memory)
    volumes = {volume["name"]: volume for volume in pod_of(job)["spec"]["volumes"]}
    assert volumes["shm"]["emptyDir"]["sizeLimit"] == shm


@pytest.mark.parametrize("resource", ["nvidia.com/gpu", "amd.com/gpu"])
def test_pods_with_gpus_tolerate_the_taint_of_gpu_nodes(resource: str) -> None:
    gpus = {"key": resource, "operator": "Exists", "effect": "NoSchedule"}
    other = {"key": "team", "operator": "Equal", "value": "a"}
    asked = {"gpu": 1, "gpu_resource": resource}
    for given, expected in (
        ({}, None),
        ({"tolerations": [other]}, [other]),
        (asked, [gpus]),
        ({**asked, "tolerations": [gpus]}, [gpus]),
        ({**asked, "tolerations": [other]}, [other, gpus]),
    ):
        assert pod_of(build(spec(**given)))["spec"].get("tolerations") == expected


def test_labels_open_only_the_network_that_is_used() -> None:
    plain = pod_of(build(spec(("tracking.uri=''",))))["metadata"]["labels"]
    assert not {"ddpm.io/uses-mlflow", "ddpm.io/uses-s3", "ddpm.io/uses-api"} & set(plain)
    config = params.load(None, ["tracking.uri=http://mlflow:5000"], "s3://bucket/run")
    made = build(JobSpec(config, options.read({}), "run", "ddpm", "ddpm:dev"))
    labels = pod_of(made)["metadata"]["labels"]
    assert labels["ddpm.io/uses-mlflow"] == labels["ddpm.io/uses-s3"] == "true"


def test_the_job_name_follows_from_run_and_stage() -> None:
    kfp = "3f2b8c1e-aaaa-bbbb-cccc-0123456789ab"
    assert job_name(kfp, "train") == f"train-{kfp}"
    assert job_name(kfp, "train") == job_name(kfp, "train")
    names = [job_name(run, "train") for run in ("a/b", "a-b", "A-B", "x" * 80, "x" * 81, "ü", "-")]
    names += [job_name("1", "9"), job_name("s3://bucket/run", "train")]
    assert len(set(names)) == len(names)
    for name in names:
        assert len(name) <= 46
        assert name[0].isalpha()
        assert name.replace("-", "a").isalnum()
        assert name == name.lower().strip("-")
    assert build(spec(run_id="s3://b/run"))["metadata"]["labels"][RUN_ID] == label_value(
        "s3://b/run"
    )
    assert len(label_value("x" * 80)) <= 63
    assert label_value("s3://b/run") != label_value("s3://b-run")


def test_the_hash_covers_settings_but_not_the_owner() -> None:
    def mark(made: JobSpec, **owner: Any) -> str:
        return str(build(made, **owner)["metadata"]["annotations"][SPEC_HASH])

    owned = {"owner": {"kind": "Pod", "name": "launcher", "uid": "1"}}
    assert mark(spec()) == mark(spec()) == mark(spec(), **owned)
    others = [spec(("train.steps=5",)), spec(memory="3Gi"), spec(queue="q"), spec(max_replicas=2)]
    assert len({mark(one) for one in [spec(), *others]}) == 1 + len(others)
    assert build(spec(), **owned)["metadata"]["ownerReferences"] == [owned["owner"]]


def test_all_impossible_combinations_are_listed_at_once() -> None:
    message = refused(
        "device=cuda",
        min_replicas=5,
        max_replicas=4,
        processes=9,
        shm="4Gi",
        grace_seconds=30,
        cpu="2",
        cpu_limit="1",
        env={"AWS_SECRET_ACCESS_KEY": "x"},
        secrets=["one"],
        optional_secrets=["one"],
    )
    assert message.startswith("8 problems in the options of the job:")
    for part in (
        "min_replicas: got 5; must be at most max_replicas, 4",
        "max_replicas: got 4 with 9 processes each: 36; must be at most train.batch_size, 32",
        "gpu: got 0 with device cuda",
        "shm: got 4Gi; must be less than memory, 2Gi",
        "grace_seconds: got 30; must be more than shutdown_seconds, 60",
        "cpu: got 2; must be at most cpu_limit, 1",
        "AWS_SECRET_ACCESS_KEY looks like a secret",
        "one is also in optional_secrets",
    ):
        assert part in message


@pytest.mark.parametrize(
    ("settings", "given", "part"),
    [
        ((), {"gpu": 2, "processes": 4}, "NCCL requires one GPU per process"),
        (("device=cpu",), {"gpu": 1}, "gpu: got 1 with device cpu"),
        (("device=cuda:1",), {"gpu": 1}, "each process has its own GPU"),
        (("device=mps",), {}, "got mps, which pods do not have"),
        ((), {"memory": "2"}, "is the unit missing?"),
        ((), {"cpu": "0"}, "must be more than 0"),
        ((), {"volumes": []}, "/workspace/run is not on a writable volume"),
        (
            (),
            {"volumes": [{"claim": "a", "path": "/workspace", "read_only": True}]},
            "not on a writable volume",
        ),
        ((), {"volumes": [*MOUNTED["volumes"], {"claim": "b", "path": "/workspace"}]}, "twice"),
        (
            (),
            {"volumes": [*MOUNTED["volumes"], {"claim": "b", "path": "/tmp/x"}]},
            "the job itself mounts",
        ),
        (("tracking.uri=sqlite:///x.db",), {}, "would be lost with the pod"),
        (("tracking.tensorboard=events",), {}, "events would be lost with the pod"),
        (
            ("tracking.uri=http://me:pass@mlflow:5000",),
            {},
            "contains a password",
        ),
        ((), {"deadline_seconds": 10}, "deadline_seconds: got 10"),
        ((), {"run_id": " "}, "run_id: empty"),
    ],
)
def test_impossible_options_are_refused(
    settings: tuple[str, ...], given: Settings, part: str
) -> None:
    assert part in refused(*settings, **given)


@pytest.mark.parametrize(
    ("uri", "safe"),
    [
        ("http://me:hunter2@mlflow:5000", "http://***@mlflow:5000"),
        ("HTTPS://me:hunter2@mlflow", "HTTPS://***@mlflow"),
        ("http://me:hunt@er2@mlflow/x", "http://***@mlflow/x"),
        ("http://m@e:hunter2@mlflow", "http://***@mlflow"),
        ("http://:hunter2@mlflow", "http://***@mlflow"),
        ("https://hunter2@mlflow", "https://***@mlflow"),
        ("https://hunt@er2@mlflow", "https://***@mlflow"),
        ("https://hunter2:x-oauth-basic@mlflow", "https://***@mlflow"),
        ("https://oauth2:hunter2@mlflow", "https://***@mlflow"),
        ("postgresql+psycopg2://me:hunter2@db/runs", "postgresql+psycopg2://me:***@db/runs"),
        ("dvc:https://hunter2@github.com/o/r.git#p@v1", "dvc:https://***@github.com/o/r.git#p@v1"),
        ("ssh://git:hunter2@host/r.git", "ssh://git:***@host/r.git"),
    ],
)
def test_a_secret_in_a_uri_is_refused_and_not_repeated(uri: str, safe: str) -> None:
    assert masked(uri) == safe
    for text in (f'{{"uri": "{uri}"}}', f"from {uri} and http://host:80/x@y"):
        assert masked(text) == text.replace(uri, safe)
    message = refused(f"prepare.source={uri}")
    assert f"prepare.source: {safe} contains a password or token" in message
    assert "hunter2" not in message and "er2" not in message


@pytest.mark.parametrize("option", ["env", "annotations"])
def test_a_secret_in_an_option_is_refused_and_not_repeated(option: str) -> None:
    message = refused(**{option: {"STORE": "https://me:hunter2@mlflow"}})
    assert f"{option}.STORE: https://***@mlflow contains a password or token" in message


@pytest.mark.parametrize("name", ["HF_TOKEN", "GITHUB_TOKENS", "MY_APIKEY", "token"])
def test_a_variable_named_like_a_secret_is_refused(name: str) -> None:
    assert f"env: {name} looks like a secret" in refused(env={name: "x"})


@pytest.mark.parametrize(
    ("settings", "given"),
    [
        ((), {"env": {"TOKENIZERS_PARALLELISM": "false", "STORE": "https://mlflow/a:b@c"}}),
        (("device=cpu", "train.precision=fp16"), {}),
    ],
)
def test_possible_options_are_accepted(settings: tuple[str, ...], given: Settings) -> None:
    assert build(spec(settings, **given))


@pytest.mark.parametrize(
    "uri",
    [
        "dvc:ssh://git@host:22/registry.git#photos@v1",
        "dvc:https://host:8443/registry.git#photos@v1",
        "dvc:git@github.com:o/r.git#photos@v1",
        "s3://bucket/a:b@c",
        "http://mlflow:5000",
        "sqlite:////a/b@c.db",
    ],
)
def test_a_uri_without_a_secret_is_accepted_and_not_masked(uri: str) -> None:
    assert masked(uri) == uri
    assert spec((f"prepare.source={uri}",)).config.prepare.source == uri


def test_unknown_options_and_wrong_types_are_listed_at_once() -> None:
    wrong = {"min_replicas": 0, "memory": "2 GB", "nodes": 3, "runtime_class": ""}
    with pytest.raises(UserError) as caught:
        options.read({**wrong, "volumes": [{"path": "x"}]})
    for part in (
        "min_replicas: got 0; must be greater than 0",
        "memory: got '2 GB'; must be a text that matches",
        "nodes: unknown key; known keys: backend, image,",
        "runtime_class: got ''; must be a text that matches",
        "volumes[0].claim: missing (required)",
    ):
        assert part in str(caught.value)


def test_numbers_are_read_as_kfp_and_yaml_pass_them() -> None:
    assert options.read({"max_replicas": 2.0, "cpu": 1, "grace_seconds": 120.0}) == options.read(
        {"max_replicas": 2, "cpu": "1", "grace_seconds": 120}
    )


def test_flags_override_the_file_and_settings_override_both(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("memory: 1Gi\nmin_replicas: 2\nmax_replicas: 2\n")
    flags = {"min_replicas": None, "max_replicas": 4, "volumes": ["claim:/workspace"]}
    assert cli.merge_options(file, flags, ["memory=3Gi", "gpu=1"]) == {
        "memory": "3Gi",
        "min_replicas": 2,
        "max_replicas": 4,
        "gpu": 1,
        "volumes": [{"claim": "claim", "path": "/workspace"}],
    }
    for wrong in (["memory"], ["=3"], ["a=[1"]):
        with pytest.raises(UserError, match="-K"):
            cli.merge_options(None, {}, wrong)
    file.write_text("memory: 1Gi\nmemory: 2Gi\n")
    with pytest.raises(UserError, match="duplicate key 'memory'"):
        cli.merge_options(file, {}, [])


@pytest.mark.parametrize(
    ("text", "value"), [("90s", 90.0), ("30m", 1800.0), ("1h", 3600.0), ("2d", 172800.0)]
)
def test_durations_are_read(text: str, value: float) -> None:
    assert cli.parse_duration(text) == value


def test_a_duration_without_a_unit_is_refused() -> None:
    with pytest.raises(UserError, match="90s, 30m, 1h or 2d"):
        cli.parse_duration("90")


@pytest.mark.parametrize(("given", "seconds"), [("90s", 90), ("2h", 7200), (900, 900), (60.0, 60)])
def test_patience_is_a_duration(given: object, seconds: int) -> None:
    assert options.read({"patience": given}).patience_seconds == seconds


@pytest.mark.parametrize("given", ["soon", "0s", "-5m", "", True])
def test_other_values_of_patience_are_refused(given: object) -> None:
    with pytest.raises(UserError, match=r"patience: got .*; must be a time such as 90s, 15m or 2h"):
        options.read({"patience": given})


def test_a_launcher_with_more_patience_adopts_the_job() -> None:
    assert spec().options.patience_seconds == 15 * 60
    assert build(spec(patience="2h")) == build(spec())


def test_the_job_has_no_deadline_but_its_own() -> None:
    """A launcher that is lost and started again finds its job after any time before that."""
    times = {key for key in flat(build(spec())) if "deadline" in key.lower() or "ttl" in key}
    policy = "spec/runPolicy"
    assert times == {f"{policy}/activeDeadlineSeconds", f"{policy}/ttlSecondsAfterFinished"}


def test_the_commands_load_without_torch_or_kubernetes() -> None:
    code = (
        "import sys; from ddpm_kube import cli; from ddpm_kube import job, options, spec; "
        "sys.exit(bool({'torch', 'kubernetes', 'kubeflow'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    done = subprocess.run(
        [sys.executable, "-m", "ddpm_core.cli", "jobs", "--help"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for name in ("train", "list", "gc"):
        assert f"  {name}" in done.stdout


def test_the_params_contain_every_default() -> None:
    shown = yaml.safe_load(spec().params)
    assert shown["train"]["restarts"] == 3
    assert shown["workspace"] == "/workspace/run"
