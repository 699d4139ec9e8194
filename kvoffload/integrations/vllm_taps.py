"""The four methods of vLLM's `OffloadingConnector` that the adapter wraps, and nothing else of vLLM is changed.

vLLM 0.32's connector knows no failed copies (it asserts success) and hands its manager no tokens. Both are on the
public interface of KV connectors, one call further out, so the adapter wraps that call on the connector's class:

===============================  =========  =================================================================
method                           runs in    what is added
===============================  =========  =================================================================
`on_new_request`                 scheduler  the manager gets a view of the request, to describe its blocks
`get_transfer_results`           worker     requests whose load failed are named in `failed_recving`
`build_connector_worker_meta`    worker     tickets of failed copies travel with the worker's report
`update_connector_output`        scheduler  they reach the manager before vLLM calls the copies complete
===============================  =========  =================================================================

A connector whose manager or worker is not kvoffload's behaves as before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from kvoffload.integrations.vllm_manager import KVOffloadManager
from kvoffload.integrations.vllm_requests import GroupView
from kvoffload.integrations.vllm_worker import KVOffloadWorker

_INSTALLED = "_kvoffload_taps"


@dataclass
class KVOffloadWorkerMetadata(OffloadingWorkerMetadata):  # type: ignore[misc] # vLLM is untyped here
    """A worker's report with the tickets of copies that failed on it.

    Attributes:
        failed_tickets: Reservations whose copy did not bring all bytes; a failure on one rank is one on all.
    """

    failed_tickets: set[int] = field(default_factory=set)

    def aggregate(self, other: Any) -> KVOffloadWorkerMetadata:  # noqa: ANN401 - vLLM's type
        """Return the report of both workers."""
        merged = super().aggregate(other)
        return KVOffloadWorkerMetadata(
            completed_jobs=merged.completed_jobs,
            transfer_stats=merged.transfer_stats,
            failed_tickets=self.failed_tickets | getattr(other, "failed_tickets", set()),
        )


def install_taps() -> None:
    """Wrap the four methods; once per process, calls after the first change nothing."""
    if getattr(OffloadingConnector, _INSTALLED, False):
        return
    for tap in (on_new_request, get_transfer_results, build_connector_worker_meta, update_connector_output):
        original = getattr(OffloadingConnector, tap.__name__)
        setattr(OffloadingConnector, tap.__name__, _wrapped(original, tap))
    setattr(OffloadingConnector, _INSTALLED, True)


def _wrapped(original: Callable[..., Any], tap: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(self: Any, *args: Any) -> Any:  # noqa: ANN401 - stands for a method of vLLM
        return tap(original, self, *args)

    return method


def _manager(connector: Any) -> KVOffloadManager | None:  # noqa: ANN401
    manager = getattr(connector.connector_scheduler, "manager", None)
    return manager if isinstance(manager, KVOffloadManager) else None


def _worker(connector: Any) -> KVOffloadWorker | None:  # noqa: ANN401
    worker = getattr(connector.connector_worker, "worker", None)
    return worker if isinstance(worker, KVOffloadWorker) else None


def on_new_request(original: Callable[..., Any], connector: Any, request: Any) -> None:  # noqa: ANN401
    """Give the manager a view of the request when blocks are to be described."""
    original(connector, request)
    manager = _manager(connector)
    if manager is not None and manager.wants_requests:
        manager.attach_request(request, functools.partial(_groups, connector))


def _groups(connector: Any) -> dict[int, GroupView]:  # noqa: ANN401
    return {
        group.group_idx: GroupView(
            tokens_per_block=group.tokens_per_block,
            tokens_per_chunk=group.tokens_per_chunk,
            kind=group.kv_event_group_spec.kv_cache_spec_kind or "full_attention",
            sliding_window=group.kv_event_group_spec.kv_cache_spec_sliding_window,
        )
        for group in connector.connector_scheduler.config.kv_group_configs
    }


def get_transfer_results(original: Callable[..., Any], connector: Any, finished_req_ids: set[str]) -> Any:  # noqa: ANN401
    """Name the requests whose load failed: vLLM recomputes or fails them, by its `kv_load_failure_policy`."""
    results = original(connector, finished_req_ids)
    worker = _worker(connector)
    failed = worker.take_failed_requests() if worker is not None else None
    return replace(results, failed_recving=results.failed_recving | failed) if failed else results


def build_connector_worker_meta(original: Callable[..., Any], connector: Any) -> Any:  # noqa: ANN401
    """Let the tickets of failed copies travel with the completions they belong to."""
    meta = original(connector)
    worker = _worker(connector)
    if meta is None or worker is None:
        return meta
    return KVOffloadWorkerMetadata(
        completed_jobs=meta.completed_jobs,
        transfer_stats=meta.transfer_stats,
        failed_tickets=worker.take_failed_tickets(),
    )


def update_connector_output(original: Callable[..., Any], connector: Any, connector_output: Any) -> None:  # noqa: ANN401
    """Tell the manager which copies failed before vLLM calls them complete."""
    manager = _manager(connector)
    failed = getattr(connector_output.kv_connector_worker_meta, "failed_tickets", None)
    if manager is not None and failed:
        manager.note_failed(failed)
    original(connector, connector_output)
