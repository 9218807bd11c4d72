"""The pipeline for Kubeflow Pipelines: prepare, train, sample in parallel, evaluate, register.

python pipelines/ddpm.py compile          # writes pipelines/ddpm.yaml
python pipelines/ddpm.py submit --help    # runs the pipeline on a KFP server
python pipelines/ddpm.py watch RUN        # follows a run there
python pipelines/ddpm.py local            # runs it on this machine, in processes
"""

import sys
from pathlib import Path

from kfp import dsl

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # `components` is next to this folder, and not installed
    sys.path.insert(0, str(ROOT))

from pods import PARALLEL, VOLUME, configure  # noqa: E402

from components.evaluate import evaluate  # noqa: E402
from components.finish import finish  # noqa: E402
from components.plan import plan  # noqa: E402
from components.prepare import prepare  # noqa: E402
from components.register import register  # noqa: E402
from components.sample import sample  # noqa: E402
from components.train import train  # noqa: E402
from ddpm_kube.steps import PASS  # noqa: E402


@dsl.pipeline(
    name="score", description="Sample each checkpoint, score the samples, and register the best."
)
def score(settings: str, worst: float, model: dsl.Input[dsl.Model]) -> None:
    """A separate pipeline, so that its loop gets `settings` as an input: kfp.local (2.17) replaces
    the output of any other task in a loop by the loop's item."""
    planned = plan(settings=settings, model=model)
    configure(planned, cpu="50m", memory="512Mi", hours=1, retries=1, uses=("s3",))

    with dsl.ParallelFor(planned.output, name="sampling", parallelism=PARALLEL) as part:
        sampled = sample(settings=settings, part=part)
        sampling = ("s3", "gpu")
        configure(
            sampled, cpu="200m", memory="512Mi", limit="4Gi", hours=24, retries=2, uses=sampling
        )

    samples = dsl.Collected(sampled.outputs["samples"])
    scored = evaluate(settings=settings, worst=worst, samples=samples)
    tracked = ("s3", "mlflow", "gpu")  # `register` may have to sample the champion again
    configure(scored, cpu="200m", memory="1Gi", limit="6Gi", hours=24, retries=1, uses=tracked)

    with dsl.If(scored.outputs["Output"] == PASS, name="gate"):
        made = register(settings=settings)
        configure(made, cpu="100m", memory="1Gi", limit="4Gi", hours=12, retries=1, uses=tracked)


@dsl.pipeline(
    name="ddpm",
    description="From a folder of images to a registered diffusion model, with the evidence.",
)
def ddpm(
    workspace: str = f"{VOLUME}/run",
    params: str = "",
    overrides: list = [],  # noqa: B006
    source: str = "",
    tracking: str = "http://ddpm-mlflow:5000",
    backend: str = "auto",
    job: dict = {},  # noqa: B006
    patience: str = "15m",
    worst: float = 0.0,
) -> None:
    """Prepare, train, sample, evaluate and register; always clean up at the end.

    Args:
        workspace: Where the run is stored: a directory of the claim ddpm-workspace, or
            s3://bucket/prefix.
        params: The content of a params file; empty: the ConfigMap ddpm-params, else the digits.
        overrides: `section.key=value`, with priority over everything else.
        source: prepare.source, for example dvc:REPO#PATH@REV; empty: as in the params.
        tracking: The URI of MLflow; empty: as in the params.
        backend: pytorchjob, trainjob, auto (what the cluster has), or process, which trains in the
            component's own pod.
        job: Options of the job that trains, such as workers and resources; empty: the defaults.
        patience: How long a worker may be without a node, quota or image, such as 15m.
        worst: The highest score that may be registered; 0: no limit.
    """
    run_id = dsl.PIPELINE_JOB_ID_PLACEHOLDER
    inputs = {
        "workspace": workspace,
        "params": params,
        "overrides": overrides,
        "source": source,
        "tracking": tracking,
        "run_id": run_id,
    }
    end = finish(**inputs, backend=backend)
    configure(end, cpu="50m", memory="512Mi", hours=1, uses=("s3", "api"))
    with dsl.ExitHandler(end, name="ddpm"):
        data = prepare(**inputs)
        configure(data, cpu="100m", memory="512Mi", hours=12, retries=1, uses=("s3",))
        settings = data.outputs["Output"]

        trained = train(
            settings=settings,
            backend=backend,
            job=job,
            patience=patience,
            data=data.outputs["data"],
        )
        # It follows a job of workers, or trains in its own pod.
        reached = ("s3", "mlflow", "api")
        configure(
            trained, cpu="100m", memory="512Mi", limit="4Gi", hours=240, retries=2, uses=reached
        )

        scored = score(settings=settings, worst=worst, model=trained.outputs["model"])
        scored.set_caching_options(False)


if __name__ == "__main__":
    from commands import app

    app(obj=ddpm)
