"""Clean up and summarize a run, whether it succeeded or failed."""

from kfp import dsl
from kfp.dsl import Markdown, Output, PipelineTaskFinalStatus

from components import LIGHT_IMAGE


@dsl.component(base_image=LIGHT_IMAGE, install_kfp_package=False)
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
    """Delete the job that this run may have left, and write a summary.

    Args:
        status: The state of the run, from KFP, which has no cause of a failure.
        backend: that of the step `train`; process leaves nothing to delete.
        run_id: KFP's id of the run, after which its job is named.
    """
    from ddpm_kube import tasks

    inputs = (params, overrides, workspace, source, tracking)
    tasks.finish(status.state, inputs, backend, run_id, summary)
