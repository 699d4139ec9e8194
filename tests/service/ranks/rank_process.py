"""One rank as a process: its "GPU" is shared memory that the test can see.

    python rank_process.py ADDRESS RANK WORLD_SIZE GPU_FD BLOCKS PAGE [OPTIONS as JSON]

Prints `up` when it has joined; ends when its standard input does. With the piggyback transport each line on standard
input is a step's commands in hex, answered by the reports in hex.
"""

from __future__ import annotations

import json
import mmap
import sys

import numpy as np

import kvoffload as kv


def main() -> int:
    address, rank, world_size, fd, blocks, page = sys.argv[1], *map(int, sys.argv[2:7])
    options = json.loads(sys.argv[7]) if len(sys.argv) > 7 else {}
    memory = mmap.mmap(fd, world_size * blocks * page)
    gpu = np.frombuffer(memory, np.int8).reshape(world_size, blocks, page)[rank]
    config = kv.OffloadConfig(cpu_bytes_to_use=1 << 20, gpu_block_size=4, world_size=world_size, **options)
    caches = kv.CanonicalKVCaches.from_layers({"layer": gpu}, block_dim=0)
    worker = kv.OffloadRankWorker(config, caches, rank=rank, address=address, timeout=20)
    try:
        worker.start()
    except kv.KVOffloadError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        return 1
    print("up", flush=True)
    for line in sys.stdin:
        word = line.strip()
        if word.startswith("step "):
            worker.note_step(int(word.split()[1]))
            print("ok", flush=True)
        else:
            print(worker.execute(bytes.fromhex(word), "host-visible").hex(), flush=True)
    worker.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
