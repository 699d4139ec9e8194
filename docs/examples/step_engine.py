"""A stepping engine core with two ranks: commands in its own step messages. `python docs/examples/step_engine.py`"""

import multiprocessing
from dataclasses import dataclass
from multiprocessing.connection import Connection

import numpy as np

import kvoffload as kv

BLOCK, BLOCKS, LAYERS, RANKS = 16, 64, 2, 2  # tokens in a block; blocks on each rank's "GPU"; layers; ranks
config = kv.OffloadConfig(cpu_bytes_to_use="8MiB", gpu_block_size=BLOCK, world_size=RANKS)


def rank_main(rank: int, address: str, pipe: Connection) -> None:  # a process that owns its part of the model
    layers = {f"layer.{i}": np.zeros((2, BLOCKS, BLOCK, 1, 64), np.int32) for i in range(LAYERS)}
    worker = kv.OffloadRankWorker(
        config, kv.CanonicalKVCaches.from_layers(layers, block_dim=1), rank=rank, address=address
    )
    worker.start()
    while (message := pipe.recv()) is not None:
        batch, commands = message
        results = worker.execute(commands, "host-visible")  # on a GPU: an event recorded after the last forward
        pipe.send(([forward(layers, rank, *request) for request in batch], results))
    worker.close()


def forward(layers: dict[str, np.ndarray], rank: int, token_ids: list[int], start: int, table: list[int]) -> int:
    """Write the KV data of `token_ids[start:]`; the next token depends on all of it, so wrong bytes would show."""
    for layer in layers.values():
        for at in range(start, len(token_ids)):
            layer[:, table[at // BLOCK], at % BLOCK] = token_ids[at] * (rank + 1)
    blocks, total = table[: -(-len(token_ids) // BLOCK)], len(token_ids)
    kept = [layer[:, blocks].reshape(2, len(blocks) * BLOCK, -1)[:, :total] for layer in layers.values()]
    return int(sum(int(part.astype(np.int64).sum()) for part in kept)) % 997


@dataclass
class Request:
    id: str
    tokens: list[int]
    stop_at: int
    chain: kv.BlockChain
    table: list[int]
    computed: int = 0
    stored: int = 0  # blocks offered
    loaded: int = 0
    tried: bool = False


class EngineCore:
    """The scheduler; `ranks` are the pipes to the rank processes."""

    def __init__(self, engine: kv.OffloadEngine, ranks: list[Connection]) -> None:
        self.engine, self.ranks = engine, ranks
        self.pool, self.leaving = list(range(BLOCKS)), list[int]()
        self.running, self.parked, self.done = list[Request](), dict[int, Request](), list[Request]()

    def add(self, name: str, tokens: list[int], max_tokens: int) -> None:
        chain = kv.BlockChain(self.engine.geometry.groups, tokens)
        table = [self.pool.pop() for _ in range(-(-(len(tokens) + max_tokens) // BLOCK))]
        self.engine.begin(name, chain)
        self.running.append(Request(name, list(tokens), len(tokens) + max_tokens, chain, table))

    def step(self) -> None:
        engine = self.engine
        for job in engine.poll():  # what ended on every rank
            if isinstance(job.result, kv.LoadResult):
                request = self.parked.pop(job.job_id)
                request.computed = request.loaded = job.result.num_tokens
                request.stored = request.loaded // BLOCK
                for block in job.result.undefined_gpu_blocks:  # a late copy may still write there: use others
                    request.table[request.table.index(block)] = self.pool.pop()
                self.leaving += job.result.undefined_gpu_blocks
                self.running.append(request)
        for request in [request for request in self.running if not request.tried]:
            request.tried = True  # one token is left to compute, so that there is a next one
            blocks = kv.GPULoadStoreSpec(request.table, [len(request.table)], [0])
            job_id = engine.submit_load(request.id, blocks, leave_tokens=1)
            if job_id is not None:
                self.running.remove(request)
                self.parked[job_id] = request

        batch = list(self.running)
        message = ([(request.tokens, request.computed, request.table) for request in batch], engine.take_commands())
        for rank in self.ranks:
            rank.send(message)
        parts = []
        for number, rank in enumerate(self.ranks):
            part, results = rank.recv()
            parts.append(part)
            engine.apply_results(number, results)
        tokens = [sum(part) % 997 for part in zip(*parts, strict=True)]

        for request, token in zip(batch, tokens, strict=True):  # the step's result is here: its blocks may be stored
            request.computed = len(request.tokens)
            whole = request.computed // BLOCK
            if whole > request.stored:
                new = request.table[request.stored : whole]
                spec = kv.GPULoadStoreSpec(new, [len(new)], [request.stored])
                engine.submit_store(request.id, spec, "host-visible")
                request.stored = whole
            request.tokens.append(token)
            request.chain.extend([token])
            if len(request.tokens) == request.stop_at:
                self.running.remove(request)
                self.done.append(request)
                engine.finish(request.id)
                self.leaving += request.table
        busy = set(engine.busy_gpu_blocks(self.leaving))  # a copy may still read them
        self.pool += [block for block in self.leaving if block not in busy]
        self.leaving = [block for block in self.leaving if block in busy]

    def run(self) -> list[Request]:
        while self.running or self.parked or self.leaving:
            self.step()
        done, self.done = self.done, []
        return done


def main() -> None:
    workers = kv.RemoteWorkers(RANKS, transport="piggyback")
    context, pipes, processes = multiprocessing.get_context("spawn"), [], []
    for rank in range(RANKS):
        ours, theirs = context.Pipe()
        pipes.append(ours)
        processes.append(context.Process(target=rank_main, args=(rank, workers.address, theirs), daemon=True))
        processes[-1].start()
    prompt = list(range(1, 101))
    with kv.OffloadEngine(config, workers=workers) as engine:
        core = EngineCore(engine, pipes)
        answers = {}
        for turn in ("first", "again"):
            core.add(turn, prompt, max_tokens=20)
            core.add(f"{turn}, other", prompt[::-1], max_tokens=20)
            for request in core.run():
                print(f"{request.id}: loaded {request.loaded} tokens, generated {request.tokens[100:104]}...")
                answers[request.id] = request.tokens
            core.pool.reverse()  # other GPU blocks: what is right there was loaded
        assert answers["first"] == answers["again"], "what was loaded is what was computed"
        assert sorted(core.pool) == list(range(BLOCKS))
        for pipe in pipes:
            pipe.send(None)
    for process in processes:
        process.join()


if __name__ == "__main__":
    main()
