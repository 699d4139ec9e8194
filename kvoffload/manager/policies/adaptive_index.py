"""`NodeIndex`: which node of the adaptive policy's tree a key is in, without the stalls of one large dict.

A dict that grows is copied inside one insertion: tens of milliseconds with a million keys. So the index is in shards,
as in `kvoffload.manager.block_table`. And a dict of objects is looked through by the garbage collector, entry by entry:
so the shards hold node numbers, plain ints, and a list has the nodes. A small index is a single dict of nodes, which is
asked directly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvoffload.keys import OffloadKey
from kvoffload.manager.block_table import make_shards
from kvoffload.manager.policies.adaptive_node import Node


class NodeIndex:
    """Every known key and its node.

    Args:
        num_keys: Keys to expect at most.

    Attributes:
        get: Returns the node of a key, None for an unknown one; an attribute, since it is asked most.
    """

    __slots__ = ("_free", "_nodes", "_shards", "_shift", "_size", "_small", "get")

    def __init__(self, num_keys: int) -> None:
        self._shards, self._shift = make_shards(num_keys)
        self._small: dict[OffloadKey, Node] | None = None
        self._nodes: list[Node | None] = [None]  # by number; 0 is that of unknown keys
        self._free: list[int] = []
        self._size = 0
        self.get: Callable[[OffloadKey], Node | None]
        if len(self._shards) == 1:
            self._small = {}
            self.get = self._small.get
        else:
            nodes, shift, getters = self._nodes, self._shift, tuple(shard.get for shard in self._shards)
            self.get = lambda key: nodes[getters[hash(key) >> shift](key, 0)]

    def __len__(self) -> int:
        return self._size

    def __contains__(self, key: OffloadKey) -> bool:
        return self.get(key) is not None

    def __getitem__(self, key: OffloadKey) -> Node:
        node = self.get(key)
        if node is None:
            raise KeyError(key)
        return node

    def unknown_until(self, keys: Sequence[OffloadKey], at: int) -> int:
        """Return the place of the first known key from place `at` on, or the number of keys."""
        if self._small is not None:
            small = self._small
            return next((place for place in range(at, len(keys)) if keys[place] in small), len(keys))
        shards, shift = self._shards, self._shift
        for place in range(at, len(keys)):
            key = keys[place]
            if key in shards[hash(key) >> shift]:
                return place
        return len(keys)

    def first_unknown(self, keys: Sequence[OffloadKey]) -> int | None:
        """Return the place of the first unknown key; None when all are known."""
        if self._small is not None:
            small = self._small
            return next((place for place, key in enumerate(keys) if key not in small), None)
        shards, shift = self._shards, self._shift
        for place, key in enumerate(keys):
            if key not in shards[hash(key) >> shift]:
                return place
        return None

    def nodes(self) -> set[Node]:
        """Return every node that is kept here."""
        return set(self._small.values()) if self._small is not None else {node for node in self._nodes if node}

    def add(self, keys: Sequence[OffloadKey], node: Node) -> tuple[OffloadKey, ...]:
        """Take unknown keys, and return them, each once."""
        fresh = dict.fromkeys(keys, node)
        self._size += len(fresh)
        if self._small is None:
            self.move(tuple(fresh), node)
        else:
            self._small.update(fresh)
        return tuple(fresh)

    def move(self, keys: Sequence[OffloadKey], node: Node) -> None:
        """Note that known keys are in `node` now."""
        if self._small is not None:
            self._small.update(dict.fromkeys(keys, node))
            return
        number = node.number
        if not number:
            number = node.number = self._free.pop() if self._free else len(self._nodes)
            if number == len(self._nodes):
                self._nodes.append(node)
            else:
                self._nodes[number] = node
        shards, shift = self._shards, self._shift
        for key in keys:
            shards[hash(key) >> shift][key] = number

    def remove(self, keys: Sequence[OffloadKey]) -> None:
        """Forget known keys, each given once."""
        self._size -= len(keys)
        if self._small is not None:
            for key in keys:
                del self._small[key]
            return
        shards, shift = self._shards, self._shift
        for key in keys:
            del shards[hash(key) >> shift][key]

    def let_go(self, node: Node) -> None:
        """Forget a node that has no keys any more."""
        if node.number:
            self._nodes[node.number] = None
            self._free.append(node.number)
            node.number = 0

    def clear(self) -> None:
        """Forget every key and node."""
        self._size = 0
        if self._small is not None:
            self._small.clear()
        for shard in self._shards:
            shard.clear()
        del self._nodes[1:]
        self._free.clear()
