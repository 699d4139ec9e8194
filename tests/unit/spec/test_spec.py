"""Specs: sizing, managers, handlers, and finding a spec by name."""

import subprocess
import sys
import textwrap

import numpy as np
import pytest

from kvoffload.config import OffloadConfig
from kvoffload.errors import ConfigError, RegistrationError
from kvoffload.manager.cpu import CPUOffloadingManager
from kvoffload.manager.reuse_filter import FilterReusedOffloadingManager
from kvoffload.memory.canonical import CanonicalKVCaches
from kvoffload.spec.base import KVCacheConfig, OffloadingSpec
from kvoffload.spec.cpu import CPUOffloadingSpec
from kvoffload.spec.factory import OffloadingSpecFactory


def config(**changes):
    return OffloadConfig(**{"cpu_bytes_to_use": 983_040, "gpu_block_size": 16, **changes})


def sizes(*pages, groups=(16,)):
    return KVCacheConfig(num_blocks=100, page_size_bytes=pages, gpu_block_sizes=groups)


def test_a_block_is_the_sum_of_its_pages_once():
    """A-C2."""
    spec = CPUOffloadingSpec(config(), sizes(65_536, 32_768))
    assert spec.num_blocks == 10
    assert spec.num_blocks * spec.offloaded_block_bytes <= 983_040


@pytest.mark.parametrize(("world", "factor", "expected"), [(1, 1, 10), (2, 1, 5), (1, 3, 3), (2, 4, 1)])
def test_ranks_and_factor_divide_the_budget(world, factor, expected):
    spec = CPUOffloadingSpec(config(world_size=world, block_size=16 * factor), sizes(65_536, 32_768))
    assert spec.num_blocks == expected
    assert spec.num_blocks * 98_304 * world * factor <= 983_040


def test_a_budget_below_one_block_names_all_numbers():
    with pytest.raises(ConfigError, match=r"196608 bytes \(98304 bytes x 1 engine blocks x 2 ranks\); got 100000"):
        CPUOffloadingSpec(config(cpu_bytes_to_use=100_000, world_size=2), sizes(65_536, 32_768))
    with pytest.raises(ConfigError, match="no bytes per block"):
        CPUOffloadingSpec(config(), sizes())


def test_sizes_come_from_canonical_caches():
    layers = {f"layer.{index}": np.zeros((8, 2, 64), np.int8) for index in range(2)}
    caches = CanonicalKVCaches.from_layers(layers, block_dim=0, groups=[["layer.0"], ["layer.1"]])
    found = KVCacheConfig.from_canonical(caches, config())
    assert (found.num_blocks, found.bytes_per_block, found.gpu_block_sizes) == (8, caches.bytes_per_block, (16, 16))


def test_groups_that_disagree_with_the_configuration_are_refused():
    with pytest.raises(ConfigError, match=r"\[16, 32\].*\[16\]"):
        CPUOffloadingSpec(config(gpu_block_size=(16, 32)), sizes(1024))
    spec = CPUOffloadingSpec(config(gpu_block_size=(32, 16)), sizes(1024, groups=(32, 16)))
    assert (spec.gpu_block_size, spec.hash_block_size) == ((32, 16), 16)


def test_the_manager_is_made_once_and_filtered_from_threshold_two():
    for threshold in (0, 1):
        spec = CPUOffloadingSpec(config(store_threshold=threshold), sizes(98_304))
        assert type(spec.get_manager()) is CPUOffloadingManager
    spec = CPUOffloadingSpec(config(store_threshold=2, eviction_policy="arc"), sizes(98_304))
    assert type(spec.get_manager()) is FilterReusedOffloadingManager
    assert spec.get_manager() is spec.get_manager()
    assert spec.get_manager().stats().capacity == 10


def test_an_unknown_policy_names_the_known_ones():
    with pytest.raises(RegistrationError, match="arc, lru"):
        CPUOffloadingSpec(config(eviction_policy="mru"), sizes(98_304)).get_manager()


def test_handlers_are_made_once_for_both_directions():
    layers = {"layer.0": np.zeros((2, 8, 1024), np.int8)}
    caches = CanonicalKVCaches.from_layers(layers, block_dim=1)
    spec = CPUOffloadingSpec(config(), KVCacheConfig.from_canonical(caches, config()))
    routes = list(spec.get_handlers(caches))
    try:
        assert [(source.medium(), target.medium()) for source, target, _ in routes] == [("GPU", "CPU"), ("CPU", "GPU")]
        assert [handler for _, _, handler in spec.get_handlers(caches)] == [handler for _, _, handler in routes]
    finally:
        for _, _, handler in routes:
            handler.shutdown()


def test_a_name_is_registered_once(monkeypatch):
    """A-C4."""
    monkeypatch.setattr(OffloadingSpecFactory, "_registry", dict(OffloadingSpecFactory._registry))
    OffloadingSpecFactory.register_spec("X", "no.such.module", "X")
    assert "no" not in sys.modules
    with pytest.raises(ValueError, match=r"'X' is already registered as no\.such\.module\.X"):
        OffloadingSpecFactory.register_spec("X", "other", "X")
    with pytest.raises(ImportError, match=r"no\.such\.module.*'X'"):
        OffloadingSpecFactory.create_spec(config(spec_name="X"), sizes(1024))


def test_an_unknown_name_needs_a_module():
    """A-C4."""
    with pytest.raises(ValueError, match=r"'Nope' is not registered .*CPUOffloadingSpec.*or set spec_module_path"):
        OffloadingSpecFactory.create_spec(config(spec_name="Nope"), sizes(1024))


def test_a_module_outside_is_used_by_its_path(tmp_path, monkeypatch):
    """A-C4."""
    (tmp_path / "outside_spec.py").write_text(
        "from kvoffload.spec.cpu import CPUOffloadingSpec\nclass Mine(CPUOffloadingSpec):\n    pass\nother = 3\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    spec = OffloadingSpecFactory.create_spec(config(spec_name="Mine", spec_module_path="outside_spec"), sizes(1024))
    assert type(spec).__name__ == "Mine"
    assert isinstance(spec, OffloadingSpec)
    with pytest.raises(AttributeError, match=r"'outside_spec' has no class 'Absent'"):
        OffloadingSpecFactory.create_spec(config(spec_name="Absent", spec_module_path="outside_spec"), sizes(1024))
    with pytest.raises(TypeError, match=r"spec_name 'other' .*must be a subclass of OffloadingSpec"):
        OffloadingSpecFactory.create_spec(config(spec_name="other", spec_module_path="outside_spec"), sizes(1024))


def test_a_class_of_another_type_is_refused_under_optimisation_too():
    """A-C4."""
    code = textwrap.dedent("""
        from kvoffload.config import OffloadConfig
        from kvoffload.spec.base import KVCacheConfig
        from kvoffload.spec.factory import OffloadingSpecFactory
        config = OffloadConfig(
            cpu_bytes_to_use=1024, gpu_block_size=16, spec_name="OrderedDict", spec_module_path="collections"
        )
        try:
            OffloadingSpecFactory.create_spec(config, KVCacheConfig(1, (1024,), (16,)))
        except TypeError as error:
            print(error)
        try:
            OffloadConfig(cpu_bytes_to_use=1024, gpu_block_size=16, block_size=24)
        except ValueError as error:
            print(error)
    """)
    out = subprocess.run([sys.executable, "-O", "-c", code], capture_output=True, text=True, check=True).stdout
    assert "spec_module_path 'collections' must be a subclass of OffloadingSpec" in out
    assert "multiple of gpu_block_size 16" in out
