"""Random call sequences against a dict-sized model: the conservation laws of `ManagerStats` hold after each step."""

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from reference.manager_model import CheckedManager, RandomCaller

from kvoffload.manager.cpu import CPUOffloadingManager
from kvoffload.manager.reuse_filter import FilterReusedOffloadingManager

KEYS = [f"key{i:02}".encode() for i in range(14)]
STEPS_EACH = 50_000


def checked_manager(policy, threshold, capacity):
    manager = CPUOffloadingManager(capacity, policy, enable_events=True)
    if threshold:
        manager = FilterReusedOffloadingManager(manager, threshold, max_tracker_size=len(KEYS))
    plain = policy != "adaptive"  # it keeps prefixes whole and lets new tails wait, so it may refuse or decline
    return CheckedManager(manager, capacity, threshold, refuses_only_when_full=plain, admits_all=plain)


@pytest.mark.slow
@pytest.mark.parametrize("threshold", [0, 2])
@pytest.mark.parametrize("policy", ["lru", "arc", "adaptive"])
def test_laws_hold_over_long_random_runs(policy, threshold):
    for seed, capacity in enumerate([0, 1, 3, 6, 9, 20, 7, 8, 5, 12]):
        caller = RandomCaller(checked_manager(policy, threshold, capacity), KEYS, f"{policy} {threshold} {seed}")
        for _ in range(STEPS_EACH // 10):
            caller.step()


key_lists = st.lists(st.sampled_from(KEYS), max_size=6)
requests = st.sampled_from([None, "r0", "r1"])


class ManagerMachine(RuleBasedStateMachine):
    @initialize(
        policy=st.sampled_from(["lru", "arc", "adaptive"]),
        threshold=st.sampled_from([0, 2]),
        capacity=st.integers(0, 8),
    )
    def begin(self, policy, threshold, capacity):
        self.checked = checked_manager(policy, threshold, capacity)

    def pick(self, number):
        known = [*self.checked.tickets, *self.checked.dead_tickets, 10**9]
        return known[number % len(known)]

    def keys_of(self, ticket, extra):
        reservation = self.checked.tickets.get(ticket)
        return [*(reservation.blocks if reservation else ()), *extra]

    @rule(key=st.sampled_from(KEYS), req_id=requests)
    def lookup(self, key, req_id):
        self.checked.lookup(key, req_id)

    @rule(keys=key_lists, req_id=requests)
    def lookup_prefix(self, keys, req_id):
        self.checked.lookup_prefix(keys, req_id)

    @rule(keys=key_lists)
    def touch(self, keys):
        self.checked.touch(keys)

    @rule(keys=key_lists)
    def prepare_load(self, keys):
        self.checked.prepare_load(keys)

    @rule(keys=key_lists, req_id=requests, store=st.booleans())
    def prepare_store(self, keys, req_id, store):
        self.checked.prepare_store(keys, req_id, store=store)

    @rule(number=st.integers(0, 40), extra=key_lists, success=st.booleans(), ticketless=st.booleans())
    def complete_store(self, number, extra, success, ticketless):
        ticket = self.pick(number)
        keys = self.keys_of(ticket, extra)
        self.checked.complete_store(keys, success=success, ticket=None if ticketless else ticket)

    @rule(number=st.integers(0, 40), extra=key_lists, ticketless=st.booleans())
    def complete_load(self, number, extra, ticketless):
        ticket = self.pick(number)
        self.checked.complete_load(self.keys_of(ticket, extra), ticket=None if ticketless else ticket)

    @rule(number=st.integers(0, 40), copy_running=st.booleans(), hung=st.booleans())
    def abandon(self, number, copy_running, hung):
        self.checked.abandon(self.pick(number), copy_running=copy_running, hung=hung)

    @rule(keys=key_lists)
    def discard(self, keys):
        self.checked.discard(keys)

    @rule()
    def reset_cache(self):
        self.checked.reset_cache()

    @rule(req_id=st.sampled_from(["r0", "r1"]))
    def finish_request(self, req_id):
        self.checked.finish_request(req_id)

    @rule()
    def take_events(self):
        self.checked.take_events()

    @invariant()
    def laws_hold(self):
        if hasattr(self, "checked"):
            self.checked.check()
            for key in KEYS:
                assert self.checked.manager.match((key,)) == self.checked.expected_match((key,))


TestManagerMachine = ManagerMachine.TestCase
TestManagerMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
