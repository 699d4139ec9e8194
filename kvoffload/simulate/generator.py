"""The built-in workload: seeded multi-turn chats and one-off documents, as an endless trace.

Users arrive as a Poisson process. A chat begins with one of a few shared system prompts (a few are popular), grows by
the user's words and the answer of each turn, and pauses for a think time before the next turn. Some requests are long
documents that nobody asks for again. Lengths and pauses are log-normal: many short, few long ones. Equal seeds give
equal requests.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvoffload.simulate.trace import TraceRequest


@dataclass(frozen=True, slots=True)
class ChatWorkload:
    """What the chats are like; all lengths in tokens.

    Attributes:
        block_tokens: Tokens for one id.
        arrivals_per_second: New chats and documents.
        system_prompts: How many different ones there are; the n-th is asked for in proportion to 1/n.
        system_tokens: Median length of a system prompt.
        user_tokens: Median growth by the user in one turn.
        answer_tokens: Median growth by the answer in one turn.
        mean_turns: Turns of a chat, on average.
        think_seconds: Median pause before the next turn.
        document_share: Part of the arrivals that are documents.
        document_tokens: Median length of a document.
        max_tokens: A chat ends before its prompt is longer.
    """

    block_tokens: int = 64
    arrivals_per_second: float = 1.0
    system_prompts: int = 8
    system_tokens: int = 768
    user_tokens: int = 160
    answer_tokens: int = 320
    mean_turns: float = 5.0
    think_seconds: float = 30.0
    document_share: float = 0.15
    document_tokens: int = 4096
    max_tokens: int = 16_384


@dataclass(slots=True)
class _Chat:
    tokens: int
    full_ids: list[int] = field(default_factory=list)


def generate_chats(seed: int = 0, workload: ChatWorkload | None = None) -> Iterator[TraceRequest]:
    """Yield requests in order of arrival, without end; only chats that go on are kept in memory."""
    shape = workload or ChatWorkload()
    rng = random.Random(seed)  # noqa: S311 - a workload, not a secret
    ids = itertools.count()
    prompts = [_length(rng, shape.system_tokens, 0.5) for _ in range(shape.system_prompts)]
    prompt_ids = [[next(ids) for _ in range(tokens // shape.block_tokens)] for tokens in prompts]
    popularity = [1 / (rank + 1) for rank in range(shape.system_prompts)]
    order = itertools.count()
    waiting: list[tuple[float, int, _Chat]] = []
    arrival = 0.0
    while True:
        arrival += rng.expovariate(shape.arrivals_per_second)
        while waiting and waiting[0][0] <= arrival:
            now, _, chat = heapq.heappop(waiting)
            yield from _turn(rng, shape, ids, now, chat, waiting, order)
        if rng.random() < shape.document_share:
            document = _Chat(_length(rng, shape.document_tokens, 0.6))
            yield _request(shape, ids, arrival, document, _length(rng, shape.answer_tokens, 0.7))
        else:
            which = rng.choices(range(shape.system_prompts), popularity)[0]
            chat = _Chat(prompts[which], list(prompt_ids[which]))
            yield from _turn(rng, shape, ids, arrival, chat, waiting, order)


def _turn(
    rng: random.Random,
    shape: ChatWorkload,
    ids: Iterator[int],
    now: float,
    chat: _Chat,
    waiting: list[tuple[float, int, _Chat]],
    order: Iterator[int],
) -> Iterator[TraceRequest]:
    chat.tokens += _length(rng, shape.user_tokens, 0.9)
    answer = _length(rng, shape.answer_tokens, 0.7)
    yield _request(shape, ids, now, chat, answer)
    chat.tokens += answer
    if rng.random() > 1 / shape.mean_turns and chat.tokens < shape.max_tokens:
        pause = rng.lognormvariate(math.log(shape.think_seconds), 1.0)
        heapq.heappush(waiting, (now + pause, next(order), chat))


def _request(shape: ChatWorkload, ids: Iterator[int], now: float, chat: _Chat, answer: int) -> TraceRequest:
    full, rest = divmod(chat.tokens, shape.block_tokens)
    chat.full_ids.extend(next(ids) for _ in range(full - len(chat.full_ids)))
    tail = (next(ids),) if rest else ()
    return TraceRequest(now, chat.tokens, answer, (*chat.full_ids, *tail))


def _length(rng: random.Random, median: int, spread: float) -> int:
    return max(1, round(rng.lognormvariate(math.log(median), spread)))
