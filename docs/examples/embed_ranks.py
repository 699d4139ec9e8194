"""The front end of embed.py over two ranks: the service decides here, each rank process moves its own bytes.

`pip install fastapi uvicorn`, then `uvicorn --app-dir docs/examples embed_ranks:app`.
"""

import asyncio
import multiprocessing
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection

import numpy as np
from fastapi import Body, FastAPI
from fastapi.responses import StreamingResponse

import kvoffload as kv

BLOCK, BLOCKS, LAYERS, RANKS = 16, 512, 4, 2
config = kv.OffloadConfig(cpu_bytes_to_use="64MiB", gpu_block_size=BLOCK, world_size=RANKS, model_name="toy")
pool = list(range(BLOCKS))  # your allocator


def rank_main(rank: int, address: str, steps: Connection) -> None:  # your worker process
    layers = {f"layer.{i}": np.zeros((2, BLOCKS, BLOCK, 1, 64), np.int16) for i in range(LAYERS)}
    caches = kv.CanonicalKVCaches.from_layers(layers, block_dim=1)
    worker = kv.OffloadRankWorker(config, caches, rank=rank, address=address)
    worker.start()  # commands come over ZeroMQ, to a thread of its own
    while (step := steps.recv()) is not None:
        token_ids, start, table = step
        for at in range(start, len(token_ids)):  # your model: the next token depends on every key and value
            for layer in layers.values():
                layer[:, table[at // BLOCK], at % BLOCK] = token_ids[at] % 100 + rank
        rows = np.concatenate([layer[0, table].reshape(-1, 64)[: len(token_ids), 0] for layer in layers.values()])
        steps.send(int(rows.sum()) % 1000)
    worker.close()


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    workers = kv.RemoteWorkers(RANKS)
    context = multiprocessing.get_context("spawn")
    app.state.lock, app.state.steps, processes = asyncio.Lock(), [], []
    for rank in range(RANKS):
        ours, theirs = context.Pipe()
        app.state.steps.append(ours)
        processes.append(context.Process(target=rank_main, args=(rank, workers.address, theirs), daemon=True))
        processes[-1].start()
    async with kv.OffloadService(config, workers=workers) as service:
        app.state.service = service
        yield
        for steps in app.state.steps:
            steps.send(None)
    for process in processes:
        await asyncio.to_thread(process.join)


app = FastAPI(lifespan=lifespan)


async def forward(token_ids: list[int], start: int, table: list[int]) -> int:
    """Run one step on every rank; when it returns, the blocks it wrote may be stored."""

    def step() -> int:
        for steps in app.state.steps:
            steps.send((token_ids, start, table))
        return sum(int(steps.recv()) for steps in app.state.steps) % 1000

    async with app.state.lock:
        return await asyncio.to_thread(step)


async def generate(service: kv.OffloadService, ids: list[int], max_tokens: int) -> AsyncIterator[str]:
    chain = service.chain(ids)
    table = [pool.pop() for _ in range(-(-(len(ids) + max_tokens) // BLOCK))]
    async with service.request(uuid.uuid4().hex, chain, gpu_blocks=table, free=pool.extend) as request:
        loaded = await request.load()  # on every rank, or not at all
        for block in loaded.undefined_gpu_blocks:  # a late copy may still write there: compute into others
            table[table.index(block)] = pool.pop()
        request.when_released(loaded.undefined_gpu_blocks, pool.extend)
        yield f'data: {{"loaded_tokens": {loaded.num_tokens}}}\n\n'
        token = await forward(ids, loaded.num_tokens, table)
        request.store(computed_tokens=len(ids), ready="host-visible")  # the step has come back
        for _ in range(max_tokens):
            yield f"data: {token}\n\n"
            ids.append(token)
            chain.extend([token])
            token = await forward(ids, len(ids) - 1, table)
            request.store(computed_tokens=len(ids), ready="host-visible")


@app.post("/generate")
async def endpoint(token_ids: list[int] = Body(), max_tokens: int = Body(32)) -> StreamingResponse:
    return StreamingResponse(generate(app.state.service, token_ids, max_tokens), media_type="text/event-stream")
