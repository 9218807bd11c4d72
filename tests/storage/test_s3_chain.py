"""All five verbs on a workspace in S3, and the files they leave in S3 and locally."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from support.images import write_classes
from support.mlflow_server import put_store, wait_until
from support.program import TINY, start, write_params
from support.s3_server import Bucket
from support.served_models import address, ask, get


@pytest.mark.slow
def test_chain_runs_in_s3_and_touches_only_its_prefix(
    bucket: Bucket, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    beside = tmp_path_factory.mktemp("beside")
    photos = write_classes(beside / "photos", ["cat", "dog"], each=30)
    text = TINY.replace('uri: ""', f"uri: {put_store(beside / 'mlflow.db')}")
    text = text.replace("workers: 1", f"workers: 1, source: {photos}")
    write_params(tmp_path, f"{text}evaluate: {{metrics: [fid]}}\nregister: {{name: in-s3}}\n")
    for neighbour in ("chain2/snapshots/step-00000012/model", "chai/lease.json"):
        bucket.put(neighbour, b"a neighbour's")
    uri, place = bucket.uri("chain"), tmp_path / "tmp"
    said = bucket.ddpm(tmp_path, "run", "-w", uri, place=place)
    assert "Promoted: there was no champion" in said
    assert f"Look at {uri}/evaluation/report.html" in said
    said = bucket.ddpm(tmp_path, "status", "-w", uri, place=place)
    assert said.count("up to date") == 5
    said = bucket.ddpm(tmp_path, "report", "-w", uri, place=place)
    assert f"{uri}/evaluation/report.html" in said
    assert b"<html" in bucket.read("chain/evaluation/report.html")
    assert {path.name for path in tmp_path.iterdir()} == {"params.yaml", "tmp"}
    answers_without_s3(tmp_path)
    others = [key for key in bucket.keys("chai") if not key.startswith("chain/")]
    assert others == ["chai/lease.json", "chain2/snapshots/step-00000012/model"]


def answers_without_s3(folder: Path) -> None:
    """Serve and call the registered model without access to the bucket."""
    process = start(folder, "serve", "--port", "0")
    try:
        url = address(process)
        wait_until(lambda: get(f"{url}/ready")[0] == 200, "the model of S3 is served")
        status, images = ask(f"{url}/invocations", {"inputs": [{"n": 2}]})
        assert (status, len(images)) == (200, 2)
    finally:
        process.send_signal(signal.SIGTERM)
        process.ended(10)
