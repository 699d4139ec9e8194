"""Hints for a simulation: what an embedder could have said about each request, right or wrong by a given amount.

The truth comes from the trace's future: a request *returns* when its last whole block is asked for again, else it is
finished. Hints are drawn from a seeded generator, so equal seeds give equal hints.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvoffload.errors import ConfigError
from kvoffload.keys import OffloadKey

_NOISE_SECONDS = (1.0, 3600.0)


class HintedRequest(Protocol):
    """What hints are made from."""

    @property
    def arrival_seconds(self) -> float:
        """Time of arrival."""
        ...

    @property
    def keys(self) -> Sequence[OffloadKey]:
        """Keys in prefix order."""
        ...


@dataclass(frozen=True, slots=True)
class Hint:
    """What is said about one request; the default says nothing."""

    conversation_ended: bool = False
    expected_return_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class HintModel:
    """How hints come about.

    Attributes:
        text: As it was given.
        said: Part of the finished requests that are said to be finished.
        wrong: Part of the returning requests that are wrongly said to be finished.
        sigma: Spread of the stated return times of returning requests: each is wrong by a factor `exp(N(0, sigma))`.
        noise: Hints that know nothing: nothing, "finished" or a return time, at random.
    """

    text: str
    said: float = 0.0
    wrong: float = 0.0
    sigma: float | None = None
    noise: bool = False

    def draw(self, requests: Sequence[HintedRequest], seed: int = 0) -> list[Hint]:
        """Return one hint per request."""
        rng = random.Random(f"{seed} {self.text}")  # noqa: S311 - a workload, not a secret
        if self.noise:
            return [_noise(rng) for _ in requests]
        hints = []
        for waits in return_seconds(requests):
            roll, spread = rng.random(), rng.gauss(0.0, 1.0)
            if self.sigma is not None and waits is not None:
                hints.append(Hint(expected_return_seconds=waits * math.exp(self.sigma * spread)))
            else:
                hints.append(Hint(conversation_ended=roll < (self.said if waits is None else self.wrong)))
        return hints


def parse_hint(text: str) -> HintModel:
    """Read `finished:SAID:WRONG`, `return:SIGMA`, `noise` or `none`.

    Raises:
        ConfigError: It is none of them, or a number is out of range.
    """
    kind, *numbers = text.split(":")
    if text in {"none", "noise"}:
        return HintModel(text, noise=text == "noise")
    if kind == "finished" and len(numbers) == 2:
        said, wrong = (_share(number, text) for number in numbers)
        return HintModel(text, said=said, wrong=wrong)
    if kind == "return" and len(numbers) == 1:
        sigma = _number(numbers[0])
        if 0 <= sigma < 100:
            return HintModel(text, sigma=sigma)
    raise ConfigError(
        "a hint is 'none', 'noise', 'finished:SAID:WRONG' such as finished:0.8:0.02, or 'return:SIGMA' such as "
        f"return:1; got {text!r}"
    )


def return_seconds(requests: Sequence[HintedRequest]) -> list[float | None]:
    """Return for each request the time until its last block is asked for again; None when it never is."""
    asked_at: dict[OffloadKey, float] = {}
    waits: list[float | None] = []
    for request in reversed(requests):
        now = request.arrival_seconds
        later = asked_at.get(request.keys[-1]) if request.keys else None
        waits.append(later - now if later is not None else None)
        asked_at.update(dict.fromkeys(request.keys, now))
    waits.reverse()
    return waits


def _noise(rng: random.Random) -> Hint:
    roll = rng.randrange(3)
    low, high = _NOISE_SECONDS
    seconds = low * (high / low) ** rng.random()
    return Hint(conversation_ended=roll == 1, expected_return_seconds=seconds if roll == 2 else None)


def _share(text: str, whole: str) -> float:
    value = _number(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    if not 0 <= value <= 1:
        raise ConfigError(f"a share in a hint lies between 0 and 1 (or 0% and 100%); got {text!r} in {whole!r}")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
