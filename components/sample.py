"""Sample one shard of one checkpoint's images."""

from kfp import dsl
from kfp.dsl import HTML, Dataset, Output

from components import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def sample(settings: str, part: str, samples: Output[Dataset], grid: Output[HTML]) -> None:
    """Sample a shard unless it is complete; the last pod of a checkpoint gathers its shards.

    Args:
        part: `STEP:I/N`, from `plan`.
    """
    from ddpm_core.console import report_errors
    from ddpm_core.storage.workspace import GRID, samples_key
    from ddpm_kube import artifacts, steps

    with report_errors("sample"):
        config, workspace = steps.open_settings(settings)
        step = steps.sample_part(config, workspace, part)
        facts = artifacts.samples_facts(workspace, step, part)
        artifacts.put_json(samples, facts, facts)
        image = artifacts.read_image(workspace, f"{samples_key(step)}/{GRID}")
        artifacts.put_page(grid, f"Samples of step {step}", facts, [("The first 64", image)])
