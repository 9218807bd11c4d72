"""The commands of pipelines/ddpm.py: compile, local, submit and watch."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Annotated, Any

import typer
from compiling import compile_pipeline

from components import IMAGE, LIGHT_IMAGE
from ddpm_core.cli.command import SetOption
from ddpm_core.config import yaml_text
from ddpm_core.console import report_errors
from ddpm_core.errors import UserError
from ddpm_kube import options, steps

MAX_INPUTS = 10_000  # bytes; KFP's limit for the inputs of a run
MAX_NAME = 100  # characters of the name of a run, which KFP's lists show in one line
COMPILED = Path(__file__).resolve().parent / "ddpm.yaml"

app = typer.Typer(
    help="The pipeline for Kubeflow Pipelines.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
ImageOption = Annotated[
    str, typer.Option(help="The image of pods that train, sample, score or register.")
]
LightImageOption = Annotated[str, typer.Option(help="The image of all other pods.")]
ParamsOption = Annotated[
    Path | None, typer.Option("--params", "-p", help="A params file; its content is an input.")
]
WorkspaceOption = Annotated[
    str, typer.Option("--workspace", "-w", help="Where the run lives: a directory, or s3://...")
]
SourceOption = Annotated[str, typer.Option(help="prepare.source. Default: as in the params.")]
GpuOption = Annotated[
    bool, typer.Option("--gpu", help="A GPU for each pod that samples, scores or registers.")
]
WorstOption = Annotated[
    float, typer.Option(help="The highest score that may be registered; 0: no limit.")
]

HostOption = Annotated[
    str,
    typer.Option(
        envvar="KF_PIPELINES_ENDPOINT",
        help="The KFP server, for example http://localhost:8888 after "
        "`kubectl port-forward -n kubeflow svc/ml-pipeline 8888`.",
    ),
]
UiOption = Annotated[
    str,
    typer.Option(
        envvar="KF_PIPELINES_UI_ENDPOINT",
        help="The address of KFP's UI, for links. Default: that of the server.",
    ),
]
NamespaceOption = Annotated[str, typer.Option(help="Namespace in a multi-user KFP.")]
TokenOption = Annotated[
    Path | None, typer.Option(help="A file with a bearer token. Default: $KFP_TOKEN.")
]


@app.command(name="compile")
def compile_(
    context: typer.Context,
    output: Annotated[Path, typer.Option("--output", "-o")] = COMPILED,
    image: ImageOption = IMAGE,
    light_image: LightImageOption = LIGHT_IMAGE,
    gpu: GpuOption = False,
) -> None:
    """Write pipelines/ddpm.yaml."""
    compile_pipeline(context.obj, output, {IMAGE: image, LIGHT_IMAGE: light_image}, gpu)
    typer.echo(output)


@app.command()
def local(
    context: typer.Context,
    p: ParamsOption = None,
    w: Annotated[
        str, typer.Option("--workspace", "-w", help="The directory of the run.")
    ] = "workspace",
    s: SetOption = None,
    source: SourceOption = "",
    worst: WorstOption = 0.0,
) -> None:
    """Run the pipeline on this machine, each task a process. Artifacts go to WORKSPACE/kfp.

    Without -p the params are ./params.yaml if it exists, else the digits, as for `ddpm run`.
    """
    from local import PROCESS, run

    with report_errors("local"):
        if "://" in w:
            raise UserError(
                f"-w: got {w}; must be a directory, because kfp.local stores artifacts in files. "
                "For s3://bucket/prefix use `submit` or `ddpm run`."
            )
        workspace, default = Path(w).absolute(), Path("params.yaml")
        params = p or (default if default.exists() else None)
        inputs = make_inputs(params, s, str(workspace), source, worst) | PROCESS
        check(inputs)
        raise SystemExit(run(context.obj, workspace / "kfp", inputs))


@app.command()
def submit(
    context: typer.Context,
    host: HostOption,
    p: ParamsOption = None,
    w: WorkspaceOption = "/workspace/run",
    s: SetOption = None,
    source: SourceOption = "",
    worst: WorstOption = 0.0,
    tracking: Annotated[str, typer.Option(help='URI of MLflow; "": as in the params.')] = (
        "http://ddpm-mlflow:5000"
    ),
    backend: Annotated[
        str, typer.Option(help="pytorchjob, trainjob, auto: what the cluster has, or process.")
    ] = "auto",
    job: Annotated[
        Path | None, typer.Option(help="A YAML file of options of the job that trains.")
    ] = None,
    patience: Annotated[
        str, typer.Option(help="How long a worker may be without a node, quota or image.")
    ] = "15m",
    image: ImageOption = IMAGE,
    light_image: LightImageOption = LIGHT_IMAGE,
    gpu: GpuOption = False,
    experiment: Annotated[str, typer.Option(help="Experiment in KFP.")] = "ddpm",
    name: Annotated[
        str, typer.Option(help="Name of the run. Default: the workspace and the settings.")
    ] = "",
    namespace: NamespaceOption = "kubeflow",
    token_file: TokenOption = None,
    ui: UiOption = "",
    wait: Annotated[bool, typer.Option("--wait", help="Follow the run to its end.")] = False,
) -> None:
    """Run the pipeline on a KFP server."""
    from submission import Server, follow

    with report_errors("submit"):
        inputs = make_inputs(p, s, w, source, worst, options.read_file(job), patience)
        inputs |= {"tracking": tracking, "backend": backend}
        check(inputs)
        logging.disable()  # urllib3 logs a traceback for each failed attempt
        server = Server(host, namespace, lambda: read_token(token_file), ui)
        name = name or run_name(p, inputs)
        images = {IMAGE: image, LIGHT_IMAGE: light_image}
        run_id = server.create(context.obj, images, gpu, experiment, name, inputs)
        if wait:
            raise SystemExit(follow(server, run_id))


@app.command()
def watch(
    run: Annotated[str, typer.Argument(help="The id of a run, as in the address of its page.")],
    host: HostOption,
    namespace: NamespaceOption = "kubeflow",
    token_file: TokenOption = None,
    ui: UiOption = "",
) -> None:
    """Follow a run to its end, as `submit --wait` does, also one submitted elsewhere."""
    from submission import Server, follow

    with report_errors("watch"):
        logging.disable()
        server = Server(host, namespace, lambda: read_token(token_file), ui)
        raise SystemExit(follow(server, run))


def run_name(params: Path | None, inputs: dict[str, Any]) -> str:
    """Return the name of a run: its workspace, its params file, and the settings given."""
    given = [params.name if params else "", inputs["source"], *inputs["overrides"]]
    return " ".join([inputs["workspace"], *filter(None, given)])[:MAX_NAME]


def make_inputs(
    params: Path | None,
    overrides: list[str] | None,
    workspace: str,
    source: str,
    worst: float,
    job: dict[str, Any] | None = None,
    patience: str = "15m",
) -> dict[str, Any]:
    """Return the pipeline's inputs, named as in its signature."""
    return {
        "workspace": workspace,
        "params": without_comments(params) if params else "",
        "overrides": overrides or [],
        "source": source,
        "worst": worst,
        "job": job or {},
        "patience": patience,
    }


def without_comments(params: Path) -> str:
    """Return a params file as JSON, which is YAML too. Raises UserError.

    The explanations of `ddpm params` alone would take nearly all of MAX_INPUTS.
    """
    given = yaml_text.read(params, "params file", "sections such as `train:`")
    return json.dumps(given, indent=1, ensure_ascii=False)


def check(inputs: dict[str, Any]) -> None:
    """Raise UserError for inputs that would fail in a pod.

    Without a params file the ConfigMap in the cluster is used, which is unknown here; then the
    other inputs are checked on their own.
    """
    if len(json.dumps(inputs).encode()) > MAX_INPUTS:
        raise UserError(
            f"The inputs have more than {MAX_INPUTS:,} bytes, KFP's limit. Put the params file "
            "into the ConfigMap ddpm-params and omit -p."
        )
    names = ("overrides", "workspace", "source", "tracking")
    config = None
    if inputs["params"].strip():
        config = steps.make_config(inputs["params"], *(inputs[name] for name in names))
    else:
        steps.check_overrides(inputs["overrides"])
    steps.refuse_secrets(json.dumps(inputs))  # comments of the params, and `job`, are sent too
    job = {"patience": inputs["patience"], **inputs["job"]}
    steps.check_backend(inputs["backend"], job, config)


def read_token(file: Path | None) -> str | None:
    """Return a bearer token. It is no argument, because other users could see that."""
    if file is None:
        return os.environ.get("KFP_TOKEN")
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise UserError(f"Cannot read the token in {file}: {error.strerror}.") from error
