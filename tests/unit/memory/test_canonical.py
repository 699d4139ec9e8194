"""Canonical KV caches: accepted layouts become rows of bytes, the rest is refused with the right call."""

import subprocess
import sys

import numpy as np
import pytest

from kvoffload.errors import LayoutError
from kvoffload.memory.block_tensor import BlockTensor, as_block_tensor
from kvoffload.memory.canonical import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor, torch_view


def numpy_zeros(*shape):
    return np.zeros(shape, np.float16)


def torch_zeros(*shape):
    torch = pytest.importorskip("torch")
    return torch.zeros(shape, dtype=torch.bfloat16)


both = pytest.mark.parametrize("zeros", [numpy_zeros, torch_zeros])


def rows(caches):
    return [(t.view.num_blocks, t.view.row_stride_bytes, t.view.row_bytes) for t in caches.tensors]


@both
def test_kv_in_dim_0_becomes_two_tensors(zeros):
    layer = zeros(2, 10, 4, 3, 8)
    caches = CanonicalKVCaches.from_layers({"a": layer}, block_dim=1)
    page = 4 * 3 * 8 * 2
    assert rows(caches) == [(10, page, page)] * 2
    assert caches.tensors[1].view.base_address - caches.tensors[0].view.base_address == 10 * page
    assert caches.group_data_refs == ((CanonicalKVCacheRef(0, page), CanonicalKVCacheRef(1, page)),)
    assert (caches.num_blocks, caches.num_groups, caches.bytes_per_block, caches.device) == (10, 1, 2 * page, "cpu")


@both
def test_kv_in_dim_1_and_mla_become_one_tensor(zeros):
    assert rows(CanonicalKVCaches.from_layers({"a": zeros(10, 2, 4, 3, 8)}, block_dim=0)) == [(10, 384, 384)]
    assert rows(CanonicalKVCaches.from_layers({"a": zeros(10, 4, 576)})) == [(10, 4608, 4608)]


@both
def test_k_v_tuple_becomes_two_tensors_also_with_two_blocks(zeros):
    caches = CanonicalKVCaches.from_layers({"a": (zeros(2, 4, 8), zeros(2, 4, 8))})
    assert rows(caches) == [(2, 64, 64)] * 2


@both
def test_kv_logical_first_but_adjacent_in_memory_becomes_one_row(zeros):
    layer = zeros(10, 2, 4, 8).swapaxes(0, 1)
    assert rows(CanonicalKVCaches.from_layers({"a": layer}, block_dim=1)) == [(10, 128, 128)]


@both
def test_dense_inner_dimensions_may_be_permuted(zeros):
    layer = zeros(2, 10, 3, 4, 8).swapaxes(2, 3)  # heads before tokens in memory
    assert rows(CanonicalKVCaches.from_layers({"a": layer}, block_dim=1)) == [(10, 192, 192)] * 2


@both
def test_padded_pages_keep_their_stride_and_copy_only_what_is_used(zeros):
    assert rows(CanonicalKVCaches.from_layers({"a": zeros(10, 64)[:, :48]})) == [(10, 128, 96)]


def test_padded_page_by_hand_names_the_used_part_in_the_ref():
    tensor = CanonicalKVCacheTensor(np.zeros((4, 128), np.int8), 128)
    caches = CanonicalKVCaches([tensor], [[CanonicalKVCacheRef(0, 96)]])
    assert caches.bytes_per_block == 128


@both
def test_same_memory_under_two_names_is_one_tensor(zeros):
    layer = zeros(10, 8)
    caches = CanonicalKVCaches.from_layers({"a": layer, "b": layer, "c": layer}, groups=[["a", "b"], ["c"]])
    assert len(caches.tensors) == 1
    assert caches.group_data_refs == ((CanonicalKVCacheRef(0, 16),), (CanonicalKVCacheRef(0, 16),))


def test_pages_of_different_size_are_summed_once():
    """A-C2: pages of 65536 and 32768 bytes fit ten times in 983040, not five."""
    caches = CanonicalKVCaches.from_layers({"a": np.zeros((4, 65536), np.int8), "b": np.zeros((4, 32768), np.int8)})
    assert 983040 // caches.bytes_per_block == 10


WRONG = {
    "two in front, no block_dim": (lambda z: z(2, 10, 4, 3, 8), {}, r"layer 'x'.*ambiguous.*block_dim=1.*block_dim=0"),
    "one block, no block_dim": (lambda z: z(1, 8), {}, "ambiguous"),
    "K/V first called as second": (
        lambda z: z(2, 10, 4, 3, 8),
        {"block_dim": 0},
        r"\(2, 10, 4, 3, 8\).*pass block_dim=1",
    ),
    "K/V second called as first": (
        lambda z: z(10, 2, 4, 3, 8),
        {"block_dim": 1},
        r"\(10, 2, 4, 3, 8\).*pass block_dim=0",
    ),
    "MLA called as K/V first": (lambda z: z(10, 4, 576), {"block_dim": 1}, "pass block_dim=0"),
    "two by blocks": (lambda z: z(2, 10), {"block_dim": 1}, "pass block_dim=0"),
    "third dimension": (lambda z: z(10, 2, 4), {"block_dim": 2}, "block_dim=2: pass block_dim=0, block_dim=1"),
    "flat": (lambda z: z(10), {}, r"expected \(num_blocks, ...\)"),
    "sliced heads": (
        lambda z: z(10, 4, 6, 8)[:, :, :3],
        {"block_dim": 0},
        r"stride \(192, 48, 8, 1\).*one dense range",
    ),
    "transposed blocks": (
        lambda z: z(16, 10, 8).swapaxes(0, 1),
        {"block_dim": 0},
        "not one dense range.*as the engine",
    ),
    "tuple of three": (lambda z: (z(10, 8),) * 3, {}, "a tuple of 3.*tuple \\(K, V\\)"),
    "tuple of a slice": (lambda z: (z(10, 8), z(10, 4, 8)[:, :, :4]), {}, r"layer 'x' \(V\)"),
    "not a tensor": (lambda z: "cache", {}, "str is not a tensor of numbers: pass a torch tensor, a numpy array"),
    "dates": (lambda z: np.zeros((4, 8), "M8[s]"), {}, "not a tensor of numbers"),
    "text": (lambda z: np.zeros((4, 8), "U5"), {}, "not a tensor of numbers"),
    "empty": (lambda z: z(0, 8), {"block_dim": 0}, "no memory behind it"),
}


@both
@pytest.mark.parametrize("case", WRONG)
def test_wrong_layout_is_refused_with_the_right_call(zeros, case):
    make, arguments, message = WRONG[case]
    with pytest.raises(LayoutError, match=f"(?s){message}"):
        CanonicalKVCaches.from_layers({"x": make(zeros)}, **arguments)


def test_expanded_and_meta_and_read_only_memory_is_refused():
    torch = pytest.importorskip("torch")
    with pytest.raises(LayoutError, match="not one dense range"):
        CanonicalKVCaches.from_layers({"x": torch.zeros(1, 8).expand(10, 8)})
    with pytest.raises(LayoutError, match="on 'meta' has no memory"):
        CanonicalKVCaches.from_layers({"x": torch.zeros(10, 8, device="meta")})
    array = np.zeros((10, 8))
    array.flags.writeable = False
    with pytest.raises(LayoutError, match=r"read-only.*pass a writable array"):
        CanonicalKVCaches.from_layers({"x": array})


def test_mixed_devices_and_block_counts_name_both_layers():
    owner = np.zeros((4, 8), np.int8)
    on_gpu = BlockTensor(owner.ctypes.data, 4, 8, 8, "cuda:0", owner)
    with pytest.raises(LayoutError, match=r"'a' is on 'cpu', layer 'b' on 'cuda:0'.*once per device"):
        CanonicalKVCaches.from_layers({"a": owner, "b": on_gpu})
    with pytest.raises(LayoutError, match="'a' has 4 blocks, layer 'b' has 5"):
        CanonicalKVCaches.from_layers({"a": owner, "b": np.zeros((5, 8), np.int8)})


def test_groups_must_name_each_layer_once():
    layers = {"a": np.zeros((4, 8)), "b": np.zeros((4, 8))}
    with pytest.raises(LayoutError, match=r"unknown \['c'\], missing \['b'\], named twice \['a'\], empty groups \[1\]"):
        CanonicalKVCaches.from_layers(layers, groups=[["a", "a", "c"], []])
    with pytest.raises(LayoutError, match="layers must be tensors by name"):
        CanonicalKVCaches.from_layers(np.zeros((4, 8)))
    with pytest.raises(LayoutError, match="at least one KV-cache tensor"):
        CanonicalKVCaches.from_layers({})


def test_refs_are_checked_against_tensors():
    tensor = CanonicalKVCacheTensor(np.zeros((4, 8), np.int8), 8)
    with pytest.raises(LayoutError, match="tensor_idx of group 0 must be 0 to 0; got 1"):
        CanonicalKVCaches([tensor], [[CanonicalKVCacheRef(1, 8)]])
    with pytest.raises(LayoutError, match="at most the 8 bytes of a page of tensor 0; got 9"):
        CanonicalKVCaches([tensor], [[CanonicalKVCacheRef(0, 9)]])
    with pytest.raises(LayoutError, match=r"page_size_bytes is 4.*rows have 8 bytes"):
        CanonicalKVCacheTensor(np.zeros((4, 8), np.int8), 4)


def test_numpy_and_torch_views_share_the_memory_and_keep_it_alive():
    torch = pytest.importorskip("torch")
    view = as_block_tensor(np.arange(32, dtype=np.int8).reshape(4, 8)[:, :6])
    array, tensor = np.asarray(view), torch_view(view)
    array[2, 1] = 77
    assert tensor.shape == (4, 6)
    assert tensor.stride() == (8, 1)
    assert int(tensor[2, 1]) == 77
    assert tensor.dtype == torch.int8
    with pytest.raises(LayoutError, match="cuda:0"):
        torch_view(BlockTensor(1, 1, 1, 1, "cuda:0"))


def test_numpy_layers_load_no_torch():
    code = (
        "import sys, numpy as np; from kvoffload import CanonicalKVCaches;"
        "CanonicalKVCaches.from_layers({'a': np.zeros((4, 8))}); print('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
