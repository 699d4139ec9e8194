"""What environment variables can get wrong: a message with the variable, its value, what it must be and the remedy."""

import pytest

from kvoffload.config import OffloadConfig
from kvoffload.errors import ConfigError

GOOD = {"KVOFFLOAD_CPU_BYTES_TO_USE": "1GiB", "KVOFFLOAD_GPU_BLOCK_SIZE": "16"}
WRONG = [
    ("KVOFFLOAD_CPU_BYTES_TO_USE", "ten", "got 'ten'", "'512MiB' or '10GB'"),
    ("KVOFFLOAD_GPU_BLOCK_SIZE", "16,,x", "got '16,,x'", "such as 16, or one for each KV-cache group"),
    ("KVOFFLOAD_GPU_BLOCK_SIZE", ",", "got ','", "such as 16, or one for each KV-cache group"),
    ("KVOFFLOAD_BLOCK_SIZE", "24", "got 24", "multiple of gpu_block_size 16, such as 16 or 32"),
    ("KVOFFLOAD_WORLD_SIZE", "", "got ''", "must be a whole number, such as"),
    ("KVOFFLOAD_WORLD_SIZE", "0", "got '0'", "must be at least 1"),
    ("KVOFFLOAD_MAX_INFLIGHT_JOBS", "many", "got 'many'", "must be a whole number"),
    ("KVOFFLOAD_PENDING_WAIT_SECONDS", "soon", "got 'soon'", "must be a number"),
    ("KVOFFLOAD_DRAIN_SECONDS", "inf", "got 'inf'", "must be a finite number"),
    ("KVOFFLOAD_FAIL_OPEN", "maybe", "got 'maybe'", "must be true or false"),
    ("KVOFFLOAD_PIN_MEMORY", "always", "got 'always'", "must be 'auto', 'require' or 'never'"),
    ("KVOFFLOAD_EVENTS", "x", "got 'x'", "must be a table of keys, or true or false"),
    ("KVOFFLOAD_EVENTS__DP_RANK", "first", "got 'first'", "must be a whole number"),
    ("KVOFFLOAD_EVENTS__CONSUMER", "vllm,x", "got 'x'", "'vllm-router' or 'aibrix'"),
    ("KVOFFLOAD_EVENTS__BATCH_WINDOW_SECONDS", "-1", "got '-1'", "must be at least 0"),
    ("KVOFFLOAD_WORLD_SIZ", "2", "world_siz is no known key", "did you mean world_size?"),
    ("KVOFFLOAD_WORLD_SIZE__X", "2", "world_size.x is no known key", "did you mean world_size?"),
    ("KVOFFLOAD_NOTHING", "2", "nothing is no known key", "known keys: block_size"),
    ("KVOFFLOAD_EVENTS__ENDPONT", "x", "events.endpont is no known key", "did you mean endpoint?"),
    ("KVOFFLOAD_EVENTS__A__B", "x", "events.a.b is no known key", "known keys: also"),
]


@pytest.mark.parametrize(("name", "value", "told"), [(name, value, told) for name, value, *told in WRONG])
def test_a_wrong_variable_is_told_with_its_name_value_and_what_is_right(name, value, told):
    with pytest.raises(ConfigError) as caught:
        OffloadConfig.load(env={**GOOD, name: value})
    message = str(caught.value)
    assert message.startswith(f"{name}: ")
    assert [words for words in told if words not in message] == [], message
