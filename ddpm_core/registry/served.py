"""The script that MLflow loads as the model, with this package beside it."""

import warnings
from pathlib import Path
from typing import Any

from mlflow.models import set_model
from mlflow.pyfunc import PythonModel

from ddpm_core.registry.package import CHECKPOINT
from ddpm_core.registry.serving import Served

# MLflow advises type hints when the class is created, in colors. It would take hints for the types
# of a request, and warn of these too. The advice passes every filter, but not recording.
with warnings.catch_warnings(record=True):

    class Model(PythonModel):  # type: ignore[misc]
        """The answers of the checkpoint among the model's artifacts."""

        def load_context(self, context: Any) -> None:
            self._served = Served(Path(context.artifacts[CHECKPOINT]))

        def predict(self, context, model_input, params=None):  # type: ignore[no-untyped-def]
            return self._served.answer(model_input)


set_model(Model())
