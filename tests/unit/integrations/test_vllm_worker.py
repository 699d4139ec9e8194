from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from kvoffload.manager.specs import CPULoadStoreSpec
from kvoffload.transfer.host import HostStream
from kvoffload.transfer.host_copy import copy_plan

PAGE, BLOCKS, FACTOR = 64, 8, 2


class Rig:
    """A worker over one numpy KV cache; copies of a direction fail while its name is in `broken`."""

    def __init__(self, adapter, fake):
        self.fake = fake
        self.gpu = np.arange(BLOCKS * PAGE, dtype=np.int64).astype(np.int8).reshape(BLOCKS, PAGE)
        self.broken: set[str] = set()
        caches = fake.CanonicalKVCaches(
            tensors=[SimpleNamespace(tensor=self.gpu, page_size_bytes=PAGE)],
            group_data_refs=[[SimpleNamespace(tensor_idx=0, page_size_bytes=PAGE)]],
        )
        self.worker = adapter.KVOffloadWorker(caches, FACTOR, 4, make_stream=self._stream)

    def _stream(self, name, on_done):
        def copier(plan):
            if name in self.broken:
                raise OSError("broken on purpose")
            copy_plan(plan)

        return HostStream(name, on_done, copier=copier)

    def host(self, blocks, ticket=1, req_id="r"):
        return self.host_blocks(CPULoadStoreSpec(blocks, ticket), req_id)

    def blocks(self, ids, first=0):
        return self.fake.GPULoadStoreSpec(
            block_ids=np.array(ids, np.int32), group_sizes=[len(ids)], block_indices=[first]
        )

    def finish(self, *jobs):
        self.worker.wait(set(jobs))
        return {result.job_id: result for result in self.worker.get_finished()}


@pytest.fixture
def rig(adapter, fake):
    from kvoffload.integrations.vllm_state import HostBlocks

    rig = Rig(adapter, fake)
    rig.host_blocks = HostBlocks.of
    yield rig
    rig.worker.shutdown()


def test_blocks_come_back_as_they_left(rig):
    before = rig.gpu.copy()
    assert rig.worker.submit_store(1, rig.blocks([0, 1, 2, 3]), rig.host([3, 0]))
    done = rig.finish(1)
    assert (done[1].success, done[1].transfer_size) == (True, 4 * PAGE)
    rig.gpu[:] = 0
    assert rig.worker.submit_load(2, rig.host([3, 0]), rig.blocks([4, 5, 6, 7]))
    assert rig.finish(2)[2].success
    assert (rig.gpu[4:] == before[:4]).all()


def test_a_load_may_begin_inside_an_offloaded_block(rig):
    before = rig.gpu.copy()
    rig.worker.submit_store(1, rig.blocks([0, 1, 2, 3]), rig.host([1, 2]))
    rig.finish(1)
    rig.worker.submit_load(2, rig.host([1, 2]), rig.blocks([5, 6, 7], first=1))
    rig.finish(2)
    assert (rig.gpu[5:] == before[1:4]).all()


def test_a_failed_store_is_reported_to_vllm_as_done_and_to_the_manager_as_failed(rig):
    rig.broken.add("kvoffload-store")
    assert rig.worker.submit_store(7, rig.blocks([0, 1]), rig.host([0], ticket=42))
    result = rig.finish(7)[7]
    assert result.success
    assert result.transfer_size is None
    assert rig.worker.take_failed_tickets() == {42}
    assert rig.worker.take_failed_tickets() == set()
    assert rig.worker.take_failed_requests() == set()


def test_a_failed_load_names_its_request(rig):
    rig.worker.submit_store(1, rig.blocks([0, 1]), rig.host([0]))
    rig.finish(1)
    rig.broken.add("kvoffload-load")
    rig.worker.submit_load(2, rig.host([0], ticket=5, req_id="victim"), rig.blocks([2, 3]))
    assert rig.finish(2)[2].success
    assert rig.worker.take_failed_requests() == {"victim"}
    assert rig.worker.take_failed_tickets() == {5}


def test_a_submission_that_cannot_be_made_is_a_failed_job_and_not_a_refusal(rig):
    assert rig.worker.submit_store(9, rig.blocks([0, BLOCKS + 5]), rig.host([0], ticket=3))
    assert rig.finish(9)[9].success
    assert rig.worker.take_failed_tickets() == {3}


def test_waiting_for_jobs_it_never_had_returns(rig):
    rig.worker.wait({1, 2, 3})


def test_specs_travel_between_processes(rig):
    import pickle

    copy = pickle.loads(pickle.dumps(rig.host([1, 2], ticket=8, req_id="far")))
    assert (copy.block_ids.tolist(), copy.ticket, copy.req_id) == ([1, 2], 8, "far")


def test_what_a_load_that_broke_off_left_in_the_engines_blocks_is_zeroed(rig):
    rig.worker.submit_store(1, rig.blocks([0, 1, 2, 3]), rig.host([3, 0]))
    rig.finish(1)
    before = rig.gpu.copy()
    rig.broken.add("kvoffload-load")
    rig.gpu[5:7] = -1  # NaN in any float format
    rig.worker.submit_load(2, rig.host([3]), rig.blocks([5, 6]))
    rig.finish(2)
    assert (rig.gpu[5:7] == 0).all()
    assert (rig.gpu[:5] == before[:5]).all()
    assert (rig.gpu[7] == before[7]).all()


def test_a_store_that_failed_leaves_the_engines_blocks_alone(rig):
    before = rig.gpu.copy()
    rig.broken.add("kvoffload-store")
    rig.worker.submit_store(1, rig.blocks([0, 1]), rig.host([2]))
    rig.finish(1)
    assert (rig.gpu == before).all()
