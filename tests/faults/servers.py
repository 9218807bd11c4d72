"""Servers that a run depends on become unavailable for a while."""

from __future__ import annotations

import logging
import os
import signal
import tempfile
import time
from functools import partial
from pathlib import Path

from support import s3_server
from support.program import write_params

from ddpm_core.storage.s3 import assemble

from .attempt import until
from .play import Playing, Worlds


def mlflow_down(run: Playing) -> Worlds:
    """Freeze the MLflow server, or kill and restart it: it receives each row once."""
    server, size = run.stage.server(), run.schedule.worlds[0]
    run.undo.append(server.running)
    attempt = run.under_way()
    if run.schedule.chance < 0.5:
        server.signal(signal.SIGSTOP)
        try:
            until(lambda: run.last_step() >= run.schedule.at[1], "training goes on", 120)
        finally:
            server.signal(signal.SIGCONT)
        run.finish(attempt)
    else:
        server.kill()
        run.finish(attempt)
        server.start()
        run.finish(run.begin(1))  # training is done; this sends the missing rows
    return {size}


def s3_down(run: Playing) -> Worlds:
    """Make S3 unavailable for seconds: the run is delayed, and its result does not change."""
    size = run.schedule.worlds[0]
    logging.getLogger("werkzeug").setLevel(logging.WARNING)  # moto's requests
    with s3_server.server() as environment:
        gate = s3_server.Gate(environment["AWS_ENDPOINT_URL"])
        bucket = s3_server.Bucket(environment)
        text = (run.folder / "params.yaml").read_text()
        text = text.replace("worker_timeout: 5", "worker_timeout: 100")
        write_params(
            run.folder, text.replace("workspace: workspace", f"workspace: {bucket.uri('run')}")
        )
        place = run.folder / "copies"
        bucket.ddpm(run.folder, "prepare", place=place)
        found = {**environment, "AWS_ENDPOINT_URL": gate.endpoint, "TMPDIR": str(place)}
        attempt = run.begin(size, beside=partial(_enter, found))
        first = "run/snapshots/step-00000010/manifest.json"
        until(lambda: first in bucket.keys("run/snapshots/"), "the second snapshot", 120)
        time.sleep(run.schedule.delay)
        gate.shut()
        time.sleep(1 + 5 * run.schedule.chance)
        gate.open()
        run.finish(attempt)
        _copy(bucket, run.workspace)
    return {size}


def _enter(environment: dict[str, str]) -> None:
    """In a worker, set the address of the server and the folder of local copies."""
    os.environ.update(environment)
    tempfile.tempdir = None


def _copy(bucket: s3_server.Bucket, workspace: Path) -> None:
    """Copy the workspace from S3 to disk."""
    for key in bucket.keys("run/"):
        if not key.startswith("run/data/"):
            path = workspace / key.removeprefix("run/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(bucket.read(key))
    segments = sorted((workspace / "log.jsonl.parts").iterdir())
    (workspace / "log.jsonl").write_bytes(assemble([part.read_bytes() for part in segments]))
