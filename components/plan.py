"""List the work of the sampling pods: checkpoints times shards."""

from kfp import dsl
from kfp.dsl import Input, Model

from components import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def plan(settings: str, model: Input[Model]) -> list:
    """Return `STEP:I/N` for each pod: every missing shard, and one part of complete checkpoints."""
    from ddpm_core.console import report_errors
    from ddpm_kube import steps

    with report_errors("plan"):
        parts = steps.list_parts(*steps.open_settings(settings))
    print(f"{len(parts)} parts: {', '.join(parts)}")
    return parts
