"""The nodes of the adaptive policy's radix tree, and the requests that hold on to them."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from kvoffload.keys import OffloadKey

if TYPE_CHECKING:
    from kvoffload.manager.policies.adaptive_hazard import ReuseClass

NO_CONVERSATION = -1


class RequestState:
    """A request between its first touch and its end.

    Attributes:
        chains: Its keys, one list per KV-cache group.
        matched: Per chain, how many leading keys were known before it.
        open: False once it ended or its claim on its nodes was given up.
        start: Policy time at which it came; None when nobody said.
        prospects: Kind and levels that each of its nodes can get, once a store had to evict.
        storing: Some of its new keys were found worth a copy.
        declined: From some key on, nothing more is stored.
    """

    __slots__ = ("chains", "declined", "matched", "open", "prospects", "start", "storing")

    def __init__(self, chains: list[list[OffloadKey]]) -> None:
        self.chains = chains
        self.matched = [0] * len(chains)
        self.open = True
        self.prospects: dict[Node, tuple[int, tuple[int, ...]]] | None = None
        self.start: float | None = None
        self.storing = False
        self.declined = False

    def is_continued_by(self, chains: list[list[OffloadKey]]) -> bool:
        """Whether `chains` name all that is claimed so far: the same lists, or longer ones, or more of them."""
        if len(chains) < len(self.chains):
            return False
        return all(new[: len(old)] == old for old, new in zip(self.chains, chains, strict=False))

    def successor(self) -> RequestState:
        """Return what takes over when the request comes again with other keys; the old claim ends."""
        state = RequestState(self.chains)
        state.matched = self.matched
        state.start = self.start
        state.storing, state.declined = self.storing, self.declined
        return state


class Node:
    """A run of keys with one parent and no fork inside.

    Attributes:
        keys: The run; the first `held` of them have blocks. A tuple, which the garbage collector does not look into.
        parent: The node it continues; None at a root.
        live_kids: Children that hold a key, themselves or below.
        forks: Children ever that were part of a finished request.
        count: Finished requests that passed through.
        time: Policy time of the last finish.
        touched: Number of the last request that touched it (the shadow LRU's recency).
        reuse: Class whose hazards rank it.
        age_bin: Bin of its cell.
        turn: Turn of the conversation whose end it is; `NO_CONVERSATION` otherwise.
        busy: The last request that touched it.
        cell: Eviction queue that it waits in.
        exposure: Queue in which its age is watched.
        number: Its number in a large index; 0 without one.
    """

    __slots__ = (
        "age_bin", "busy", "cell", "count", "exposure", "forks", "held", "keys", "live_kids", "number", "parent",
        "reuse", "time", "touched", "turn",
    )  # fmt: skip

    def __init__(self, keys: tuple[OffloadKey, ...], parent: Node | None, reuse: ReuseClass, now: float) -> None:
        self.keys = keys
        self.held = 0
        self.parent = parent
        self.live_kids = 0
        self.forks = 0
        self.count = 0
        self.time = now
        self.touched = -1
        self.reuse = reuse
        self.age_bin = 0
        self.turn = NO_CONVERSATION
        self.busy: RequestState | None = None
        self.cell: OrderedDict[Node, None] | None = None
        self.exposure: OrderedDict[Node, None] | None = None
        self.number = 0

    def __repr__(self) -> str:
        return f"Node(keys={len(self.keys)}, held={self.held}, live_kids={self.live_kids}, count={self.count})"

    def leave_cell(self) -> None:
        """Take it out of the eviction order, if it is there."""
        if self.cell is not None:
            del self.cell[self]
            self.cell = None

    def leave_exposure(self) -> None:
        """Stop watching its age."""
        if self.exposure is not None:
            del self.exposure[self]
            self.exposure = None
