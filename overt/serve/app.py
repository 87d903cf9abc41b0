"""The server: a page, and questions that it asks in JSON. Nothing on the disk is handed out."""

import sys
import traceback
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import asynccontextmanager
from functools import lru_cache
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware

from overt.errors import BadInput, Damaged, Failed
from overt.serve.line import Busy, Line
from overt.serve.questions import MOST_BODY, Question
from overt.serve.replies import picture, reply
from overt.serve.shelf import Shelf

POLICY = (
    "default-src 'none'; img-src data: blob:; style-src 'unsafe-inline'; script-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
}

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"description": "What is wrong with the question, in a sentence."},
    413: {"description": "The question is too large."},
    422: {"description": "The question is not of the form that is asked for."},
    503: {"description": "Too many are waiting, or it took too long."},
}


class NotTooLarge:
    """Turns away bodies above a size, whatever their head says of it."""

    def __init__(self, app: Any, most: int = MOST_BODY) -> None:
        self.app, self.most = app, most

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Count the bytes as they come, and stop the request at the first too many."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        said = dict(scope["headers"]).get(b"content-length", b"0")
        if not said.isdigit() or int(said) > self.most:
            await _told(413, self._sentence())(scope, receive, send)
            return
        taken = 0

        async def counted() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > self.most:
                raise HTTPException(413, self._sentence())
            return message

        await self.app(scope, counted, send)

    def _sentence(self) -> str:
        return f"the question is larger than {self.most // 2**20} MiB; send a smaller picture."


def make(shelf: Shelf, hosts: list[str] | None = None, line: Line | None = None) -> FastAPI:
    """The app over these models; it answers only to the names in `hosts`."""
    queue = line or Line()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> Any:
        yield
        queue.close()

    app = FastAPI(
        title="overt",
        description="Ask models where they look.",
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
    )
    app.add_middleware(NotTooLarge)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=hosts or ["127.0.0.1", "localhost"])
    _explaining(app)

    @app.middleware("http")
    async def guarded(request: Request, call: Callable[[Request], Awaitable[Response]]) -> Response:
        response = await call(request)
        response.headers.update(HEADERS)
        return response

    @app.get("/", response_class=HTMLResponse)
    async def page() -> str:
        return _page()

    @app.get("/serve.js")
    async def script() -> Response:
        return Response(_script(), media_type="text/javascript")

    @app.get("/api/models")
    async def models() -> list[dict[str, Any]]:
        return [shelf.about(name) for name in shelf.names]

    @app.get("/api/examples", responses=ERRORS)
    async def examples(model: str) -> list[dict[str, Any]]:
        return await queue.run(lambda: shelf.examples(model))

    @app.post("/api/ask", responses=ERRORS)
    async def ask(question: Question) -> dict[str, Any]:
        folder = _named(shelf, question.model)
        return await queue.run(lambda: reply(shelf.subject(question.model), folder, question))

    @app.post("/api/picture", responses={**ERRORS, 200: {"content": {"image/png": {}}}})
    async def drawn(question: Question) -> Response:
        shelf.find(question.model)
        made = await queue.run(lambda: picture(shelf.subject(question.model), question))
        return Response(made, media_type="image/png")

    @app.get("/api/health")
    async def health() -> dict[str, Any]:
        return {"waiting": queue.length, "models": shelf.names}

    return app


def _named(shelf: Shelf, name: str) -> str:
    """How a person would name a model in code: the run's folder, or what the command line said."""
    offered = shelf.find(name)
    return offered.name if offered.run is None else str(offered.run)


def _explaining(app: FastAPI) -> None:
    """Every problem as one sentence: {"error": ...}, and no more."""

    def wrong(request: Request, error: Exception) -> JSONResponse:
        return _told(400, str(error))

    for kind in (BadInput, Damaged, Failed):
        app.add_exception_handler(kind, wrong)

    @app.exception_handler(Busy)
    async def busy(request: Request, error: Busy) -> JSONResponse:
        return _told(503, str(error), {"Retry-After": "2"})

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> JSONResponse:
        return _told(error.status_code, str(error.detail), dict(error.headers or {}))

    @app.exception_handler(RequestValidationError)
    async def misshapen(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"] if part != "body") or "the question"
        return _told(422, f"{where[:80]}: {str(first['msg']).removeprefix('Value error, ')}.")

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> JSONResponse:
        traceback.print_exception(error, file=sys.stderr)
        told = "memory does not suffice for this" if isinstance(error, MemoryError) else "a mistake"
        return _told(500, f"{told} of the server; its terminal says more.")


def _told(status: int, sentence: str, headers: dict[str, str] | None = None) -> JSONResponse:
    line = " ".join(sentence.split())
    text = line.encode("utf-8", "replace").decode()
    return JSONResponse({"error": text}, status, {**HEADERS, **(headers or {})})


@lru_cache
def _page() -> str:
    from overt.show.cards import scale_css, under_css

    return (
        _templates("overt.serve")
        .get_template("page.html.jinja")
        .render(scale=scale_css(), under=under_css())
    )


@lru_cache
def _script() -> str:
    return _templates("overt.serve").get_template("serve.js").render()


def _templates(package: str) -> Any:
    from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

    return Environment(
        loader=ChoiceLoader([PackageLoader(package, "."), PackageLoader("overt.show", ".")]),
        autoescape=lambda name: bool(name and name.endswith(".jinja")),
        undefined=StrictUndefined,
    )
