"""The script that MLflow loads as the model; it finds this package beside it."""

import warnings
from pathlib import Path
from typing import Any

from mlflow.exceptions import MlflowException
from mlflow.models import set_model
from mlflow.protos.databricks_pb2 import INTERNAL_ERROR, INVALID_PARAMETER_VALUE
from mlflow.pyfunc import PythonModel

from ddpm_core.errors import UserError
from ddpm_core.registry.package import CHECKPOINT
from ddpm_core.registry.serving import Served

# When the class is created, MLflow advises type hints. With hints it would validate requests
# itself, and warn about these hints too. The advice ignores filters, but not recording.
with warnings.catch_warnings(record=True):

    class Model(PythonModel):  # type: ignore[misc]
        """Draws images with the checkpoint among the model's artifacts."""

        def load_context(self, context: Any) -> None:
            self._served = Served(Path(context.artifacts[CHECKPOINT]))

        def predict(self, context, model_input, params=None):  # type: ignore[no-untyped-def]
            try:
                tasks = self._served.tasks(_rows(model_input))
            except UserError as error:  # HTTP status 400
                raise MlflowException(str(error), error_code=INVALID_PARAMETER_VALUE) from error
            try:
                return list(self._served.images(tasks))
            except Exception as error:  # HTTP status 500: the request was valid
                message = f"Drawing failed: {error}"
                raise MlflowException(message, error_code=INTERNAL_ERROR) from error


def _rows(model_input: Any) -> list[dict[str, Any]]:
    """Return a table, a dict or a list of dicts as a list of dicts of plain values."""
    if hasattr(model_input, "to_dict"):
        model_input = model_input.to_dict("records")
    rows = [model_input] if isinstance(model_input, dict) else model_input
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise UserError("The request must be a table or a list of rows, such as [{'n': 4}].")
    return [{str(key): _plain(value) for key, value in row.items()} for row in rows]


def _plain(value: Any) -> Any:
    """Return a NumPy number as Python's, an array as a list."""
    return value.tolist() if hasattr(value, "tolist") else value


set_model(Model())
