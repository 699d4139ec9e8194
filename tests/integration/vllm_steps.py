"""The call pattern of vLLM's offloading connector, drawn at random and played to several managers at once.

Runs inside the virtual environment of vLLM (see `.ci/vllm.sh`), which has no pytest: the tests call it as a program.

    python vllm_steps.py differential --policy lru --threshold 0 --steps 50000 --seed 1
    python vllm_steps.py cost --steps 3000
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager as VllmManager

from kvoffload.integrations.vllm import KVOffloadManager

TOKENS = 16


def _lookup(key: bytes, manager: Any, context: Any) -> Any:
    return manager.lookup(key, context)


def key_of(document: int, index: int, group: int = 0) -> bytes:
    return hashlib.sha256(b"%d/%d" % (document, index)).digest() + group.to_bytes(4, "big")


class Request:
    """One request: keys of a shared prefix and of its own, as the connector would name them."""

    def __init__(self, name: str, keys: list[bytes]) -> None:
        self.name, self.keys = name, keys
        self.contexts: list[Any] = []
        self.next_stored = 0
        self.loading: list[bytes] = []
        self.storing: list[list[bytes]] = []
        self.refused = False  # or reset: the connector offers the same keys once more

    def open(self, managers: list[Any]) -> None:
        for manager in managers:
            context = ReqContext(req_id=self.name)
            for index, key in enumerate(self.keys):
                context.set_offload_key_position(key, (index + 1) * TOKENS)
            manager.on_new_request(context)
            self.contexts.append(context)


class Differential:
    """Plays the same calls to vLLM's manager and to ours and compares every answer."""

    def __init__(self, policy: str, threshold: int, seed: int, capacity: int = 64) -> None:
        self.rng = random.Random(seed)
        self.theirs = VllmManager(capacity, policy, store_threshold=max(1, threshold))
        self.ours = KVOffloadManager(capacity, policy, store_threshold=threshold, clock=lambda: 0.0)
        self.managers: list[Any] = [self.theirs, self.ours]
        self.policy, self.threshold = policy, threshold
        self.running: list[Request] = []
        self.finished: list[Request] = []
        self.count = 0
        self.tally = dict.fromkeys(
            ("lookups", "hits", "pending", "loads", "stores", "refused", "evicted", "filtered", "finished", "resets"), 0
        )

    def same(self, what: str, answers: list[Any]) -> Any:
        if answers[0] != answers[1]:
            raise SystemExit(f"step {self.count}: {what}: vLLM {answers[0]!r}, kvoffload {answers[1]!r}")
        return answers[0]

    def each(self, request: Request, call: Callable[[Any, Any], Any]) -> list[Any]:
        return [call(manager, context) for manager, context in zip(self.managers, request.contexts, strict=True)]

    # ---- the connector's calls

    def start(self) -> None:
        document = min(int(self.rng.paretovariate(0.9)), 60)
        length = self.rng.randint(1, 28)
        shared = self.rng.randint(0, length)
        own = 1_000_000 + self.count if self.rng.random() < 0.4 else document + 100
        keys = [key_of(document, index) for index in range(shared)]
        keys += [key_of(own, index) for index in range(shared, length)]
        request = Request(f"r{self.count}", keys)
        request.open(self.managers)
        self.running.append(request)
        self.lookup_and_load(request)

    def lookup_and_load(self, request: Request) -> None:
        if request.loading or request.storing:
            return
        first = self.rng.randint(0, len(request.keys) // 2)
        hits, deferred = 0, False
        for key in request.keys[first:]:
            result = self.same("lookup", self.each(request, functools.partial(_lookup, key)))
            self.tally["lookups"] += 1
            if result is LookupResult.MISS:
                break
            deferred |= result is LookupResult.HIT_PENDING
            self.tally["pending"] += result is LookupResult.HIT_PENDING
            hits += 1
        if deferred or not hits or self.rng.random() < 0.1:
            return
        self.tally["hits"] += hits
        keys = request.keys[first : first + hits]
        specs = self.each(request, lambda manager, context: manager.prepare_load(keys, context))
        self.same("blocks loaded", [len(spec.block_ids) for spec in specs])
        request.loading = keys
        request.next_stored = max(request.next_stored, first + hits)
        self.tally["loads"] += 1

    def end_load(self, request: Request) -> None:
        keys = set(request.loading)
        self.each(request, lambda manager, context: manager.complete_load(keys, context))
        request.loading = []

    def offer(self, request: Request) -> None:
        if request.loading or request.next_stored >= len(request.keys):
            return
        if request.refused and self.threshold >= 2:
            return  # vLLM counts a refused offer again each step: see docs/vllm.md, "what differs on purpose"
        end = self.rng.randint(request.next_stored + 1, len(request.keys))
        keys = request.keys[request.next_stored : end]
        outputs = self.each(request, lambda manager, context: manager.prepare_store(keys, context))
        if self.same("refused", [output is None for output in outputs]):
            self.tally["refused"] += 1
            request.refused = True
            return
        stored = self.same("stored keys", [output.keys_to_store for output in outputs])
        victims = self.same("victims", [output.evicted_keys for output in outputs])
        self.tally["stores"] += len(stored)
        self.tally["evicted"] += len(victims)
        self.tally["filtered"] += len(keys) - len(stored)
        request.next_stored = end
        if stored:
            request.storing.append(stored)

    def end_store(self, request: Request) -> None:
        keys = set(request.storing.pop(self.rng.randrange(len(request.storing))))
        self.each(request, lambda manager, context: manager.complete_store(keys, context))

    def finish(self, request: Request) -> None:
        if self.policy == "arc":
            # vLLM makes a block frequent that this request used, that was evicted since, and that is written anew;
            # ours does not. Such a request finishes later here.
            writing = {key for other in self.running + self.finished for keys in other.storing for key in keys}
            if writing & self.ours._state(request.contexts[1]).context.uses.classes()[0]:
                return
        self.each(request, lambda manager, context: manager.on_request_finished(context))
        self.running.remove(request)
        self.tally["finished"] += 1
        if request.loading or request.storing:
            self.finished.append(request)

    def reset(self) -> None:
        for manager in self.managers:
            manager.reset_cache()
        for request in self.finished:
            request.loading, request.storing = [], []
        self.finished.clear()
        for request in self.running:
            request.loading, request.storing, request.next_stored = [], [], 0
            request.refused = True
        self.tally["resets"] += 1

    def step(self) -> None:
        self.count += 1
        rng = self.rng
        chance = rng.random()
        if len(self.running) < 3 or (chance < 0.16 and len(self.running) < 12):
            self.start()
        elif chance < 0.30:
            self.lookup_and_load(rng.choice(self.running))
        elif chance < 0.60:
            self.offer(rng.choice(self.running))
        elif chance < 0.86:
            busy = [request for request in self.running + self.finished if request.loading or request.storing]
            if busy:
                request = rng.choice(busy)
                self.end_load(request) if request.loading else self.end_store(request)
                if request in self.finished and not request.loading and not request.storing:
                    self.finished.remove(request)
        elif chance < 0.9995:
            self.finish(rng.choice(self.running))
        else:
            self.reset()
        for manager in self.managers:
            manager.on_schedule_end(ScheduleEndContext((), ()))

    def run(self, steps: int) -> dict[str, Any]:
        for _ in range(steps):
            self.step()
        stats = self.ours.cpu.stats()
        if stats.free + stats.writing + stats.ready + stats.detached != stats.capacity:
            raise SystemExit(f"the books do not balance: {stats}")
        return {"steps": steps, **self.tally, "policy": self.policy, "threshold": self.threshold}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("differential", "cost"))
    parser.add_argument("--policy", default="lru")
    parser.add_argument("--threshold", type=int, default=0)
    parser.add_argument("--steps", type=int, default=50_000)
    parser.add_argument("--length", type=int, default=256, help="blocks of a request in `cost`")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    if args.what == "differential":
        result = Differential(args.policy, args.threshold, args.seed).run(args.steps)
    else:
        result = cost(args.policy, args.threshold, args.steps, length=args.length)
    print("RESULT " + json.dumps(result))


def cost(policy: str, threshold: int, steps: int, requests: int = 8, length: int = 256) -> dict[str, Any]:
    """Time the connector's calls of one scheduler step for both managers, in turns in one process."""
    makers: dict[str, Callable[[], Any]] = {
        "vllm": lambda: VllmManager(64 * length, policy, store_threshold=max(1, threshold)),
        "kvoffload": lambda: KVOffloadManager(64 * length, policy, store_threshold=threshold),
    }
    managers = {name: make() for name, make in makers.items()}
    seconds: dict[str, list[float]] = {name: [] for name in managers}
    for step in range(steps):
        order = list(managers) if step % 2 else list(managers)[::-1]
        for name in order:
            rng = random.Random(step)
            batch = []
            for number in range(requests):
                document = min(int(rng.paretovariate(0.7)), 200)
                shared = rng.randint(0, length)
                keys = [key_of(document, index) for index in range(shared)]
                keys += [key_of(10_000 + step * requests + number, index) for index in range(shared, length)]
                context = ReqContext(req_id=f"s{step}-{number}")
                for index, key in enumerate(keys):
                    context.set_offload_key_position(key, (index + 1) * TOKENS)
                batch.append((context, keys))
            seconds[name].append(_play(managers[name], batch))
    return {
        "policy": policy,
        "threshold": threshold,
        "length": length,
        **{f"{name}_us": round(statistics.median(values[steps // 5 :]) * 1e6, 1) for name, values in seconds.items()},
        # Both managers play each step one after the other: the median of the steps' ratios bears a busy machine.
        "ratio": round(
            statistics.median(
                ours / theirs
                for ours, theirs in list(zip(seconds["kvoffload"], seconds["vllm"], strict=True))[steps // 5 :]
            ),
            3,
        ),
    }


def _play(manager: Any, batch: list[tuple[Any, list[bytes]]]) -> float:
    started = time.thread_time()
    jobs = []
    for context, keys in batch:
        manager.on_new_request(context)
        hits = 0
        for key in keys:
            if manager.lookup(key, context) is LookupResult.MISS:
                break
            hits += 1
        if hits:
            manager.prepare_load(keys[:hits], context)
        jobs.append((context, keys, hits))
    manager.on_schedule_end(ScheduleEndContext((), ()))
    stored = []
    for context, keys, hits in jobs:
        if hits:
            manager.complete_load(set(keys[:hits]), context)
        output = manager.prepare_store(keys[hits:], context) if hits < len(keys) else None
        if output is not None and output.keys_to_store:
            stored.append((context, set(output.keys_to_store)))
    for context, _, _ in jobs:
        manager.on_request_finished(context)
    for context, keys_stored in stored:
        manager.complete_store(keys_stored, context)
    for _ in manager.take_events():
        pass
    manager.get_stats()
    return time.thread_time() - started


if __name__ == "__main__":
    main()
