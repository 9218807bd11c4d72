"""Training: as an elastic PyTorchJob that this pod starts and follows, or in this pod."""

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
    """Train to train.steps, or go on from the newest whole snapshot; the last step.

    Args:
        backend: pytorchjob, or process: in this pod.
        job: What the PyTorchJob is to be like, as ddpm_kube.options names it; empty: its defaults.
        run_id: KFP's id of the run: the job is named after it.
    """
    from ddpm_core.console import telling
    from ddpm_core.storage.workspace import GRID, snapshot_key
    from ddpm_kube import artifacts, steps

    with telling("train"):
        config, place = steps.opened(settings)
        steps.train(config, backend, job, run_id)
        step = config.train.steps
        facts = artifacts.model_facts(place, step)
        artifacts.put_json(model, facts, facts)
        artifacts.put_metrics(metrics, artifacts.last_row(place), place)
        drawn = artifacts.picture(place, f"{snapshot_key(step)}/{GRID}")
        artifacts.put_page(preview, f"Training, step {step}", facts, [("Its average", drawn)])
    return step
