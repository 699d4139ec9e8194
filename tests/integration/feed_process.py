"""A publisher in a process of its own, to be killed: `feed_process.py CONSUMER ENDPOINT REPLAY_ENDPOINT SEED...`."""

import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]

from consumers import chain, store  # noqa: E402

from kvoffload.config import EventsConfig  # noqa: E402
from kvoffload.events.publisher import FeedPublisher  # noqa: E402

consumer, endpoint, replay_endpoint, *seeds = sys.argv[1:]
config = EventsConfig(
    endpoint=endpoint, replay_endpoint=replay_endpoint, consumer=consumer, batch_window_seconds=0.01,
    heartbeat_seconds=0.2,
)  # fmt: skip
with FeedPublisher(config, model_name="m", instance_id="pod", engine_block_size=16) as feed:
    for seed in seeds:
        store(feed, chain(int(seed), 8))
    feed.flush()
    print("ready", flush=True)
    while True:
        time.sleep(60)
