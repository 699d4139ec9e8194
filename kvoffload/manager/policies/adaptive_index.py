"""`NodeIndex`: which node of the adaptive policy's tree a key is in, without the stalls of one large dict.

A dict that grows is copied inside one insertion: tens of milliseconds with a million keys. So the index is in shards,
as in `kvoffload.manager.block_table`; a small one is a single dict, which is asked directly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

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

    __slots__ = ("_shards", "_shift", "_size", "get")

    def __init__(self, num_keys: int) -> None:
        raw, shift = make_shards(num_keys)
        shards: tuple[dict[OffloadKey, Node], ...] = tuple({} for _ in raw)
        self._shards, self._shift = shards, shift
        self._size = 0
        self.get: Callable[[OffloadKey], Node | None]
        if len(shards) == 1:
            self.get = shards[0].get
        else:
            getters = tuple(shard.get for shard in shards)
            self.get = lambda key: getters[hash(key) >> shift](key)

    def __len__(self) -> int:
        return self._size

    def __contains__(self, key: OffloadKey) -> bool:
        return self.get(key) is not None

    def __getitem__(self, key: OffloadKey) -> Node:
        return self._shards[hash(key) >> self._shift if len(self._shards) > 1 else 0][key]

    def values(self) -> Iterator[Node]:
        """Yield the node of each key, once for each."""
        for shard in self._shards:
            yield from shard.values()

    def add(self, keys: Sequence[OffloadKey], node: Node) -> tuple[OffloadKey, ...]:
        """Take unknown keys, and return them, each once."""
        unique = dict.fromkeys(keys, node)
        self._size += len(unique)
        self._put(unique)
        return tuple(unique)

    def move(self, keys: Sequence[OffloadKey], node: Node) -> None:
        """Note that known keys are in `node` now."""
        self._put(dict.fromkeys(keys, node))

    def remove(self, keys: Sequence[OffloadKey]) -> None:
        """Forget known keys, each given once."""
        self._size -= len(keys)
        shards, shift = self._shards, self._shift
        if len(shards) == 1:
            for key in keys:
                del shards[0][key]
            return
        for key in keys:
            del shards[hash(key) >> shift][key]

    def clear(self) -> None:
        """Forget every key."""
        self._size = 0
        for shard in self._shards:
            shard.clear()

    def _put(self, nodes: dict[OffloadKey, Node]) -> None:
        shards, shift = self._shards, self._shift
        if len(shards) == 1:
            shards[0].update(nodes)
            return
        for key, node in nodes.items():
            shards[hash(key) >> shift][key] = node
