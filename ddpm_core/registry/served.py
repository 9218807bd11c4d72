"""The script that MLflow loads as the model, with this package beside it."""

import warnings
from pathlib import Path
from typing import Any

from mlflow.exceptions import MlflowException
from mlflow.models import set_model
from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE
from mlflow.pyfunc import PythonModel

from ddpm_core.errors import UserError
from ddpm_core.registry.package import CHECKPOINT
from ddpm_core.registry.serving import Served

# MLflow advises type hints when the class is created, in colors. It would take hints for the types
# of a request, and warn of these too. The advice passes every filter, but not recording.
with warnings.catch_warnings(record=True):

    class Model(PythonModel):  # type: ignore[misc]
        """Draws images with the checkpoint among the model's artifacts."""

        def load_context(self, context: Any) -> None:
            self._served = Served(Path(context.artifacts[CHECKPOINT]))

        def predict(self, context, model_input, params=None):  # type: ignore[no-untyped-def]
            try:
                return list(self._served.images(self._served.tasks(_rows(model_input))))
            except UserError as error:
                raise MlflowException(str(error), error_code=INVALID_PARAMETER_VALUE) from error


def _rows(given: Any) -> list[dict[str, Any]]:
    """Return a table, a dict or a list of dicts as a list of dicts of plain values."""
    if hasattr(given, "to_dict"):
        given = given.to_dict("records")
    if isinstance(given, dict):
        given = [given]
    if not isinstance(given, list) or not all(isinstance(row, dict) for row in given):
        raise UserError("The request must be a table or a list of rows, such as [{'n': 4}].")
    return [{str(key): _plain(value) for key, value in row.items()} for row in given]


def _plain(value: Any) -> Any:
    """Return a NumPy number as Python's, an array as a list."""
    return value.tolist() if hasattr(value, "tolist") else value


set_model(Model())
