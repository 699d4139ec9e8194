"""A small HTTP server for a command's own metrics: `/metrics`, `/livez`, `/readyz`; in threads of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

from kvoffload.metrics.exposition import MetricsExposition

_IDLE_CLIENT_SECONDS = 5.0


class MetricsServer:
    """Serves an exposition until stopped. `with MetricsServer(host, port) as server: server.show(...)`.

    `/livez` answers 200 as long as the process does: a sick cache is no reason to kill it. `/readyz` answers 200 while
    something is shown that may be sent requests.

    Args:
        host: Address to listen on.
        port: Port; 0 chooses a free one.

    Raises:
        OSError: The address cannot be bound.
    """

    def __init__(self, host: str, port: int) -> None:
        self._exposition: MetricsExposition | None = None
        self._ready: Callable[[], bool] = lambda: False
        self._server = ThreadingHTTPServer((host, port), self._handler())
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="kvoffload-http", daemon=True
        )

    @property
    def url(self) -> str:
        """Where it listens."""
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}"

    def show(self, exposition: MetricsExposition | None, ready: Callable[[], bool] = lambda: False) -> None:
        """Serve this exposition from now on; None: nothing, and not ready."""
        self._exposition, self._ready = exposition, ready

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, et: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _answer(self, path: str, accept: str) -> tuple[HTTPStatus, bytes, str]:
        text = "text/plain; charset=utf-8"
        if path == "/livez":
            return HTTPStatus.OK, b"alive\n", text
        if path == "/readyz":
            ready = self._ready()
            return (
                (HTTPStatus.OK, b"ready\n", text) if ready else (HTTPStatus.SERVICE_UNAVAILABLE, b"not ready\n", text)
            )
        if path == "/metrics":
            exposition = self._exposition
            if exposition is None:
                return HTTPStatus.SERVICE_UNAVAILABLE, b"nothing to show yet\n", text
            return HTTPStatus.OK, *exposition.render(accept)
        return HTTPStatus.NOT_FOUND, b"/metrics, /livez, /readyz\n", text

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        answer = self._answer

        class Handler(BaseHTTPRequestHandler):
            timeout = _IDLE_CLIENT_SECONDS

            def do_GET(self, *, with_body: bool = True) -> None:
                status, body, content_type = answer(urlsplit(self.path).path, self.headers.get("Accept", ""))
                self.send_response(status)
                self.send_header("Content-Type", content_type)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if with_body:
                    self.wfile.write(body)

            def do_HEAD(self) -> None:
                self.do_GET(with_body=False)

            def log_message(self, *_: object) -> None:
                """Say nothing: a scrape is no news."""

        return Handler
