"""The end of every run, however it went: cleans up, and says what happened."""

from kfp import dsl
from kfp.dsl import Markdown, Output, PipelineTaskFinalStatus

from components import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def finish(
    status: PipelineTaskFinalStatus,
    workspace: str,
    params: str,
    overrides: list,
    source: str,
    tracking: str,
    backend: str,
    run_id: str,
    summary: Output[Markdown],
) -> None:
    """Remove the PyTorchJob that this run may have left, and sum the run up.

    Args:
        status: What KFP says of the run so far.
        backend: pytorchjob, or process: then there is nothing to remove.
        run_id: KFP's id of the run, by which its PyTorchJob is found.
    """
    from ddpm_core.console import telling
    from ddpm_kube import artifacts, steps

    with telling("finish"):
        told = steps.clean_up(backend, run_id)
        inputs = (params, overrides, workspace, source, tracking)
        text = steps.ending(status.state, status.error_message or "", inputs, told)
        artifacts.put(summary, text, {"workspace": workspace, "state": status.state})
    print(text)
