"""System metrics of a training run, by MLflow's own monitor: tracking.system_metrics."""

from __future__ import annotations

import logging
import math
import time
from typing import Any

from ddpm_core.errors import require
from ddpm_core.tracking.client import CALL_TIMEOUT, within

RESTART = 30.0  # seconds between two starts of MLflow's thread


class SystemMetrics:
    """Logs the use of CPU, memory, disk, network and GPU to a run, as metrics `system/...`.

    MLflow measures and sends in a thread, by default every 10 seconds. The thread ends at an error
    of the server; `ensure` starts it again.
    """

    def __init__(self, uri: str) -> None:
        """Raises UserError if a package is missing."""
        require("psutil", "tracking")
        self._uri = uri
        self._monitor: Any = None
        self._started = -math.inf
        # The tracker reports outages of the server itself.
        logging.getLogger("mlflow.system_metrics").setLevel(logging.CRITICAL)

    def ensure(self, run_id: str) -> None:
        """Measure for a run, unless that is already so; continues its last step.

        Raises what MLflow, psutil or the network raises.
        """
        thread = self._monitor and self._monitor._process  # None if it could not be started
        is_running = thread is not None and thread.is_alive()
        if not is_running and time.monotonic() - self._started > RESTART:
            self._started = time.monotonic()
            module = require("mlflow.system_metrics.system_metrics_monitor", "tracking")
            make = module.SystemMetricsMonitor
            self._monitor = make(run_id, resume_logging=True, tracking_uri=self._uri)
            self._monitor.start()

    def stop(self) -> None:
        """Send what is measured, and end the thread. Raises what MLflow or the network raises."""
        if self._monitor:
            within(CALL_TIMEOUT, self._monitor.finish)
        self._monitor = None
