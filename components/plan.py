"""List the work of the sampling pods: checkpoints times shards."""

from kfp import dsl
from kfp.dsl import Input, Model

from components import LIGHT_IMAGE


@dsl.component(base_image=LIGHT_IMAGE, install_kfp_package=False)
def plan(settings: str, model: Input[Model]) -> list:
    """Return the shards of each pod, `STEP:I/N STEP:I/N ...`: missing ones, and one of complete
    checkpoints."""
    from ddpm_kube import tasks

    return tasks.plan(settings)
