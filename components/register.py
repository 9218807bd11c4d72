"""Register the best checkpoint as a version of the model."""

from kfp import dsl
from kfp.dsl import Markdown, Model, Output

from components import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def register(settings: str, registered: Output[Model], decision: Output[Markdown]) -> str:
    """Register a version, promote it if it beats the champion, return `models:/NAME/VERSION`."""
    from ddpm_kube import tasks

    return tasks.register(settings, registered, decision)
