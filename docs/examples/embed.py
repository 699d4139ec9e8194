"""A streaming front end (fastapi, uvicorn) that offloads: `uvicorn --app-dir docs/examples embed:app`"""

import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import numpy as np
from fastapi import Body, FastAPI
from fastapi.responses import StreamingResponse

import kvoffload as kv

BLOCK, BLOCKS, LAYERS = 16, 512, 4  # tokens in a block; blocks on the "GPU" (here: numpy arrays); layers
layers = {f"layer.{i}": np.zeros((2, BLOCKS, BLOCK, 2, 64), np.float16) for i in range(LAYERS)}  # K and V first
config = kv.OffloadConfig(cpu_bytes_to_use="64MiB", gpu_block_size=BLOCK, model_name="toy")
pool = list(range(BLOCKS))  # your allocator


def forward(token_ids: Sequence[int], start: int, table: list[int]) -> int:  # your model
    """Write the KV data of `token_ids[start:]` and return the next token."""
    for at in range(start, len(token_ids)):
        for layer in layers.values():
            layer[:, table[at // BLOCK], at % BLOCK] = token_ids[at] % 1000
    return (sum(token_ids) + 1) % 1000


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with kv.OffloadService(config, kv.CanonicalKVCaches.from_layers(layers, block_dim=1)) as service:
        app.state.service = service
        yield


app = FastAPI(lifespan=lifespan)


async def generate(service: kv.OffloadService, ids: list[int], max_tokens: int) -> AsyncIterator[str]:
    chain = service.chain(ids)
    table = [pool.pop() for _ in range(-(-(len(ids) + max_tokens) // BLOCK))]
    async with service.request(uuid.uuid4().hex, chain, gpu_blocks=table, free=pool.extend) as request:
        loaded = await request.load()  # a miss, a timeout, a failed copy: 0 tokens, no exception
        for block in loaded.undefined_gpu_blocks:  # a late copy may still write there: compute into others
            table[table.index(block)] = pool.pop()
        request.when_released(loaded.undefined_gpu_blocks, pool.extend)
        yield f'data: {{"loaded_tokens": {loaded.num_tokens}}}\n\n'
        token = forward(ids, loaded.num_tokens, table)
        request.store(computed_tokens=len(ids), ready="host-visible")  # on a GPU: an event recorded after the forward
        for _ in range(max_tokens):
            yield f"data: {token}\n\n"
            ids.append(token)
            chain.extend([token])
            token = forward(ids, len(ids) - 1, table)
            request.store(computed_tokens=len(ids), ready="host-visible")  # does nothing between the ends of blocks
    # However the request ends, `free` gets each block as soon as no copy touches it.


@app.post("/generate")
async def endpoint(token_ids: list[int] = Body(), max_tokens: int = Body(32)) -> StreamingResponse:
    return StreamingResponse(generate(app.state.service, token_ids, max_tokens), media_type="text/event-stream")
