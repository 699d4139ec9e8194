"""Simulated hints: from the trace's future, wrong by as much as was asked."""

import math
from dataclasses import dataclass

import pytest

from kvoffload.errors import ConfigError
from kvoffload.simulate.hints import parse_hint, return_seconds


@dataclass
class Request:
    arrival_seconds: float
    keys: list


RETURNS = [Request(0, [b"a", b"b"]), Request(5, [b"x"]), Request(9, [b"a", b"b", b"c"]), Request(10, [])]
MANY = [Request(float(i), [b"%d" % (i % 500)]) for i in range(1000)]


def test_a_request_returns_when_its_last_block_is_asked_for_again():
    assert return_seconds(RETURNS) == [9.0, None, None, None]


def test_exact_finish_hints_say_the_truth():
    ended = [hint.conversation_ended for hint in parse_hint("finished:1:0").draw(RETURNS)]
    assert ended == [False, True, True, True]


def test_finish_hints_are_wrong_as_often_as_asked():
    hints = parse_hint("finished:80%:0.02").draw(MANY)
    wrong = sum(hint.conversation_ended for hint in hints[:500])
    said = sum(hint.conversation_ended for hint in hints[500:])
    assert wrong < 30
    assert 350 < said < 450


def test_return_hints_are_given_to_what_returns_with_the_spread_asked():
    hints = parse_hint("return:1").draw(MANY)
    errors = [math.log(hint.expected_return_seconds / 500.0) for hint in hints[:500]]
    assert all(hint.expected_return_seconds is None for hint in hints[500:])
    assert 0.8 < math.sqrt(sum(error * error for error in errors) / 500) < 1.2
    assert [h.expected_return_seconds for h in parse_hint("return:0").draw(RETURNS)] == [9.0, None, None, None]


def test_noise_knows_nothing_but_the_seed():
    noise = parse_hint("noise")
    assert noise.draw(MANY, 1) == noise.draw(MANY[::-1], 1)
    assert noise.draw(MANY, 1) != noise.draw(MANY, 2)


@pytest.mark.parametrize(
    "text", ["", "finished", "finished:2:0", "finished:0.8", "return:x", "return:-1", "return:nan"]
)
def test_wrong_hints_are_refused_with_what_is_right(text):
    with pytest.raises(ConfigError, match=r"finished:0\.8:0\.02|between 0 and 1"):
        parse_hint(text)
