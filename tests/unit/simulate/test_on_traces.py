"""What the adaptive policy reaches on the Mooncake traces, second halves."""

import os
from functools import lru_cache
from pathlib import Path

import pytest

from kvoffload.simulate.hints import parse_hint
from kvoffload.simulate.simulator import SimulatedTrace, simulate

ROOT = Path(__file__).resolve().parents[3]
TRACES = Path(os.environ.get("KVOFFLOAD_TRACES", ROOT.parent / "shared" / "traces"))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not TRACES.is_dir(), reason="the traces are not beside the checkout; KVOFFLOAD_TRACES names them"
    ),
]


@lru_cache(maxsize=2)
def loaded(name):
    return SimulatedTrace(TRACES / f"{name}_trace.jsonl")


def result(name, policy, percent, hint="none"):
    trace = loaded(name)
    return simulate(trace, policy, int(trace.unique_blocks * percent / 100), hint=parse_hint(hint))


def hits(*cell):
    return 100 * result(*cell).prefix_hit_ratio


@pytest.mark.parametrize(("percent", "more"), [(1, 5.5), (2, 7.0), (5, 2.0), (10, 1.2), (20, -0.4)])
def test_chat_hits_more_than_lru(percent, more):
    assert hits("conversation", "adaptive", percent) >= hits("conversation", "lru", percent) + more


@pytest.mark.parametrize(("percent", "least"), [(1, 13.5), (2, 20.0), (5, 31.0), (10, 35.0)])
def test_a_finish_hint_is_worth_more_than_a_policy(percent, least):
    assert hits("conversation", "adaptive", percent, "finished:0.8:0.02") >= least


@pytest.mark.parametrize("percent", [1, 5])
def test_random_hints_cost_little(percent):
    assert hits("conversation", "adaptive", percent, "noise") >= hits("conversation", "adaptive", percent) - 0.6


@pytest.mark.parametrize(("percent", "least", "writes"), [(1, 1.1, 0.5), (5, 1.0, 0.7)])
def test_documents_and_tools_hit_no_less_with_fewer_writes(percent, least, writes):
    lru, adaptive = (result("synthetic", policy, percent) for policy in ("lru", "adaptive"))
    assert adaptive.prefix_hit_ratio >= least * lru.prefix_hit_ratio
    assert adaptive.stored_blocks <= writes * lru.stored_blocks


@pytest.mark.parametrize(("percent", "bound"), [(1, 25.4), (2, 32.8), (5, 39.2)])
def test_the_clairvoyant_bound_is_the_known_one(percent, bound):
    assert hits("conversation", "belady", percent) == pytest.approx(bound, abs=0.05)


@pytest.mark.parametrize(("percent", "prototype"), [(1, 11.75), (2, 16.89), (5, 23.72), (10, 31.30), (20, 36.68)])
def test_decisions_agree_with_the_prototype(percent, prototype):
    """The prototype with ghosts for four capacities; it knows each answer's length before the request stores."""
    assert hits("conversation", "adaptive", percent) == pytest.approx(prototype, abs=0.3)
