"""Where the adapter announces stored and removed blocks: kvoffload's own publisher, or vLLM's.

`OwnFeed` hands events to an `EventSink` with the description of each stored block; nothing goes through vLLM's
publisher then, which would announce every block twice. `VllmFeed` gives vLLM the events it drains each step. vLLM
describes them itself if `self_describing_kv_events` is set, but at a reset it forgets the descriptions before the
removals are drained, and would announce a removal of the last engine block of each offloaded block only; so the adapter
names every engine block in those.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from vllm.v1.kv_offload.base import Medium
from vllm.v1.kv_offload.base import OffloadingEvent as VllmEvent

from kvoffload.keys import BlockInfo, OffloadKey, get_offload_group_idx, make_offload_key
from kvoffload.manager.base import EventSink, OffloadingEvent


class Feed(ABC):
    """One way out for the manager's events.

    Attributes:
        infos: Descriptions of blocks that are being stored; the manager adds them, the feed takes them.
        needs_infos: Whether blocks are to be described.
    """

    needs_infos = True

    def __init__(self) -> None:
        self.infos: dict[OffloadKey, BlockInfo] = {}

    @abstractmethod
    def publish(self, events: Sequence[OffloadingEvent]) -> None:
        """Announce what became readable and what is gone."""

    @abstractmethod
    def reset(self, events: Sequence[OffloadingEvent]) -> None:
        """Announce the removals of a reset; every block that is being stored is forgotten."""

    def forget(self, keys: Iterable[OffloadKey]) -> None:
        """Drop the descriptions of blocks whose store failed."""
        for key in keys:
            self.infos.pop(key, None)

    def take(self) -> Iterable[VllmEvent]:
        """Return and clear what vLLM is to publish."""
        return ()

    def close(self) -> None:
        """Stop announcing; idempotent."""


class OwnFeed(Feed):
    """Announces on kvoffload's own publisher."""

    def __init__(self, sink: EventSink) -> None:
        super().__init__()
        self.sink = sink

    def publish(self, events: Sequence[OffloadingEvent]) -> None:
        """Hand the events over, with the descriptions of what was stored."""
        infos = {}
        for event in events:
            if not event.removed:
                for key in event.keys:
                    info = self.infos.pop(key, None)
                    if info is not None:
                        infos[key] = info
        self.sink.publish(events, infos)

    def reset(self, events: Sequence[OffloadingEvent]) -> None:
        """Hand the removals over; descriptions of running stores are void."""
        self.infos.clear()
        if events:
            self.sink.publish(events, {})

    def close(self) -> None:
        """Close the publisher, if it can be closed."""
        close = getattr(self.sink, "close", None)
        if close is not None:
            close()


class VllmFeed(Feed):
    """Keeps events until vLLM's scheduler drains them.

    Args:
        factor: Engine blocks in an offloaded block.
    """

    def __init__(self, factor: int) -> None:
        super().__init__()
        self.needs_infos = factor > 1
        self._outbox: list[VllmEvent] = []
        self._engine_keys: dict[OffloadKey, list[OffloadKey]] = {}

    def publish(self, events: Sequence[OffloadingEvent]) -> None:
        """Keep the events for the next drain."""
        for event in events:
            self._outbox.append(VllmEvent(keys=list(event.keys), medium=Medium.CPU, removed=event.removed))
            for key in event.keys:
                if event.removed:
                    self._engine_keys.pop(key, None)
                elif (info := self.infos.pop(key, None)) is not None:
                    group = get_offload_group_idx(key)
                    self._engine_keys[key] = [make_offload_key(value, group) for value in info.block_hashes]

    def reset(self, events: Sequence[OffloadingEvent]) -> None:
        """Replace what was not drained by removals of what was announced."""
        # Blocks whose store vLLM has not drained were never announced: neither their store nor their removal is news.
        unseen = {key for event in self._outbox if not event.removed for key in event.keys}
        gone = {key for event in self._outbox if event.removed for key in event.keys}
        gone.update(key for event in events for key in event.keys)
        named = [name for key in gone - unseen for name in self._engine_keys.get(key, (key,))]
        self._outbox = [VllmEvent(keys=named, medium=Medium.CPU, removed=True)] if named else []
        self._engine_keys.clear()
        self.infos.clear()

    def take(self) -> Iterable[VllmEvent]:
        """Return and clear the events kept."""
        taken, self._outbox = self._outbox, []
        return taken
