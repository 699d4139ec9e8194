"""Chooses victims for the adaptive policy: the end of the oldest node in the lowest cell, all or nothing.

Theory of operation. Only nodes that may lose their end stand in cells. A node whose last block is pinned or still
written leaves its cell when it is met, once; unpinning and finished writes put nodes back, so pinned blocks are not
looked at again and again. A node that must not be cut now (its end is offered, or what is offered continues it) is set
aside and put back. When there are too few victims, all steps are undone in reverse.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from kvoffload.keys import OffloadKey
from kvoffload.manager.policies.adaptive_node import Node
from kvoffload.manager.policies.adaptive_table import ReuseTable
from kvoffload.manager.policies.adaptive_tree import RadixTree
from kvoffload.manager.policies.base import BlockStatus

Cell = OrderedDict[Node, None]


class EvictionOrder:
    """The eviction order over a tree and its cells.

    Args:
        tree: The known keys.
        table: Ranks and cells.
        blocks: Status of the held keys.
    """

    __slots__ = ("_blocks", "_table", "_tree")

    def __init__(self, tree: RadixTree, table: ReuseTable, blocks: Mapping[OffloadKey, BlockStatus]) -> None:
        self._tree = tree
        self._table = table
        self._blocks = blocks

    def take(self, count: int, protected: set[OffloadKey], *, plain_lru: bool) -> list[OffloadKey] | None:
        """Let `count` keys go, in the order of eviction; None when there are not enough, and nothing has changed.

        Keys in `protected` stay, and so do the ends of runs that absent keys in `protected` continue.
        """
        shielded = self._continued(protected)
        table = self._table
        victims: list[OffloadKey] = []
        steps: list[tuple[Node, int]] = []  # what was met, and how many keys it held
        aside: list[Node] = []
        while len(victims) < count:
            cell = self._next_cell(plain_lru=plain_lru)
            if cell is None:
                break
            node = next(iter(cell))
            held = node.held
            steps.append((node, held))
            end = held if node in shielded else self._cut(node, count - len(victims), protected)
            if end < held:
                victims.extend(reversed(node.keys[end:held]))
                self._tree.shrink(node, end)
                continue
            node.leave_cell()
            if node in shielded or node.keys[held - 1] in protected:
                aside.append(node)
        if len(victims) == count:
            for node in reversed(aside):
                table.put_back(node)
            return victims
        for node, held in reversed(steps):
            self._tree.restore(node, held)
            table.put_back(node)
        return None

    def _next_cell(self, *, plain_lru: bool) -> Cell | None:
        if plain_lru:
            return self._table.least_recent()
        lowest = self._table.lowest()
        return lowest[1] if lowest is not None else None

    def _cut(self, node: Node, count: int, protected: set[OffloadKey]) -> int:
        """Return how many keys `node` would hold after giving up to `count` from its end."""
        keys, blocks = node.keys, self._blocks
        end = node.held
        limit = max(0, end - count)
        while end > limit:
            key = keys[end - 1]
            if blocks[key].ref_cnt or key in protected:
                break
            end -= 1
        return end

    def _continued(self, protected: set[OffloadKey]) -> set[Node]:
        """Return the nodes that absent keys in `protected` would lengthen or hang from."""
        node_of, blocks = self._tree.node_of, self._blocks
        shielded: set[Node] = set()
        seen: set[Node] = set()
        for key in protected:
            if key in blocks:
                continue
            node = node_of.get(key)
            while node is not None and node not in seen:
                seen.add(node)
                if node.held:
                    shielded.add(node)
                    break
                node = node.parent
        return shielded
