"""Registers a feed with NVIDIA Dynamo's indexer, over HTTP.

Dynamo keeps a watermark per registration and ignores lower numbers, so a registration that exists is removed first.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
import urllib.error
import urllib.request
import zlib
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from kvoffload.errors import KVOffloadError
from kvoffload.events.settings import reachable

logger = logging.getLogger(__name__)


class IndexerError(KVOffloadError):
    """The indexer refused, or cannot be reached."""


def instance_number(instance_id: str) -> int:
    """Return the number under which an instance registers when none is given: the same in every process."""
    return zlib.crc32(instance_id.encode())


def registration(
    description: Mapping[str, Any], *, instance: int | None = None, model: str | None = None, dp_rank: int | None = None
) -> dict[str, Any]:
    """Return the body of a registration from what the publisher says of itself."""
    return {
        "instance_id": instance_number(description["instance_id"]) if instance is None else instance,
        "endpoint": description["endpoint"],
        "replay_endpoint": description["replay_endpoint"],
        "model_name": model or description["model_name"] or "model",
        "block_size": description["block_size"],
        "dp_rank": description["rank"] if dp_rank is None else dp_rank,
    }


def registered_instance(workers: Sequence[Mapping[str, Any]], endpoint: str) -> int | None:
    """Return the instance that is registered with an endpoint: another one would count the same worker twice."""
    for worker in workers:
        if endpoint in (worker.get("endpoints") or {}).values():
            return int(worker["instance_id"])
    return None


def dialled(description: Mapping[str, Any], host: str) -> dict[str, Any]:
    """Return a description whose endpoints others can dial: a wildcard address is replaced by `host`."""
    replay = description["replay_endpoint"]
    return {
        **description,
        "endpoint": reachable(description["endpoint"], host),
        "replay_endpoint": None if replay is None else reachable(replay, host),
    }


def address_towards(url: str) -> str:
    """Return this host's address on the way to a URL's host; the host's name when that cannot be told."""
    target = urlsplit(url).hostname or ""
    try:
        family, kind, _, _, address = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # of a datagram socket: chooses the way, sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return socket.gethostname()


class DynamoIndexer:
    """Dynamo's indexer behind a URL."""

    def __init__(self, url: str, timeout: float = 5.0) -> None:
        self.url = url.rstrip("/")
        self._timeout = timeout

    def workers(self) -> list[dict[str, Any]]:
        """Return the registrations.

        Raises:
            IndexerError: It cannot be reached.
        """
        found = self._call("/workers")
        return found if isinstance(found, list) else []

    def register(self, body: Mapping[str, Any]) -> None:
        """Remove what is registered under the instance and model, then register.

        Raises:
            IndexerError: It refuses or cannot be reached.
        """
        instance, model, slot = body["instance_id"], body["model_name"], str(body["dp_rank"])
        slots = {
            str(each)
            for worker in self.workers()
            if worker.get("instance_id") == instance and worker.get("model_name") == model
            for each in worker.get("endpoints") or {}
        }
        if slot in slots or not slots:  # Dynamo 1.6 removes all slots at once: a free one is taken without that
            self.unregister(instance, model)
            for other in sorted(slots - {slot}):
                logger.warning("slot %s of instance %s is no longer registered: register it again", other, instance)
        self._call("/register", body)

    def unregister(self, instance: int, model: str) -> bool:
        """Remove a registration with all its blocks; False when there was none.

        Raises:
            IndexerError: It cannot be reached.
        """
        try:
            self._call("/unregister", {"instance_id": instance, "model_name": model})
        except IndexerError as error:
            if isinstance(error.__cause__, urllib.error.HTTPError):
                return False
            raise
        return True

    def query(self, token_ids: Sequence[int], model: str, instance: int) -> dict[str, int]:
        """Return what an instance holds of a prompt: tokens per tier; lower tiers include the higher ones.

        Raises:
            IndexerError: It cannot be reached.
        """
        try:
            answer = self._call("/query", {"token_ids": list(token_ids), "model_name": model})
        except IndexerError as error:
            if not isinstance(error.__cause__, urllib.error.HTTPError):
                raise
            answer = {}
        found = answer.get("instances", {}).get(str(instance), {}) if isinstance(answer, dict) else {}
        return {tier: int(found.get(tier, 0)) for tier in ("gpu", "cpu")}

    def _call(self, path: str, body: Mapping[str, Any] | None = None) -> Any:  # noqa: ANN401 - JSON
        data = None if body is None else json.dumps(body).encode()
        if not self.url.startswith(("http://", "https://")):
            raise IndexerError(
                f"indexer URL {self.url!r} must begin with http:// or https://, such as http://127.0.0.1:8090"
            )
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})  # noqa: S310
        try:
            with urllib.request.urlopen(request, timeout=self._timeout) as answer:  # noqa: S310
                return json.loads(answer.read() or b"null")
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace").strip()
            error.close()
            raise IndexerError(f"{self.url}{path}: {error.code} {text}") from error
        except (OSError, ValueError) as error:
            why = getattr(error, "reason", None) or error
            raise IndexerError(f"{self.url}{path}: no usable answer ({why}); does the indexer run there?") from error


class AutoRegistration:
    """Registers at start and unregisters at close, in threads of its own; failures are logged, never raised."""

    def __init__(self, url: str, bodies: Sequence[Mapping[str, Any]]) -> None:
        self._indexer = DynamoIndexer(url, timeout=2.0)
        self._bodies = bodies
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Register, in the background."""
        self._thread = threading.Thread(target=self._register, name="kvoffload-register", daemon=True)
        self._thread.start()

    def stop(self, timeout: float) -> None:
        """Unregister within `timeout` seconds."""
        if self._thread is not None:
            self._thread.join(timeout)
        closing = threading.Thread(target=self._unregister, name="kvoffload-unregister", daemon=True)
        closing.start()
        closing.join(timeout)

    def _register(self) -> None:
        for body in self._bodies:
            try:
                self._indexer.register(body)
                logger.info("registered %s with %s", body["endpoint"], self._indexer.url)
            except Exception as error:  # noqa: BLE001 - never fatal
                logger.warning("the feed is not registered: %s", error)

    def _unregister(self) -> None:
        for body in self._bodies:
            try:
                self._indexer.unregister(body["instance_id"], body["model_name"])
            except Exception as error:  # noqa: BLE001 - never fatal
                logger.warning("the feed is not unregistered: %s", error)
