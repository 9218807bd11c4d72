"""Train in an elastic PyTorchJob that this pod starts and follows, or in this pod."""

from kfp import dsl
from kfp.dsl import HTML, Dataset, Input, Metrics, Model, Output

from components import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def train(
    settings: str,
    backend: str,
    job: dict,
    run_id: str,
    data: Input[Dataset],
    model: Output[Model],
    metrics: Output[Metrics],
    preview: Output[HTML],
) -> int:
    """Train to train.steps, from the newest complete snapshot if any; return the last step.

    Args:
        backend: pytorchjob, or process: in this pod.
        job: Options of the PyTorchJob (docs/launcher.md); empty: the defaults.
        run_id: KFP's id of the run, after which the job is named.
    """
    from ddpm_core.console import report_errors
    from ddpm_core.storage.workspace import GRID, snapshot_key
    from ddpm_kube import artifacts, steps

    with report_errors("train"):
        config, workspace = steps.open_settings(settings)
        steps.train(config, backend, job, run_id)
        step = config.train.steps
        facts = artifacts.model_facts(workspace, step)
        artifacts.put_json(model, facts, facts)
        artifacts.put_metrics(metrics, artifacts.last_row(workspace), workspace)
        image = artifacts.read_image(workspace, f"{snapshot_key(step)}/{GRID}")
        images = [("Samples of the averaged weights", image)]
        artifacts.put_page(preview, f"Training, step {step}", facts, images)
    return step
