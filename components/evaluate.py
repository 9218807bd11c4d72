"""Score every sampled checkpoint, and decide whether the best one may be registered."""

from kfp import dsl
from kfp.dsl import HTML, Dataset, Input, Markdown, Metrics, Output

from components import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def evaluate(
    settings: str,
    worst: float,
    samples: Input[list[Dataset]],
    report: Output[HTML],
    table: Output[Markdown],
    metrics: Output[Metrics],
) -> str:
    """Score new samples and write the report; return `pass`, or why nothing is registered.

    Args:
        worst: The highest score that may be registered; 0: no limit.
    """
    from ddpm_kube import tasks

    return tasks.evaluate(settings, worst, report, table, metrics)
