"""docker-compose.yml and what it mounts fit together."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from kvoffload import __version__
from kvoffload.cli.main import main

ROOT = Path(__file__).parents[3]
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES = COMPOSE["services"]
SERVICE_KEYS = {
    "image", "build", "command", "ports", "healthcheck", "stop_grace_period", "restart", "volumes",
    "depends_on", "environment",
}  # fmt: skip


def mounts(service: str) -> dict[str, Path]:
    """Container path to host path of a service's bind mounts."""
    found = {}
    for volume in SERVICES[service].get("volumes", ()):
        source, target = volume.split(":")[:2]
        if source.startswith("."):
            found[target] = ROOT / source
            assert volume.endswith(":ro"), volume
        else:
            assert source in COMPOSE["volumes"], volume
    return found


def test_the_file_has_the_three_services_and_only_known_keys():
    assert set(COMPOSE) == {"name", "services", "volumes"}
    assert set(SERVICES) == {"kvoffload", "prometheus", "grafana"}
    for name, service in SERVICES.items():
        assert set(service) <= SERVICE_KEYS, name


@pytest.mark.parametrize("name", SERVICES)
def test_images_are_pinned_ports_are_on_loopback_and_health_is_checked(name):
    service = SERVICES[name]
    assert re.fullmatch(r"[\w./-]+:v?\d+\.\d+\.\d+", service["image"])
    for port in service["ports"]:
        assert re.fullmatch(r"127\.0\.0\.1:(\d+):\1", port)
    assert service["healthcheck"]["test"][0] == "CMD"
    assert {"interval", "timeout", "retries"} <= set(service["healthcheck"])
    for target, source in mounts(name).items():
        assert source.exists(), target


def test_the_image_is_this_version_built_from_a_pinned_base():
    service = SERVICES["kvoffload"]
    assert service["image"] == f"kvoffload:{__version__}"
    dockerfile = service["build"]["dockerfile_inline"]
    assert re.search(r"^FROM python:3\.\d+\.\d+-slim-\w+$", dockerfile, re.MULTILINE)
    assert service["build"]["context"] == "."


def test_prometheus_scrapes_the_service_at_the_port_it_serves():
    command = SERVICES["kvoffload"]["command"]
    port = command[command.index("--http") + 1].rsplit(":", 1)[1]
    config = yaml.safe_load(mounts("prometheus")["/etc/prometheus/prometheus.yml"].read_text())
    (job,) = config["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"kvoffload:{port}"]}]
    assert f"127.0.0.1:{port}:{port}" in SERVICES["kvoffload"]["ports"]
    for name in config["rule_files"]:
        assert f"/etc/prometheus/{name}" in mounts("prometheus")
    assert "--config.file=/etc/prometheus/prometheus.yml" in SERVICES["prometheus"]["command"]


def test_grafana_finds_its_source_and_its_dashboards():
    provisioning = mounts("grafana")["/etc/grafana/provisioning"]
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yml").read_text())["datasources"]
    assert (source["type"], source["url"]) == ("prometheus", "http://prometheus:9090")
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "kvoffload.yml").read_text())["providers"]
    assert mounts("grafana")[provider["options"]["path"]] == ROOT / "dashboards" / "grafana"
    folder, _, home = SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"].rpartition("/")
    assert (mounts("grafana")[folder] / home).exists()


def test_services_wait_for_each_other():
    assert SERVICES["prometheus"]["depends_on"] == {"kvoffload": {"condition": "service_healthy"}}
    assert SERVICES["grafana"]["depends_on"] == {"prometheus": {"condition": "service_healthy"}}


def test_the_command_line_knows_the_options_of_the_command(capsys):
    command = SERVICES["kvoffload"]["command"]
    assert command[0] == "kvoffload"
    with pytest.raises(SystemExit) as done:
        main([*command[1:], "--help"])
    assert done.value.code == 0
    text = capsys.readouterr().out
    assert all(option in text for option in command if option.startswith("--"))
