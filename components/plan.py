"""What the sampling pods are to do: checkpoints times shards."""

from kfp import dsl
from kfp.dsl import Input, Model

from components import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def plan(settings: str, model: Input[Model]) -> list:
    """One `STEP:I/N` a pod: all shards that lack, and one part of each checkpoint that has all."""
    from ddpm_core.console import telling
    from ddpm_kube import steps

    with telling("plan"):
        listed = steps.parts(*steps.opened(settings))
    print(f"{len(listed)} parts: {', '.join(listed)}")
    return listed
