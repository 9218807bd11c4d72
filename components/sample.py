"""One shard of one checkpoint's images."""

from kfp import dsl
from kfp.dsl import HTML, Dataset, Output

from components import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def sample(settings: str, part: str, samples: Output[Dataset], grid: Output[HTML]) -> None:
    """Draw a shard, unless it is there; whoever ends last puts the checkpoint's together.

    Args:
        part: `STEP:I/N`, one of plan's.
    """
    from ddpm_core.console import telling
    from ddpm_core.storage.workspace import GRID, samples_key
    from ddpm_kube import artifacts, steps

    with telling("sample"):
        config, place = steps.opened(settings)
        step = steps.draw(config, place, part)
        facts = artifacts.samples_facts(place, step, part)
        artifacts.put_json(samples, facts, facts)
        drawn = artifacts.picture(place, f"{samples_key(step)}/{GRID}")
        artifacts.put_page(grid, f"Samples of step {step}", facts, [("The first 64", drawn)])
