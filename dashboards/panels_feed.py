"""The dashboard *feed*: whether consumers see what is held."""

from __future__ import annotations

from panels import EVENTS, READY_ENGINE_BLOCKS, RED, YELLOW, Dashboard, Panel, of, rate, total

FEED = Dashboard(
    "kvoffload-feed",
    "kvoffload / Events feed",
    "Is the feed on, does somebody listen, and do consumers see what is held?",
    (
        (
            "Is it heard?",
            (
                Panel(
                    "Feeds on",
                    "Engines that publish events.",
                    "0 where a router should listen: events are off in the configuration.",
                    "short",
                    ((total("feed_enabled"), "on"),),
                    kind="stat",
                    width=6,
                ),
                Panel(
                    "Subscribers",
                    "Subscriptions to all feeds.",
                    "0 while a feed is on: nobody listens; check endpoint and topic.",
                    "short",
                    ((total("feed_subscribers"), "subscriptions"),),
                    kind="stat",
                    width=6,
                ),
                Panel(
                    "Dropped batches in the last hour",
                    "Publications lost to a full queue; consumers fetch their changes by replay.",
                    "Above 0: a consumer or the network is too slow.",
                    "short",
                    ((f"sum(increase({of('feed_dropped_batches')}[1h]))", "dropped"),),
                    kind="stat",
                    width=6,
                    thresholds=((0.5, RED),),
                ),
                Panel(
                    "Blocks withheld",
                    "Readable blocks that are not announced: not described, or behind a block that is not held.",
                    "Above 0 for long: the log names the reason, such as blocks that are stored without tokens.",
                    "short",
                    ((total("feed_withheld_blocks"), "withheld"),),
                    kind="stat",
                    width=6,
                    thresholds=((0.5, YELLOW),),
                ),
            ),
        ),
        (
            "Traffic",
            (
                Panel(
                    "Events and batches",
                    "Events handed to the feed and batches sent.",
                    "No batch for longer than the heartbeat: the publisher is gone.",
                    EVENTS,
                    (
                        (rate("feed_events"), "events"),
                        (rate("feed_batches"), "batches"),
                        (rate("feed_dropped_batches"), "dropped batches"),
                    ),
                ),
                Panel(
                    "Lag",
                    "Time since the sender last took something, while something waits.",
                    "Above the batch window for long: the publisher's thread is starved.",
                    "s",
                    ((f"max({of('feed_lag_seconds')})", "lag"),),
                ),
                Panel(
                    "Publications that wait",
                    "Publications in the sender's queue.",
                    "Near max_queue_size: drops begin.",
                    "short",
                    ((total("feed_queue_events"), "waiting"),),
                ),
                Panel(
                    "Announced against held",
                    "Engine blocks that consumers know of, and engine blocks that can be loaded.",
                    "The difference is withheld, or in two blocks at once, or in a medium that is not announced.",
                    "short",
                    (
                        (total("feed_announced_blocks"), "announced"),
                        (READY_ENGINE_BLOCKS, "held"),
                    ),
                ),
                Panel(
                    "Replays",
                    "Replay requests answered, and batches sent in answer.",
                    "Each is a consumer that joined late or lost batches; regular ones point at a lossy path.",
                    EVENTS,
                    ((rate("feed_replays"), "replays"), (rate("feed_replayed_batches"), "batches replayed")),
                ),
                Panel(
                    "Errors",
                    "Faults of the publisher, of event sinks, and of who reports metrics.",
                    "See the log.",
                    EVENTS,
                    (
                        (rate("feed_errors"), "publisher"),
                        (rate("observer_errors"), "event sinks"),
                        (rate("metrics_errors"), "metrics"),
                    ),
                ),
            ),
        ),
    ),
)
