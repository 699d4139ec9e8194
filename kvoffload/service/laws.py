"""The conservation laws of the manager's counters: what is always true, whatever happens to requests and copies."""

from __future__ import annotations

from kvoffload.manager.base import ManagerStats


def broken_laws(stats: ManagerStats) -> list[str]:
    """Return each law that `stats` breaks, with its numbers; nothing when the books are exact."""
    s = stats
    sums = {
        "free + writing + ready + detached = capacity": (s.free + s.writing + s.ready + s.detached, s.capacity),
        "stored + failed + abandoned + reset_while_writing + writing = reserved": (
            s.stored + s.failed + s.abandoned + s.reset_while_writing + s.writing,
            s.reserved,
        ),
        "stored - evicted - discarded - reset_while_ready = ready": (
            s.stored - s.evicted - s.discarded - s.reset_while_ready,
            s.ready,
        ),
        "hits + misses + pending = lookups": (s.hits + s.misses + s.pending, s.lookups),
    }
    broken = [f"{law}: {left} is not {right}" for law, (left, right) in sums.items() if left != right]
    if min(s.free, s.writing, s.ready, s.detached, s.pinned, s.quarantined) < 0:
        broken.append(f"a block count is negative: {s}")
    if s.pinned > s.ready or s.quarantined > s.detached:
        broken.append(f"pinned {s.pinned} of ready {s.ready}, quarantined {s.quarantined} of detached {s.detached}")
    return broken
