"""The page of `ddpm serve`, on which a person draws images.

GET /                   the page
GET /live               what it shows of the champion as JSON, which it fetches every few seconds
GET /live.js, /page.js  its scripts, which draw with POST /generate
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ddpm_core.config.identity import flat
from ddpm_core.config.results import SamplerName
from ddpm_core.evaluation.pages import LIVE_SCRIPT, environment
from ddpm_core.registry.current import CurrentChampion, Loaded
from ddpm_core.registry.request import MAX_IMAGES
from ddpm_core.runtime.http import PAGE_HEADERS, page_routes
from ddpm_core.text import shown, throughout

_FOLDER = Path(__file__).parent
CAPTIONS = 50  # of the training data, suggested as texts


async def live(request: Request) -> Response:
    found = await run_in_threadpool(view, request.app.state.champion)
    return JSONResponse(found, headers=PAGE_HEADERS)


def routes() -> list[Route]:
    """Return the routes of the page."""
    page = page_routes(lambda: _rendered("page.html.j2", {}), LIVE_SCRIPT, _FOLDER / "page.js")
    return [*page, Route("/live", live)]


def view(champion: CurrentChampion) -> dict[str, Any]:
    """Return what the page shows of the champion.

    `head` and `fields` are HTML: which version answers and why, and the fields of its form. `model`
    is what the script needs to know; None: there is no champion yet.
    """
    loaded = champion.loaded
    facts = loaded and throughout(shown, loaded.facts)
    evidence = flat(facts["evidence"]) if facts and facts["evidence"] else {}
    given = {name: value for name, value in evidence.items() if value is not None}
    head = {"facts": facts, "trouble": shown(champion.trouble), "evidence": given}
    return {
        "key": loaded and list(map(str, loaded.key)),
        "title": f"{facts['name']} {facts['version']}" if facts else "ddpm",
        "head": _rendered("champion.html.j2", head),
        "fields": loaded and _rendered("fields.html.j2", _form(loaded)),
        "model": loaded and _model(loaded),
    }


def _model(loaded: Loaded) -> dict[str, Any]:
    checkpoint = loaded.served.checkpoint
    return {
        "version": loaded.facts["version"],
        "size": checkpoint.training_data.image_size,
        "gray": checkpoint.training_data.channels == 1,
        "conditioning": checkpoint.params.model.conditioning,
    }


def _form(loaded: Loaded) -> dict[str, Any]:
    """Return the variables of the form: what can be chosen, and the defaults."""
    checkpoint = loaded.served.checkpoint
    config, data = checkpoint.params, checkpoint.training_data
    by_condition = config.model.conditioning != "none" and config.train.label_drop > 0
    return {
        "conditioning": config.model.conditioning,
        "classes": data.classes,
        "captions": [shown(text) for text, _ in data.captions[:CAPTIONS]],
        "sample": config.sample,
        "samplers": get_args(SamplerName),
        "timesteps": config.diffusion.timesteps,
        "guided": by_condition or config.sample.guide is not None,
        "most": MAX_IMAGES,
    }


def _rendered(name: str, variables: dict[str, Any]) -> str:
    return str(environment(_FOLDER).get_template(name).render(variables))
