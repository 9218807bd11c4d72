"""Check the settings and prepare the images as packed arrays, before anything else starts."""

from kfp import dsl
from kfp.dsl import HTML, Dataset, Output

from components import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def prepare(
    workspace: str,
    params: str,
    overrides: list,
    source: str,
    tracking: str,
    data: Output[Dataset],
    contact: Output[HTML],
) -> str:
    """Prepare data/ unless it is up to date; return the settings of all later components.

    Args:
        workspace: A directory of the mounted volume, or s3://bucket/prefix.
        params: The content of a params file; empty: the ConfigMap ddpm-params, else the digits.
        overrides: `section.key=value`, with priority over everything else.
        source: prepare.source, for example dvc:REPO#PATH@REV; empty: as in the params.
        tracking: The URI of MLflow; empty: as in the params.
    """
    from ddpm_core.console import report_errors
    from ddpm_core.data.prepare import prepare
    from ddpm_core.storage.workspace import CONTACT, Workspace
    from ddpm_kube import artifacts, steps

    with report_errors("prepare"):
        config = steps.make_config(params, overrides, workspace, source, tracking)
        opened = Workspace.open(config.workspace)
        manifest = prepare(config, opened)
        facts = artifacts.data_facts(opened, manifest)
        artifacts.put_json(data, manifest, facts)
        sheet = artifacts.read_image(opened, CONTACT)
        images = [("Some images of every class", sheet)]
        artifacts.put_page(contact, "Prepared images", facts, images)
    return steps.to_text(config)
