"""The ASGI app beside a service."""

from __future__ import annotations

import asyncio
import threading

import httpx
import pytest
from fastapi import FastAPI
from service.harness import Rig, tokens

from kvoffload.asgi import make_app


def client_of(app):
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test")


async def test_a_sick_cache_is_not_a_dead_server(caplog):
    """A-P6."""
    rig = Rig()
    async with rig.service() as service, client_of(make_app(service, state=True)) as client:
        service.engine.break_down("the completion bridge failed", OSError("bad descriptor"))
        assert (await client.get("/livez")).status_code == 200
        ready = await client.get("/readyz")
        assert (ready.status_code, "serving misses" in ready.text) == (200, True)
        state = (await client.get("/state")).json()
        assert state["health"] == {"ok": False, "reason": service.health().reason}
        metrics = (await client.get("/metrics")).text
        healthy = [line for line in metrics.splitlines() if line.startswith("kvoffload_healthy")]
        assert healthy[0].endswith(" 0.0")


async def test_service_that_raises_when_sick_is_not_ready(caplog):
    rig = Rig(fail_open=False)
    async with rig.service() as service, client_of(make_app(service)) as client:
        assert (await client.get("/readyz")).status_code == 200
        service.engine.break_down("test", OSError("device lost"))
        assert (await client.get("/readyz")).status_code == 503
        assert (await client.get("/livez")).status_code == 200


async def test_app_that_is_built_before_its_service_says_not_started_and_closed():
    rig = Rig()
    found = []
    app = make_app(lambda: found[0] if found else None, state=True, admin=True)
    async with client_of(app) as client:
        for path in ("/readyz", "/metrics", "/state"):
            assert (await client.get(path)).status_code == 503
        assert (await client.get("/livez")).status_code == 200
        async with rig.service() as service:
            found.append(service)
            assert (await client.get("/readyz")).status_code == 200
        assert (await client.get("/readyz")).status_code == 503
        assert (await client.get("/metrics")).status_code == 200, "the last numbers stay readable"
        assert (await client.get("/state")).json()["health"]["reason"] == "closed"
        assert (await client.post("/admin/reset")).status_code == 409


async def test_state_and_admin_are_served_only_where_asked_for():
    rig = Rig()
    async with rig.service() as service, client_of(make_app(service)) as client:
        assert (await client.get("/state")).status_code == 404
        assert (await client.post("/admin/reset")).status_code == 404


async def test_state_shows_jobs_and_pins_by_owner_but_no_key_and_no_token():
    """A-P5."""
    rig = Rig(capacity=4)
    async with rig.service() as service, client_of(make_app(service, state=True)) as client:
        rig.stores.hold()
        async with service.request("r", service.chain(tokens(8)), gpu_blocks=[0, 1], free=rig.free) as request:
            job = request.store(computed_tokens=8, ready="host-visible")
            await asyncio.sleep(0)
            state = (await client.get("/state")).json()
            assert state["jobs"] == [
                {
                    "id": job.id,
                    "request_id": "r",
                    "kind": "store",
                    "state": "running",
                    "gpu_blocks": [0, 1],
                    "num_bytes": 256,
                }
            ]
            rig.stores.finish_all()
            await job
            async with request.lease():
                assert (await client.get("/state")).json()["pins_by_owner"] == {"r": 2}
            text = (await client.get("/state")).text
            assert request.chain.keys(0)[0].hex() not in text


async def test_admin_resets_switches_pauses_drains_and_aborts():
    rig = Rig()
    async with (
        rig.service() as service,
        client_of(make_app(service, admin=True)) as client,
        service.request("r", service.chain(tokens(8)), gpu_blocks=[0, 1], free=rig.free) as request,
    ):
        await request.store(computed_tokens=8, ready="host-visible")
        assert (await client.get("/admin/reset")).status_code == 405
        assert (await client.post("/admin/reset")).json() == {"dropped_blocks": 2}
        assert (await client.post("/admin/disable")).json() == {"enabled": False}
        assert (await client.post("/admin/enable")).json() == {"enabled": True}
        assert (await client.post("/admin/pause_stores")).json() == {"stores_paused": True}
        assert (await client.post("/admin/resume_stores")).json() == {"stores_paused": False}
        assert (await client.post("/admin/drain?timeout=1")).json() == {"drained": True}
        assert (await client.post("/admin/drain?timeout=soon")).status_code == 400
        assert (await client.post("/admin/abort/r")).json() == {"known": True}
        assert (await client.post("/admin/abort/nobody")).json() == {"known": False}
        assert (await client.post("/admin/explode")).status_code == 404


async def test_mounted_under_a_prefix_it_answers_there():
    rig = Rig()
    async with rig.service() as service:
        app = FastAPI()
        app.mount("/kv", make_app(service))
        async with client_of(app) as client:
            assert (await client.get("/kv/livez")).text == "alive\n"
            assert (await client.head("/kv/readyz")).content == b""
            assert (await client.post("/kv/metrics")).status_code == 405
            missing = await client.get("/kv/nothing")
            assert (missing.status_code, missing.text) == (404, "/metrics, /livez, /readyz\n")


async def test_metrics_are_rendered_off_the_loop(monkeypatch):
    rig = Rig()
    async with rig.service() as service, client_of(make_app(service)) as client:
        rendered_in = []
        render = service.metrics.render

        def noted(accept=""):
            rendered_in.append(threading.current_thread())
            return render(accept)

        monkeypatch.setattr(service.metrics, "render", noted)
        response = await client.get("/metrics", headers={"accept": "application/openmetrics-text"})
        assert "openmetrics" in response.headers["content-type"]
        assert rendered_in != []
        assert threading.main_thread() not in rendered_in


async def test_page_that_fails_is_a_500_and_one_log_line(monkeypatch, caplog):
    rig = Rig()
    async with rig.service() as service, client_of(make_app(service, state=True)) as client:
        monkeypatch.setattr(service, "stats", lambda: 1 / 0)
        assert (await client.get("/state")).status_code == 500
        assert "answering /state failed" in caplog.text


@pytest.mark.parametrize("kind", ["lifespan", "websocket"])
async def test_other_kinds_of_connection_are_answered_as_the_protocol_asks(kind):
    sent = []
    inbox = iter([{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}])

    async def receive():
        return next(inbox)

    async def send(message):
        sent.append(message["type"])

    await make_app(lambda: None)({"type": kind}, receive, send)
    expected = {
        "lifespan": ["lifespan.startup.complete", "lifespan.shutdown.complete"],
        "websocket": ["websocket.close"],
    }
    assert sent == expected[kind]
