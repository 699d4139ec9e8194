"""A process that has imported everything, and forks front ends and ranks of one instance when it is told to.

    python rank_zygote.py ADDRESS

Each line on standard input is `front STAGE` or `rank NUMBER STAGE`; a process that gets to its stage kills itself. What
happens is said on standard output, one line each: `forked PID`, `front up`, `served`, `corrupt`, `front closed`.
"""

import os
import signal
import sys
import time

import kvoffload as kv
from kvoffload.memory import mapping
from kvoffload.memory.region import SharedOffloadRegion
from kvoffload.service.ranks import link, meeting
from kvoffload.service.ranks.rank_worker import OffloadRankWorker
from kvoffload.service.ranks.remote import RemoteWorkers
from kvoffload.simulate.sharded_gpu import ShardedGpu
from kvoffload.transfer.host import HostStream

WORLD, PAGE, BLOCKS = 2, 256, 32
ADDRESS = sys.argv[1]
GPU = ShardedGpu(BLOCKS, WORLD * PAGE, WORLD)
CONFIG = kv.OffloadConfig(cpu_bytes_to_use=WORLD * PAGE * 16, gpu_block_size=4, world_size=WORLD)


def say(line):
    os.write(1, f"{line}\n".encode())


def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)


def after(function):
    def call(*args, **kwargs):
        function(*args, **kwargs)
        die()

    return call


def arm(stage):
    if stage == "before reserve":
        os.memfd_create = die
    if stage == "after reserve":
        os.posix_fallocate = after(os.posix_fallocate)
    if stage == "before map":
        mapping._mmap = die
    if stage == "after map":
        mapping._mmap = after(mapping._mmap)
    if stage == "before publish":
        SharedOffloadRegion.send = die
    if stage == "after publish":
        SharedOffloadRegion.send = after(SharedOffloadRegion.send)
    if stage == "before hello":
        meeting.introduce = die
    if stage == "before ready":
        link.Link.say = die
    if stage == "after ready":
        link.Link.say = after(link.Link.say)
    if stage == "mid copy":
        HostStream._copy = die
    if stage == "during cleanup":
        SharedOffloadRegion.cleanup = die


class StopError(Exception):
    """SIGTERM came while a rank waited."""


ASKED = {"stop": False, "waits": False}


def stop(*_):
    ASKED["stop"] = True
    if ASKED["waits"]:
        ASKED["waits"] = False
        raise StopError


def front(stage):
    while True:
        try:
            workers = RemoteWorkers(WORLD, address=ADDRESS, join_timeout=120)
            break
        except kv.UsageError:  # the one before is about to be gone
            time.sleep(0.005)
    with kv.OffloadEngine(CONFIG, workers=workers) as engine:
        say("front up")
        if stage == "with a fork":
            hold_everything()
        number = 0
        while not ASKED["stop"]:
            serve(engine, number)
            number += 1
    say("front closed")


def hold_everything():
    """Leave a fork that holds what this process has open, and does nothing."""
    pid = os.fork()
    if pid:
        say(f"held {pid}")
    while not pid:
        time.sleep(60)


def serve(engine, number):
    names = [number.to_bytes(15, "big") + b"a", number.to_bytes(15, "big") + b"b"]
    gpu_blocks = [1, 2, 8, 9]
    if engine.busy_gpu_blocks(gpu_blocks):
        engine.wait([-1], 0.0)
        time.sleep(0.002)
        return
    GPU.compute([1, 2], names)
    for rank in GPU.ranks:
        for layer in rank.layers.values():
            layer[[8, 9]] = -1
    engine.begin(str(number), kv.BlockChain(engine.geometry.groups, block_hashes=names))
    stored = result_of(engine, engine.submit_store(str(number), kv.GPULoadStoreSpec([1, 2], [2], [0]), "host-visible"))
    if stored is not None and stored.stored == 2:
        job = engine.submit_load(str(number), kv.GPULoadStoreSpec([8, 9], [2], [0]))
        loaded = result_of(engine, job) if job is not None else None
        if loaded is not None and loaded.outcome is kv.LoadOutcome.LOADED:
            say("corrupt" if GPU.count_wrong([8, 9], names) else "served")
    else:
        time.sleep(0.002)
    engine.finish(str(number))


def result_of(engine, job):
    return next((done.result for done in engine.wait([job], 20) if done.job_id == job), None)


def rank(number):
    caches = kv.CanonicalKVCaches.from_layers(GPU.ranks[number].layers, block_dim=0)
    worker = OffloadRankWorker(CONFIG, caches, rank=number, address=ADDRESS, timeout=120)
    try:
        while not ASKED["stop"]:
            try:
                worker.start()
            except (kv.ClosedError, kv.ConfigError):  # it went away meanwhile; or the one before is not gone yet
                time.sleep(0.005)
            else:
                ASKED["waits"] = True
                if not ASKED["stop"]:
                    worker.wait_until_lost()
                ASKED["waits"] = False
    except StopError:
        pass
    worker.close()


def main():
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in iter(sys.stdin.readline, ""):  # no reading ahead: a fork would inherit it
        role, *words = line.rstrip("\n").split(" ", 1)
        pid = os.fork()
        if pid:
            say(f"forked {pid}")
            continue
        code = 1
        try:
            signal.signal(signal.SIGTERM, stop)
            if role == "front":
                arm(words[0])
                front(words[0])
            else:
                number, stage = words[0].split(" ", 1)
                arm(stage)
                rank(int(number))
            code = 0
        except BaseException as error:
            say(f"failed {role} {error!r}")
        finally:
            os._exit(code)


main()
