"""The work of each component: its arguments are those of the component in components/.

`attempt` runs it: with the file modes of a plain job, retries while a server is unavailable, and a
record of the error in the workspace, because KFP has no field for it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from ddpm_core.config import Config
from ddpm_core.config.durations import in_words
from ddpm_core.console import advice_in_pod, report_errors, warn
from ddpm_core.errors import Interrupted, Unavailable, UserError, write_termination_message
from ddpm_core.runtime import memory
from ddpm_core.storage.retry import retrying
from ddpm_core.storage.workspace import (
    CONTACT,
    GRID,
    REPORT,
    RESULTS,
    Workspace,
    samples_key,
    snapshot_key,
)
from ddpm_kube import artifacts, steps
from ddpm_kube.artifacts import Artifact
from ddpm_kube.record import RUNNING, Run, open_run

UMASK = 0o022  # KFP's launcher sets 0, which would let every user write the workspace
ATTEMPTS = 5  # of a step while a server is unavailable
PAUSE = 30.0  # seconds before the second attempt; doubles each time
SIGNALED = 128  # exit statuses from here on are those of signals

T = TypeVar("T")


@contextmanager
def reported(step: str, leave: Callable[[str], None] = lambda message: None) -> Iterator[None]:
    """Report errors like `report_errors`, also internal ones as the termination message.

    `leave` gets the message of an error, but not that of a stop on request.
    """
    if previous := os.umask(UMASK):  # not that of KFP's launcher, but chosen by a user
        os.umask(previous)
    with report_errors(step):
        try:
            with memory.translate_errors():
                yield
        except Exception as error:
            message = f"{error} {advice_in_pod(error)}".strip()
            if not isinstance(error, UserError | OSError | Interrupted):
                message = f"internal error, {type(error).__name__}: {error}"
                write_termination_message(message)
            if not isinstance(error, Interrupted) or error.status < SIGNALED:
                leave(message)
            raise


def attempt(
    step: str, begin: Callable[[], tuple[Config, Run]], work: Callable[[Config, Run], T]
) -> T:
    """Run the work of a step, again while a server is unavailable, and record its error.

    KFP retries only a step whose pod disappears, not one that fails.
    """
    run: Run | None = None

    def leave(message: str) -> None:
        with suppress(UserError, OSError):
            if run:
                run.fail(step, message)

    def once() -> T:
        nonlocal run
        config, run = begin()
        run.begin(step)
        result = work(config, run)
        run.succeed(step)
        return result

    def announce(state: Any) -> None:
        warn(
            f"{step}: {state.outcome.exception()} Trying again in "
            f"{in_words(state.next_action.sleep)} (attempt {state.attempt_number + 1} of "
            f"{ATTEMPTS})."
        )

    def is_temporary(error: BaseException) -> bool:
        return isinstance(error, Unavailable)

    with reported(step, leave):
        return retrying(is_temporary, ATTEMPTS, PAUSE, announce)(once)


def prepare(inputs: Sequence[Any], run_id: str, data: Artifact, contact: Artifact) -> str:
    """Prepare the data; `inputs` are those of `steps.make_config`. Return the settings."""
    from ddpm_core.data.prepare import prepare

    def begin() -> tuple[Config, Run]:
        config = steps.make_config(*inputs)
        return config, Run(Workspace.open(config.workspace), run_id)

    def work(config: Config, run: Run) -> str:
        manifest = prepare(config, run.workspace)
        facts = artifacts.data_facts(run.workspace, manifest)
        artifacts.put_json(data, manifest, facts)
        sheet = artifacts.read_image(run.workspace, CONTACT)
        images = [("Some images of every class", sheet)]
        artifacts.put_page(contact, "Prepared images", facts, images)
        return run.save(config)

    return attempt("prepare", begin, work)


def train(
    settings: str,
    backend: str,
    job: dict[str, Any],
    model: Artifact,
    metrics: Artifact,
    preview: Artifact,
) -> int:
    """Train, and return the last step."""

    def work(config: Config, run: Run) -> int:
        steps.train(config, backend, job, run.run_id)
        step = config.train.steps
        facts = artifacts.model_facts(run.workspace, step)
        artifacts.put_json(model, facts, facts)
        artifacts.put_metrics(metrics, artifacts.last_row(run.workspace), run.workspace)
        image = artifacts.read_image(run.workspace, f"{snapshot_key(step)}/{GRID}")
        images = [("Samples of the averaged weights", image)]
        artifacts.put_page(preview, f"Training, step {step}", facts, images)
        return step

    return attempt("train", lambda: open_run(settings), work)


def plan(settings: str) -> list[str]:
    """Return the parts of the sampling pods."""
    parts = attempt(
        "plan",
        lambda: open_run(settings),
        lambda config, run: steps.list_parts(config, run.workspace),
    )
    print(f"{len(parts)} parts: {', '.join(parts)}")
    return parts


def sample(settings: str, part: str, samples: Artifact, grid: Artifact) -> None:
    """Sample a part."""

    def work(config: Config, run: Run) -> None:
        sampled = steps.sample_part(config, run.workspace, part)
        facts = {step: artifacts.samples_facts(run.workspace, step, part) for step in sampled}
        last = facts[sampled[-1]]
        artifacts.put_json(samples, {str(step): one for step, one in facts.items()}, last)
        pages = [f"{samples_key(step)}/{GRID}" for step in sampled]
        images = [artifacts.read_image(run.workspace, page) for page in pages]
        captions = [f"Step {step}: the first 64" for step in sampled]
        title = f"Samples of step {', '.join(map(str, sampled))}"
        artifacts.put_page(grid, title, last, zip(captions, images, strict=True))

    attempt(f"sample {part.split()[0]}", lambda: open_run(settings), work)


def evaluate(
    settings: str, worst: float, report: Artifact, table: Artifact, metrics: Artifact
) -> str:
    """Score the samples; return `pass`, or why nothing is registered."""
    from ddpm_core.evaluation.evaluate import evaluate

    def work(config: Config, run: Run) -> str:
        workspace = run.workspace
        evaluate(config, workspace)
        facts, numbers, rows = artifacts.scores(workspace)
        artifacts.put(report, workspace.storage.read(REPORT).decode(), facts)
        artifacts.put(table, rows, facts)
        artifacts.put_metrics(metrics, numbers, workspace)
        verdict = steps.gate(workspace.read_json(RESULTS), worst)
        if verdict != steps.PASS:
            run.end(f"Nothing was registered. {verdict}")
        return verdict

    verdict = attempt("evaluate", lambda: open_run(settings), work)
    print(verdict)
    return verdict


def register(settings: str, registered: Artifact, decision: Artifact) -> str:
    """Register the best checkpoint; return `models:/NAME/VERSION`."""
    from ddpm_core.registry.register import register

    def work(config: Config, run: Run) -> str:
        record = register(config, run.workspace).model_dump()
        facts = {**artifacts.model_facts(run.workspace, record["step"]), **record}
        artifacts.put_json(registered, record, facts)
        name = f"models:/{record['name']}/{record['version']}"
        text = f"**{name}**, step {record['step']}. {record['why']}"
        artifacts.put(decision, f"{text}\n", facts)
        run.end(f"Registered {text}")
        return name

    return attempt("register", lambda: open_run(settings), work)


def finish(state: str, inputs: Sequence[Any], backend: str, run_id: str, summary: Artifact) -> None:
    """Delete the job that a run may have left, and write a summary."""
    with reported("finish"):
        cleaned = steps.clean_up(backend, run_id)
        outcome, text = summarize(state, inputs, run_id, cleaned)
        artifacts.put(summary, text, {"workspace": inputs[2], "state": outcome})
    print(text)


AGAIN = "Then submit the pipeline again with the same inputs; it skips what is up to date."
STOPPED = (
    "Either the run was terminated, or a pod was lost, evicted, out of memory, or never started: "
    "`kubectl get events` shows which."
)
RETRIED = (
    "KFP's Retry does not write this page again. After a retry, see `ddpm status` or "
    "`python pipelines/ddpm.py watch RUN`."
)


def summarize(state: str, inputs: Sequence[Any], run_id: str, cleaned: str = "") -> tuple[str, str]:
    """Return how a run ended (succeeded, failed or stopped), and a page about it in Markdown.

    The records in the workspace decide. KFP's `state` is RUNNING for a run that was terminated, and
    also for one that lost a pod or skipped a task.
    """
    from ddpm_core import chain

    unfinished, end, status = {}, "", ""
    try:
        config = steps.make_config(*inputs)
    except (UserError, OSError) as error:
        unfinished = {"prepare": str(error)}
    else:
        try:
            run = Run(Workspace.open(config.workspace), run_id)
            unfinished, end = run.unfinished(), run.outcome()
            status = f"```\n{chain.status(config, run.workspace)}\n```"
        except (UserError, OSError) as error:
            unfinished = {"finish": str(error)}
    errors = {step: error for step, error in unfinished.items() if error != RUNNING}
    lines = [f"**{step}** failed: {error}" for step, error in errors.items()]
    if errors:
        outcome = "failed"
        lines.append(f"Correct the cause. {AGAIN}")
    elif end and not unfinished:
        outcome, lines = "succeeded", [end]
    else:
        outcome, names = "stopped", ", ".join(unfinished)
        what = f"**{names}** was stopped while it ran" if names else "No step reports an error"
        lines = [f"{what} (KFP reports the state {state}). {STOPPED} {AGAIN}"]
    if outcome != "succeeded":
        lines.append(RETRIED)
    page = [f"# The run {outcome}", *lines, cleaned, status]
    return outcome, "\n\n".join(line for line in page if line) + "\n"
