"""Register the best checkpoint as a version of the model."""

from kfp import dsl
from kfp.dsl import Markdown, Model, Output

from components import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def register(settings: str, registered: Output[Model], decision: Output[Markdown]) -> str:
    """Register a version, promote it if it beats the champion, return `models:/NAME/VERSION`."""
    from ddpm_core.console import report_errors
    from ddpm_core.registry.register import register
    from ddpm_kube import artifacts, steps

    with report_errors("register"):
        config, workspace = steps.open_settings(settings)
        record = register(config, workspace).model_dump()
        facts = {**artifacts.model_facts(workspace, record["step"]), **record}
        artifacts.put_json(registered, record, facts)
        name = f"models:/{record['name']}/{record['version']}"
        artifacts.put(decision, f"**{name}**, step {record['step']}. {record['why']}\n", facts)
    return name
