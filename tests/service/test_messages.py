"""What a caller of the Python API can get wrong: a typed error with argument, value, limit and remedy."""

import inspect

import numpy as np
import pytest
from service.harness import BLOCK, Rig, tokens
from service.harness import chain as chain_of

import kvoffload as kv
from kvoffload.asgi import make_app
from kvoffload.events.publisher import FeedPublisher
from kvoffload.events.subscriber import subscribe
from kvoffload.service.ranks.launcher import RankLauncher
from kvoffload.transfer.worker import OffloadingWorker

HERE = "host-visible"
KEY = kv.make_offload_key(bytes(32), 0)
ONE = kv.GroupLayout(4)
CONFIG = {"cpu_bytes_to_use": 1 << 20, "gpu_block_size": 4}


def manager():
    return kv.CPUOffloadingManager(4)


def layers(*shape, **options):
    return kv.CanonicalKVCaches.from_layers({"a": np.zeros(shape)}, **options)


def spec_from(**options):
    return kv.OffloadingSpecFactory.create_spec(kv.OffloadConfig(**CONFIG, **options), None)


def block(*ids, sizes=None, first=0):
    return kv.GPULoadStoreSpec(list(ids), [len(ids)] if sizes is None else sizes, [first] * len(sizes or [0]))


def started(**options):
    with kv.OffloadEngine(kv.OffloadConfig(**{**CONFIG, **options}), Rig().kv_caches):
        pass


def take_commands():
    workers = kv.RemoteWorkers(1)
    try:
        workers.take_commands()
    finally:
        workers.shutdown()


def publisher(**options):
    return FeedPublisher(kv.EventsConfig(**options), engine_block_size=4)


PARTS = [
    (lambda: kv.make_offload_key(b"x", -1), "group_idx", "got -1", "0 to 4294967295"),
    (lambda: kv.make_offload_key(b"x", "0"), "group_idx", "got '0'", "whole number of 0 to 4294967295"),
    (lambda: kv.make_offload_key("x", 0), "block_hash", "got 'x'", "must be bytes, such as one of hash_blocks()"),
    (lambda: kv.hash_blocks([1], 0), "block_size", "got 0", "positive whole number of tokens, such as 16"),
    (lambda: kv.hash_blocks([1], "4"), "block_size", "got '4'", "positive whole number of tokens, such as 16"),
    (lambda: kv.hash_blocks([1, -2], 2), "token_ids", "got -2", "integers in [0, 2**32)"),
    (lambda: kv.hash_blocks([1, 1.5], 2), "token_ids", "got 1.5", "integers in [0, 2**32)"),
    (lambda: kv.hash_blocks(5, 2), "token_ids", "got 5", "integers in [0, 2**32)"),
    (lambda: kv.hash_blocks([1, 2], 2, extra_keys=5), "extra_keys", "got 5", "a tuple or None for each block"),
    (lambda: kv.hash_blocks([1, 2], 2, extra_keys=[({},)]), "extra_keys", "got {}", "None, bool, int, float, str"),
    (lambda: kv.BlockChain([]), "groups", "got []", "at least one GroupLayout, such as GroupLayout(16)"),
    (lambda: kv.BlockChain([16]), "groups", "got [16]", "at least one GroupLayout, such as GroupLayout(16)"),
    (lambda: kv.BlockChain([ONE, kv.GroupLayout(6)]), "block_size=6", "positive multiple of the smallest group's, 4"),
    (lambda: kv.BlockChain([ONE], [1], block_hashes=5), "block_hashes", "got 5", "a list with an item for each"),
    (lambda: kv.BlockChain([ONE], [1], block_hashes=[b""]), "block_hashes", "got b''", "non-empty bytes"),
    (lambda: kv.BlockChain([ONE], [1], extra_keys=[5]), "extra_keys", "got 5", "a tuple or None for each hash block"),
    (lambda: kv.BlockChain([ONE]).extend([1], block_hashes=[b"x"]), "block_hashes", "its tokens itself", "leave"),
    (lambda: kv.BlockChain([ONE]).keys(3), "group_idx", "got 3", "a group of this chain, 0 to 0"),
    (lambda: block(1, sizes=[2]), "group_sizes", "got [2]", "add up to the 1 block_ids"),
    (lambda: block(1, sizes=["x"]), "group_sizes", "got ['x']", "a list of whole numbers, one for each"),
    (lambda: block(1, first=-1), "block_indices", "got [-1]", "one index of at least 0 for each of the 1 groups"),
    (lambda: block(-1), "block_ids", "got -1", "must be at least 0"),
    (lambda: kv.CPULoadStoreSpec(["x"]), "block_ids", "<U1 of shape (1,)", "a flat list of integers"),
    (lambda: kv.CPUOffloadingManager(-1), "num_blocks", "got -1", "must not be negative"),
    (lambda: kv.CPUOffloadingManager("4"), "num_blocks", "got '4'", "must be a whole number"),
    (lambda: kv.CPUOffloadingManager(4, "mru"), "cache policy", "'mru'", "known are adaptive, arc, lru"),
    (lambda: kv.CPUOffloadingManager(4, 5), "cache_policy", "got 5", "a policy's name or a CachePolicy class"),
    (lambda: kv.CPUOffloadingManager(4, enable_events=3), "enable_events", "got 3", "True or False"),
    (lambda: manager().complete_load([KEY]), KEY.hex(), "no load to complete", "prepare_load comes first"),
    (lambda: kv.FilterReusedOffloadingManager(manager(), 1), "store_threshold", "got 1", "at least 2", "leave it out"),
    (lambda: kv.FilterReusedOffloadingManager(manager(), 2, 0), "max_tracker_size", "got 0", "at least 1"),
    (lambda: kv.register_policy("a:b", "m", "C"), "policy name", "'a:b'", "without a colon, such as 'mine'"),
    (lambda: kv.register_policy("lru", "m", "C"), "'lru'", "already registered as", "choose another name"),
    (lambda: kv.CanonicalKVCaches.from_layers({}), "layers", "got {}", "at least one KV-cache tensor by its name"),
    (lambda: kv.CanonicalKVCaches.from_layers({"a": 5}), "layer 'a'", "int is not a tensor", "pass a torch tensor"),
    (lambda: layers(2, 8, 4), "layer 'a'", "shape (2, 8, 4)", "ambiguous", "pass block_dim=1 if dimension 0 holds"),
    (lambda: layers(3, 8, 4, block_dim=1), "block_dim=1", "dimension 0 has 3 entries", "pass block_dim=0"),
    (lambda: layers(8, 4, block_dim=2), "block_dim=2", "pass block_dim=0, block_dim=1 or leave it out"),
    (lambda: layers(8, 4, block_dim=0, groups=5), "groups", "got 5", "a list of lists of layer names"),
    (lambda: layers(8, 4, block_dim=0, groups=[["b"]]), "groups", "unknown ['b']", "name each layer once"),
    (lambda: spec_from(spec_name="No"), "spec_name 'No'", "known: CPUOffloadingSpec", "set spec_module_path"),
    (lambda: spec_from(spec_name="No", spec_module_path="no"), "spec_module_path 'no'", "install it, or put"),
    (lambda: spec_from(spec_name="No", spec_module_path="json"), "spec_module_path 'json'", "'No'", "set spec_name"),
    (lambda: kv.RemoteWorkers("2"), "world_size", "got '2'", "a whole number of at least 1"),
    (lambda: kv.RemoteWorkers(1, transport="tcp"), "transport", "got 'tcp'", '"zmq" or "piggyback"'),
    (lambda: kv.RemoteWorkers(1, address=5), "address", "got 5", '"ipc", a path'),
    (lambda: OffloadingWorker().transfer_async(1, (kv.CPULoadStoreSpec([1]),) * 2), "CPU to CPU", "register_handler"),
    (lambda: spec_from(spec_name="JSONDecoder", spec_module_path="json"), "'JSONDecoder'", "a subclass of"),
    (lambda: kv.OffloadRankWorker(Rig().config, Rig().kv_caches, rank=3, address="@x"), "rank", "got 3", "0 to 0"),
    (lambda: kv.OffloadRankWorker(Rig().config, Rig().kv_caches, rank="0", address="@x"), "rank", "got '0'", "0 to 0"),
    (take_commands, "take_commands", "this one is zmq", "make RemoteWorkers with it"),
    (lambda: kv.CpuGpuOffloadingHandlers(Rig().kv_caches, 0, 4), "block_size_factor", "got 0 and 4", "at least 1"),
    (lambda: kv.CanonicalKVCaches([], []), "at least one tensor", "make it with from_layers(...)"),
    (lambda: make_app(5), "service", "got 5", "an OffloadService, or a function that returns one"),
    (lambda: started(eviction_policy="mru"), "eviction_policy", "'mru'", "known are adaptive, arc, lru"),
    (lambda: started(cpu_bytes_to_use=100), "cpu_bytes_to_use", "got 100", "at least one offloaded block of 128 bytes"),
    (lambda: started(cpu_bytes_to_use="900TB"), "900000000000000 bytes needed", "ask for fewer", "cpu_bytes_to_use"),
    (lambda: started(gpu_block_size=(4, 8)), "gpu_block_size names 2 groups", "have 1", "give one size for each"),
    (lambda: started(world_size=2), "world_size is 2", "those of one process", "pass workers=RemoteWorkers(2)"),
    (lambda: kv.OffloadService({}, Rig().kv_caches), "config", "got {}", "must be an OffloadConfig"),
    (lambda: kv.OffloadService(Rig().config, {"a": np.ones(99)}), "kv_caches", "got a dict", "from_layers(...)"),
    (lambda: publisher(endpoint=f"ipc://{__file__}"), "a file that is no socket", "give another path"),
    (lambda: kv.RemoteWorkers(1, address=__file__), "ranks cannot meet", "it is no socket", "use another address"),
    (lambda: kv.RemoteWorkers(1, address="@" + "x" * 120), "ranks cannot meet", "the 107 bytes", "use another address"),
    (lambda: publisher(endpoint="ipc:///no/x"), "events.endpoint", "'ipc:///no/x'", "a folder that may be written"),
    (lambda: publisher(endpoint="ipc:///" + "x" * 120), "events.endpoint", "a path of at most 107 bytes"),
    (lambda: publisher(endpoint="tcp://no.invalid:1"), "'tcp://no.invalid:1'", "give an address of this host"),
    (lambda: kv.OffloadConfig.load(5), "path", "got 5", "the path of a .toml or .json file"),
    (lambda: kv.OffloadConfig.load(env={"KVOFFLOAD_WORLD_SIZE": 5}), "KVOFFLOAD_WORLD_SIZE", "got 5", "must be text"),
    (lambda: RankLauncher("a:b", world_size="1", address="@a"), "world_size", "got '1'", "whole number of at least 1"),
    (lambda: kv.OffloadConfig.load("no.toml", env={}), "no.toml", "No such file", "give the path of a .toml or .json"),
    (lambda: subscribe("abc"), "endpoint", "'abc'", "must look like tcp://host:port, ipc://path or inproc://name"),
    (lambda: publisher(endpoint="tcp://h"), "events.endpoint", "'tcp://h'", "port number of 0 to 65535: use tcp://host:port"),
    (lambda: publisher(replay_endpoint="x"), "events.replay_endpoint", "'x'", "must look like tcp://host:port"),
    (lambda: publisher(replay_endpoint="tcp://127.0.0.1:5557"), "5557", "overlap with 1 ranks", "use 5557 and 5558"),
    (lambda: publisher(encoding="map", consumer="aibrix"), "encoding", "consumer aibrix", "use array"),
    (lambda: publisher(topic="a", consumer="llm-d"), "topic", "'a'", "must be kv@<pod>@<model>"),
    (lambda: publisher(merge_replay_from="tcp://a:1"), "merge_replay_from names 1", "one replay endpoint for each"),
    (lambda: kv.OffloadEngine(5, Rig().kv_caches), "config", "got 5", "must be an OffloadConfig"),
    (lambda: kv.OffloadEngine(Rig().config, 5), "kv_caches", "got 5", "CanonicalKVCaches.from_layers(...)"),
    (lambda: kv.OffloadEngine(Rig().config), "kv_caches", "workers", "not both or neither"),
    (lambda: kv.OffloadEngine(Rig().config, Rig().kv_caches).poll(), "not started", "use `with OffloadEngine(...)`"),
]  # fmt: skip
ENGINE = [
    (lambda e, c: e.begin("r", c), "'r'", "begun already", "finish it first, or use another id"),
    (lambda e, c: e.begin("", c), "req_id", "got ''", "a non-empty str"),
    (lambda e, _: e.begin("s", 5), "chain", "got int", "must come from service.chain(...)"),
    (lambda e, _: e.begin("s", kv.BlockChain([kv.GroupLayout(8)])), "chain", "block_size=8", "config.group_layouts()"),
    (lambda e, _: e.match("zz"), "'zz'", "has not begun or has finished", "begin it first"),
    (lambda e, _: e.match([]), "request_id", "got []", "must be a str"),
    (lambda e, _: e.abort([]), "request_id", "got []", "must be a str, the id that a request began with"),
    (lambda e, _: e.abort(5), "request_id", "got 5", "must be a str, the id that a request began with"),
    (lambda e, _: e.explain([]), "request_id", "got []", "must be a str, the id that a request began with"),
    (lambda e, _: e.explain("zz"), "'zz'", "not known", "open ones and the last 256 are"),
    (lambda e, _: e.finish([]), "request_id", "got []", "must be a str"),
    (lambda e, _: e.hint("r", 5), "outcome", "got 5", "must be a RequestOutcome"),
    (lambda e, _: e.submit_load([], block(1)), "request_id", "got []", "must be a str"),
    (lambda e, _: e.submit_load("r", 5), "GPU blocks", "got 5", "named by a GPULoadStoreSpec"),
    (lambda e, _: e.submit_load("r", block(1000)), "GPU block ids", "got 1000..1000", "in [0, 64)"),
    (lambda e, _: e.submit_load("r", block(1, 2, sizes=[1, 1])), "group_sizes", "got [1, 1]", "each of 1 groups"),
    (lambda e, _: e.submit_store("r", block(1), "soon"), "ready", "got 'soon'", '"host-visible" or an event recorded'),
    (lambda e, _: e.submit_store("r", block(1, first=99), HERE), "blocks 99..99", "which has 4", "extend the chain"),
    (lambda e, _: e.submit_store("r", block(1, 1), HERE), "GPU block", "got [1, 1]", "each must be another one"),
    (lambda e, _: e.wait(5, 1), "jobs", "got 5", "a list of job ids"),
    (lambda e, _: e.wait([], "x"), "timeout", "got 'x'", "a number of seconds, or None"),
    (lambda e, _: e.busy_gpu_blocks(5), "gpu_blocks", "got 5", "a list of block ids"),
    (lambda e, _: e.discard(5), "keys", "got 5", "a list of block keys, as chain.keys() gives them"),
    (lambda e, _: e.discard([5]), "keys", "got 5", "must be bytes, as chain.keys() gives them"),
    (lambda e, _: e.take_commands(), "no rank processes", "workers=RemoteWorkers(world_size)"),
    (lambda e, _: e.pause_stores("x"), "paused", "got 'x'", "must be True or False"),
    (lambda e, _: setattr(e, "enabled", 3), "enabled", "got 3", "must be True or False"),
]  # fmt: skip
SERVICE = [
    (lambda s, _, c: s.request(5, c, gpu_blocks=[0], free=None), "request", "got 5", "a str or a ReqContext"),
    (lambda s, _, c: s.request("s", c, gpu_blocks=[0], free=5), "free", "got 5", "callable with a list of GPU blocks"),
    (lambda s, _, c: s.request("s", c, gpu_blocks=[0], free=None).match(), "'s'", "not entered", "use `async with"),
    (lambda s, _, c: s.request("s", c, gpu_blocks=5, free=None).__aenter__(), "block table", "got int", "a list of"),
    (lambda s, *_: s.abort([]), "request_id", "got []", "must be a str, the id that a request began with"),
    (lambda s, *_: s.explain([]), "request_id", "got []", "must be a str, the id that a request began with"),
    (lambda s, *_: s.drain("x"), "timeout", "got 'x'", "a number of seconds, or None"),
    (lambda s, *_: s.__aenter__(), "OffloadService", "entered once", "make a new one"),
    (lambda _, r, __: r.load(first_block="x"), "first_block", "got 'x'", "must be a whole number"),
    (lambda _, r, __: r.load(leave_tokens=-1), "leave_tokens", "got -1", "must not be negative"),
    (lambda _, r, __: r.load(after="x"), "after", "got 'x'", '"host-visible" or an event recorded'),
    (lambda _, r, __: r.store(computed_tokens=99, ready=HERE), "computed_tokens", "got 99", "16", "extend the chain"),
    (lambda _, r, __: r.store(computed_tokens=4, ready=HERE), "computed_tokens", "from 8 to 4", "all tokens so far"),
    (lambda _, r, __: r.store(computed_tokens=16, ready=HERE), "2 GPU blocks", "16 tokens need 4", "append to"),
    (lambda _, r, __: r.finished(output_tokens="x"), "output_tokens", "got 'x'", "must be a whole number"),
    (lambda _, r, __: r.prefilled(1, -1), "tokens and seconds", "got 1 and -1", "above 0"),
    (lambda _, r, __: r.when_released(5, print), "blocks", "got 5", "a list of GPU block ids"),
    (lambda _, r, __: r.when_released([0], 5), "callback", "got 5", "callable with a list of GPU blocks"),
]  # fmt: skip


async def _answer(call, *parts):
    answer = call(*parts)
    return await answer if inspect.isawaitable(answer) else answer


def said(caught, told):
    message = str(caught.value)
    return [words for words in told if words not in message], message


@pytest.mark.parametrize(
    ("call", "told"), [(call, told) for call, *told in PARTS], ids=[str(case[1:3]) for case in PARTS]
)
def test_a_mistake_with_a_part_is_told_with_argument_value_and_what_is_right(call, told):
    with pytest.raises(kv.KVOffloadError) as caught:
        call()
    missing, message = said(caught, told)
    assert missing == [], message


@pytest.mark.parametrize(
    ("call", "told"), [(call, told) for call, *told in ENGINE], ids=[str(case[1:3]) for case in ENGINE]
)
def test_a_mistake_with_the_engine_is_told_and_changes_nothing(call, told):
    rig = Rig()
    with rig.engine() as engine:
        chain = chain_of(rig, 4 * BLOCK)
        engine.begin("r", chain)
        before = engine.stats()
        with pytest.raises(kv.UsageError) as caught:
            call(engine, chain)
        missing, message = said(caught, told)
        assert missing == [], message
        assert (engine.health().ok, engine.pins(), engine.stats().manager) == (True, {}, before.manager)


@pytest.mark.parametrize(
    ("call", "told"), [(call, told) for call, *told in SERVICE], ids=[str(c[1:3]) for c in SERVICE]
)
async def test_a_mistake_with_the_service_is_told_and_changes_nothing(call, told):
    rig = Rig()
    async with rig.service() as service:
        chain = service.chain(tokens(4 * BLOCK))
        async with service.request("r", chain, gpu_blocks=[0, 1], free=rig.free) as request:
            await request.store(computed_tokens=8, ready=HERE)
            with pytest.raises(kv.UsageError) as caught:
                await _answer(call, service, request, chain)
            missing, message = said(caught, told)
            assert missing == [], message
            assert service.health().ok
    rig.check(freed=[0, 1])
