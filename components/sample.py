"""Sample some shards of the checkpoints' images."""

from kfp import dsl
from kfp.dsl import HTML, Dataset, Output

from components import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def sample(settings: str, part: str, samples: Output[Dataset], grid: Output[HTML]) -> None:
    """Sample a part of `plan`; the last pod of a checkpoint gathers its shards."""
    from ddpm_kube import tasks

    tasks.sample(settings, part, samples, grid)
