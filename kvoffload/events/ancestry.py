"""Parents before children: orders, absent ancestors, and removed blocks that a described one still needs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

from kvoffload.events.blocks import Ident, Node


class RemovedNodes:
    """Removed blocks that others still hold, by identity; the rest vanishes by itself."""

    _SLACK = 1024

    def __init__(self) -> None:
        self.refs: dict[Ident, weakref.ref[Node]] = {}
        self._purge_at = self._SLACK

    def add(self, node: Node) -> None:
        """Remember a removed block as long as somebody holds it."""
        self.refs[node.ident] = weakref.ref(node)
        if len(self.refs) >= self._purge_at:
            self.refs = {ident: ref for ident, ref in self.refs.items() if ref() is not None}
            self._purge_at = 2 * len(self.refs) + self._SLACK

    def get(self, ident: Ident) -> Node | None:
        """Return the removed block, if somebody holds it."""
        ref = self.refs.get(ident)
        return None if ref is None else ref()


def absent_chain(parent: Node | None, present: Callable[[Ident], bool]) -> list[Node]:
    """Return the ancestors up from `parent` that a consumer does not hold, outermost first."""
    chain: list[Node] = []
    while parent is not None and not present(parent.ident):
        chain.append(parent)
        parent = parent.parent
    chain.reverse()
    return chain


def parents_first(nodes: Iterable[Node]) -> list[Node]:
    """Return `nodes` in an order in which each comes after its parent, as close to the given order as that allows."""
    members = {node.ident: node for node in nodes}
    ordered: dict[Ident, Node] = {}
    for node in members.values():
        chain: list[Node] = []
        current: Node | None = node
        while current is not None and current.ident in members and current.ident not in ordered:
            chain.append(members[current.ident])
            current = chain[-1].parent
        for member in reversed(chain):
            ordered[member.ident] = member
    return list(ordered.values())
