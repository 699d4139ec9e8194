"""A streaming front end under load: clients queue for GPU blocks, disconnect, and share prefixes.

    pip install fastapi uvicorn
    uvicorn --app-dir docs/examples front_end:app
    curl -N localhost:8000/generate -H 'content-type: application/json' -d '{"token_ids": [1, 2, 3], "max_tokens": 8}'
    curl localhost:8000/kvoffload/metrics

The model is a toy on numpy arrays, but it reads what it wrote: its next token is made from the KV data of all tokens
before it, so a block that was lost, stale or overwritten would show in the answer.

At a request's end it says what only a front end knows, which is worth more than any policy (docs/policies.md): the user
closes the session with this turn, or the answer calls a tool and goes on when that is done. It does not say whether an
answer stopped or was cut: that tells little of what follows.
"""

import asyncio
import uuid
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Annotated

import numpy as np
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field

import kvoffload as kv
from kvoffload.asgi import make_app

BLOCK, BLOCKS, LAYERS = 16, 256, 2
layers = {f"layer.{i}": np.zeros((2, BLOCKS, BLOCK, 2, 32), np.int32) for i in range(LAYERS)}  # K and V first
config = kv.OffloadConfig(cpu_bytes_to_use="64MiB", gpu_block_size=BLOCK, model_name="toy", eviction_policy="adaptive")


class Ask(BaseModel):
    token_ids: list[Annotated[int, Field(ge=0, lt=2**32)]] = Field(min_length=1, max_length=1024)
    max_tokens: int = Field(default=32, ge=1, le=1024)
    closes_session: bool = False
    tool_seconds: dict[
        int, Annotated[float, Field(ge=0, allow_inf_nan=False)]
    ] = {}  # tokens that call a tool, its time


class Allocator:
    """GPU blocks, first come first served. `free` is what the service calls, on the loop's thread."""

    def __init__(self, num_blocks: int) -> None:
        self.blocks = list(range(num_blocks))
        self._waiting: deque[tuple[int, asyncio.Future[list[int]]]] = deque()

    async def allocate(self, count: int) -> list[int]:
        turn: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        self._waiting.append((count, turn))
        self._serve()
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # the client left at the very moment its blocks came
                self.free(turn.result())
            raise

    def free(self, blocks: Sequence[int]) -> None:
        self.blocks.extend(blocks)
        self._serve()

    def _serve(self) -> None:
        while self._waiting:
            count, turn = self._waiting[0]
            if turn.done():
                self._waiting.popleft()
            elif len(self.blocks) < count:
                return
            else:
                self._waiting.popleft()
                turn.set_result([self.blocks.pop() for _ in range(count)])


allocator = Allocator(BLOCKS)


async def forward(token_ids: Sequence[int], start: int, table: Sequence[int]) -> int:
    """Write the KV data of `token_ids[start:]`, then answer from the KV data of all tokens. Yours runs on a GPU."""
    positions = np.arange(start, len(token_ids))
    blocks, offsets = np.asarray(table)[positions // BLOCK], positions % BLOCK
    for layer in layers.values():
        layer[:, blocks, offsets] = np.asarray(token_ids[start:])[:, None, None]
    await asyncio.sleep(0)
    used = np.asarray(table[: -(-len(token_ids) // BLOCK)])
    seen = sum(layer[0, used, :, 0, 0].reshape(-1)[: len(token_ids)].astype(np.int64) for layer in layers.values())
    return int((seen * (np.arange(len(token_ids)) % 7 + 1)).sum()) % 9973


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with kv.OffloadService(config, kv.CanonicalKVCaches.from_layers(layers, block_dim=1)) as service:
        app.state.service = service
        yield


app = FastAPI(lifespan=lifespan)
app.mount("/kvoffload", make_app(lambda: getattr(app.state, "service", None), state=True))


async def generate(service: kv.OffloadService, ask: Ask) -> AsyncIterator[str]:
    token_ids = list(ask.token_ids)
    chain = service.chain(token_ids)
    table = await allocator.allocate(-(-(len(token_ids) + ask.max_tokens) // BLOCK))
    async with service.request(uuid.uuid4().hex, chain, gpu_blocks=table, free=allocator.free) as request:
        loaded = await request.load()
        if loaded.undefined_gpu_blocks:  # a copy failed or is late, and may still write: answer from other blocks
            yield "event: retry\ndata: {}\n\n"
            return
        token = await forward(token_ids, loaded.num_tokens, table)
        request.store(computed_tokens=len(token_ids), ready="host-visible")
        answered = 0
        for _ in range(ask.max_tokens):
            yield f"data: {token}\n\n"
            answered += 1
            tool_seconds = ask.tool_seconds.get(token)
            if tool_seconds is not None:
                break
            token_ids.append(token)
            chain.extend([token])
            token = await forward(token_ids, len(token_ids) - 1, table)
            request.store(computed_tokens=len(token_ids), ready="host-visible")
        request.finished(
            output_tokens=answered, conversation_ended=ask.closes_session, expected_return_seconds=tool_seconds
        )
    # A client that disconnects cancels this generator anywhere above. Its blocks reach `free` when no copy uses them.


@app.post("/generate")
async def endpoint(ask: Ask) -> StreamingResponse:
    return StreamingResponse(generate(app.state.service, ask), media_type="text/event-stream")
