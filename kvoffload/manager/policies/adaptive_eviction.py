"""Chooses victims for the adaptive policy: the end of the oldest node in the lowest cell, all or nothing.

Theory of operation. Only nodes that may lose their end stand in cells. A node whose last block is pinned or still
written is *parked*: it leaves its cell when it is met, once, and comes back when that block is released, so pinned
blocks are not looked at again and again. A node that must not be cut now (its end is offered, or what is offered
continues it) is set aside and put back. When there are too few victims, all steps are undone in reverse.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from kvoffload.keys import OffloadKey
from kvoffload.manager.block_table import BlockTable
from kvoffload.manager.policies.adaptive_node import Node
from kvoffload.manager.policies.adaptive_table import ReuseTable
from kvoffload.manager.policies.adaptive_tree import RadixTree


class EvictionOrder:
    """The eviction order over a tree and its cells.

    Args:
        tree: The known keys.
        reuse: Ranks and cells.
    """

    __slots__ = ("_reuse", "_tree")

    def __init__(self, tree: RadixTree, reuse: ReuseTable) -> None:
        self._tree = tree
        self._reuse = reuse

    def take(
        self, count: int, offered: Sequence[OffloadKey], kept: set[int], blocks: BlockTable, *, plain_lru: bool
    ) -> list[int] | None:
        """Let `count` blocks go, the first victim first; None when there are not enough, and nothing has changed.

        Args:
            count: How many.
            offered: Keys about to be stored; those that are absent keep the runs that they continue.
            kept: Offered blocks; the caller has raised their `refs`.
            blocks: The index, and `refs`.
            plain_lru: Take the node that was unused longest, whatever its rank.
        """
        shielded = self._continued(offered, blocks)
        victims: list[int] = []
        steps: list[tuple[Node, int]] = []  # what was met, and how many keys it held
        aside: list[Node] = []
        while len(victims) < count:
            cell = self._next_cell(plain_lru=plain_lru)
            if cell is None:
                break
            node = next(iter(cell))
            held = node.held
            steps.append((node, held))
            if node in shielded:
                node.leave_cell()
                aside.append(node)
                continue
            ends = blocks.find(node.keys[max(0, held - count + len(victims)) : held])
            refs = blocks.refs[ends].tolist()
            if not any(refs):
                victims += reversed(ends)
                self._tree.shrink(node, held - len(ends))
            elif not refs[-1]:
                first = len(refs) - next(back for back, value in enumerate(reversed(refs)) if value)
                victims += reversed(ends[first:])
                self._tree.shrink(node, held - len(ends) + first)
            else:
                node.leave_cell()
                if ends[-1] in kept:
                    aside.append(node)
                elif not blocks.parked[ends[-1]]:
                    blocks.parked[ends[-1]] = True
                    blocks.num_parked += 1
        if len(victims) == count:
            for node in reversed(aside):
                self._reuse.put_back(node)
            return victims
        for node, held in reversed(steps):
            self._tree.restore(node, held)
            self._reuse.put_back(node)
        return None

    def _next_cell(self, *, plain_lru: bool) -> OrderedDict[Node, None] | None:
        if plain_lru:
            return self._reuse.least_recent()
        lowest = self._reuse.lowest()
        return lowest[1] if lowest is not None else None

    def _continued(self, offered: Sequence[OffloadKey], blocks: BlockTable) -> set[Node]:
        """Return the nodes that absent keys of `offered` would lengthen or hang from."""
        node_of = self._tree.node_of
        shielded: set[Node] = set()
        seen: set[Node] = set()
        for key, block in zip(offered, blocks.find(offered), strict=True):
            node = node_of.get(key) if block is None else None
            while node is not None and node not in seen:
                seen.add(node)
                if node.held:
                    shielded.add(node)
                    break
                node = node.parent
        return shielded
