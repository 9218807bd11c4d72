"""Compare the end of a disturbed run with that of an undisturbed one."""

from __future__ import annotations

import json

from support.runs import bits, distance, final, of_file
from support.runs import rows as run_rows

from .play import Playing, Worlds
from .schedule import STEPS

TOLERANCE = 1e-3  # relative to the distance from the start, if the world size changed


def judge(run: Playing, worlds: Worlds) -> None:
    """Raise AssertionError if weights, averages, optimizer or log differ from an undisturbed run.

    With one world size they must be bitwise the same as with that size undisturbed. With several
    sizes, weights and averages may differ by rounding.
    """
    rows = run.rows()
    assert [row["step"] for row in rows] == list(range(2, STEPS + 1, 2)), "rows are not in order"
    sizes = {int(row["world_size"]) for row in rows}
    assert sizes == worlds, f"world sizes in the log: {sizes}, scheduled: {worlds}"
    assert not run.staged(), run.staged()
    undisturbed = run.stage.undisturbed(min(sizes))
    ended, wanted = final(run.folder, STEPS), final(undisturbed, STEPS)
    if len(sizes) == 1:
        differ = sorted(n for n in wanted if bits(ended).get(n) != bits(wanted)[n])
        assert not differ, f"tensors that are not bitwise the same: {differ}"
        assert curve(rows) == curve(run_rows(undisturbed)), "the loss curves differ"
    start = final(run.stage.undisturbed(0), 1)
    for file in ("model", "ema-0.9"):
        far = distance(*(of_file(some, file) for some in (ended, wanted, start)))
        assert far < TOLERANCE, f"{file} is {far:.2g} of its movement away"
    if run.schedule.kind == "mlflow-down":
        check_mlflow(run, rows)


def curve(rows: list[dict[str, float]]) -> list[tuple[float, ...]]:
    return [(row["step"], row["loss"], row["grad_norm"], row["lr"]) for row in rows]


def check_mlflow(run: Playing, rows: list[dict[str, float]]) -> None:
    """Raise AssertionError unless MLflow's history of every metric equals log.jsonl."""
    from mlflow import MlflowClient

    client = MlflowClient(run.stage.server().uri)
    run_id = json.loads((run.workspace / "run.json").read_text())["mlflow"]["run_id"]
    numbers = [n for n, v in rows[0].items() if isinstance(v, int | float)]
    for name in sorted(set(numbers) - {"step", "time"}):
        history = client.get_metric_history(run_id, f"train/{name}")
        there = sorted((metric.step, metric.value) for metric in history)
        wanted = [(row["step"], row[name]) for row in rows]
        assert there == wanted, f"{name}: {len(there)} entries on the server, {len(wanted)} rows"
    assert client.get_run(run_id).info.status == "FINISHED", "the MLflow run has not ended"
