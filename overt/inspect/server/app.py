"""FastAPI app: the page and a JSON API. It never serves files from disk."""

from contextlib import asynccontextmanager
from functools import lru_cache
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response
from starlette.exceptions import HTTPException

from overt.errors import CorruptFileError, RunError, UserError
from overt.inspect.server.address import Address
from overt.inspect.server.middleware import RequestGuard, error_response
from overt.inspect.server.model_cache import ModelCache
from overt.inspect.server.request_queue import QueueBusyError, RequestQueue
from overt.inspect.server.request_schema import InspectRequest
from overt.inspect.server.responses import build_response, view_png

ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"description": "The request is invalid; the error says why."},
    403: {"description": "The request comes from another origin."},
    408: {"description": "The request did not arrive in time."},
    413: {"description": "The request is too large."},
    415: {"description": "The request is not application/json in UTF-8."},
    422: {"description": "The request does not match the schema."},
    503: {"description": "The queue is full, or the request timed out."},
}


def create_app(
    cache: ModelCache, address: Address | None = None, line: RequestQueue | None = None
) -> FastAPI:
    """Build the app over these models; it only accepts the host names of `address`."""
    queue = line or RequestQueue()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> Any:
        yield
        queue.close()

    app = FastAPI(
        title="overt",
        description="View the attention of models.",
        # The documentation pages of FastAPI load scripts of other hosts, which the policy forbids.
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
    )
    app.add_middleware(RequestGuard, address=address or Address())
    _add_error_handlers(app)

    @app.get("/", response_class=HTMLResponse)
    async def page() -> str:
        return _page()

    @app.get("/serve.js")
    async def script() -> Response:
        return Response(_script(), media_type="text/javascript")

    @app.get("/api/models")
    async def models() -> list[dict[str, Any]]:
        return cache.describe_all()

    @app.get("/api/examples", responses=ERRORS)
    async def examples(model: str) -> list[dict[str, Any]]:
        return await queue.run(lambda: cache.examples(model))

    @app.post("/api/ask", responses=ERRORS)
    async def ask(request: InspectRequest) -> dict[str, Any]:
        # An unknown model is an error before the request is queued.
        folder = _python_name(cache, request.model)
        return await queue.run(lambda: build_response(cache.load(request.model), folder, request))

    @app.post("/api/picture", responses={**ERRORS, 200: {"content": {"image/png": {}}}})
    async def picture(request: InspectRequest) -> Response:
        cache.find(request.model)
        png = await queue.run(lambda: view_png(cache.load(request.model), request))
        return Response(png, media_type="image/png")

    @app.get("/api/health")
    async def health() -> dict[str, Any]:
        return {"waiting": queue.length, "models": cache.names}

    return app


def _python_name(cache: ModelCache, name: str) -> str:
    """Return the name of a model in Python code: the run folder or the command line name."""
    offered = cache.find(name)
    return offered.name if offered.run is None else str(offered.run)


def _add_error_handlers(app: FastAPI) -> None:
    """Return every error as JSON with one sentence: {"error": ...}."""

    def wrong(request: Request, error: Exception) -> JSONResponse:
        return error_response(400, str(error))

    for kind in (UserError, CorruptFileError, RunError):
        app.add_exception_handler(kind, wrong)

    @app.exception_handler(QueueBusyError)
    async def busy(request: Request, error: QueueBusyError) -> JSONResponse:
        return error_response(503, str(error), {"Retry-After": "2"})

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> JSONResponse:
        return error_response(error.status_code, str(error.detail), dict(error.headers or {}))

    @app.exception_handler(RequestValidationError)
    async def misshapen(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        if first["type"] == "json_invalid":
            return error_response(422, "the request is not valid JSON: send one object.")
        where = ".".join(str(part) for part in first["loc"] if part != "body") or "the request"
        return error_response(
            422, f"{where[:80]}: {str(first['msg']).removeprefix('Value error, ')}."
        )


@lru_cache
def _page() -> str:
    from overt.viz.gallery import colour_scale_css, dimmed_photo_css

    return (
        _templates("overt.inspect.server")
        .get_template("page.html.jinja")
        .render(scale=colour_scale_css(), under=dimmed_photo_css())
    )


@lru_cache
def _script() -> str:
    return _templates("overt.inspect.server").get_template("serve.js").render()


def _templates(package: str) -> Any:
    from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

    return Environment(
        loader=ChoiceLoader([PackageLoader(package, "."), PackageLoader("overt.viz", ".")]),
        autoescape=lambda name: bool(name and name.endswith(".jinja")),
        undefined=StrictUndefined,
    )
