"""What the adaptive policy does when a request begins, stores and ends: paths, worth, and learning."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from math import isfinite, log2
from typing import NamedTuple

from kvoffload.keys import OffloadKey
from kvoffload.manager.base import RequestOutcome
from kvoffload.manager.policies.adaptive_guard import LRUGuard, ShadowLRU
from kvoffload.manager.policies.adaptive_hazard import FIRST_TURN, LATER_TURN, PRIVATE_PATH, SHARED
from kvoffload.manager.policies.adaptive_node import NO_CONVERSATION, Node, RequestState
from kvoffload.manager.policies.adaptive_table import ReuseTable
from kvoffload.manager.policies.adaptive_tree import RadixTree

_GROUP_SUFFIX = slice(-4, None)
_SHARED_FORKS = 4
_POPULARITY_LEVELS = 5
_ADMIT_RATIO = 1.5
_HINT_ENDED, _HINT_RETURNS, _HINT_RETURN_LEVELS = 1, 2, 20
_MAX_PRIORITY = 8
_ANSWER_LENGTHS = (0, 17, 257)  # one of each level


class Ending(NamedTuple):
    """What is known about a request at its end.

    Attributes:
        start: Policy time of its start.
        answer_tokens: Tokens generated.
        hint: Number of the hint class; 0 without one.
        priority: Clamped priority.
    """

    start: float
    answer_tokens: int
    hint: int
    priority: int


class RequestLearner:
    """Follows requests through the tree and teaches the table.

    Args:
        tree: The known keys.
        table: Classes and ranks.
        guard: Counts own hits against the shadow's.
        shadow: What plain LRU would hold.
        place: Puts a node into the eviction order if it may be there.
    """

    __slots__ = ("_guard", "_place", "_shadow", "_table", "_tree")

    def __init__(
        self, tree: RadixTree, table: ReuseTable, guard: LRUGuard, shadow: ShadowLRU, place: Callable[[Node], None]
    ) -> None:
        self._tree = tree
        self._table = table
        self._guard = guard
        self._shadow = shadow
        self._place = place

    # ---- it begins

    def begin(self, state: RequestState) -> None:
        """Claim the nodes of a new request, and count what it finds here and in the shadow."""
        self._shadow.request += 1
        entered = [self._enter(chain, state) for chain in state.chains]
        state.matched = [known for known, _, _ in entered]
        own, lru = sum(own for _, own, _ in entered), sum(lru for _, _, lru in entered)
        self._guard.count(own, lru, sum(map(len, state.chains)))

    def _enter(self, chain: list[OffloadKey], state: RequestState) -> tuple[int, int, int]:
        """Claim the nodes of one chain; return how many leading keys were known, found here, and in the shadow."""
        path, known = self._tree.walk(chain, state)
        shadow = self._shadow
        own = lru = total = 0
        own_whole = lru_whole = True
        for node in path:
            node.leave_cell()
            node.busy = state
            size = len(node.keys)
            total += size
            if own_whole:
                own += node.held
                own_whole = node.held == size
            if node.touched >= 0:
                lru_whole = lru_whole and shadow.holds(node.touched)
                lru += size if lru_whole else 0
                shadow.leave(node.touched, size)
            else:
                lru_whole = False
            node.touched = shadow.request
        shadow.enter(total)
        return known, own, lru

    def again(self, state: RequestState, chains: list[list[OffloadKey]]) -> None:
        """Claim the nodes of a request that is tried once more, with other keys perhaps; nothing is counted."""
        before = {chain[0]: known for chain, known in zip(state.chains, state.matched, strict=True) if chain}
        state.matched = []
        for chain in chains:
            path, known = self._tree.walk(chain, state)
            for node in path:
                node.leave_cell()
                node.busy = state
            state.matched.append(min(known, before.get(chain[0], known)))
        state.chains = chains
        state.open = True

    # ---- it stores

    def adopt(self, keys: Sequence[OffloadKey], state: RequestState) -> None:
        """Hang unknown keys that a request offers (its answer's blocks) behind those before them."""
        find = self._tree.node_of.get
        for chain in group_chains(keys):
            first = self._tree.node_of.first_unknown(chain)
            if first is None:
                continue
            group = chain[0][_GROUP_SUFFIX]
            known = next((keys for keys in state.chains if keys and keys[0][_GROUP_SUFFIX] == group), None)
            if known is None:
                known = []
                state.chains.append(known)
                state.matched.append(0)
            before = chain[first - 1] if first else known[-1] if known else None
            parent = self._tree.end_at(before) if before is not None else None
            fresh = [key for key in chain[first:] if find(key) is None]
            self._tree.append(parent, fresh, state)
            known += fresh

    def worth_storing(self, keys: Sequence[OffloadKey], state: RequestState, priority: int) -> list[OffloadKey]:
        """Return the leading keys that are worth more than what they would evict, by the ranks of their classes."""
        lowest = self._table.lowest()
        if lowest is None:
            return list(keys)
        prospects = state.prospects
        if prospects is None:
            prospects = state.prospects = self._prospects(state)
        find = self._tree.node_of.get
        last: Node | None = None
        for index, key in enumerate(keys):
            node = find(key)
            if node is last or node is None:
                continue
            last = node
            prospect = prospects.get(node)
            if prospect is None:
                continue
            rank = self._table.expected_rank(*prospect, clamp_priority(priority))
            fresh = node.count == 0
            if rank < lowest[0] * (_ADMIT_RATIO if fresh and not state.storing else 1.0):
                return list(keys[:index])
            state.storing |= fresh
        return list(keys)

    def _prospects(self, state: RequestState) -> dict[Node, tuple[int, tuple[int, ...]]]:
        """Return what each node of an open request can be at its end: kind, and levels."""
        roles: dict[Node, tuple[int, tuple[int, ...]]] = {}
        for chain, matched in zip(state.chains, state.matched, strict=True):
            path, _ = self._tree.walk(chain, state)
            known = self._known_nodes(path, matched)
            continues, fork = _role(path[:known])
            fresh = sum(len(node.keys) for node in path[known:]) * self._table.weight
            levels = tuple(reuse_level(answer, fresh) for answer in _ANSWER_LENGTHS)
            tail = LATER_TURN if continues else FIRST_TURN
            for index, node in enumerate(path):
                if index <= fork:
                    roles[node] = SHARED, (_popularity(node.count + 1),)
                else:
                    roles[node] = PRIVATE_PATH if index < known else tail, levels
        return roles

    # ---- it ends

    def finish(self, state: RequestState, chains: list[list[OffloadKey]], ending: Ending) -> bool:
        """Learn from a request: which runs were reused, and what classes its runs are in from now on.

        Returns:
            Whether the tree could follow all its keys.
        """
        complete = True
        for index, chain in enumerate(chains):
            if chain:
                matched = state.matched[index] if index < len(state.matched) else None
                complete &= self._finish_chain(chain, matched, state, ending)
        return complete

    def _finish_chain(self, chain: list[OffloadKey], matched: int | None, state: RequestState, ending: Ending) -> bool:
        tree, table = self._tree, self._table
        path, _ = tree.walk(chain, state)
        known = self._known_nodes(path, matched)
        for node in path[:known]:
            table.ask(node, max(0.0, ending.start - node.time), len(node.keys))
        continues, fork = _role(path[:known])
        turn = 0
        if continues:
            last = path[known - 1]
            turn = last.turn + 1
            last.turn = NO_CONVERSATION
        hint, priority = ending.hint, ending.priority
        fresh = sum(len(node.keys) for node in path[known:]) * table.weight
        level = reuse_level(ending.answer_tokens, fresh)
        private = PRIVATE_PATH, level, hint, priority
        tail = LATER_TURN if continues else FIRST_TURN, level, hint, priority
        for index, node in enumerate(path):
            node.count += 1
            if node.count == 1 and node.parent is not None:
                node.parent.forks += 1
            if node.busy is state:
                node.busy = None
            if node.touched < 0:
                node.touched = self._shadow.request
                self._shadow.enter(len(node.keys))
            if index <= fork or (index >= known and node.count > 1):  # also what another request used meanwhile
                table.watch(node, table.get((SHARED, _popularity(node.count), 0, priority)))
            else:
                table.watch(node, table.get(private if index < known else tail))
        end = path[-1]
        if known < len(path) or continues or end.turn == NO_CONVERSATION:
            end.turn = turn
        if continues:
            path = path[: fork + 1] + self._merge(path[fork + 1 :])
        length = 0
        for node in path:
            self._place(node)
            tree.renew_ghosts(node)
            length += len(node.keys)
        return length == len(chain)

    def _known_nodes(self, path: list[Node], matched: int | None) -> int:
        """Return how many nodes of `path` were known before the request, cutting one that is half known."""
        length = 0
        for index, node in enumerate(path):
            size = len(node.keys)
            if matched is None:
                if node.count == 0:
                    return index
            elif length + size > matched:
                if length == matched:
                    return index
                path.insert(index, self._tree.split(node, matched - length))
                return index + 1
            length += size
        return len(path)

    def _merge(self, path: list[Node]) -> list[Node]:
        """Join neighbours of one class, so that the path of a long conversation stays one run."""
        merged: list[Node] = []
        for index, node in enumerate(path):
            above = merged[-1] if merged else None
            joined: Node | None = None
            if (
                above is not None
                and above.forks == 1
                and above.reuse is node.reuse
                and above.touched == node.touched
                and above.busy is node.busy
                and node.parent is above
            ):
                joined = self._tree.join(above, node, path[index + 1] if index + 1 < len(path) else None)
            if joined is None:
                merged.append(node)
            else:
                merged[-1] = joined
        return merged


def _role(known: Sequence[Node]) -> tuple[bool, int]:
    """Return whether a request that knew these nodes continues a conversation, and the last shared one's index."""
    if not known or known[-1].turn == NO_CONVERSATION or known[-1].forks >= _SHARED_FORKS:
        return False, len(known) - 1
    return True, max((index for index, node in enumerate(known) if node.forks >= 2), default=-1)


def _popularity(count: int) -> int:
    return min(_POPULARITY_LEVELS, count.bit_length())


def reuse_level(answer_tokens: int, new_blocks: float) -> int:
    """Return the cell of the 3 x 3 table of answer length and new blocks (of 512 tokens)."""
    answered = 0 if answer_tokens <= 16 else 1 if answer_tokens <= 256 else 2
    asked = 0 if new_blocks <= 4 else 1 if new_blocks <= 16 else 2
    return 3 * answered + asked


def clamp_priority(priority: int) -> int:
    """Return a priority within the range that the policy tells apart."""
    return max(-_MAX_PRIORITY, min(_MAX_PRIORITY, priority))


def hint_number(outcome: RequestOutcome | None) -> int:
    """Return the hint class of an outcome; 0 without a hint, or with one that is no number."""
    if outcome is None:
        return 0
    if outcome.conversation_ended:
        return _HINT_ENDED
    seconds = outcome.expected_return_seconds
    if seconds is None or not isfinite(seconds):
        return 0
    return _HINT_RETURNS + min(_HINT_RETURN_LEVELS, int(log2(1.0 + max(0.0, seconds))))


def group_chains(keys: Iterable[OffloadKey]) -> list[list[OffloadKey]]:
    """Cut keys into one list per KV-cache group; the last four bytes of a key name it."""
    flat = list(keys)
    if not flat:
        return []
    if flat[0][_GROUP_SUFFIX] == flat[-1][_GROUP_SUFFIX]:
        return [flat]
    return [list(group) for _, group in groupby(flat, key=lambda key: key[_GROUP_SUFFIX])]
