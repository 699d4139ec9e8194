"""Scenarios on a real vLLM engine. Runs inside vLLM's virtual environment (see `.ci/vllm.sh`); prints one JSON line.

    python vllm_engine.py MODEL SCENARIO [key=value ...]

Every scenario starts with prompt A (200 tokens), fillers that evict it from the tiny primary cache, and A again.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from typing import Any

OWN = {"spec_name": "KVOffloadSpec", "spec_module_path": "kvoffload.integrations.vllm", "cpu_bytes_to_use": "32MiB"}
GREEDY = {"temperature": 0, "max_tokens": 16, "ignore_eos": True}


class Engine:
    """One engine and the prompts that the scenarios share."""

    def __init__(self, model: str, extra: dict[str, Any] | None, **options: Any) -> None:
        from vllm import LLM

        if extra is not None:
            options["kv_transfer_config"] = {
                "kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra,
                **options.pop("transfer", {}),
            }  # fmt: skip
        self.llm = LLM(
            model=model, block_size=32, kv_cache_memory_bytes=64 << 20, num_gpu_blocks_override=24, enforce_eager=True,
            max_model_len=512, max_num_seqs=8, dtype="float32", enable_prefix_caching=True, **options,
        )  # fmt: skip
        rng = random.Random(0)
        self.prompts = [{"prompt_token_ids": [rng.randrange(3, 512) for _ in range(200)]} for _ in range(40)]
        self.a = self.prompts[0]
        self.fillers = [{"prompt_token_ids": [rng.randrange(3, 512) for _ in range(220)]} for _ in range(6)]

    def ask(self, prompt: dict[str, Any]) -> tuple[list[int], int]:
        from vllm import SamplingParams

        (done,) = self.llm.generate([prompt], SamplingParams(**GREEDY), use_tqdm=False)
        return list(done.outputs[0].token_ids), done.num_cached_tokens or 0

    def evict(self) -> None:
        for filler in self.fillers:
            self.ask(filler)

    def proof(self) -> dict[str, Any]:
        first, _ = self.ask(self.a)
        self.evict()
        again, cached = self.ask(self.a)
        return {"first": first, "again": again, "cached": cached}

    # ---- only with the engine core in this process

    @property
    def scheduler(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    @property
    def manager(self) -> Any:
        return self.scheduler.connector.connector_scheduler.manager

    def stats(self) -> dict[str, Any]:
        stats = self.manager.cpu.stats()
        metrics = self.manager.metrics
        named = ("capacity", "free", "writing", "ready", "pinned", "detached", "hits", "misses", "stored", "failed",
                 "evicted", "discarded", "stale_completions")  # fmt: skip
        jobs = ("loads", "failed_loads", "failed_stores", "resets")
        return {**{name: getattr(stats, name) for name in named}, **{name: getattr(metrics, name) for name in jobs}}

    def settle(self) -> None:
        """Step until the connector has no jobs left."""
        core = self.llm.llm_engine.engine_core.engine_core
        for _ in range(2000):
            if not self.scheduler.has_requests():
                return
            core.step_fn()
            time.sleep(0.001)
        raise SystemExit("the engine did not come to rest")


def proof(model: str, options: dict[str, str]) -> dict[str, Any]:
    extra: dict[str, Any] | None = dict(OWN)
    if options.get("offload") == "none":
        extra = None
    else:
        extra |= {key: value for key, value in options.items() if key in ("eviction_policy", "blocks_per_chunk")}
        if "fault" in options:
            extra |= {"spec_name": options["fault"], "spec_module_path": "vllm_faults"}
    ranks = int(options.get("ranks", 1))
    if ranks > 1:
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "|".join(map(str, range(ranks))))
    engine = Engine(model, extra, tensor_parallel_size=ranks)
    result = engine.proof()
    if extra is not None and os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0":
        engine.settle()
        result["stats"] = engine.stats()
    return result


def burst(model: str, options: dict[str, str]) -> dict[str, Any]:
    """Many requests at once over few prompts, a third of them aborted at random steps; then a reset."""
    from vllm import SamplingParams

    extra = OWN | {"cpu_bytes_to_use": "1MiB"}  # 32 engine blocks: evictions all the time
    extra |= {key: value for key, value in options.items() if key in ("eviction_policy", "blocks_per_chunk")}
    events = {"endpoint": "tcp://127.0.0.1:0", "replay_endpoint": "tcp://127.0.0.1:0"} if "events" in options else None
    if events:
        extra |= {"events": events}
    engine = Engine(model, extra)
    follower = Follower(engine.manager.feed) if events else None
    llm = engine.llm.llm_engine
    rng = random.Random(1)
    outputs: dict[str, list[int]] = {}
    prompt_of: dict[str, int] = {}
    live: list[str] = []
    aborted = 0
    for number in range(120):
        name, which = f"r{number}", rng.randrange(8)
        prompt_of[name] = which
        ids = engine.prompts[which]["prompt_token_ids"][: rng.choice((130, 200))]
        prompt_of[name] = len(ids) * 100 + which
        llm.add_request(name, {"prompt_token_ids": ids}, SamplingParams(**GREEDY))
        live.append(name)
        for _ in range(rng.randrange(3)):
            for done in llm.step():
                if done.finished:
                    outputs[done.request_id] = list(done.outputs[0].token_ids)
        if rng.random() < 0.35:
            running = [name for name in live if name not in outputs]
            victim = rng.choice(running) if running else None
            if victim is not None:
                llm.abort_request([victim])
                live.remove(victim)
                aborted += 1
    while llm.has_unfinished_requests():
        for done in llm.step():
            if done.finished:
                outputs[done.request_id] = list(done.outputs[0].token_ids)
    engine.settle()
    by_prompt: dict[int, set[tuple[int, ...]]] = {}
    for name, tokens in outputs.items():
        if len(tokens) == GREEDY["max_tokens"]:
            by_prompt.setdefault(prompt_of[name], set()).add(tuple(tokens))
    before = engine.stats()
    result: dict[str, Any] = {
        "aborted": aborted, "finished": len(outputs), "answers": {key: len(texts) for key, texts in by_prompt.items()},
        "before": before, "open": len(engine.manager._open),
    }  # fmt: skip
    if follower is not None:
        result["feed_before"] = follower.size(expect=before["ready"] * engine_blocks(options))
        starts = [prompt["prompt_token_ids"][:32] for prompt in engine.prompts]
        result["first_blocks"] = [tokens in starts for tokens in follower.first_blocks()]
    result["reset"] = engine.llm.reset_prefix_cache(reset_connector=True)
    result["after"] = engine.stats()
    if follower is not None:
        result["feed_after"] = follower.size(expect=0)
        result["feed_wrong"] = follower.wrong
        follower.close()
    _, cached = engine.ask(engine.a)
    result["cached_after_reset"] = cached
    return result


def engine_blocks(options: dict[str, str]) -> int:
    return int(options.get("blocks_per_chunk", 1))


def reset_with_running_copies(model: str, options: dict[str, str]) -> dict[str, Any]:
    """Reset while stores are queued on the worker: their memory comes back, nothing is readable."""
    engine = Engine(model, dict(OWN))
    core = engine.llm.llm_engine.engine_core.engine_core
    from vllm import SamplingParams

    for number in range(4):
        engine.llm.llm_engine.add_request(
            f"x{number}", engine.prompts[number], SamplingParams(temperature=0, max_tokens=1)
        )
    engine.llm.llm_engine.step()
    engine.llm.llm_engine.step()
    during = engine.stats()
    done = core.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    after = engine.stats()
    while engine.llm.llm_engine.has_unfinished_requests():
        engine.llm.llm_engine.step()
    engine.settle()
    rest = engine.stats()
    return {"during": during, "after": after, "rest": rest, "reset": done, **engine.proof()}


def failing(model: str, options: dict[str, str]) -> dict[str, Any]:
    """Copies fail: the engine lives, nothing wrong is read."""
    import vllm_faults

    extra = OWN | {"spec_name": options["fault"], "spec_module_path": "vllm_faults"}
    engine = Engine(model, extra, transfer={"kv_load_failure_policy": options.get("policy", "recompute")})
    if options["fault"] == "FailingStores":
        vllm_faults.FAILURES["left"] = 1
    first, _ = engine.ask(engine.a)
    engine.settle()
    after_first = engine.stats()
    engine.evict()
    if options["fault"] == "FailingLoads":
        vllm_faults.FAILURES["left"] = 1
    try:
        again, cached = engine.ask(engine.a)
    except Exception as error:  # vLLM's own, named in the result
        again, cached = [], -1
        failure = f"{type(error).__name__}: {error}"
    else:
        failure = ""
    engine.settle()
    after_second = engine.stats()
    engine.evict()
    third, cached_third = engine.ask(engine.a)
    return {
        "first": first, "again": again, "third": third, "cached": cached, "cached_third": cached_third,
        "failure": failure, "after_first": after_first, "after_second": after_second,
        "left": vllm_faults.FAILURES["left"],
    }  # fmt: skip


class Follower:
    """An index of our feed, as another process keeps it: blocks by hash and medium, with their tokens."""

    def __init__(self, feed: Any) -> None:
        import zmq

        publisher = feed.sink
        self.socket = zmq.Context.instance().socket(zmq.SUB)
        self.socket.subscribe(b"")
        self.socket.connect(publisher.endpoints[0])
        self.held: dict[tuple[int, str], dict[str, Any]] = {}
        self.wrong: list[str] = []
        self._next: int | None = None
        if not self._receive(10.0):  # a heartbeat: from here on nothing is missed
            raise SystemExit("the feed is silent")

    def _receive(self, seconds: float) -> bool:
        import msgspec

        if not self.socket.poll(int(seconds * 1000)):
            return False
        _, number, payload = self.socket.recv_multipart()
        sequence = int.from_bytes(number, "big")
        if self._next not in (None, sequence):
            self.wrong.append(f"gap: {self._next} to {sequence}")
        self._next = sequence + 1
        for event in msgspec.msgpack.decode(payload)[1]:
            if event["type"] == "AllBlocksCleared":
                self.held.clear()
                continue
            for index, name in enumerate(event["block_hashes"]):
                key = (name, event["medium"])
                if event["type"] == "BlockRemoved":
                    if self.held.pop(key, None) is None:
                        self.wrong.append(f"removed without store: {key}")
                    continue
                if key in self.held:
                    self.wrong.append(f"stored twice: {key}")
                size = event["block_size"]
                self.held[key] = event | {"tokens": event["token_ids"][index * size : (index + 1) * size]}
        return True

    def size(self, expect: int) -> int:
        """Return how many blocks are held, once it is `expect` or after a few seconds."""
        deadline = time.monotonic() + 5
        while len(self.held) != expect and time.monotonic() < deadline:
            self._receive(0.2)
        return len(self.held)

    def first_blocks(self) -> list[list[int]]:
        """Return the tokens of the blocks that begin a prompt."""
        return [block["tokens"] for (name, _), block in self.held.items() if block["block_hashes"][0] == name
                and block["parent_block_hash"] is None]  # fmt: skip

    def close(self) -> None:
        self.socket.close(linger=0)


SCENARIOS = {
    "proof": proof, "burst": burst, "failing": failing, "reset_with_running_copies": reset_with_running_copies,
}  # fmt: skip


def main() -> None:
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    model, scenario, *rest = sys.argv[1:]
    options = dict(option.split("=", 1) for option in rest)
    started = time.monotonic()
    result = SCENARIOS[scenario](model, options)
    print("RESULT " + json.dumps(result | {"seconds": round(time.monotonic() - started, 1)}), flush=True)


if __name__ == "__main__":
    main()
