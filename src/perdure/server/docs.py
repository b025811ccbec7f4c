"""`/docs`: a page of our own that shows `/openapi.json`; nothing is loaded from elsewhere."""

from collections.abc import Awaitable, Callable
from pathlib import Path

from fastapi import APIRouter
from starlette.responses import Response

_STATIC = Path(__file__).parent / "static"
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_FILES = {
    "/docs": ("docs.html", "text/html; charset=utf-8"),
    "/docs/docs.js": ("docs.js", "text/javascript; charset=utf-8"),
    "/docs/docs.css": ("docs.css", "text/css; charset=utf-8"),
}


def docs_routes() -> APIRouter:
    """Return the routes of the page and its two files."""
    router = APIRouter(include_in_schema=False)
    for path, (name, media_type) in _FILES.items():
        router.add_api_route(path, _serve(name, media_type), methods=["GET"])
    return router


def _serve(name: str, media_type: str) -> Callable[[], Awaitable[Response]]:
    data = (_STATIC / name).read_bytes()

    async def serve() -> Response:
        return Response(data, media_type=media_type, headers={"Content-Security-Policy": _POLICY})

    return serve
