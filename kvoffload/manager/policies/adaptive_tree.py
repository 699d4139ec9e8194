"""The radix tree of the adaptive policy: which keys follow which, and how much of each run is held.

Theory of operation. A *node* is a run of keys without a fork. Keys are *held* (memory has their block) or *ghosts*; the
held keys of a node are always its first `held` ones, so a hole in a run (a failed copy, a discarded block) splits it. A
node is *live* while it or anything below holds a key; it counts its live children, and a key may be evicted only from
the end of a node that has none: the cache stays closed under prefixes.

A key names its whole prefix, so the list that came last is right about parents: a node found under another parent (it
was stored before its request was known, or its old parent was forgotten) moves. Lists that contradict themselves are
followed only as far as they make no cycle.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from kvoffload.keys import OffloadKey
from kvoffload.manager.policies.adaptive_hazard import ReuseClass
from kvoffload.manager.policies.adaptive_index import NodeIndex
from kvoffload.manager.policies.adaptive_node import Node, RequestState


class RadixTree:
    """All known keys, the bookkeeping of who is live, and the list of ghosts, oldest first.

    Args:
        first_class: Class of a node that no request has finished with yet.
        on_evictable: Called with a held node whose last child ceased to be live.
        max_ghosts: Keys without a block to remember.
        max_held: Keys with a block at most.

    Attributes:
        node_of: Every known key and its node.
        now: The policy's clock.
    """

    __slots__ = ("_first_class", "_ghosts", "_max_ghosts", "_on_evictable", "node_of", "now")

    def __init__(
        self, first_class: ReuseClass, on_evictable: Callable[[Node], None], max_ghosts: int, max_held: int
    ) -> None:
        self._first_class = first_class
        self._on_evictable = on_evictable
        self._max_ghosts = max_ghosts
        self._ghosts: OrderedDict[Node, None] = OrderedDict()
        self.node_of = NodeIndex(max_ghosts + max_held)
        self.now = 0.0

    def walk(self, keys: Sequence[OffloadKey], owner: RequestState | None = None) -> tuple[list[Node], int]:
        """Return the nodes that make up `keys`, from the first, and how many leading keys were known.

        Unknown keys get nodes (or lengthen the run that only `owner` uses), partial matches split.
        """
        keys = tuple(keys)  # as runs are
        find = self.node_of.get
        known: int | None = None
        path: list[Node] = []
        previous: Node | None = None
        at, total = 0, len(keys)
        while at < total:
            key = keys[at]
            node = find(key)
            if node is None:
                end = self.node_of.unknown_until(keys, at + 1)
                node = self.append(previous, keys[at:end], owner)
                known = at if known is None else known
                at = end
                if node is not previous:
                    path.append(node)
                previous = node
                continue
            run = node.keys
            if run[0] != key:
                if previous is not None:
                    break  # a list that contradicts what is known
                self.split(node, run.index(key))
                run = node.keys
            if previous is not None and node.parent is not previous and not self._move(node, previous):
                break
            size = len(run)
            if run != keys[at : at + size]:
                size = 1
                limit = min(len(run), total - at)
                while size < limit and run[size] == keys[at + size]:
                    size += 1
                if size < len(run):
                    node = self.split(node, size)
            path.append(node)
            previous = node
            at += size
        return path, at if known is None else known

    def append(self, parent: Node | None, keys: Sequence[OffloadKey], owner: RequestState | None = None) -> Node:
        """Add unknown keys behind `parent`: as a new node, or to its run when `owner` just began that one."""
        grows = (
            parent is not None and owner is not None and parent.busy is owner
            and parent.touched < 0 and not parent.count and not parent.live_kids
        )  # fmt: skip
        node = parent if parent is not None and grows else Node((), parent, self._first_class, self.now)
        node.busy = owner
        node.keys += self.node_of.add(keys, node)
        self.note_ghosts(node)
        return node

    def end_at(self, key: OffloadKey) -> Node | None:
        """Return the node that ends with `key`, splitting behind it; None for an unknown key."""
        node = self.node_of.get(key)
        if node is None or node.keys[-1] == key:
            return node
        return self.split(node, node.keys.index(key) + 1)

    def split(self, node: Node, size: int) -> Node:
        """Cut `node` behind `size` keys; it keeps the lower part, its children with it. Return the new upper part."""
        upper = Node(node.keys[:size], node.parent, node.reuse, node.time)
        upper.count = node.count
        upper.forks = 1 if node.count else 0
        upper.touched = node.touched
        upper.busy = node.busy
        upper.held = min(node.held, size)
        node.keys = node.keys[size:]
        node.held -= upper.held
        node.parent = upper
        upper.live_kids = 1 if node.held or node.live_kids else 0
        self.node_of.move(upper.keys, upper)
        if not node.held:
            node.leave_cell()
        if upper.held < size:
            self.note_ghosts(upper)
        if upper.held and not upper.live_kids:
            self._on_evictable(upper)
        return upper

    def join(self, upper: Node, lower: Node, below: Node | None) -> Node | None:
        """Make one run of a node and a child, and return it; None where living children or a hole forbid it.

        `below` is the child of `lower` that the caller goes on with. Usually only that one lives, and `upper`, which
        tends to be the longer one, takes over; otherwise `lower` does, with the children it has.
        """
        if lower.held and upper.held < len(upper.keys):
            return None
        below_lives = 1 if below is not None and (below.held or below.live_kids) else 0
        lower_lives = 1 if lower.held or lower.live_kids else 0
        if lower.live_kids == below_lives:
            stays, goes = upper, lower
            upper.live_kids += lower.live_kids - lower_lives
            upper.forks = lower.forks
            upper.turn = lower.turn
            if below is not None:
                below.parent = upper
        elif upper.live_kids == lower_lives:
            stays, goes = lower, upper
            lower.parent = upper.parent
            lower.count = upper.count
        else:
            return None
        for node in (upper, lower):
            node.leave_cell()
        goes.leave_exposure()
        self.node_of.move(goes.keys, stays)
        stays.keys, stays.held = upper.keys + lower.keys, upper.held + lower.held
        goes.keys = ()
        self.node_of.let_go(goes)
        goes.held = goes.live_kids = 0
        return stays

    def hold(self, keys: tuple[OffloadKey, ...]) -> list[Node]:
        """Note that `keys` have blocks now, and return their nodes; an unknown key becomes a root of its own."""
        find = self.node_of.get
        nodes: list[Node] = []
        at, total = 0, len(keys)
        while at < total:
            key = keys[at]
            node = find(key)
            if node is None:
                node = self.append(None, (key,))
            held = node.held
            if node.keys[held] != key:
                self.split(node, node.keys.index(key))
                held = 0
            run = node.keys[held : held + total - at]
            count = len(run) if run == keys[at : at + len(run)] else 1
            node.held = held + count
            if not held and not node.live_kids:
                self._becomes_live(node)
            if node.held == len(node.keys):
                self._ghosts.pop(node, None)
            nodes.append(node)
            at += count
        return nodes

    def release(self, key: OffloadKey) -> Node:
        """Note that `key` has no block any more, and return its node; in the middle of a run this cuts the run."""
        node = self.node_of[key]
        index = node.keys.index(key) if node.keys[node.held - 1] != key else node.held - 1
        if index < node.held - 1:
            node = self.split(node, index + 1)
        self.shrink(node, index)
        return node

    def shrink(self, node: Node, held: int) -> None:
        """Let `node` hold its first `held` keys only."""
        node.held = held
        if held == 0:
            node.leave_cell()
            if not node.live_kids:
                self._ceases_to_live(node)
        self.note_ghosts(node)

    def restore(self, node: Node, held: int) -> None:
        """Undo `shrink`."""
        was_dead = not node.held and not node.live_kids
        node.held = held
        if was_dead:
            self._becomes_live(node)

    def note_ghosts(self, node: Node) -> None:
        """Put a node with ghosts at the end of the list, unless it is there."""
        if node not in self._ghosts:
            self._ghosts[node] = None

    def renew_ghosts(self, node: Node) -> None:
        """Put a node that was used now at the end of the list, or off it when it has no ghosts."""
        self._ghosts.pop(node, None)
        if node.held < len(node.keys):
            self._ghosts[node] = None

    def trim_ghosts(self, held: int) -> None:
        """Forget the oldest ghosts beyond the limit; `held` is the number of held keys."""
        surplus = len(self.node_of) - held - self._max_ghosts
        for _ in range(len(self._ghosts)):
            if surplus <= 0:
                return
            node = self._ghosts.popitem(last=False)[0]
            if node.busy is not None and node.busy.open:
                self._ghosts[node] = None
            elif not node.live_kids:
                surplus -= len(node.keys) - node.held
                self.node_of.remove(node.keys[node.held :])
                node.keys = node.keys[: node.held]
                if not node.keys:
                    node.leave_exposure()
                    self.node_of.let_go(node)

    def clear(self) -> None:
        """Forget every key."""
        self.node_of.clear()
        self._ghosts.clear()

    def _becomes_live(self, node: Node) -> None:
        above = node.parent
        while above is not None:
            above.live_kids += 1
            if above.live_kids > 1:
                return
            if above.held:
                above.leave_cell()
                return
            above = above.parent

    def _ceases_to_live(self, node: Node) -> None:
        above = node.parent
        while above is not None:
            above.live_kids -= 1
            if above.live_kids:
                return
            if above.held < len(above.keys):
                self.note_ghosts(above)
            if above.held:
                self._on_evictable(above)
                return
            above = above.parent

    def _move(self, node: Node, parent: Node) -> bool:
        """Hang `node` below `parent`; False when that would make a cycle."""
        above: Node | None = parent
        while above is not None:
            if above is node:
                return False
            above = above.parent
        live = node.held or node.live_kids
        if live:
            self._ceases_to_live(node)
        node.parent = parent
        if live:
            self._becomes_live(node)
        return True
