"""The publisher: an `EventSink` that never blocks, and the thread that owns everything behind it.

`publish` puts the manager's events in the intake and returns. When that is full the changes fold into one entry per
block: the send is lost, consumers see a gap in the sequence, and a replay of it holds the truth. The thread collects
what arrives within the batching window, brings it to each lane, and sends sealed batches.
"""

from __future__ import annotations

import logging
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import zmq

from kvoffload.chain import BlockChain
from kvoffload.config import EventsConfig, OffloadConfig
from kvoffload.errors import ConfigError
from kvoffload.events.description import PublisherStats, describe_lane
from kvoffload.events.intake import Command, Intake, Publication
from kvoffload.events.lane import Lane
from kvoffload.events.listeners import Listeners
from kvoffload.events.merge import MergeReader
from kvoffload.events.register import AutoRegistration, address_towards, dialled, registration
from kvoffload.events.replay import ReplayServer
from kvoffload.events.settings import default_instance_id, resolve
from kvoffload.events.wire import BlockStored, Hash
from kvoffload.events.withheld import REASONS, WHY
from kvoffload.keys import BlockInfo, OffloadKey
from kvoffload.manager.base import OffloadingEvent

logger = logging.getLogger(__name__)

_LONGEST_WAIT_SECONDS = 3600.0


class FeedPublisher:
    """Publishes residency changes on one or more endpoints.

    `publish`, `describe` and the `gpu_*` methods may be called from any thread; they return at once and never raise.
    Mappings of infos are handed over: do not change them afterwards.

    Args:
        config: Endpoints and behaviour.
        model_name: Model in the default topic.
        instance_id: Name of this instance; default: host and process id.
        engine_block_size: Tokens in an engine block, for `describe`.
        clock: Wall clock in seconds: `ts` of batches, and `epoch` sequences.
        monotonic: Monotonic clock in seconds.

    Raises:
        ConfigError: Settings that exclude each other, or an endpoint that cannot be bound.
    """

    def __init__(
        self,
        config: EventsConfig,
        *,
        model_name: str | None = None,
        instance_id: str | None = None,
        engine_block_size: int | None = None,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.model_name = model_name
        self.instance_id = instance_id or default_instance_id()
        self.engine_block_size = engine_block_size
        self._monotonic = monotonic
        if len(config.merge_replay_from) > len(config.merge_from):
            raise ConfigError(
                f"merge_replay_from names {len(config.merge_replay_from)} feeds, merge_from {len(config.merge_from)}: "
                "give one replay endpoint for each feed, or none"
            )
        self._intake = Intake(config.max_queue_size)
        replays = [*config.merge_replay_from, *[None] * len(config.merge_from)]
        self._merged = [
            MergeReader(endpoint, replay, self._intake.command, alone=len(config.merge_from) == 1)
            for endpoint, replay in zip(config.merge_from, replays, strict=False)
        ]
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.lanes: list[Lane] = []
        try:
            for settings in resolve(config, model_name=model_name, instance_id=self.instance_id):
                self.lanes.append(Lane(settings, self._context, clock))
            self._listeners = Listeners(self.lanes, monotonic(), self._joined)
        except BaseException:
            for lane in self.lanes:
                lane.close()
            self._context.term()
            raise
        self._errors = 0
        self._warned: set[str] = set()
        self._closed = False
        self._stopping = threading.Event()
        self._sent_at = dict.fromkeys(self.lanes, monotonic())
        self._server = ReplayServer(self.lanes, self._describe_lane, self._tick)
        self._thread = threading.Thread(target=self._run, name="kvoffload-feed", daemon=True)
        self._registration: AutoRegistration | None = None

    # What callers use.

    @property
    def endpoints(self) -> list[str]:
        """Bound endpoints of the feed, with the real ports."""
        return [lane.endpoint for lane in self.lanes]

    @property
    def replay_endpoints(self) -> list[str | None]:
        """Bound replay endpoints, one for each of `endpoints`."""
        return [lane.replay_endpoint for lane in self.lanes]

    def start(self) -> None:
        """Start publishing: announces the new life on every endpoint."""
        for lane in self.lanes:
            lane.start()
        self._server.start()
        self._thread.start()
        for reader in self._merged:
            reader.start()
        if self.config.indexer is not None:
            host = address_towards(self.config.indexer)
            meant = [lane for lane in self.lanes if "dynamo" in lane.settings.consumers] or self.lanes
            bodies = [registration(dialled(self._describe_lane(meant[0]), host))]  # one slot, one feed
            self._registration = AutoRegistration(self.config.indexer, bodies)
            self._registration.start()

    def publish(self, events: Sequence[OffloadingEvent], infos: Mapping[OffloadKey, BlockInfo]) -> None:
        """Take the manager's events. Never blocks, never raises."""
        self._intake.publish(events, infos)

    def describe(self, infos: Mapping[OffloadKey, BlockInfo]) -> None:
        """Take infos of held blocks; those withheld for want of them are announced."""
        if infos:
            self.publish((), infos)

    def reannounce(self, medium: str | None = None) -> None:
        """Remove and store again everything announced (of one medium): right whatever a consumer holds."""
        self._intake.command(lambda lane: lane.journal.reannounce(medium))

    def gpu_stored(self, chain: BlockChain, first_block: int, num_blocks: int, *, group_idx: int = 0) -> None:
        """Engine blocks of `chain` became present on the GPU; each call is undone by one `gpu_removed`."""
        layout = chain.groups[group_idx]
        hashes = chain.block_hashes(group_idx)[: first_block + num_blocks]
        tokens = list(chain.token_ids[first_block * layout.block_size : len(hashes) * layout.block_size])
        extras = [chain.extra_keys_of(block, group_idx) for block in range(first_block, len(hashes))]
        salted = chain.cache_salt is not None or chain.lora_name is not None or any(extras)

        def stored(lane: Lane) -> None:
            names = [lane.codec.hash_of(h) for h in hashes]
            lane.residency.engine_stored(
                BlockStored(
                    names[first_block:],
                    names[first_block - 1] if first_block else None,
                    tokens,
                    layout.block_size,
                    None,
                    "GPU",
                    chain.lora_name,
                    extras if salted else None,
                    group_idx,
                    layout.kind,
                    layout.sliding_window,
                )
            )

        if len(hashes) > first_block:
            self._intake.command(stored)

    def gpu_removed(self, block_hashes: Sequence[bytes], *, group_idx: int = 0) -> None:
        """Engine blocks are no longer on the GPU."""
        gone = list(block_hashes)
        self._intake.command(
            lambda lane: lane.residency.engine_removed([lane.codec.hash_of(h) for h in gone], "GPU", group_idx)
        )

    def gpu_cleared(self) -> None:
        """The engine dropped its whole tier; what other media hold is announced again."""
        self._intake.command(lambda lane: lane.residency.engine_cleared("GPU"))

    def flush(self, timeout: float = 5.0) -> bool:
        """Wait until what was published before is on its way; False when it takes longer. At once when closed."""
        command = self._intake.command(lambda _lane: None)
        return command.done.wait(timeout)

    def stats(self) -> PublisherStats:
        """Return counters and gauges; cheap, from any thread."""
        counters = [lane.counters for lane in self.lanes]
        first = self.lanes[0]
        withheld, waiting = first.residency.withheld, len(self._intake)
        return PublisherStats(
            published_batches=sum(c.batches for c in counters),
            published_events=sum(c.events for c in counters),
            sent_bytes=sum(c.sent_bytes for c in counters),
            dropped=self._intake.dropped,
            lag=waiting,
            lag_seconds=max(0.0, self._monotonic() - max(self._sent_at.values())) if waiting else 0.0,
            subscribers=sum(c.subscribers for c in counters),
            announced=len(first.journal),
            withheld={str(reason): count for reason, count in withheld.sizes().items()},
            withheld_total={str(reason): withheld.total[reason] for reason in REASONS},
            replays=sum(c.replays for c in counters),
            active_replays=self._server.active,
            incomplete_replays=sum(c.incomplete_replays for c in counters),
            replays_given_up=sum(c.replays_given_up for c in counters),
            replays_refused=sum(c.replays_refused for c in counters),
            replay_messages=sum(c.replay_messages for c in counters),
            replay_bytes=sum(c.replay_bytes for c in counters),
            lives=first.counters.lives,
            next_sequence=first.journal.next,
            unencodable=withheld.total["unencodable"],
            decode_errors=sum(reader.decode_errors for reader in self._merged),
            merge_gaps=sum(reader.gaps for reader in self._merged),
            errors=self._errors,
        )

    def withheld_hashes(self) -> set[Hash]:
        """Return the hashes of the blocks that are present but not announced (first endpoint)."""
        lane = self.lanes[0]
        with lane.lock:
            return {lane.journal.tiers.hash_of(ident) for ident in lane.residency.withheld.blocks}

    def close(self, timeout: float = 5.0) -> bool:
        """Send what is queued and close; idempotent. False when a thread did not end in time (its sockets stay)."""
        if self._closed:
            return True
        self._closed = True
        self._intake.close()
        deadline = time.monotonic() + timeout
        if self._registration is not None:
            self._registration.stop(timeout / 4)
        merged = [reader.stop(max(deadline - time.monotonic(), 0)) for reader in self._merged]
        self._stopping.set()
        self._intake.wake()
        if self._thread.is_alive():
            self._thread.join(max(deadline - time.monotonic(), 0))
        ended = self._server.stop(max(deadline - time.monotonic(), 0.2)) and not self._thread.is_alive()
        ended = ended and all(merged)
        self._intake.end()
        if ended:
            self._listeners.close()
            for lane in self.lanes:
                lane.close()
            self._context.term()
        return ended

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        """Close what was never started nor closed: the context would wait for its sockets for ever."""
        if not getattr(self, "_closed", True):  # True: it was never made
            message = f"unclosed publisher of the feed {', '.join(self.endpoints)}"
            warnings.warn(message, ResourceWarning, stacklevel=2, source=self)
            self.close(0)

    # The thread.

    def _run(self) -> None:
        window = min(self.config.batch_window_seconds, _LONGEST_WAIT_SECONDS)
        idle = min(self.config.heartbeat_seconds or 1.0, _LONGEST_WAIT_SECONDS)
        collect = (lambda: self._stopping.wait(window)) if window else None
        while True:
            stopping = self._stopping.is_set()
            items = self._intake.take(0.0, None) if stopping else self._intake.take(idle, collect)
            try:
                self._process(items)
            except Exception:
                self._errors += 1
                logger.exception("the feed goes on after an error")
            if stopping and not len(self._intake):
                return

    def _process(self, items: list[Command | Publication]) -> None:
        now = self._monotonic()
        for lane in self.lanes:
            with lane.lock:
                for item in items:
                    self._apply(lane, item)
                lane.journal.seal()
                lane.renew()
                batches = lane.journal.take_sealed()
            self._warn_withheld(lane)
            lane.send(batches)
            if batches:
                self._sent_at[lane] = now
        fold = self._intake.take_fold()
        if fold is not None:
            for lane in self.lanes:
                with lane.lock:
                    lane.journal.skip(fold.lost - 1)
                    fold.apply(lane.residency)
                    lane.journal.seal(empty=True)
                    lane.journal.take_sealed()
                self._sent_at[lane] = now
        heartbeat = self.config.heartbeat_seconds
        for lane in self.lanes:
            if heartbeat and now - self._sent_at[lane] >= heartbeat * 0.99:
                self._sent_at[lane] = now
                with lane.lock:
                    lane.journal.seal(empty=True)
                    batches = lane.journal.take_sealed()
                lane.send(batches)
        for item in items:
            if isinstance(item, Command):
                item.done.set()

    def _apply(self, lane: Lane, item: Command | Publication) -> None:
        try:
            if isinstance(item, Command):
                item.action(lane)
                return
            events, infos = item
            residency = lane.residency
            for event in events:
                medium = event.medium
                if event.removed:
                    for key in event.keys:
                        residency.remove(key, medium)
                else:
                    residency.store_all(event.keys, medium, infos)
            if not events:
                residency.describe(infos)
        except Exception:
            self._errors += 1
            logger.exception("an event could not be published")

    def _warn_withheld(self, lane: Lane) -> None:
        for reason, count in lane.residency.withheld.total.items():
            if count and reason not in self._warned:
                self._warned.add(reason)
                logger.warning("some blocks are not announced on the feed (%s): %s", reason, WHY[reason])

    def _joined(self, lane: Lane) -> None:
        if lane.settings.reannounce_on_join:
            self._intake.command(lambda each: each.journal.reannounce() if each is lane else None)

    def _tick(self) -> None:
        self._listeners.poll(self._monotonic())

    def _describe_lane(self, lane: Lane) -> dict[str, Any]:
        return describe_lane(
            lane,
            instance_id=self.instance_id,
            model_name=self.model_name,
            block_size=self.engine_block_size,
            heartbeat_seconds=self.config.heartbeat_seconds,
        )


def create_publisher(config: OffloadConfig) -> FeedPublisher | None:
    """Return the publisher that `config.events` describes, not started; None when the feed is off.

    Raises:
        ConfigError: Its settings cannot be used.
    """
    if config.events is None:
        return None
    return FeedPublisher(
        config.events,
        model_name=config.model_name,
        instance_id=config.instance_id,
        engine_block_size=config.gpu_block_sizes[0],
    )
