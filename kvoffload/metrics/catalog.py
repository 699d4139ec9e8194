"""Every metric, in one table: the single source for the recorder, the collector, the dashboards and the docs.

Names here have neither the prefix `kvoffload_` nor a counter's suffix `_total`; `Metric.full_name` has both. A metric
has at most one label besides the constant ones, and the table lists all its values, so the number of series is fixed.
*Block* means an offloaded block everywhere: the unit that host memory is cut into.
"""

from __future__ import annotations

from kvoffload.metrics.metric import Metric, counter, gauge, histogram

# 10 us to 10 s and 4 KiB to 1 GiB: from one small block to a whole long prompt.
_WAITS = (*(round(step * 10.0**power, 6) for power in range(-5, 1) for step in (1, 2, 5)), 10.0)
_SIZES = tuple(float(4096 << 2 * step) for step in range(10))
_IDLE = (0.1, 1.0, 3.0, 10.0, 30.0, 60.0, 180.0, 600.0, 1800.0, 3600.0, 10800.0, 43200.0)
_LAGS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)

_DIRECTIONS = ("load", "store")
MISS_CAUSES = ("new", "evicted", "filtered", "rejected", "failed", "reset", "discarded", "unreachable")
LOAD_REASONS = (
    "backpressure", "timeout", "deadline", "copy_failed", "reset", "aborted", "expired", "disabled", "unhealthy",
    "other",
)  # fmt: skip
STORE_REASONS = (
    "no_space", "backpressure", "paused", "disabled", "aborted", "unhealthy", "copy_failed", "deadline", "reset",
    "other",
)  # fmt: skip


_OCCUPANCY = (
    gauge(
        "cache_capacity_blocks",
        "Blocks that host memory holds.",
        "Raise cpu_bytes_to_use when misses by cause show that evictions cost hits.",
        unit="blocks",
    ),
    gauge(
        "cache_blocks",
        "Blocks of host memory by state; every block is in exactly one, so the sum is the capacity.",
        "A full cache is normal. Worry when pinned and writing leave no ready block, or when quarantined grows.",
        "state",
        ("free", "ready", "pinned", "writing", "detached", "quarantined"),
        "blocks",
    ),
    gauge(
        "cache_block_bytes",
        "Bytes of one block, all layers and ranks.",
        "Turns blocks into bytes.",
        unit="bytes per block",
    ),
    gauge("block_size_factor", "Engine blocks in one block.", "Turns blocks into the engine's own."),
    gauge(
        "block_tokens",
        "Tokens in one block of the main attention group.",
        "Turns blocks into tokens.",
        unit="tokens per block",
    ),
)

_HITS = (
    counter("requests", "Requests that looked for their prefix.", "The traffic behind every other number."),
    counter("prompt_tokens", "Tokens of those requests.", "The denominator of the hit ratio in tokens.", unit="tokens"),
    counter(
        "hit_tokens",
        "Tokens of those requests that host memory held.",
        "Share of prompt tokens: the hit ratio.",
        unit="tokens",
    ),
    counter(
        "requested_blocks",
        "Blocks those requests looked for: hits, pending and misses.",
        "Denominator of the hit ratio in blocks.",
        unit="blocks",
    ),
    counter(
        "hit_blocks",
        "Blocks found ready at the first look-up.",
        "Falls after restarts and resets, rises with reuse.",
        unit="blocks",
    ),
    counter(
        "pending_blocks",
        "Blocks found while another request was still writing them.",
        "High: the same prompts arrive at the same time; pending_wait_seconds decides whether loads wait.",
        unit="blocks",
    ),
    counter(
        "miss_blocks",
        "Blocks not found, by what last happened to them; unreachable: held, but behind one that is not.",
        "evicted: more memory helps; new: nothing helps; filtered, rejected: settings; failed, reset: faults.",
        "cause",
        MISS_CAUSES,
        "blocks",
    ),
    counter(
        "lookups",
        "Blocks looked up in the manager, up to each request's first miss.",
        "What the manager itself saw, also behind an adapter that brings no prompts.",
        "result",
        ("hit", "miss", "pending"),
        "blocks",
    ),
)

_LOADS = (
    counter(
        "loads",
        "Loads as requests felt them, by outcome.",
        "partial is usual: prompts end in new tokens. failed, unhealthy cost a recompute; cancelled: clients left.",
        "outcome",
        ("loaded", "partial", "miss", "failed", "unhealthy", "cancelled"),
    ),
    counter(
        "unserved_loads",
        "Loads that gave less than was asked for a reason other than a miss.",
        "backpressure, timeout: the link is too slow for the traffic; the others name their fault.",
        "reason",
        LOAD_REASONS,
    ),
    counter(
        "loaded_tokens",
        "Tokens that loads brought to the GPU.",
        "What did not have to be computed again.",
        unit="tokens",
    ),
    histogram(
        "load_seconds",
        "Time a request spent in a load that moved bytes: pending wait, turn, queue and copy.",
        "Compare its sum with prefill_seconds_saved: larger means offloading costs more than it saves.",
        _WAITS,
    ),
    histogram(
        "load_pending_seconds",
        "Part of it spent waiting for blocks that were being written.",
        "High: lower pending_wait_seconds, or stores are slow.",
        _WAITS,
    ),
    counter(
        "prefill_seconds_saved",
        "Prefill time that loaded tokens would have cost, at the configured or reported prefill rate.",
        "Stays 0 until prefill_tokens_per_second is configured or request.prefilled() reports.",
        unit="seconds",
    ),
    gauge(
        "prefill_tokens_per_second",
        "Prefill rate behind prefill_seconds_saved; 0: unknown.",
        "Check it against the engine's own figure.",
        unit="tokens per second",
    ),
)

_TRANSFERS = (
    counter(
        "transfers",
        "Transfers that ended, well or not.",
        "One transfer is one load, or the stores of one tick.",
        "direction",
        _DIRECTIONS,
    ),
    counter(
        "transfer_bytes",
        "Bytes that ended transfers moved.",
        "Its rate against link_bytes_per_second is the load on the link.",
        "direction",
        _DIRECTIONS,
        "bytes",
    ),
    histogram(
        "transfer_size_bytes",
        "Size of transfers.",
        "Small ones cost more per byte: raise block_size.",
        _SIZES,
        "direction",
        _DIRECTIONS,
        "bytes",
    ),
    histogram(
        "transfer_queue_seconds",
        "Time from submission to the copy's start.",
        "High with a quiet link: waits for ready events; with a busy one: too much traffic.",
        _WAITS,
        "direction",
        _DIRECTIONS,
    ),
    histogram(
        "transfer_copy_seconds",
        "Time of the copy itself.",
        "High: small blocks, unpinned memory, or a shared link.",
        _WAITS,
        "direction",
        _DIRECTIONS,
    ),
    gauge(
        "link_bytes_per_second",
        "Speed of one large copy, measured at the start; 0: not measured.",
        "The ceiling of the copy speed.",
        "direction",
        _DIRECTIONS,
        "bytes per second",
    ),
    counter(
        "transfer_failures",
        "Transfers whose copy failed or could not be submitted.",
        "Any is a fault of device, driver or memory: see the log.",
        "direction",
        _DIRECTIONS,
    ),
    counter(
        "deadlines",
        "Transfers whose copy did not end in time; their blocks are quarantined until it does.",
        "A stuck device or a ready event that never came.",
        "direction",
        _DIRECTIONS,
    ),
    counter(
        "late_completions",
        "Transfers that ended after their deadline.",
        "Many: the deadline is too short for this link.",
        "direction",
        _DIRECTIONS,
    ),
    gauge(
        "running_transfers",
        "Transfers queued or copying.",
        "Grows without end: the link is slower than the traffic.",
        "direction",
        _DIRECTIONS,
    ),
    gauge(
        "inflight_bytes",
        "Bytes of those transfers.",
        "Near max_inflight_*_bytes: backpressure begins.",
        "direction",
        _DIRECTIONS,
        "bytes",
    ),
    gauge(
        "queued_stores", "Stores that wait for the end of the tick.", "Above zero for long: the owner does not flush."
    ),
    gauge("waiting_loads", "Loads that wait for their turn.", "Above zero for long: loads queue behind the link."),
)

_STORES = (
    counter(
        "store_blocks",
        "Blocks offered for storing, by outcome; the sum is what was offered and settled.",
        "rejected and failed are lost hits; filtered is the reuse filter at work.",
        "outcome",
        ("stored", "already_present", "filtered", "rejected", "failed"),
        "blocks",
    ),
    counter(
        "unstored_blocks",
        "Blocks rejected or failed, by reason.",
        "no_space: everything is pinned or written; backpressure: stores come faster than the link takes them.",
        "reason",
        STORE_REASONS,
        "blocks",
    ),
    counter(
        "removed_blocks",
        "Readable blocks that left host memory, by reason; evicted made room for others.",
        "A full cache evicts; that alone is no fault.",
        "reason",
        ("evicted", "discarded", "reset"),
        "blocks",
    ),
    counter(
        "evicted_unused_blocks",
        "Evicted blocks that were never loaded.",
        "A large share: blocks are stored for nothing; try store_threshold 2 or another policy.",
        unit="blocks",
    ),
    histogram(
        "eviction_idle_seconds",
        "Time from a block's last use to its eviction.",
        "Shorter than the time between turns of a conversation: more memory helps.",
        _IDLE,
    ),
    counter(
        "manager_store_blocks",
        "Blocks for which the manager reserved memory, by how that ended; until then they are writing.",
        "The manager's own books, also behind an adapter; refused never got memory.",
        "outcome",
        ("stored", "failed", "abandoned", "reset", "refused", "filtered"),
        "blocks",
    ),
    counter(
        "stale_completions",
        "Blocks whose copy ended after they were reset, abandoned or evicted.",
        "Harmless; follows resets, aborts and late copies.",
        unit="blocks",
    ),
)

_SERVICE = (
    gauge(
        "healthy",
        "1: hits are served; 0: every load misses.",
        "0: see the log and /state; restart the process when convenient.",
        unit="bool",
    ),
    gauge("enabled", "1: switched on.", "0 is somebody's decision.", unit="bool"),
    gauge(
        "stores_paused",
        "1: stores are rejected on purpose.",
        "Call pause_stores(False) when the reason is gone.",
        unit="bool",
    ),
    gauge("active_requests", "Requests that began and did not finish.", "Grows without end: requests are not left."),
    gauge("leases", "Leases that pin blocks.", "Grows without end: leases are not left."),
    gauge("hung_jobs", "Jobs whose copy outlived its deadline and still runs.", "Above zero: see quarantine."),
    gauge(
        "gpu_blocks",
        "GPU blocks by why they are held back from their owner.",
        "quarantined: lost until the copy ends or the process does.",
        "state",
        ("busy", "deferred", "quarantined"),
        "blocks",
    ),
    counter("aborts", "Requests aborted.", "Follows the front end's disconnects."),
    counter("expired_leases", "Leases that held longer than lease_seconds.", "A caller forgets to leave them."),
    counter("resets", "Times the whole cache was dropped.", "Each follows new weights or an explicit reset."),
    counter("callback_errors", "Callbacks of the embedder that raised.", "A bug in the embedding code: see the log."),
    counter(
        "observer_errors",
        "Times the events sink raised; what it was told is lost to it.",
        "A bug in the sink: see the log.",
    ),
    counter(
        "metrics_errors", "Values or names that were no metric and were ignored.", "A bug in who reports: see the log."
    ),
    histogram(
        "loop_lag_seconds",
        "How much later than planned the event loop ran a timer.",
        "High: something blocks the loop; completions wait for it.",
        _LAGS,
    ),
    gauge("ranks_expected", "Rank processes that hold a slice of host memory.", "The world size."),
    gauge("ranks_up", "Those that answer.", "Fewer than expected: every load misses until the rank is back."),
    gauge(
        "start_time_seconds",
        "Unix time at which the engine started.",
        "Its age guards alerts against cold caches.",
        unit="seconds",
    ),
    Metric(
        "build_info",
        "info",
        "Version and settings; always 1.",
        "Join on it to tell versions and policies apart; it changes only with a restart.",
    ),
    Metric(
        "policy_value",
        "gauge",
        "Internal figures of the cache policy, by its own names.",
        "See the policy's documentation.",
        "name",
        (),
    ),
)

_FEED = (
    gauge("feed_enabled", "1: the events feed is on.", "Guards the alerts about the feed.", unit="bool"),
    counter("feed_events", "Events handed to the feed.", "Follows stores and removals."),
    counter("feed_batches", "Batches sent.", "At least one per heartbeat while the publisher lives."),
    counter(
        "feed_dropped_batches",
        "Publications lost to a full queue; their changes are kept for replay.",
        "A consumer or the network is too slow.",
    ),
    counter("feed_replays", "Replay requests answered.", "Each is a consumer that joined late or lost batches."),
    counter("feed_replayed_batches", "Batches sent in answer to them.", "Large replays follow restarts of the router."),
    counter("feed_errors", "Faults of the publisher's sockets or encoder.", "See the log."),
    gauge("feed_subscribers", "Subscriptions to the feed now.", "0 while the feed is on: nobody listens."),
    gauge("feed_queue_events", "Publications that wait for the sender.", "Near max_queue_size: drops begin."),
    gauge(
        "feed_lag_seconds",
        "Time since the sender last took something, while something waits.",
        "Above the batch window for long: the publisher's thread is starved.",
        unit="seconds",
    ),
    gauge(
        "feed_announced_blocks",
        "Engine blocks that consumers know as held.",
        "Compare with ready blocks times block_size_factor.",
        unit="blocks",
    ),
    gauge(
        "feed_withheld_blocks",
        "Readable blocks not announced: not described, or behind a block that is not held.",
        "Stays above zero: the log names the reason, such as blocks that are stored without tokens.",
        unit="blocks",
    ),
)

CATALOG: tuple[Metric, ...] = (*_OCCUPANCY, *_HITS, *_LOADS, *_TRANSFERS, *_STORES, *_SERVICE, *_FEED)
BY_NAME: dict[str, Metric] = {metric.name: metric for metric in CATALOG}
SERIES: dict[str, Metric] = {series: metric for metric in CATALOG for series in metric.series_names}
"""Every exported series name and its metric."""
