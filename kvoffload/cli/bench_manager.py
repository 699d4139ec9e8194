"""What the manager's decisions cost, beside a plain OrderedDict manager and, if at hand, vLLM's.

All managers take part in each round; the median of the rounds is reported, and ratios are of medians. Times are of this
thread on its CPU, so a busy machine blurs them less. Keys are chosen at random over the whole cache, so the memory is
cold: `dict_get_floor` is what a bare `dict.get` of each key's block number costs there.

Examples:
  kvoffload bench manager
  kvoffload bench manager --blocks 100000 --policy lru,adaptive --parts calls --json
"""

from __future__ import annotations

import argparse
import gc
import operator
import statistics
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from kvoffload.cli.bench_manager_peers import Keys, OrderedDictPeer, OwnPeer, Peer, VllmPeer, load_vllm
from kvoffload.cli.main import OK
from kvoffload.cli.report import print_json, print_table
from kvoffload.cli.values import add_json, add_repeat, add_seed, add_skip_bad_lines, policies, positive, some_of
from kvoffload.keys import OffloadKey
from kvoffload.simulate.workload import Workload

Maker = Callable[[int], Peer]
BATCHES = (1, 16, 64, 1024)
EVICT = 1000

PARTS = ("calls", "pins", "longest", "memory", "replay")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's options."""
    add = parser.add_argument
    add("traces", nargs="*", type=Path, metavar="TRACE", help="request traces, replayed too (default built-in chats)")
    add_skip_bad_lines(parser)
    add("--blocks", type=positive, default=1_000_000, metavar="N", help="blocks in the cache (default 1000000)")
    add(
        "--policy", "--policies", type=policies, default="lru,arc", metavar="POLICY,...",
        help="cache policies of kvoffload to measure (default lru,arc)",
    )  # fmt: skip
    add_repeat(parser, 9, "--rounds")
    add(
        "--operations", type=positive, default=2_000_000, metavar="N",
        help="block operations for the longest call (default 2000000)",
    )  # fmt: skip
    add(
        "--passes", type=positive, default=1, metavar="N",
        help="repeat the longest-call run, same calls, N times (default 1)",
    )  # fmt: skip
    add(
        "--replay-capacity", type=positive, default=9_000, metavar="N",
        help="blocks in the trace replay (default 9000)",
    )  # fmt: skip
    add("--vllm-path", type=Path, metavar="FOLDER", help="an unpacked vLLM 0.32 wheel, measured too (default none)")
    add(
        "--parts", type=some_of(PARTS), default=",".join(PARTS), metavar="PART,...",
        help="parts to measure (default %(default)s)",
    )  # fmt: skip
    add_seed(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Measure and report."""
    makers = _makers(args.policy, args.vllm_path)
    keys = make_keys(2 * args.blocks, args.seed)
    measure: dict[str, Callable[[], dict[str, object]]] = {
        "calls": lambda: measure_calls(makers, keys, args.blocks, args.repeat, args.seed),
        "pins": lambda: measure_pins(makers, keys, args.blocks),
        "longest": lambda: measure_longest(makers, keys, args.blocks, args.operations, args.seed, args.passes),
        "memory": lambda: measure_memory(makers, keys, args.blocks),
        "replay": lambda: measure_replay(
            makers, Workload(args.traces, seed=args.seed, skip_bad_lines=args.skip_bad_lines), args.replay_capacity
        ),
    }
    result: dict[str, object] = {"blocks": args.blocks}
    for part in args.parts:
        result[part] = measure[part]()
    if args.json:
        print_json(result)
    else:
        for part in args.parts:
            table = result[part]
            tables = table.items() if part == "calls" and isinstance(table, dict) else [(part, table)]
            for name, values in tables:
                print_table(f"manager, {args.blocks:,} blocks: {name}", values if isinstance(values, dict) else {})
    return OK


def _makers(policies: list[str], vllm_path: Path | None) -> dict[str, Maker]:
    makers: dict[str, Maker] = {}
    for policy in policies:
        makers[f"kvoffload_{policy}"] = lambda blocks, policy=policy: OwnPeer(policy, blocks)  # type: ignore[misc]
    makers["ordereddict_lru"] = OrderedDictPeer
    if vllm_path is not None:
        modules = load_vllm(vllm_path)
        for policy in ("lru", "arc"):
            makers[f"vllm_{policy}"] = lambda blocks, policy=policy: VllmPeer(modules, policy, blocks)  # type: ignore[misc]
    return makers


def make_keys(count: int, seed: int) -> list[OffloadKey]:
    """Return distinct keys of 36 bytes, as sha256 hashes with a group would be."""
    raw = np.random.default_rng(seed).bytes(32 * count)
    return [OffloadKey(raw[at : at + 32] + b"\0\0\0\0") for at in range(0, 32 * count, 32)]


def fill(peer: Peer, keys: Keys) -> None:
    """Store keys in batches."""
    for at in range(0, len(keys), 1024):
        peer.store(keys[at : at + 1024])


def measure_calls(
    makers: dict[str, Maker], keys: list[OffloadKey], blocks: int, rounds: int, seed: int
) -> dict[str, object]:
    """Return nanoseconds per block of each call, per batch size and manager.

    Batches are random and cold when they are looked up, one after the other, as the floor is measured; others are
    looked up, touched and loaded in turn, as a request does, which times the latter two. A store of new keys evicts as
    many; the keys themselves are warm, as just computed.
    """
    peers = [make(blocks) for make in makers.values()]
    held, fresh = keys[:blocks], keys[blocks:]
    for peer in peers:
        fill(peer, held)
    floor = {key: block for block, key in enumerate(held)}
    rng = np.random.default_rng(seed)
    at_once = max(1, min(8192, blocks // (rounds * len(BATCHES))))
    times: dict[str, dict[str, list[float]]] = {
        f"{call}_{batch}": {} for call in ("lookup", "touch", "load", "store") for batch in BATCHES
    }
    clock = _clock_seconds()

    def note(call: str, batch: int, name: str, seconds: float) -> None:
        net = (seconds - -(-at_once // batch) * clock) / at_once * 1e9
        times[f"{call}_{batch}"].setdefault(name, []).append(net)

    gc.collect()
    for batch in BATCHES:
        for _ in range(rounds):
            note(
                "lookup", batch, "dict_get_floor", _seconds(partial(_get_all, floor), _cold(held, rng, at_once, batch))
            )
            for peer in peers:
                note("lookup", batch, peer.name, _seconds(peer.lookup, _cold(held, rng, at_once, batch)))
                spent = _using_seconds(peer, _cold(held, rng, at_once, batch))
                for call, seconds in spent.items():
                    note(call, batch, peer.name, seconds)
    for batch in BATCHES:
        for _ in range(rounds):
            chosen, fresh = fresh[:at_once], fresh[at_once:]
            for peer in peers:
                sum(map(hash, chosen))
                note("store", batch, peer.name, _seconds(peer.store, _cut(chosen, batch)))
    medians = {call: {name: statistics.median(values) for name, values in row.items()} for call, row in times.items()}
    own = next(iter(makers))
    return {
        "ns_per_block": {call: {name: round(ns) for name, ns in row.items()} for call, row in medians.items()},
        f"times_faster_{own}": {
            call: {name: round(ns / row[own], 2) for name, ns in row.items() if name != own}
            for call, row in medians.items()
        },
    }


def _cut(keys: list[OffloadKey], batch: int) -> list[list[OffloadKey]]:
    return [keys[at : at + batch] for at in range(0, len(keys), batch)]


def _cold(held: list[OffloadKey], rng: np.random.Generator, count: int, batch: int) -> list[list[OffloadKey]]:
    return _cut([held[at] for at in rng.integers(0, len(held), count)], batch)


def _get_all(index: dict[OffloadKey, int], keys: Keys) -> list[int | None]:
    get = index.get
    return [get(key) for key in keys]


def _clock_seconds() -> float:
    """Return what reading the clock twice around a call adds."""
    return min(-time.thread_time() + time.thread_time() for _ in range(1000))


def _seconds(call: Callable[[Keys], object], batches: list[list[OffloadKey]]) -> float:
    spent = 0.0
    for batch in batches:
        begin = time.thread_time()
        call(batch)
        spent += time.thread_time() - begin
    return spent


def _using_seconds(peer: Peer, batches: list[list[OffloadKey]]) -> dict[str, float]:
    """Return what it costs to touch and to load what was just looked up."""
    spent = dict.fromkeys(("touch", "load"), 0.0)
    for batch in batches:
        peer.lookup(batch)
        for call in spent:
            run_call = getattr(peer, call)
            begin = time.thread_time()
            run_call(batch)
            spent[call] += time.thread_time() - begin
    return spent


def measure_pins(makers: dict[str, Maker], keys: list[OffloadKey], blocks: int) -> dict[str, object]:
    """Return milliseconds to store and evict 1,000 blocks while a share of the oldest blocks is pinned."""
    result: dict[str, object] = {}
    count = max(1, min(EVICT, blocks // 100))
    for name, make in makers.items():
        row: dict[str, float] = {}
        for share in (0, 50, 90):
            peer = make(blocks)
            fill(peer, keys[:blocks])
            for at in range(0, blocks * share // 100, 1024):
                peer.pin(keys[at : min(at + 1024, blocks * share // 100)])
            spent = [
                _seconds(peer.store, [keys[blocks + at : blocks + at + count]]) * 1e3
                for at in range(0, 9 * count, count)
            ]
            row[f"first_ms_{share}"] = round(spent[0], 2)
            row[f"median_ms_{share}"] = round(statistics.median(spent), 2)
            del peer
        result[name] = row
    return result


def measure_longest(
    makers: dict[str, Maker], keys: list[OffloadKey], blocks: int, operations: int, seed: int, passes: int = 1
) -> dict[str, object]:
    """Return the longest single call, in milliseconds, of random calls of 64 to 1,024 blocks with random pins.

    Each pass makes the same calls in the same order. `longest_ms` is the longest call of any pass. A clock that ticks,
    or a machine with other work, adds milliseconds to some calls, to others each time; of each call the least of all
    passes counts in `repeatable_ms`, the longest of those, and in the figures of the kinds of calls. The collector runs
    as it pleases; how long its longest pause was is reported too, and is part of the call it hit.
    """
    result: dict[str, object] = {}
    for name, make in makers.items():
        each: list[list[float]] = []
        kinds: list[str] = []
        collector = 0.0
        for _ in range(passes):
            kinds, spent, paused = _longest_pass(make(blocks), keys, blocks, operations, seed)
            each.append(spent)
            collector = max(collector, paused)
        least = [min(times) for times in zip(*each, strict=True)]
        longest: dict[str, float] = {}
        for kind, seconds in zip(kinds, least, strict=True):
            longest[kind] = max(longest.get(kind, 0.0), seconds)
        result[name] = {
            "longest_ms": round(max(map(max, each)) * 1e3, 2),
            "repeatable_ms": round(max(least) * 1e3, 2),
            **{f"{kind}_ms": round(seconds * 1e3, 2) for kind, seconds in longest.items()},
            "collector_ms": round(collector * 1e3, 2),
        }
    return result


def _longest_pass(
    peer: Peer, keys: list[OffloadKey], blocks: int, operations: int, seed: int
) -> tuple[list[str], list[float], float]:
    """Return the kind of each call, its seconds, and the longest pause of the collector."""
    fill(peer, keys[:blocks])
    rng = np.random.default_rng(seed)
    held, largest = blocks, max(1, min(1024, blocks // 8))
    pinned: list[tuple[list[OffloadKey], object]] = []
    kinds: list[str] = []
    spent: list[float] = []
    pauses = _Pauses()
    done = 0
    while done < operations:
        size = int(rng.integers(max(1, largest // 16), largest + 1))
        at = held - int(rng.integers(size, max(size, blocks // 2) + 1))
        some = [keys[i % len(keys)] for i in range(at, at + size)]
        roll = rng.random()
        call, argument = "store", [keys[i % len(keys)] for i in range(held, held + size)]
        if roll < 0.2:
            call, argument = "touch", some
        elif roll < 0.5:
            call, argument = "lookup", some
        elif roll < 0.65 and peer.lookup(some) == size:
            call, argument = "pin", some
        elif roll < 0.75 and pinned:
            call = "unpin"
        begin = time.thread_time()
        if call == "pin":
            pinned.append((some, peer.pin(some)))
        elif call == "unpin":
            peer.unpin(*pinned.pop(0))
        else:
            answer = getattr(peer, call)(argument)
            held += size if call == "store" and answer >= 0 else 0
        spent.append(time.thread_time() - begin)
        kinds.append(call)
        done += size
        while len(pinned) > 100:
            peer.unpin(*pinned.pop(0))
    pauses.stop()
    return kinds, spent, pauses.longest


class _Pauses:
    """Hears of garbage collections."""

    def __init__(self) -> None:
        self.longest = 0.0
        self._begin = 0.0
        gc.collect()
        gc.callbacks.append(self._heard)

    def _heard(self, phase: str, info: dict[str, int]) -> None:  # noqa: ARG002
        if phase == "start":
            self._begin = time.thread_time()
        else:
            self.longest = max(self.longest, time.thread_time() - self._begin)

    def stop(self) -> None:
        gc.callbacks.remove(self._heard)


def measure_memory(makers: dict[str, Maker], keys: list[OffloadKey], blocks: int) -> dict[str, object]:
    """Return bytes per entry of a full cache: filled once, and after as many evictions again; keys excluded."""
    result: dict[str, object] = {}
    for name, make in makers.items():
        gc.collect()
        tracemalloc.start()
        peer = make(blocks)
        fill(peer, keys[:blocks])
        full = tracemalloc.get_traced_memory()[0]
        fill(peer, keys[blocks:])
        churned = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        result[name] = {"full": round(full / blocks, 1), "churned": round(churned / blocks, 1)}
        del peer
    return result


def measure_replay(makers: dict[str, Maker], workload: Workload, capacity: int) -> dict[str, object]:
    """Return seconds per manager for a workload: look up, touch, load the hits, store the rest in steps of 16.

    The least of three runs counts, for all requests and for each one: `request_p999_us` is what 99.9 % of them stay
    within.
    """
    requests = [[OffloadKey(name + b"\0\0\0\0") for name in request.block_hashes] for request in workload]
    result: dict[str, object] = {}
    for name, make in makers.items():
        least = [float("inf")] * len(requests)
        spent, hits = [], 0
        for _ in range(3):
            peer = make(capacity)
            hits = 0
            ends = [time.thread_time()]
            for number, keys in enumerate(requests):
                hits += _serve(peer, str(number), keys)
                ends.append(time.thread_time())
            spent.append(ends[-1] - ends[0])
            least = list(map(min, least, map(operator.sub, ends[1:], ends)))
        blocks = sum(map(len, requests))
        result[name] = {
            "seconds": round(min(spent), 3),
            "ns_per_block": round(min(spent) / blocks * 1e9),
            "request_p999_us": round(sorted(least)[int(0.999 * (len(least) - 1))] * 1e6),
            "hit_ratio": round(hits / blocks, 4),
        }
    return result


def _serve(peer: Peer, req_id: str, keys: list[OffloadKey]) -> int:
    peer.begin(req_id)
    hits = peer.lookup(keys)
    peer.touch(keys)
    if hits:
        peer.load(keys[:hits])
    for at in range(hits, len(keys), 16):
        peer.store(keys[at : at + 16])
    peer.end(keys)
    return hits
