"""A machine without a GPU, and without torch."""

import subprocess
import sys
import textwrap

import pytest

from kvoffload.config import OffloadConfig
from kvoffload.errors import UnsupportedError
from kvoffload.memory.block_tensor import BlockTensor
from kvoffload.memory.canonical import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor
from kvoffload.spec.base import KVCacheConfig
from kvoffload.spec.factory import OffloadingSpecFactory


def test_everything_but_gpu_handlers_works_without_torch_and_cuda():
    """A-K2."""
    code = textwrap.dedent("""
        import sys
        sys.modules["torch"] = None                     # an import of torch fails, as where it is not installed
        sys.modules["cuda"] = None
        import numpy
        import kvoffload
        from kvoffload.spec.base import KVCacheConfig
        config = kvoffload.OffloadConfig(cpu_bytes_to_use=1 << 20, gpu_block_size=16)
        caches = kvoffload.CanonicalKVCaches.from_layers({"layer": numpy.zeros((2, 8, 64), "i1")}, block_dim=1)
        spec = kvoffload.OffloadingSpecFactory.create_spec(config, KVCacheConfig.from_canonical(caches, config))
        print(spec.get_manager().stats().capacity)
        handlers = [handler for _, _, handler in spec.get_handlers(caches)]
        print(len(handlers))
        for handler in handlers:
            handler.shutdown()
        import kvoffload.metrics.exposition
        from kvoffload.events.publisher import FeedPublisher
        events = kvoffload.EventsConfig(endpoint="tcp://127.0.0.1:0", replay_endpoint="tcp://127.0.0.1:0")
        feed = FeedPublisher(events, instance_id="pod")
        feed.start()
        print(feed.close(10))
    """)
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.split() == ["8192", "2", "True"]


def test_handlers_for_a_missing_device_are_refused_at_the_call():
    """A-K2."""
    config = OffloadConfig(cpu_bytes_to_use=1 << 20, gpu_block_size=16)
    tensor = BlockTensor(1 << 30, 8, 64, 64, "cuda:99", None)
    caches = CanonicalKVCaches([CanonicalKVCacheTensor(tensor, 64)], [[CanonicalKVCacheRef(0, 64)]])
    spec = OffloadingSpecFactory.create_spec(config, KVCacheConfig.from_canonical(caches, config))
    assert spec.get_manager().stats().capacity == 16_384
    with pytest.raises(UnsupportedError, match="cuda:99"):
        list(spec.get_handlers(caches))
