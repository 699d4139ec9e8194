"""What must be true of an adaptive policy's inside after every call."""

from __future__ import annotations

from collections import Counter


def check_adaptive(policy):
    """Assert every law of the tree, the cells, the ghosts and the shadow."""
    tree, table, blocks = policy._tree, policy._reuse, policy.blocks
    nodes = tree.node_of.nodes()
    for node in nodes:
        assert node.keys
        assert all(tree.node_of[key] is node for key in node.keys), "a key's node holds it"
        assert [key in blocks for key in node.keys] == [i < node.held for i in range(len(node.keys))], "held keys lead"
    assert sum(node.held for node in nodes) == len(blocks) == policy._held <= policy.cache_capacity
    assert sum(len(node.keys) for node in nodes) == len(tree.node_of)

    live_kids, live, rising = Counter(), set(), [node for node in nodes if node.held]
    while rising:
        node = rising.pop()
        if node not in live:
            live.add(node)
            if node.parent is not None:
                live_kids[node.parent] += 1
                rising.append(node.parent)
    for node in nodes | live:
        assert node.live_kids == live_kids[node], "live children are counted"

    for node in nodes:
        if node.cell is not None:
            assert node.held
            assert not node.live_kids
            assert node in node.cell
            assert node.cell is node.reuse.cells[node.age_bin]
        elif node.held and not node.live_kids and not (node.busy is not None and node.busy.open):
            assert blocks[node.keys[node.held - 1]].ref_cnt != 0, "what may be evicted stands in a cell"
        if node.held < len(node.keys) and not node.live_kids:
            assert node in tree._ghosts, "ghosts can be forgotten"
        if node.exposure is not None:
            assert node in node.exposure
    for reuse in table.classes.values():
        for index in range(len(reuse.cells)):
            assert set(reuse.cells[index]) <= nodes
            assert set(reuse.exposures[index]) <= nodes
            if reuse.cells[index]:
                assert any(entry[3] is reuse and entry[2] == index and entry[0] == reuse.rank[index]
                           for entry in table._heap), "a filled cell is in the heap"  # fmt: skip
    shadow = policy._shadow
    assert shadow._held == sum(shadow._blocks_of.values()) <= policy.cache_capacity
    assert all(count >= 0 for count in shadow._blocks_of.values())


def check_ghost_bound(policy):
    """Assert, at a request's end, that no more ghosts are remembered than the limit and what open requests need."""
    tree = policy._tree
    nodes = tree.node_of.nodes()
    needed = sum(len(n.keys) - n.held for n in nodes if n.live_kids or (n.busy is not None and n.busy.open))
    assert len(tree.node_of) - len(policy.blocks) <= tree._max_ghosts + needed
