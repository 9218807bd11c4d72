"""Check the settings and prepare the images as packed arrays, before anything else starts."""

from kfp import dsl
from kfp.dsl import HTML, Dataset, Output

from components import LIGHT_IMAGE


@dsl.component(base_image=LIGHT_IMAGE, install_kfp_package=False)
def prepare(
    workspace: str,
    params: str,
    overrides: list,
    source: str,
    tracking: str,
    run_id: str,
    data: Output[Dataset],
    contact: Output[HTML],
) -> str:
    """Prepare data/ unless it is up to date; return a reference to the settings.

    Args:
        workspace: A directory of the mounted volume, or s3://bucket/prefix.
        params: The content of a params file; empty: the ConfigMap ddpm-params, else the digits.
        overrides: `section.key=value`, with priority over everything else.
        source: prepare.source, for example dvc:REPO#PATH@REV; empty: as in the params.
        tracking: The URI of MLflow; empty: as in the params.
        run_id: KFP's id of the run, after which its records in the workspace are named.
    """
    from ddpm_kube import tasks

    inputs = (params, overrides, workspace, source, tracking)
    return tasks.prepare(inputs, run_id, data, contact)
