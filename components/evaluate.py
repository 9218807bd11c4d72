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
    from ddpm_core.console import report_errors
    from ddpm_core.evaluation.evaluate import evaluate
    from ddpm_core.storage.workspace import REPORT, RESULTS
    from ddpm_kube import artifacts, steps

    with report_errors("evaluate"):
        config, workspace = steps.open_settings(settings)
        evaluate(config, workspace)
        facts, numbers, rows = artifacts.scores(workspace)
        page = workspace.storage.read(REPORT).decode()
        artifacts.put(report, page, facts)
        artifacts.put(table, rows, facts)
        artifacts.put_metrics(metrics, numbers, workspace)
        verdict = steps.gate(workspace.read_json(RESULTS), worst)
    print(verdict)
    return verdict
