"""Configure the pods of tasks on Kubernetes; `local` ignores all of it."""

from kfp import dsl, kubernetes

HOUR = 3600
PARALLEL = 4  # sampling pods at once
CORES = "1"  # limit of a pod; the workers of a PyTorchJob have their own

# Fixed names: KFP cannot mount a claim conditionally, only when the workspace is a path.
CLAIM, VOLUME = "ddpm-workspace", "/workspace"
PARAMS = "/etc/ddpm"
USES = "ddpm.io/uses-"  # prefix of the labels that open network policies
# Keys of the Secrets, all optional
S3_KEYS = (
    "AWS_ENDPOINT_URL",
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_DEFAULT_REGION",
)
MLFLOW_KEYS = ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD")


def configure(
    task: dsl.PipelineTask,
    cpu: str,
    memory: str,
    hours: int,
    limit: str = "2Gi",
    retries: int = 0,
    uses: tuple[str, ...] = (),
) -> None:
    """Set the resources, security, volumes, Secrets and labels of a task's pod.

    `cpu` and `memory` are requests, `limit` is the limit of memory. `uses` names what the network
    policies open; "mlflow" also adds its password, and "gpu" a GPU with `compile --gpu`. The pod
    runs as uid 1000; KFP has no setting for a read-only root file system.
    """
    # KFP's cache looks at inputs alone, and would return what is gone from the workspace. The
    # commands check the workspace, and skip what is up to date.
    task.set_caching_options(False)
    task.set_cpu_request(cpu).set_cpu_limit(CORES).set_memory_request(memory)
    # Otherwise torch starts a thread for each core of the node, and they wait for each other.
    task.set_env_variable("OMP_NUM_THREADS", CORES)
    task.set_memory_limit(limit)
    if retries:
        # KFP counts the maximum from the start of the first attempt, and kills every later one at
        # its end. It retries only a pod that disappears; the rest is in ddpm_kube.tasks.attempt.
        longest = f"{(retries + 1) * hours * HOUR}s"
        task.set_retry(
            retries, backoff_duration="5s", backoff_factor=2, backoff_max_duration=longest
        )
    kubernetes.set_timeout(task, hours * HOUR)
    kubernetes.set_security_context(task, run_as_user=1000, run_as_group=1000, run_as_non_root=True)
    kubernetes.set_image_pull_policy(task, "IfNotPresent")
    kubernetes.mount_pvc(task, pvc_name=CLAIM, mount_path=VOLUME)
    kubernetes.use_config_map_as_volume(task, "ddpm-params", mount_path=PARAMS, optional=True)
    secrets = {"ddpm-s3": S3_KEYS} | ({"ddpm-mlflow": MLFLOW_KEYS} if "mlflow" in uses else {})
    for name, keys in secrets.items():
        kubernetes.use_secret_as_env(task, name, {key: key for key in keys}, optional=True)
    kubernetes.empty_dir_mount(task, volume_name="tmp", mount_path="/tmp")
    kubernetes.empty_dir_mount(task, volume_name="shm", mount_path="/dev/shm", medium="Memory")
    for used in uses:
        kubernetes.add_pod_label(task, f"{USES}{used}", "true")
