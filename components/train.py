"""Train in an elastic job that this pod starts and follows, or in this pod."""

from kfp import dsl
from kfp.dsl import HTML, Dataset, Input, Metrics, Model, Output

from components import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def train(
    settings: str,
    backend: str,
    job: dict,
    patience: str,
    data: Input[Dataset],
    model: Output[Model],
    metrics: Output[Metrics],
    preview: Output[HTML],
) -> int:
    """Train to train.steps, from the newest complete snapshot if any; return the last step.

    Args:
        backend: pytorchjob, trainjob, auto, or process: in this pod.
        job: Options of the job that trains (docs/launcher.md); empty: the defaults.
        patience: How long a worker may be without a node, quota or image, such as 15m.
    """
    from ddpm_kube import tasks

    return tasks.train(settings, backend, {"patience": patience, **job}, model, metrics, preview)
