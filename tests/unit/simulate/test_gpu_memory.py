"""Bytes that can be checked."""

import numpy as np
import pytest

from kvoffload.errors import ConfigError, NoSpaceError
from kvoffload.simulate.gpu_memory import SimulatedGpu

NAMES = [b"first", b"second", b"third"]


def test_what_was_computed_is_right_under_its_name_only():
    gpu = SimulatedGpu(4, 64)
    gpu.compute([0, 2, 3], NAMES)
    assert gpu.count_wrong([0, 2, 3], NAMES) == 0
    assert gpu.count_wrong([0, 2, 3], [b"second", b"second", b"first"]) == 2
    assert gpu.count_wrong([1], [b"first"]) == 1


def test_one_wrong_word_in_any_layer_shows():
    for layer in SimulatedGpu(1, 64).layers:
        gpu = SimulatedGpu(2, 64)
        gpu.compute([1], NAMES[:1])
        gpu.layers[layer][1, -1] ^= 1
        assert gpu.count_wrong([1], NAMES[:1]) == 1


def test_words_in_another_order_show():
    gpu = SimulatedGpu(1, 128)
    gpu.compute([0], NAMES[:1])
    for array in gpu.layers.values():
        array[0] = np.roll(array[0], 1)
    assert gpu.count_wrong([0], NAMES[:1]) == 1


@pytest.mark.parametrize(("block_bytes", "layers"), [(8, 1), (24, 1), (32, 2)])
def test_layers_share_a_block(block_bytes, layers):
    gpu = SimulatedGpu(3, block_bytes)
    assert len(gpu.layers) == layers
    assert sum(array[0].nbytes for array in gpu.layers.values()) == block_bytes


@pytest.mark.parametrize("block_bytes", [0, 4, 12])
def test_blocks_are_whole_words(block_bytes):
    with pytest.raises(ConfigError, match="multiple of 8"):
        SimulatedGpu(1, block_bytes)


def test_more_memory_than_the_machine_has_is_refused():
    with pytest.raises(NoSpaceError, match="simulated GPU of 1099511627776 blocks"):
        SimulatedGpu(1 << 40, 1 << 10)
