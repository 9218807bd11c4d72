"""compile, submit, local: what can be done with the pipeline."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Annotated, Any

import typer
from compiling import compiled

from ddpm_core.command import SetOption
from ddpm_core.config import yaml_text
from ddpm_core.console import telling
from ddpm_core.errors import UserError
from ddpm_kube import options, steps

LARGEST = 10_000  # bytes that KFP takes as the inputs of a run
COMPILED = Path(__file__).resolve().parent / "ddpm.yaml"

app = typer.Typer(
    help="The pipeline for Kubeflow Pipelines.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
ImageOption = Annotated[
    str | None, typer.Option(help="The image of all pods; default: that of components/__init__.py.")
]
ParamsOption = Annotated[
    Path | None, typer.Option("--params", "-p", help="A params file; its text is an input.")
]
WorkspaceOption = Annotated[
    str, typer.Option("--workspace", "-w", help="Where the run lives: a directory, or s3://...")
]
SourceOption = Annotated[str, typer.Option(help="prepare.source; default: that of the params.")]
GpuOption = Annotated[
    bool, typer.Option("--gpu", help="A GPU for each pod that samples, scores or registers.")
]
WorstOption = Annotated[
    float, typer.Option(help="The score above which nothing is registered; 0: no limit.")
]


@app.command(name="compile")
def compile_(
    context: typer.Context,
    output: Annotated[Path, typer.Option("--output", "-o")] = COMPILED,
    image: ImageOption = None,
    gpu: GpuOption = False,
) -> None:
    """Write pipelines/ddpm.yaml."""
    compiled(context.obj, output, image, gpu)
    typer.echo(output)


@app.command()
def local(
    context: typer.Context,
    p: ParamsOption = None,
    w: Annotated[
        str, typer.Option("--workspace", "-w", help="The directory where the run lives.")
    ] = "workspace",
    s: SetOption = None,
    source: SourceOption = "",
    worst: WorstOption = 0.0,
) -> None:
    """Run the same pipeline here, each task a process; its artifacts lie in WORKSPACE/kfp.

    Without -p the params are those of ./params.yaml, else the digits', as for `ddpm run`.
    """
    from local import PROCESS, run

    with telling("local"):
        if "://" in w:
            raise UserError(
                f"-w {w} given; a directory is needed, since kfp.local keeps artifacts in files. "
                "`submit` and `ddpm run` take s3://bucket/prefix."
            )
        place, usual = Path(w).absolute(), Path("params.yaml")
        inputs = (
            given(p or (usual if usual.exists() else None), s, str(place), source, worst) | PROCESS
        )
        check(inputs)
        raise SystemExit(run(context.obj, place / "kfp", inputs))


@app.command()
def submit(
    context: typer.Context,
    host: Annotated[
        str,
        typer.Option(
            envvar="KF_PIPELINES_ENDPOINT",
            help="The KFP server, as in http://localhost:8888 after "
            "`kubectl port-forward -n kubeflow svc/ml-pipeline 8888`.",
        ),
    ],
    p: ParamsOption = None,
    w: WorkspaceOption = "/workspace/run",
    s: SetOption = None,
    source: SourceOption = "",
    worst: WorstOption = 0.0,
    tracking: Annotated[str, typer.Option(help='MLflow\'s URI; "": that of the params.')] = (
        "http://mlflow:5000"
    ),
    backend: Annotated[str, typer.Option(help="pytorchjob, or process.")] = "pytorchjob",
    job: Annotated[
        Path | None, typer.Option(help="A YAML file of what the PyTorchJob is to be like.")
    ] = None,
    image: ImageOption = None,
    gpu: GpuOption = False,
    experiment: Annotated[str, typer.Option(help="KFP's experiment.")] = "ddpm",
    name: Annotated[str, typer.Option(help="Of the run.")] = "ddpm",
    namespace: Annotated[str, typer.Option(help="Of a multi-user KFP.")] = "kubeflow",
    token_file: Annotated[
        Path | None, typer.Option(help="A file with a bearer token; else $KFP_TOKEN.")
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Follow the run to its end.")] = False,
) -> None:
    """Run the pipeline on a KFP server."""
    from submission import Server, follow

    with telling("submit"):
        inputs = given(p, s, w, source, worst, options.read_file(job))
        inputs |= {"tracking": tracking, "backend": backend}
        check(inputs)
        logging.disable()  # of each attempt at a server that does not answer, with a traceback
        server = Server(host, namespace, lambda: token(token_file))
        run_id = server.create(context.obj, image, gpu, experiment, name, inputs)
        if wait:
            raise SystemExit(follow(server, run_id))


def given(
    params: Path | None,
    overrides: list[str] | None,
    workspace: str,
    source: str,
    worst: float,
    job: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The pipeline's inputs, as its signature names them."""
    return {
        "workspace": workspace,
        "params": yaml_text.text(params, "params file") if params else "",
        "overrides": overrides or [],
        "source": source,
        "worst": worst,
        "job": job or {},
    }


def check(inputs: dict[str, Any]) -> None:
    """Refuse here what would fail in a pod. Raises UserError.

    Without a params file the ConfigMap in the cluster decides, which is not known here; what is
    given beside it is checked by itself.
    """
    if len(json.dumps(inputs).encode()) > LARGEST:
        raise UserError(
            f"The inputs are more than the {LARGEST:,} bytes that KFP takes: leave comments out of "
            "the params file, or make it the ConfigMap ddpm-params and give none."
        )
    names = ("overrides", "workspace", "source", "tracking")
    config = None
    if inputs["params"].strip():
        config = steps.settings(inputs["params"], *(inputs[name] for name in names))
    else:
        steps.check_overrides(inputs["overrides"])
    steps.must_hold_no_secret(json.dumps(inputs))  # comments of the params and `job` are sent too
    steps.check_backend(inputs["backend"], inputs["job"], config)


def token(file: Path | None) -> str | None:
    """A bearer token; it is never an argument, which other users of the machine could see."""
    if file is None:
        return os.environ.get("KFP_TOKEN")
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise UserError(f"Cannot read the token in {file}: {error.strerror}.") from error
