"""The source as packed arrays; and the settings, checked before anything else is started."""

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
    """Make data/ of the source, unless it is up to date; the settings of all later steps.

    Args:
        workspace: A directory of the mounted volume, or s3://bucket/prefix.
        params: The text of a params file; empty: the ConfigMap ddpm-params, else the digits.
        overrides: `section.key=value`, which win over all.
        source: prepare.source, for example dvc:REPO#PATH@REV; empty: that of the params.
        tracking: The URI of MLflow; empty: that of the params.
    """
    from ddpm_core.console import telling
    from ddpm_core.data.prepare import prepare
    from ddpm_core.storage.workspace import CONTACT, Workspace
    from ddpm_kube import artifacts, steps

    with telling("prepare"):
        config = steps.settings(params, overrides, workspace, source, tracking)
        place = Workspace.open(config.workspace)
        manifest = prepare(config, place)
        facts = artifacts.data_facts(place, manifest)
        artifacts.put_json(data, manifest, facts)
        sheet = artifacts.picture(place, CONTACT)
        artifacts.put_page(contact, "Prepared images", facts, [("Some of every class", sheet)])
    return steps.text_of(config)
