"""A dict-sized model of the manager: performs each call on a real manager and on plain dicts, and compares.

It predicts everything but the choice of victims; of those it checks that they may go. `check` holds the conservation
laws against the manager's statistics after every step.
"""

from __future__ import annotations

import random
from collections import Counter

from kvoffload.errors import UsageError
from kvoffload.manager.base import Match, ReqContext


class Reservation:
    def __init__(self, is_store, blocks):
        self.is_store = is_store
        self.blocks = dict(blocks)


class CheckedManager:
    """Drives `manager` and the model together.

    Args:
        manager: A manager with events on.
        capacity: Its blocks.
        threshold: That of a reuse filter around it (whose tracker holds every key used); 0: no filter.
        refuses_only_when_full: The policy finds a victim whenever one exists.
        admits_all: The policy admits everything.
    """

    def __init__(self, manager, capacity, threshold=0, *, refuses_only_when_full=True, admits_all=True):
        self.manager = manager
        self.capacity = capacity
        self.threshold = threshold
        self.refuses_only_when_full = refuses_only_when_full
        self.admits_all = admits_all
        self.held = {}  # key -> block
        self.writing = set()
        self.pins = Counter()  # key -> loads of its current block
        self.tickets = {}  # ticket -> Reservation
        self.dead_tickets = []
        self.users = Counter()  # detached block -> copies that use it
        self.quarantined = set()
        self.count = Counter()
        self.seen = {}  # request -> keys booked by the manager
        self.counted = {}  # request -> keys counted by the filter
        self.reuse = Counter()
        self.announced = set()

    # ---- helpers

    def evictable(self, keys):
        return {key for key in self.held if key not in self.writing and not self.pins[key] and key not in keys}

    def free(self):
        return self.capacity - len(self.held) - len(self.users)

    def drop(self, key):
        """Forget a key's block: free it or detach it."""
        block = self.held.pop(key)
        if key in self.writing:
            self.writing.discard(key)
            self.users[block] = 1
        elif self.pins[key]:
            self.users[block] = self.pins.pop(key)

    def end_use(self, block):
        self.users[block] -= 1
        if not self.users[block]:
            del self.users[block]
            self.quarantined.discard(block)

    def close(self, ticket, key):
        reservation = self.tickets[ticket]
        block = reservation.blocks.pop(key)
        if not reservation.blocks:
            del self.tickets[ticket]
            self.dead_tickets.append(ticket)
        return block

    def owner(self, key, *, is_store):
        """Return the oldest reservation of the key's current block, else of a detached one."""
        mine = [t for t, r in sorted(self.tickets.items()) if r.is_store is is_store and key in r.blocks]
        current = [t for t in mine if self.tickets[t].blocks[key] == self.held.get(key)]
        return (current or mine or [None])[0]

    def load_of_exactly(self, keys):
        """Return the oldest load whose open blocks are these keys' current ones, in order."""
        current = [self.held.get(key) for key in keys]
        for ticket, r in sorted(self.tickets.items()):
            if keys and not r.is_store and list(r.blocks) == keys and list(r.blocks.values()) == current:
                return ticket
        return None

    def note(self, keys, req_id):
        if not self.threshold:
            return
        for key in keys:
            if req_id is None:
                self.reuse[key] += 1
            elif key not in self.counted.setdefault(req_id, set()):
                self.counted[req_id].add(key)
                self.reuse[key] += 1

    # ---- calls

    def lookup(self, key, req_id=None):
        want = None if key in self.writing else key in self.held
        assert self.manager.lookup(key, ReqContext(req_id)) is want
        if req_id is None or key not in self.seen.setdefault(req_id, set()):
            self.count["lookups"] += 1
            self.count[{True: "hits", False: "misses", None: "pending"}[want]] += 1
        if req_id is not None:
            self.seen[req_id].add(key)
        self.note([key], req_id)

    def lookup_prefix(self, keys, req_id=None):
        match = self.manager.lookup_prefix(keys, ReqContext(req_id))
        assert match == self.expected_match(keys)
        for key in keys[: match.ready + match.pending + 1]:
            want = "pending" if key in self.writing else "hits" if key in self.held else "misses"
            if req_id is None or key not in self.seen.setdefault(req_id, set()):
                self.count["lookups"] += 1
                self.count[want] += 1
            if req_id is not None:
                self.seen[req_id].add(key)
            self.note([key], req_id)

    def expected_match(self, keys):
        held = 0
        while held < len(keys) and keys[held] in self.held:
            held += 1
        ready = 0
        while ready < held and keys[ready] not in self.writing:
            ready += 1
        return Match(ready, held - ready)

    def touch(self, keys, req_id=None):
        self.manager.touch(keys, ReqContext(req_id))

    def prepare_load(self, keys):
        if any(key not in self.held or key in self.writing for key in keys):
            try:
                self.manager.prepare_load(keys, ReqContext())
            except UsageError:
                return None
            raise AssertionError("a load of unreadable keys was accepted")
        spec = self.manager.prepare_load(keys, ReqContext())
        blocks = {key: self.held[key] for key in keys}
        assert spec.block_ids.tolist() == list(blocks.values())
        if not blocks:
            assert spec.ticket is None
            return None
        self.open(spec.ticket, is_store=False, blocks=blocks)
        self.pins.update(blocks.keys())
        return spec.ticket

    def open(self, ticket, *, is_store, blocks):
        assert ticket not in self.tickets
        assert ticket not in self.dead_tickets
        self.tickets[ticket] = Reservation(is_store, blocks)

    def prepare_store(self, keys, req_id=None, *, store=True):
        offered = list(dict.fromkeys(keys))
        known = self.counted.get(req_id, ())
        fresh = [key for key in offered if key not in self.held]
        below = [key for key in fresh if self.reuse[key] + (req_id is not None and key not in known) < self.threshold]
        wanted = [key for key in fresh if key not in below] if store else []
        output = self.manager.prepare_store(keys, ReqContext(req_id, store=store))
        if req_id is not None:
            self.note(offered, req_id)
        self.count["filtered"] += len(below)
        if output is None:
            if self.refuses_only_when_full:
                assert len(wanted) > self.free() + len(self.evictable(offered))
            refused = len(wanted)
            if not self.admits_all:  # how many it would have admitted shows only here
                refused = self.manager.stats().refused - self.count["refused"]
                assert 0 < refused <= len(wanted)
            self.count["refused"] += refused
            return None
        if self.admits_all:
            assert output.filtered_keys == below
            assert output.keys_to_store == wanted
        else:
            assert set(output.keys_to_store) | set(output.filtered_keys[len(below) :]) == set(wanted)
            self.count["filtered"] += len(output.filtered_keys) - len(below)
        wanted = output.keys_to_store
        assert len(wanted) <= self.free() + len(self.evictable(offered))
        assert len(output.evicted_keys) == max(0, len(wanted) - self.free())
        assert set(output.evicted_keys) <= self.evictable(offered)
        for key in output.evicted_keys:
            del self.held[key]
        self.count["evicted"] += len(output.evicted_keys)
        blocks = dict(zip(wanted, output.store_spec.block_ids.tolist(), strict=True))
        assert output.ticket == output.store_spec.ticket
        if not blocks:
            assert output.ticket is None
            return None
        self.open(output.ticket, is_store=True, blocks=blocks)
        self.held.update(blocks)
        self.writing.update(blocks)
        self.count["reserved"] += len(blocks)
        return output.ticket

    def complete_store(self, keys, *, success=True, ticket=None):
        keys = list(dict.fromkeys(keys))
        wrong_kind = ticket in self.tickets and not self.tickets[ticket].is_store
        try:
            self.manager.complete_store(keys, success, ticket=ticket)
        except UsageError:
            assert wrong_kind
            return
        assert not wrong_kind
        for key in keys:
            owner = self.owner(key, is_store=True) if ticket is None else ticket
            if owner not in self.tickets or key not in self.tickets[owner].blocks:
                self.count["stale_completions"] += 1
                continue
            block = self.close(owner, key)
            if block in self.users:
                self.count["stale_completions"] += 1
                self.end_use(block)
            else:
                self.writing.discard(key)
                self.count["stored" if success else "failed"] += 1
                if not success:
                    del self.held[key]

    def complete_load(self, keys, *, ticket=None):
        keys, given = list(dict.fromkeys(keys)), ticket
        refused = ticket in self.tickets and self.tickets[ticket].is_store
        if ticket is None:
            ticket = self.load_of_exactly(keys)
        if ticket is None:
            refused = any(self.owner(key, is_store=False) is None for key in keys)
        try:
            self.manager.complete_load(keys, ticket=given)
        except UsageError:
            assert refused
            return
        assert not refused
        for key in keys:
            owner = self.owner(key, is_store=False) if ticket is None else ticket
            if owner not in self.tickets or key not in self.tickets[owner].blocks:
                self.count["stale_completions"] += 1
                continue
            self.unpin(key, self.close(owner, key), count_stale=True)

    def unpin(self, key, block, *, count_stale):
        if block in self.users:
            self.count["stale_completions"] += count_stale
            self.end_use(block)
        else:
            self.pins[key] -= 1

    def abandon(self, ticket, *, copy_running=False, hung=False):
        self.manager.abandon(ticket, copy_running=copy_running, hung=hung)
        reservation = self.tickets.get(ticket)
        if reservation is None:
            return
        current = [key for key, block in reservation.blocks.items() if self.held.get(key) == block]
        if reservation.is_store:
            self.count["abandoned"] += len(current)
            for key in current:
                self.drop(key)
        elif hung:
            self.count["discarded"] += len(current)
            for key in current:
                self.drop(key)
        if hung:
            self.quarantined.update(reservation.blocks.values())
        elif not copy_running:
            for key in list(reservation.blocks):
                self.unpin(key, self.close(ticket, key), count_stale=False)

    def discard(self, keys):
        gone = [key for key in dict.fromkeys(keys) if key in self.held]
        assert self.manager.discard(keys) == len(gone)
        for key in gone:
            self.count["abandoned" if key in self.writing else "discarded"] += 1
            self.drop(key)

    def reset_cache(self):
        ready = len(self.held) - len(self.writing)
        assert self.manager.reset_cache() == ready
        self.count["reset_while_ready"] += ready
        self.count["reset_while_writing"] += len(self.writing)
        for key in list(self.held):
            self.drop(key)

    def finish_request(self, req_id):
        self.manager.finish_request(ReqContext(req_id))
        self.seen.pop(req_id, None)
        self.counted.pop(req_id, None)

    def take_events(self):
        for event in self.manager.take_events():
            assert event.keys
            assert event.medium == "CPU"
            if event.removed:
                assert self.announced.issuperset(event.keys)
                self.announced.difference_update(event.keys)
            else:
                assert self.announced.isdisjoint(event.keys)
                self.announced.update(event.keys)
        assert self.announced == self.held.keys() - self.writing

    # ---- laws

    def check(self):
        stats = self.manager.stats()
        assert stats.free + stats.writing + stats.ready + stats.detached == stats.capacity == self.capacity
        assert stats.reserved == (
            stats.stored + stats.failed + stats.abandoned + stats.reset_while_writing + stats.writing
        )
        assert stats.stored - stats.evicted - stats.discarded - stats.reset_while_ready == stats.ready
        assert stats.hits + stats.misses + stats.pending == stats.lookups
        assert stats.evicted_unused <= stats.evicted
        assert (stats.free, stats.writing, stats.ready) == (
            self.free(), len(self.writing), len(self.held) - len(self.writing),
        )  # fmt: skip
        assert stats.pinned == sum(1 for key in self.held if self.pins[key])
        assert (stats.detached, stats.quarantined) == (len(self.users), len(self.quarantined))
        for name in (
            "lookups", "hits", "misses", "pending", "reserved", "stored", "failed", "abandoned", "reset_while_writing",
            "evicted", "discarded", "reset_while_ready", "refused", "filtered", "stale_completions",
        ):  # fmt: skip
            assert getattr(stats, name) == self.count[name], name
        used = [*self.held.values(), *self.users]
        assert len(used) == len(set(used))
        assert all(0 <= block < self.capacity for block in used)


class RandomCaller:
    """Makes random calls, good and bad, on a `CheckedManager`."""

    def __init__(self, checked, keys, seed):
        self.checked = checked
        self.keys = keys
        self.rng = random.Random(seed)
        self.calls = [
            (14, self.lookup), (4, self.lookup_prefix), (12, self.touch), (2, self.refresh), (12, self.load),
            (14, self.end_load), (22, self.store), (22, self.end_store), (3, self.abandon), (2, self.discard),
            (0.3, self.reset), (3, self.finish), (3, self.events),
        ]  # fmt: skip
        self.weights = [weight for weight, _ in self.calls]

    def some(self, most=6):
        start = self.rng.randrange(len(self.keys))
        run = (self.keys + self.keys)[start : start + self.rng.randint(0, most)]
        return self.rng.choices(self.keys, k=len(run)) if self.rng.random() < 0.3 else run

    def request(self):
        return self.rng.choice([None, "r0", "r1", "r2", "r3"])

    def ticket(self, *, is_store):
        open_now = [ticket for ticket, r in self.checked.tickets.items() if r.is_store is is_store]
        roll = self.rng.random()
        if open_now and roll < 0.85:
            return self.rng.choice(open_now)
        if self.checked.dead_tickets and roll < 0.95:
            return self.rng.choice(self.checked.dead_tickets[-50:])
        return self.rng.choice([*self.checked.tickets, 10**9])

    def step(self):
        _, call = self.rng.choices(self.calls, self.weights)[0]
        call()
        self.checked.check()

    def lookup(self):
        self.checked.lookup(self.rng.choice(self.keys), self.request())

    def lookup_prefix(self):
        self.checked.lookup_prefix(self.some(), self.request())

    def touch(self):
        self.checked.touch(self.some(), self.request())

    def refresh(self):
        target = getattr(self.checked.manager, "_backing", self.checked.manager)
        target.refresh(self.some())

    def load(self):
        ready = sorted(self.checked.held.keys() - self.checked.writing)
        if ready and self.rng.random() < 0.8:
            self.checked.prepare_load(self.rng.choices(ready, k=self.rng.randint(1, 4)))
        else:
            self.checked.prepare_load(self.some(3))

    def store(self):
        self.checked.prepare_store(self.some(), self.request(), store=self.rng.random() < 0.95)

    def end_store(self):
        success = self.rng.random() < 0.85
        if self.rng.random() < 0.25:
            self.checked.complete_store(self.some(), success=success)
            return
        ticket = self.ticket(is_store=True)
        self.checked.complete_store(self.part_of(ticket), success=success, ticket=ticket)

    def end_load(self):
        if self.rng.random() < 0.25:
            pinned = sorted(self.checked.pins.keys()) or self.keys
            self.checked.complete_load(self.rng.choices(pinned, k=self.rng.randint(0, 3)))
            return
        ticket = self.ticket(is_store=False)
        self.checked.complete_load(self.part_of(ticket), ticket=ticket)

    def part_of(self, ticket):
        reservation = self.checked.tickets.get(ticket)
        keys = list(reservation.blocks) if reservation else self.some(3)
        roll = self.rng.random()
        if roll < 0.15:
            return keys[: len(keys) // 2]
        return keys + self.some(2) if roll < 0.25 else keys

    def abandon(self):
        ticket = self.ticket(is_store=self.rng.random() < 0.5)
        self.checked.abandon(ticket, copy_running=self.rng.random() < 0.5, hung=self.rng.random() < 0.2)

    def discard(self):
        self.checked.discard(self.some(3))

    def reset(self):
        self.checked.reset_cache()

    def finish(self):
        self.checked.finish_request(self.request() or "r0")

    def events(self):
        self.checked.take_events()
