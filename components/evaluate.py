"""Scores of every sampled checkpoint, the report, and whether the best may be registered."""

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
    """Score what is not scored yet; `pass`, or why nothing is to be registered.

    Args:
        worst: The score above which the best checkpoint is not registered; 0: no limit.
    """
    from ddpm_core.console import telling
    from ddpm_core.evaluation.evaluate import evaluate
    from ddpm_core.storage.workspace import REPORT, RESULTS
    from ddpm_kube import artifacts, steps

    with telling("evaluate"):
        config, place = steps.opened(settings)
        evaluate(config, place)
        facts, numbers, rows = artifacts.scores(place)
        page = place.storage.read(REPORT).decode()
        artifacts.put(report, page, facts)
        artifacts.put(table, rows, facts)
        artifacts.put_metrics(metrics, numbers, place)
        verdict = steps.gate(place.read_json(RESULTS), worst)
    print(verdict)
    return verdict
