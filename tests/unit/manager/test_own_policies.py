"""Policies from outside: the reference's five methods, optional hooks, and ones that break their contract."""

import pytest

from kvoffload.errors import UsageError
from kvoffload.manager.base import ReqContext, RequestOutcome
from kvoffload.manager.policies.base import BlockStatus, CachePolicy

CTX = ReqContext()
A, B, C = b"A", b"B", b"C"


class FivesOnly(CachePolicy):
    """First in, first out, with nothing but the reference's five methods."""

    def __init__(self, cache_capacity):
        self.entries = {}
        self.fail = ""

    def get(self, key):
        return self.entries.get(key)

    def insert(self, key, block):
        if self.fail == "insert" and key == b"D":
            raise RuntimeError("insert")
        self.entries[key] = block

    def remove(self, key):
        del self.entries[key]

    def touch(self, keys):
        list(keys)

    def evict(self, n, protected):
        if self.fail == "evict":
            raise RuntimeError("evict")
        victims = [(k, b) for k, b in self.entries.items() if b.ref_cnt == 0 and k not in protected][:n]
        if len(victims) < n:
            return None
        for key, _ in victims:
            del self.entries[key]
        return victims


def test_policy_with_the_five_methods_of_the_reference_runs(make):
    s = make(2, FivesOnly)
    s.store("AB")
    s.touch("A")
    s.load("A")
    assert s.store("C").evicted_keys == [B]
    assert s.offer("DE") is None
    s.manager.finish_request(CTX, RequestOutcome(), s.keys("AC"))
    assert isinstance(s.manager._policy.get(A), BlockStatus)
    assert s.manager._policy.get(A).ref_cnt == 1
    assert s.manager.reset_cache() == 2
    assert s.manager._policy.entries == {}


@pytest.mark.parametrize("capacity", [2, 3])
@pytest.mark.parametrize("where", ["evict", "insert"])
def test_policy_that_raises_leaves_the_manager_unchanged(make, where, capacity):
    s = make(capacity, FivesOnly)
    s.store("AB")
    s.events()
    before = s.stats()
    s.manager._policy.fail = where
    with pytest.raises(RuntimeError, match=where):
        s.offer("CD")
    s.manager._policy.fail = ""
    assert s.stats() == before
    assert s.events() == []
    assert s.seen("ABC") == [True, True, False]
    assert len(s.store("CD").evicted_keys) == 4 - capacity


class Careless(FivesOnly):
    """Names victims that must not go: `choose` says which, of the held entries, the offered keys and the number."""

    choose = None

    def evict(self, n, protected):
        victims = type(self).choose(list(self.entries.items()), protected, n)
        for key, _ in victims:
            self.entries.pop(key, None)
        return victims


@pytest.mark.parametrize(
    "choose",
    [
        lambda entries, protected, n: [entry for entry in entries if entry[1].ref_cnt > 0][:n],
        lambda entries, protected, n: [entry for entry in entries if entry[1].ref_cnt < 0][:n],
        lambda entries, protected, n: [entry for entry in entries if entry[0] in protected][:n],
        lambda entries, protected, n: [(b"other", BlockStatus(0))],
        lambda entries, protected, n: [],
        lambda entries, protected, n: [entry for entry in entries if entry[0] == b"F"] * 2,
    ],
    ids=["pinned", "being written", "protected", "not held", "too few", "twice"],
)
def test_policy_that_names_victims_which_must_not_go_is_refused_and_nothing_changed(make, choose):
    s = make(4, type("Careless", (Careless,), {"choose": staticmethod(choose)}))
    s.store("ABF")
    load = s.load("A")
    writing = s.offer("C")
    before, held = s.stats(), dict(s.manager._policy.entries)
    with pytest.raises(UsageError, match="Careless: evict must name 1 different victim"):
        s.offer("BE")
    assert s.stats() == before
    assert dict(s.manager._policy.entries) == held
    s.manager.complete_load([A], ticket=load.ticket)
    s.manager.complete_store([C], ticket=writing.ticket)
    assert s.seen("ABCE") == [True, True, True, False]


class Hooked(FivesOnly):
    def __init__(self, cache_capacity):
        super().__init__(cache_capacity)
        self.told = []

    def on_ready(self, keys):
        self.told.append(("ready", list(keys)))

    def on_pinned(self, keys):
        self.told.append(("pinned", list(keys)))

    def on_unpinned(self, keys):
        self.told.append(("unpinned", list(keys)))

    def on_request_finished(self, keys_in_prefix_order, req_context, outcome):
        self.told.append(("finished", list(keys_in_prefix_order), req_context.req_id, outcome))

    def admit(self, keys, req_context):
        return [key for key in keys if key != b"X"]

    def stats(self):
        return {"told": len(self.told)}

    def clear(self):
        self.told.append("cleared")
        self.entries.clear()


def test_hooks_tell_a_policy_what_it_needs_to_know(make):
    s = make(3, Hooked)
    told = s.manager._policy.told
    output = s.store("AXB")
    assert output.keys_to_store == [A, B]
    assert output.filtered_keys == [b"X"]
    one, two = s.load("A"), s.load("AB")
    s.manager.complete_load([A], ticket=one.ticket)
    s.manager.complete_load([A, B], ticket=two.ticket)
    s.manager.finish_request(ReqContext("r"), RequestOutcome(now_seconds=1.0), [A, B])
    s.manager.reset_cache()
    assert told == [
        ("ready", [A, B]), ("pinned", [A]), ("pinned", [B]), ("unpinned", [A, B]),
        ("finished", [A, B], "r", RequestOutcome(now_seconds=1.0)), "cleared",
    ]  # fmt: skip
    assert s.stats().policy == {"told": 6}
    assert s.stats().filtered == 1
