"""What describes a block reaches the feed once, also when it comes with a later offer."""

from __future__ import annotations

from service.harness import BLOCK, Rig, tokens


class Sink:
    """Remembers which keys were described, and when."""

    def __init__(self) -> None:
        self.with_store: list[bytes] = []
        self.later: list[bytes] = []

    def publish(self, events, infos):
        self.with_store += [key for event in events if not event.removed for key in event.keys if key in infos]

    def describe(self, infos):
        self.later += list(infos)


async def _store(service, name, chain):
    async with service.request(name, chain, gpu_blocks=[0, 1], free=None) as request:
        await request.store(computed_tokens=2 * BLOCK, ready="host-visible")


async def test_infos_that_come_with_a_later_offer_are_handed_over_once_and_known_ones_never_again():
    sink, rig = Sink(), Rig()
    async with rig.service(events=sink) as service:
        full = service.chain(tokens(2 * BLOCK))
        hashes = full.block_hashes()
        await _store(service, "bare", service.chain(block_hashes=hashes))
        assert (sink.with_store, sink.later) == ([], [])
        described = service.chain(tokens(2 * BLOCK), block_hashes=hashes)
        await _store(service, "described", described)
        assert sink.later == list(described.keys())
        await _store(service, "again", described)
        assert sink.later == list(described.keys())


async def test_described_blocks_that_leave_and_come_back_are_described_with_their_store():
    sink, rig = Sink(), Rig(capacity=2)
    async with rig.service(events=sink) as service:
        first, other = service.chain(tokens(2 * BLOCK)), service.chain(tokens(2 * BLOCK, 5))
        for turn, chain in enumerate((first, other, first)):
            await _store(service, str(turn), chain)
        assert sink.with_store == [*first.keys(), *other.keys(), *first.keys()]
        assert sink.later == []
        assert service.engine._core.undescribed == set()
