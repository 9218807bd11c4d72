"""The script that MLflow loads as the model, with this package beside it."""

from mlflow.models import set_model

from ddpm_core.registry.serving import Served

set_model(Served())
