"""The diagrams of docs/concepts.md are drawn from the code as it is: every arrow can be walked, every name exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvoffload.manager.base import OffloadingManager, ReqContext
from kvoffload.manager.cpu import CPUOffloadingManager
from kvoffload.service.board import TransferBoard
from kvoffload.service.loads import LoadDesk
from kvoffload.service.request import OffloadRequest
from kvoffload.service.results import LoadResult, StoreResult
from kvoffload.service.settling import Settler
from kvoffload.service.stores import StoreDesk
from kvoffload.transfer.base import OffloadingHandler

PAGE = (Path(__file__).parents[2] / "docs" / "concepts.md").read_text()
STATES, PATHS = re.findall(r"^```text\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
KEYS, CONTEXT = [b"a", b"b"], ReqContext("r")
NAMES = {
    "manager": OffloadingManager, "handler": OffloadingHandler,
    **{cls.__name__: cls for cls in (LoadDesk, OffloadRequest, Settler, StoreDesk, TransferBoard)},
}  # fmt: skip


def where(manager):
    """The state in which all blocks are that are not free."""
    stats = manager.stats()
    ready = stats.ready - stats.pinned
    found = {"writing": stats.writing, "ready": ready, "ready, pinned": stats.pinned, "detached": stats.detached}
    return [state for state, amount in found.items() if amount] or ["free"]


def at(state):
    """A manager with two blocks in `state`, and the ticket of the copy that runs there."""
    manager, ticket = CPUOffloadingManager(2), None
    if state != "free":
        ticket = manager.prepare_store(KEYS, CONTEXT).ticket
    if state in ("ready", "ready, pinned"):
        manager.complete_store(KEYS, ticket=ticket)
    if state == "ready, pinned":
        ticket = manager.prepare_load(KEYS, CONTEXT).ticket
    if state == "detached":
        manager.reset_cache()
    assert where(manager) == [state]
    return manager, ticket


ARROWS = [
    ("free", "prepare_store", "writing", lambda m, _: m.prepare_store(KEYS, CONTEXT)),
    ("writing", "complete_store(True)", "ready", lambda m, t: m.complete_store(KEYS, True, ticket=t)),
    ("writing", "failed", "free", lambda m, t: m.complete_store(KEYS, False, ticket=t)),
    ("writing", "taken back", "free", lambda m, t: m.abandon(t)),
    ("writing", "reset", "detached", lambda m, _: m.reset_cache()),
    ("writing", "discarded", "detached", lambda m, _: m.discard(KEYS)),
    ("writing", "hung", "detached", lambda m, t: m.abandon(t, copy_running=True, hung=True)),
    ("ready", "prepare_load", "ready, pinned", lambda m, _: m.prepare_load(KEYS, CONTEXT)),
    ("ready", "evicted", "writing", lambda m, _: m.prepare_store([b"c", b"d"], CONTEXT)),
    ("ready", "discarded", "free", lambda m, _: m.discard(KEYS)),
    ("ready", "reset", "free", lambda m, _: m.reset_cache()),
    ("ready, pinned", "complete_load", "ready", lambda m, t: m.complete_load(KEYS, ticket=t)),
    ("ready, pinned", "reset", "detached", lambda m, _: m.reset_cache()),
    ("ready, pinned", "discarded", "detached", lambda m, _: m.discard(KEYS)),
    ("ready, pinned", "hung", "detached", lambda m, t: m.abandon(t, copy_running=True, hung=True)),
    ("detached", "the copy has ended", "free", lambda m, t: m.complete_store(KEYS, True, ticket=t)),
]


@pytest.mark.parametrize(
    ("state", "label", "after", "do"), ARROWS, ids=lambda value: value if type(value) is str else ""
)
def test_every_arrow_of_the_states_can_be_walked(state, label, after, do):
    assert state in STATES
    assert label in STATES
    manager, ticket = at(state)
    do(manager, ticket)
    assert where(manager) == [after]  # what is evicted is free only until the store that wanted the room takes it


def test_every_name_of_the_paths_exists():
    named = re.findall(r"(\w+)\.(\w+)", PATHS)
    assert len(named) > 12
    assert [f"{owner}.{name}" for owner, name in named if not hasattr(NAMES[owner], name)] == []
    assert {"LoadResult", "StoreResult"} == {cls.__name__ for cls in (LoadResult, StoreResult) if cls.__name__ in PATHS}
