"""What a command shows beside its service: the probes mean what those of the ASGI app mean."""

from __future__ import annotations

import asyncio
import urllib.error
import urllib.request

import pytest
from service.harness import Rig

from kvoffload.cli.metrics_server import MetricsServer
from kvoffload.cli.observe import Observer


def _status(url):
    try:
        with urllib.request.urlopen(url, timeout=10) as reply:
            return reply.status
    except urllib.error.HTTPError as error:
        with error:
            return error.code


@pytest.mark.parametrize(("fail_open", "when_sick"), [(True, 200), (False, 503)])
async def test_a_sick_service_is_ready_where_it_serves_misses_and_not_where_it_raises(fail_open, when_sick, caplog):
    """A-P6: as `/readyz` of the ASGI app says."""
    rig = Rig(fail_open=fail_open)
    with MetricsServer("127.0.0.1", 0) as server:
        async with rig.service() as service, Observer(server, None).beside(service):
            url = f"{server.url}/readyz"
            assert await asyncio.to_thread(_status, url) == 200
            service.engine.break_down("test", OSError("device lost"))
            assert await asyncio.to_thread(_status, url) == when_sick
        assert await asyncio.to_thread(_status, url) == 503
