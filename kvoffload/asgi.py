"""An ASGI app beside a service: `/metrics`, `/livez`, `/readyz`; `/state` and `/admin` only where asked for.

    app.mount("/kvoffload", make_app(lambda: app.state.service))       # FastAPI, Starlette

It needs no web framework. What takes time is rendered in a thread. `/livez` answers 200 as long as the process answers
at all: a sick cache serves misses, and is no reason to kill a server. `/readyz` answers 503 while there is no service,
and for a service that raises when it is sick (`fail_open=False`).

`/state` shows jobs, pins by owner and occupancy, but neither tokens nor keys. `/admin` takes POST: `reset`, `enable`,
`disable`, `pause_stores`, `resume_stores`, `drain`, `abort/REQUEST_ID`. Whoever reaches it can drop the cache: mount it
where only operators can.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qs

from kvoffload.errors import KVOffloadError, UsageError
from kvoffload.service.service import OffloadService

logger = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]
Find = Callable[[], OffloadService | None]

TEXT = "text/plain; charset=utf-8"
JSON = "application/json"
_DRAIN_SECONDS = 30.0


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """One response."""

    status: int
    body: bytes
    content_type: str = TEXT
    headers: tuple[tuple[bytes, bytes], ...] = ()


def make_app(service: OffloadService | Find, *, state: bool = False, admin: bool = False) -> ASGIApp:
    """Return the ASGI app of a service.

    Args:
        service: The service, or a function that finds it (None: not started yet), for apps built before their lifespan.
        state: Also serve `/state`.
        admin: Also serve `/admin/...`.

    Raises:
        UsageError: It is neither a service nor a function.
    """
    if not callable(service) and not isinstance(service, OffloadService):
        raise UsageError(f"service must be an OffloadService, or a function that returns one or None; got {service!r}")
    find: Find = service if callable(service) else lambda: service
    pages: dict[str, Callable[[OffloadService | None, Mapping[str, str]], Awaitable[Answer]]] = {
        "/metrics": _metrics,
        "/livez": _livez,
        "/readyz": _readyz,
    }
    if state:
        pages["/state"] = _state

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1000})
            return
        path = scope["path"].removeprefix(scope.get("root_path", "")) or "/"
        try:
            if admin and path.startswith("/admin/"):
                answer = await _admin(find(), scope["method"], path.removeprefix("/admin/"), scope["query_string"])
            elif path not in pages:
                known = [*pages, "/admin/..."] if admin else [*pages]
                answer = Answer(HTTPStatus.NOT_FOUND, f"{', '.join(known)}\n".encode())
            elif scope["method"] not in ("GET", "HEAD"):
                answer = _wrong_method(b"GET, HEAD")
            else:
                answer = await pages[path](find(), _headers(scope))
        except KVOffloadError as error:
            answer = Answer(HTTPStatus.CONFLICT, f"{error}\n".encode())
        except Exception as error:
            logger.exception("answering %s failed", path)
            answer = Answer(HTTPStatus.INTERNAL_SERVER_ERROR, f"{type(error).__name__}\n".encode())
        await _reply(send, answer, with_body=scope["method"] != "HEAD")

    return app


async def _metrics(service: OffloadService | None, headers: Mapping[str, str]) -> Answer:
    if service is None:
        return Answer(HTTPStatus.SERVICE_UNAVAILABLE, b"not started\n")
    body, content_type = await service.metrics.render_in_thread(headers.get("accept", ""))
    return Answer(HTTPStatus.OK, body, content_type)


async def _livez(service: OffloadService | None, headers: Mapping[str, str]) -> Answer:  # noqa: ARG001 - as the others
    return Answer(HTTPStatus.OK, b"alive\n")


async def _readyz(service: OffloadService | None, headers: Mapping[str, str]) -> Answer:  # noqa: ARG001 - as the others
    if service is None:
        return Answer(HTTPStatus.SERVICE_UNAVAILABLE, b"not started\n")
    health = service.health()
    if health.ok:
        return Answer(HTTPStatus.OK, f"ready{': ' if health.reason else ''}{health.reason}\n".encode())
    if service.is_ready:
        return Answer(HTTPStatus.OK, f"ready, serving misses: {health.reason}\n".encode())
    return Answer(HTTPStatus.SERVICE_UNAVAILABLE, f"{health.reason}\n".encode())


async def _state(service: OffloadService | None, headers: Mapping[str, str]) -> Answer:  # noqa: ARG001 - as the others
    if service is None:
        return Answer(HTTPStatus.SERVICE_UNAVAILABLE, b"not started\n")
    return await _json(describe(service))


def describe(service: OffloadService) -> dict[str, object]:
    """Return what `/state` shows: plain data without tokens, keys or hashes."""
    engine = service.engine
    health = service.health()
    started = service.is_open
    return {
        "health": {"ok": health.ok, "reason": health.reason},
        "enabled": started and engine.enabled,
        "stats": dataclasses.asdict(service.stats()),
        "pins_by_owner": engine.pins() if started else {},
        "loads_in_line": len(service.room) if started else 0,
        "jobs": [
            {
                "id": job.id,
                "request_id": job.request_id,
                "kind": job.kind,
                "state": job.state.value,
                "gpu_blocks": list(job.gpu_blocks),
                "num_bytes": job.num_bytes,
            }
            for job in (engine.unreleased_jobs() if started else ())
        ],
    }


async def _admin(service: OffloadService | None, method: str, action: str, query: bytes) -> Answer:
    if service is None:
        return Answer(HTTPStatus.SERVICE_UNAVAILABLE, b"not started\n")
    if method != "POST":
        return _wrong_method(b"POST")
    name, _, rest = action.partition("/")
    if name == "reset":
        return await _json({"dropped_blocks": await service.reset_cache()})
    if name in ("enable", "disable"):
        service.enabled = name == "enable"
        return await _json({"enabled": service.enabled})
    if name in ("pause_stores", "resume_stores"):
        service.pause_stores(name == "pause_stores")
        return await _json({"stores_paused": name == "pause_stores"})
    if name == "drain":
        seconds = _number(parse_qs(query.decode("latin-1")).get("timeout", [str(_DRAIN_SECONDS)])[-1])
        if seconds is None:
            return Answer(HTTPStatus.BAD_REQUEST, b"timeout is a number of seconds\n")
        return await _json({"drained": await service.drain(seconds)})
    if name == "abort" and rest:
        return await _json({"known": service.abort(rest)})
    actions = b"reset, enable, disable, pause_stores, resume_stores, drain, abort/REQUEST_ID\n"
    return Answer(HTTPStatus.NOT_FOUND, actions)


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) and number >= 0 else None


def _wrong_method(allowed: bytes) -> Answer:
    return Answer(HTTPStatus.METHOD_NOT_ALLOWED, b"use " + allowed + b"\n", headers=((b"allow", allowed),))


async def _json(value: object) -> Answer:
    body = await asyncio.to_thread(json.dumps, value, default=str)
    return Answer(HTTPStatus.OK, body.encode() + b"\n", JSON)


def _headers(scope: Scope) -> dict[str, str]:
    return {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope.get("headers", ())}


async def _reply(send: Send, answer: Answer, *, with_body: bool) -> None:
    headers = [
        (b"content-type", answer.content_type.encode("latin-1")),
        (b"content-length", str(len(answer.body)).encode()),
        (b"cache-control", b"no-store"),
        *answer.headers,
    ]
    await send({"type": "http.response.start", "status": int(answer.status), "headers": headers})
    await send({"type": "http.response.body", "body": answer.body if with_body else b""})


async def _lifespan(receive: Receive, send: Send) -> None:
    """Answer a server that runs this app alone; the service is started elsewhere."""
    while True:
        message = await receive()
        if message["type"] == "lifespan.startup":
            await send({"type": "lifespan.startup.complete"})
        elif message["type"] == "lifespan.shutdown":
            await send({"type": "lifespan.shutdown.complete"})
            return
