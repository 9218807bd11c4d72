"""All five verbs on a workspace in S3, and what they leave there and here."""

from __future__ import annotations

from pathlib import Path

from mlflow_server import shared_server
from program import TINY, write_params
from s3_server import Bucket


def test_the_whole_chain_lives_in_s3_and_leaves_its_neighbours_alone(
    bucket: Bucket, tmp_path: Path
) -> None:
    text = TINY.replace('uri: ""', f"uri: {shared_server().running().uri}")
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
    others = [key for key in bucket.keys("chai") if not key.startswith("chain/")]
    assert others == ["chai/lease.json", "chain2/snapshots/step-00000012/model"]
