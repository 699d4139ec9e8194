import pytest

from kvoffload.manager.base import ReqContext
from kvoffload.manager.cpu import CPUOffloadingManager
from kvoffload.manager.reuse_filter import FilterReusedOffloadingManager

CTX = ReqContext()


class Store:
    """Short words for a manager: `s.store("AB")` offers and completes the keys b"A" and b"B"."""

    def __init__(self, manager):
        self.manager = manager

    @staticmethod
    def keys(names):
        return [name.encode() for name in names]

    def offer(self, names, ctx=CTX):
        return self.manager.prepare_store(self.keys(names), ctx)

    def store(self, names, ctx=CTX):
        output = self.offer(names, ctx)
        assert output is not None
        self.manager.complete_store(output.keys_to_store, ticket=output.ticket)
        return output

    def load(self, names):
        return self.manager.prepare_load(self.keys(names), CTX)

    def touch(self, names):
        self.manager.touch(self.keys(names), CTX)

    def seen(self, names):
        return [self.manager.lookup(key, CTX) for key in self.keys(names)]

    def events(self):
        return [("-" if e.removed else "+") + b"".join(e.keys).decode() for e in self.manager.take_events()]

    def stats(self):
        return self.manager.stats()


@pytest.fixture(params=["lru", "arc", "adaptive"])
def policy(request):
    return request.param


@pytest.fixture
def make():
    def _make(capacity, policy="lru", events=True):
        return Store(CPUOffloadingManager(capacity, policy, enable_events=events))

    return _make


@pytest.fixture
def make_filtered():
    """Return a filter with short words, and the manager behind it with short words."""

    def _make(capacity, threshold=2, tracker=100, policy="lru"):
        backing = CPUOffloadingManager(capacity, policy, enable_events=True)
        return Store(FilterReusedOffloadingManager(backing, threshold, tracker)), Store(backing)

    return _make
