"""The adaptive policy under interleaved, faulty and disorderly callers."""

import random

import pytest
from reference.adaptive_laws import check_adaptive, check_ghost_bound
from reference.manager_model import CheckedManager, RandomCaller

from kvoffload.keys import make_offload_key
from kvoffload.manager import block_table
from kvoffload.manager.base import ReqContext, RequestOutcome
from kvoffload.manager.cpu import CPUOffloadingManager
from kvoffload.manager.policies.adaptive import AdaptiveCachePolicy


def key(name, group=0):
    return make_offload_key(repr(name).encode(), group)


class Traffic:
    """Conversations that share prompts, in several groups, as interleaved requests with faults.

    `faults` adds failed copies, discards, resets, hung and abandoned jobs, and requests that never end.
    """

    def __init__(self, seed, capacity, *, faults, groups=1, clock=True, max_ghosts=None):
        self.rng = random.Random(seed)
        self.manager = CPUOffloadingManager(capacity, "adaptive", enable_events=True)
        self.policy = self.manager._policy
        assert isinstance(self.policy, AdaptiveCachePolicy)
        if max_ghosts is not None:
            self.policy._tree._max_ghosts = max_ghosts
        self.faults, self.groups, self.clock = faults, groups, clock
        self.chats = [[("system", 0), ("system", 1)]]
        self.parent = {}
        self.running = []
        self.now = 100.0
        self.number = 0

    def keys_of(self, chat):
        keys = [key(tuple(chat[: i + 1]), group) for group in range(self.groups) for i in range(len(chat))]
        for group in range(self.groups):
            row = keys[group * len(chat) : (group + 1) * len(chat)]
            self.parent.update(zip(row[1:], row[:-1], strict=True))
        return keys

    def step(self):
        rng = self.rng
        if not self.running or (len(self.running) < 4 and rng.random() < 0.3):
            self.begin()
        else:
            request = rng.choice(self.running)
            rng.choice([self.store, self.store, self.load, self.end_copy, self.end_copy, self.finish])(request)
        if self.faults and rng.random() < 0.02:
            if rng.random() < 0.2:
                self.manager.reset_cache()
            else:
                self.manager.discard(rng.sample(sorted(self.policy.blocks), min(2, len(self.policy.blocks))))
        check_adaptive(self.policy)

    def begin(self):
        rng = self.rng
        self.now += rng.choice([0, 0.3, 5, 60])
        self.number += 1
        base = rng.choice(self.chats) if rng.random() < 0.8 else self.chats[0]
        cut = len(base) if rng.random() < 0.8 else rng.randint(0, len(base))
        chat = base[:cut] + [(self.number, i) for i in range(rng.randint(0, 5))]
        self.chats = [self.chats[0], *self.chats[-6:], chat] if chat else self.chats
        context = ReqContext(f"r{self.number}", priority=rng.choice([0, 0, 3, -99]),
                             started_seconds=self.now if self.clock else None)  # fmt: skip
        request = {"context": context, "keys": self.keys_of(chat), "chat": chat, "jobs": [], "at": 0}
        if not (self.faults and rng.random() < 0.1):
            self.manager.touch(request["keys"], context)
        self.running.append(request)

    def store(self, request):
        keys, at = request["keys"], request["at"]
        if at >= len(keys):
            if self.groups == 1:  # the answer's blocks
                request["chat"] = [*request["chat"], (request["context"].req_id, at)]
                request["keys"] = self.keys_of(request["chat"])
            return
        step = keys[at : at + self.rng.randint(1, 4)]
        request["at"] = at + len(step)
        before = set(self.policy.blocks)
        output = self.manager.prepare_store(step, request["context"])
        if output is None:
            assert set(self.policy.blocks) == before
            return
        for evicted in output.evicted_keys:
            assert evicted not in step
            before.discard(evicted)
            if not self.faults:
                assert not any(self.parent.get(other) == evicted for other in before), "a held child lost its parent"
        if output.ticket is not None:
            request["jobs"].append(("store", output.keys_to_store, output.ticket))

    def load(self, request):
        ready = self.manager.match(request["keys"]).ready
        if ready:
            spec = self.manager.prepare_load(request["keys"][:ready], request["context"])
            request["jobs"].append(("load", request["keys"][:ready], spec.ticket))

    def end_copy(self, request):
        if not request["jobs"]:
            return
        kind, keys, ticket = request["jobs"].pop(0)
        roll = self.rng.random() if self.faults else 1.0
        if roll < 0.1:
            self.manager.abandon(ticket, copy_running=roll < 0.05, hung=roll < 0.03)
        elif kind == "load":
            self.manager.complete_load(keys, ticket=ticket)
        else:
            self.manager.complete_store(keys, roll > 0.25, ticket=ticket)

    def finish(self, request):
        self.running.remove(request)
        if self.faults and self.rng.random() < 0.1:
            return
        while request["jobs"] and self.rng.random() < 0.9:
            self.end_copy(request)
        rng = self.rng
        outcome = RequestOutcome(
            now_seconds=self.now if self.clock else None,
            output_tokens=rng.choice([None, 0, 100, 3000]),
            conversation_ended=rng.random() < 0.1,
            expected_return_seconds=rng.choice([None, None, 0.0, -5.0, 30.0, 1e300, float("nan"), float("inf")]),
        )
        self.manager.finish_request(request["context"], outcome if rng.random() < 0.9 else None, request["keys"])
        check_ghost_bound(self.policy)


@pytest.mark.parametrize("seed", range(12))
def test_orderly_traffic_stays_closed_under_prefixes(seed):
    traffic = Traffic(seed, [5, 9, 16, 40][seed % 4], faults=False, groups=1 + seed % 2, clock=seed % 3 > 0)
    for _ in range(700):
        traffic.step()


@pytest.mark.parametrize("seed", range(12))
def test_faulty_traffic_keeps_every_law(seed, monkeypatch):
    monkeypatch.setattr(block_table, "SHARD_KEYS", 64 if seed % 2 else 16_384)
    ghosts = [None, 6, 30][seed % 3]
    traffic = Traffic(
        seed, [1, 5, 9, 16][seed % 4], faults=True, groups=1 + seed % 2, clock=seed % 5 > 0, max_ghosts=ghosts
    )
    for _ in range(700):
        traffic.step()


@pytest.mark.parametrize("seed", range(6))
def test_disorderly_calls_keep_the_managers_laws(seed, monkeypatch):
    monkeypatch.setattr(block_table, "SHARD_KEYS", 64 if seed % 3 else 16_384)
    capacity = [0, 1, 3, 6, 9, 20][seed]
    manager = CPUOffloadingManager(capacity, "adaptive", enable_events=True)
    keys = [make_offload_key(f"key{i:02}".encode(), i % 2 if seed % 2 else 0) for i in range(14)]
    caller = RandomCaller(CheckedManager(manager, capacity, refuses_only_when_full=False, admits_all=False), keys, seed)
    for _ in range(1500):
        caller.step()
        check_adaptive(manager._policy)


def test_equal_calls_give_equal_decisions():
    runs = []
    for _ in range(2):
        traffic = Traffic(7, 9, faults=True)
        events = []
        for _ in range(600):
            traffic.step()
            events += traffic.manager.take_events()
        runs.append(events)
    assert runs[0] == runs[1]
