"""The commands' own HTTP server: metrics, and probes that do not kill a serving process."""

import urllib.error
import urllib.request

import pytest

from kvoffload.cli.metrics_server import MetricsServer
from kvoffload.metrics.exposition import MetricsExposition
from kvoffload.metrics.snapshot import SnapshotRelay


@pytest.fixture
def server():
    with MetricsServer("127.0.0.1", 0) as running:
        yield running


def get(server, path, **headers):
    request = urllib.request.Request(server.url + path, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=10) as reply:
            return reply.status, reply.read().decode(), reply.headers["Content-Type"]
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode(), error.headers["Content-Type"]


def test_metrics_come_as_text_or_as_openmetrics(server):
    assert get(server, "/metrics")[0] == 503
    server.show(MetricsExposition(SnapshotRelay()))
    status, body, kind = get(server, "/metrics?x=1")
    assert (status, kind.split(";")[0]) == (200, "text/plain")
    assert "# TYPE kvoffload_requests_total counter" in body
    status, body, kind = get(server, "/metrics", Accept="application/openmetrics-text")
    assert (status, kind.split(";")[0]) == (200, "application/openmetrics-text")
    assert body.endswith("# EOF\n")


def test_a_head_request_is_answered_without_a_body(server):
    """As `curl -I` and `wget --spider` ask."""
    request = urllib.request.Request(server.url + "/livez", method="HEAD")
    with urllib.request.urlopen(request, timeout=10) as reply:
        assert (reply.status, reply.headers["Content-Length"], reply.read()) == (200, "6", b"")


def test_liveness_holds_whatever_the_cache_says_and_readiness_follows_it(server):
    """A-P6: a sick cache is not a dead server."""
    health = [True]
    assert get(server, "/readyz")[0] == 503
    server.show(MetricsExposition(SnapshotRelay()), lambda: health[0])
    assert (get(server, "/livez")[0], get(server, "/readyz")[0]) == (200, 200)
    health[0] = False
    assert (get(server, "/livez")[0], get(server, "/readyz")[0]) == (200, 503)
    assert get(server, "/")[0] == 404


def test_an_address_in_use_is_refused(server):
    port = int(server.url.rsplit(":", 1)[1])
    with pytest.raises(OSError, match="in use"):
        MetricsServer("127.0.0.1", port)
