"""What the dashboards show: panels as data, written in terms of the metric catalog.

`generate.py` turns them into Grafana's JSON and into the reference in `docs/metrics.md`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvoffload.metrics.catalog import BY_NAME
from kvoffload.metrics.metric import Metric

SELECTOR = 'instance=~"$instance", model_name=~"$model"'
WINDOW = "$__rate_interval"

BLOCKS, TOKENS, EVENTS = "count:blocks/s", "count:tokens/s", "count:/s"  # Grafana's units of rates: 1.2 K blocks/s
GREEN, YELLOW, ORANGE, RED, BLUE = "green", "yellow", "orange", "red", "blue"


@dataclass(frozen=True)
class Panel:
    """One panel.

    Attributes:
        title: Its heading.
        meaning: What it shows.
        action: What to do about it.
        unit: Grafana's unit of its values.
        queries: PromQL and legend of each query.
        kind: How it is drawn.
        width: Of 24 columns.
        stacked: Series add up.
        top: Largest value that can be, for ratios 1.
        thresholds: From which value on which colour; the base is green.
        states: What single values are called, with a colour each.
    """

    title: str
    meaning: str
    action: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    kind: Literal["timeseries", "stat", "table"] = "timeseries"
    width: int = 8
    stacked: bool = False
    top: float | None = None
    thresholds: tuple[tuple[float, str], ...] = ()
    states: tuple[tuple[int, str, str], ...] = ()


@dataclass(frozen=True)
class Dashboard:
    """One dashboard: rows of panels."""

    uid: str
    title: str
    description: str
    rows: tuple[tuple[str, tuple[Panel, ...]], ...]

    @property
    def panels(self) -> tuple[Panel, ...]:
        """All panels."""
        return tuple(panel for _, panels in self.rows for panel in panels)


def metric(name: str) -> Metric:
    """Return a metric of the catalog; a name that is not in it fails here."""
    return BY_NAME[name]


def of(name: str, suffix: str = "", **labels: str) -> str:
    """Return a selector of a metric; a label value starting with `~` is a pattern."""
    entry = metric(name)
    for label, value in labels.items():
        if label != entry.label:
            raise ValueError(f"{name} has no label {label}")
        if not value.startswith("~") and value not in entry.values:
            raise ValueError(f"{label} of {name} is never {value}")
    own = [
        f'{label}=~"{value[1:]}"' if value.startswith("~") else f'{label}="{value}"' for label, value in labels.items()
    ]
    base = entry.full_name if not suffix else "kvoffload_" + name + suffix
    return f"{base}{{{', '.join([SELECTOR, *own])}}}"


def _matcher(label: str, value: str) -> str:
    return f'{label}=~"{value[1:]}"' if value.startswith("~") else f'{label}="{value}"'


def rate(name: str, suffix: str = "", *, by: str = "", **labels: str) -> str:
    """Return a counter's summed rate."""
    inner = f"rate({of(name, suffix, **labels)}[{WINDOW}])"
    return f"sum by ({by}) ({inner})" if by else f"sum({inner})"


def total(name: str, *, by: str = "", **labels: str) -> str:
    """Return a gauge's sum."""
    return f"sum by ({by}) ({of(name, **labels)})" if by else f"sum({of(name, **labels)})"


def quantile(share: float, name: str, *, by: str = "") -> str:
    """Return a quantile of a histogram."""
    return f"histogram_quantile({share}, {rate(name, '_bucket', by=f'le, {by}' if by else 'le')})"


def ratio(part: str, whole: str) -> str:
    """Return one expression divided by another."""
    return f"{part} / {whole}"


def mean(name: str, **labels: str) -> str:
    """Return the mean of a histogram's observations."""
    return ratio(rate(name, "_sum", **labels), rate(name, "_count", **labels))


ALWAYS_GREEN: tuple[tuple[float, str], ...] = ()
ANY_IS_BAD = ((1e-9, RED),)

HIT_RATIO = f"{rate('hit_tokens')} / {rate('prompt_tokens')}"
SAVED = rate("prefill_seconds_saved")
COST = rate("load_seconds", "_sum")
USED = f"1 - {total('cache_blocks', state='free')} / {total('cache_capacity_blocks')}"

MISS_SHARE = ratio(rate("miss_blocks", by="cause"), f"ignoring(cause) group_left() {rate('miss_blocks')}")
READY = of("cache_blocks", state="~ready|pinned")
FACTOR = f"on (instance, model_name, engine) group_left() {of('block_size_factor')}"
READY_ENGINE_BLOCKS = f"sum({READY} * {FACTOR})"
READY_BYTES = f"sum({READY} * on (instance, model_name, engine) group_left() {of('cache_block_bytes')})"

OVERVIEW = Dashboard(
    "kvoffload-overview",
    "kvoffload / Overview",
    "Is offloading paying off, how full is it, and what stands in its way? Read the first row from left to right.",
    (
        (
            "Is it paying off?",
            (
                Panel(
                    "Healthy engines",
                    "Engines that serve hits; the rest answer every load with a miss.",
                    "Below the number of engines: see the log for the fault; restart when convenient.",
                    "short",
                    ((total("healthy"), "healthy"), (f"count({of('healthy')})", "all")),
                    kind="stat",
                    width=4,
                ),
                Panel(
                    "Hit ratio",
                    "Share of prompt tokens that host memory held when requests looked.",
                    "Low: look at misses by cause. It is 0 after a start and grows while the cache fills.",
                    "percentunit",
                    ((HIT_RATIO, "hit ratio"),),
                    kind="stat",
                    width=4,
                    top=1,
                ),
                Panel(
                    "Seconds saved per second",
                    "Prefill time saved less the time requests spent loading; above zero offloading pays.",
                    "Below zero: transfers are too slow for what they save; see the dashboard of transfers.",
                    "none",
                    ((f"{SAVED} - {COST}", "net"),),
                    kind="stat",
                    width=4,
                    thresholds=((-1e9, RED), (0, GREEN)),
                ),
                Panel(
                    "Cache in use",
                    "Share of host memory that holds or will hold blocks. A full cache is normal.",
                    "Nothing: this is no alarm. Worth a look when it stays low with many misses (stores refused?).",
                    "percentunit",
                    ((USED, "in use"),),
                    kind="stat",
                    width=4,
                    top=1,
                ),
                Panel(
                    "Load p99",
                    "99th percentile of the time requests spend in a load that moves bytes or has to wait.",
                    "Compare with the prefill it replaces; parts of it are on the dashboard of transfers.",
                    "s",
                    ((quantile(0.99, "load_seconds"), "p99"),),
                    kind="stat",
                    width=4,
                ),
                Panel(
                    "Faults in the last hour",
                    "Failed copies, copies that missed their deadline, and callbacks that raised.",
                    "Any is a fault of device, driver, or embedding code: the log names it.",
                    "short",
                    (
                        (f"sum(increase({of('transfer_failures')}[1h]))", "failed copies"),
                        (f"sum(increase({of('deadlines')}[1h]))", "deadlines"),
                        (f"sum(increase({of('callback_errors')}[1h]))", "callbacks"),
                    ),
                    kind="stat",
                    width=4,
                    thresholds=((0.5, RED),),
                ),
            ),
        ),
        (
            "Hits and misses",
            (
                Panel(
                    "Prompt tokens",
                    "Tokens that requests asked for, and the part that was held and loaded.",
                    "The gap between held and loaded is what the GPU had itself, partial loads and failures.",
                    TOKENS,
                    (
                        (rate("prompt_tokens"), "asked for"),
                        (rate("hit_tokens"), "held"),
                        (rate("loaded_tokens"), "loaded"),
                    ),
                ),
                Panel(
                    "Misses by cause",
                    "Blocks not found, by what last happened to them.",
                    "evicted: more memory helps; new: nothing does; rejected, filtered: settings; failed: faults.",
                    BLOCKS,
                    ((rate("miss_blocks", by="cause"), "{{cause}}"),),
                    stacked=True,
                ),
                Panel(
                    "Prefill saved against load cost",
                    "Seconds of prefill saved per second, and seconds that requests spent in loads.",
                    "Cost above saving: raise block_size, pin memory, or look for a shared link.",
                    "none",
                    ((SAVED, "saved"), (COST, "cost")),
                ),
            ),
        ),
        (
            "Memory and traffic",
            (
                Panel(
                    "Blocks by state",
                    "Every block of host memory is in exactly one state.",
                    "Mostly ready is right. Much pinned or writing: stores are refused. Quarantined: a hung copy.",
                    "short",
                    ((total("cache_blocks", by="state"), "{{state}}"),),
                    stacked=True,
                ),
                Panel(
                    "Bytes moved",
                    "Bytes of loads and stores that ended well.",
                    "Compare with the measured link on the dashboard of transfers.",
                    "Bps",
                    ((rate("transfer_bytes", by="direction"), "{{direction}}"),),
                ),
                Panel(
                    "Stores by outcome",
                    "Blocks offered for storing.",
                    "rejected: see reasons on the dashboard of the cache; already_present costs nothing.",
                    BLOCKS,
                    ((rate("store_blocks", by="outcome"), "{{outcome}}"),),
                    stacked=True,
                ),
                Panel(
                    "Requests and loads",
                    "Requests per second, and loads by outcome.",
                    "failed and unhealthy loads cost a recompute; cancelled are clients that left.",
                    EVENTS,
                    ((rate("requests"), "requests"), (rate("loads", by="outcome"), "loads {{outcome}}")),
                ),
                Panel(
                    "Event loop lag",
                    "How late the service's event loop runs its timers.",
                    "Above 20 ms: something blocks the loop, and completions wait with everything else.",
                    "s",
                    (
                        (quantile(0.5, "loop_lag_seconds"), "p50"),
                        (quantile(0.99, "loop_lag_seconds"), "p99"),
                    ),
                    thresholds=((0.02, YELLOW), (0.1, RED)),
                ),
                Panel(
                    "Versions",
                    "Version and settings of each engine.",
                    "Compare after a rollout; different policies in one fleet need separate judgement.",
                    "short",
                    ((of("build_info"), ""),),
                    kind="table",
                ),
            ),
        ),
    ),
)

CACHE = Dashboard(
    "kvoffload-cache",
    "kvoffload / Cache",
    "What is kept, why blocks are missed, refused or evicted, and whether more memory would help.",
    (
        (
            "Hits",
            (
                Panel(
                    "Blocks found",
                    "Blocks that requests looked for: found ready, still being written, or missed.",
                    "Many pending: equal prompts arrive together; pending_wait_seconds decides whether loads wait.",
                    BLOCKS,
                    (
                        (rate("requested_blocks"), "looked for"),
                        (rate("hit_blocks"), "hit"),
                        (rate("pending_blocks"), "pending"),
                        (rate("miss_blocks"), "miss"),
                    ),
                ),
                Panel(
                    "Share of misses by cause",
                    "What would have to change for a miss to be a hit.",
                    "A large evicted share is the case for more memory; new is traffic that never came before.",
                    "percentunit",
                    (
                        (
                            f"{rate('miss_blocks', by='cause')} / ignoring(cause) group_left() {rate('miss_blocks')}",
                            "{{cause}}",
                        ),
                    ),
                    stacked=True,
                    top=1,
                ),
                Panel(
                    "Look-ups in the manager",
                    "Blocks looked up, up to each request's first miss; also behind an adapter that brings no prompts.",
                    "Without prompt series this is the hit ratio.",
                    BLOCKS,
                    ((rate("lookups", by="result"), "{{result}}"),),
                ),
            ),
        ),
        (
            "Room",
            (
                Panel(
                    "Bytes held",
                    "Bytes of blocks that can be loaded, and the capacity.",
                    "Ready stays at capacity once warm.",
                    "bytes",
                    (
                        (
                            READY_BYTES,
                            "ready",
                        ),
                        (f"sum({of('cache_capacity_blocks')} * {of('cache_block_bytes')})", "capacity"),
                    ),
                ),
                Panel(
                    "Held against eviction",
                    "Share of host memory that cannot be evicted: pinned, being written, or a copy without key runs.",
                    "Above 90 %: stores are refused; leases are held too long, or copies hang.",
                    "percentunit",
                    (
                        (
                            ratio(
                                total("cache_blocks", state="~pinned|writing|detached|quarantined"),
                                total("cache_capacity_blocks"),
                            ),
                            "held",
                        ),
                    ),
                    top=1,
                    thresholds=((0.7, YELLOW), (0.9, RED)),
                ),
                Panel(
                    "Blocks that left, by reason",
                    "Readable blocks removed: evicted to make room, discarded as invalid, or reset.",
                    "Evictions come with a full cache. Resets follow new weights; discards follow hung loads.",
                    BLOCKS,
                    ((rate("removed_blocks", by="reason"), "{{reason}}"),),
                ),
            ),
        ),
        (
            "Would more memory help?",
            (
                Panel(
                    "Idle time at eviction",
                    "How long evicted blocks had not been used.",
                    "Shorter than the pause between turns of a conversation: more memory turns evictions into hits.",
                    "s",
                    (
                        (quantile(0.1, "eviction_idle_seconds"), "p10"),
                        (quantile(0.5, "eviction_idle_seconds"), "p50"),
                        (quantile(0.9, "eviction_idle_seconds"), "p90"),
                    ),
                ),
                Panel(
                    "Evicted without ever being loaded",
                    "Share of evictions that threw away a block nobody had loaded.",
                    "Near 1: blocks are stored for nothing; try store_threshold = 2 or the adaptive policy.",
                    "percentunit",
                    ((f"{rate('evicted_unused_blocks')} / {rate('removed_blocks', reason='evicted')}", "unused"),),
                    top=1,
                ),
                Panel(
                    "Figures of the policy",
                    "What the cache policy says of itself, by its own names.",
                    "See the policy's documentation; lru has none.",
                    "short",
                    ((of("policy_value"), "{{name}}"),),
                ),
            ),
        ),
        (
            "Stores",
            (
                Panel(
                    "Blocks not stored, by reason",
                    "Blocks rejected, or whose copy failed.",
                    "no_space: see what is held; backpressure: raise max_inflight_store_bytes or slow down.",
                    BLOCKS,
                    ((rate("unstored_blocks", by="reason"), "{{reason}}"),),
                    stacked=True,
                ),
                Panel(
                    "Reservations in the manager",
                    "Blocks that got memory, by how it ended, and those refused or filtered.",
                    "abandoned: aborted requests; reset: overtaken by a reset; failed: faults.",
                    BLOCKS,
                    ((rate("manager_store_blocks", by="outcome"), "{{outcome}}"),),
                ),
                Panel(
                    "Resets, aborts, late copies",
                    "Events that invalidate work.",
                    "Stale completions follow resets and aborts and are harmless.",
                    EVENTS,
                    (
                        (rate("resets"), "resets"),
                        (rate("aborts"), "aborts"),
                        (rate("expired_leases"), "expired leases"),
                        (rate("stale_completions"), "stale completions"),
                    ),
                ),
                Panel(
                    "Requests and leases",
                    "Requests that began and did not finish, and leases that pin blocks.",
                    "Growing without end: the embedding code does not leave them.",
                    "short",
                    ((total("active_requests"), "requests"), (total("leases"), "leases")),
                ),
                Panel(
                    "Switches",
                    "Engines that are on, and engines whose stores are paused.",
                    "Somebody's decision.",
                    "short",
                    ((total("enabled"), "enabled"), (total("stores_paused"), "stores paused")),
                ),
                Panel(
                    "Age",
                    "Time since each engine started.",
                    "A young cache has few hits.",
                    "s",
                    ((f"time() - {of('start_time_seconds')}", "{{instance}} {{engine}}"),),
                ),
            ),
        ),
    ),
)

TRANSFERS = Dashboard(
    "kvoffload-transfers",
    "kvoffload / Transfers",
    "Where the time of a load goes: waiting for blocks being written, in the queue, or in the copy.",
    (
        (
            "As requests feel it",
            (
                Panel(
                    "Load time",
                    "Time a request spends in a load that moves bytes or has to wait.",
                    "Compare with the prefill time of the same tokens.",
                    "s",
                    ((quantile(0.5, "load_seconds"), "p50"), (quantile(0.99, "load_seconds"), "p99")),
                ),
                Panel(
                    "Parts of a load, mean",
                    "Mean load as requests feel it, and its wait for blocks being written, its queue and its copy.",
                    "The tallest part is what to improve; the rest is a turn in line or a busy event loop.",
                    "s",
                    (
                        (mean("load_seconds"), "whole"),
                        (mean("load_pending_seconds"), "pending"),
                        (
                            mean("transfer_queue_seconds", direction="load"),
                            "queue",
                        ),
                        (
                            mean("transfer_copy_seconds", direction="load"),
                            "copy",
                        ),
                    ),
                ),
                Panel(
                    "Loads that gave less, by reason",
                    "Loads that ended with a reason other than a plain miss.",
                    "backpressure, timeout: too much traffic for the link; the others name their fault.",
                    EVENTS,
                    ((rate("unserved_loads", by="reason"), "{{reason}}"),),
                    stacked=True,
                ),
            ),
        ),
        (
            "The link",
            (
                Panel(
                    "Copy speed",
                    "Bytes per second while copies run, and the speed of one large copy measured at the start.",
                    "Far below the ceiling: small blocks, unpinned memory, or another user of the link.",
                    "Bps",
                    (
                        (
                            ratio(
                                rate("transfer_bytes", by="direction"),
                                rate("transfer_copy_seconds", "_sum", by="direction"),
                            ),
                            "{{direction}}",
                        ),
                        (f"max by (direction) ({of('link_bytes_per_second')})", "ceiling {{direction}}"),
                    ),
                ),
                Panel(
                    "Link used",
                    "Bytes per second of each direction as a share of the measured ceiling.",
                    "Near 1: the link is the limit; store_threshold = 2 stores less.",
                    "percentunit",
                    (
                        (
                            ratio(
                                rate("transfer_bytes", by="direction"),
                                f"sum by (direction) ({of('link_bytes_per_second')} > 0)",
                            ),
                            "{{direction}}",
                        ),
                    ),
                ),
                Panel(
                    "Busy with copies",
                    "Share of the time in which each direction copies.",
                    "Near 1: the direction is saturated, and the queue grows.",
                    "percentunit",
                    ((rate("transfer_copy_seconds", "_sum", by="direction"), "{{direction}}"),),
                ),
                Panel(
                    "Queue time p99",
                    "Time from submission to the copy's start.",
                    "High with an idle link: a transfer waits for its ready event; with a busy one: traffic.",
                    "s",
                    ((quantile(0.99, "transfer_queue_seconds", by="direction"), "{{direction}}"),),
                ),
                Panel(
                    "Copy time p99",
                    "Time of the copy itself.",
                    "Grows with the transfer's size: see the next panel first.",
                    "s",
                    ((quantile(0.99, "transfer_copy_seconds", by="direction"), "{{direction}}"),),
                ),
                Panel(
                    "Transfer size p50",
                    "Median bytes of a transfer.",
                    "Small transfers cost more per byte: raise block_size or the step in which you store.",
                    "bytes",
                    ((quantile(0.5, "transfer_size_bytes", by="direction"), "{{direction}}"),),
                ),
            ),
        ),
        (
            "In flight",
            (
                Panel(
                    "Transfers in flight",
                    "Transfers queued or copying, stores that wait for their tick, and loads that wait for their turn.",
                    "Growing without end: the link is slower than the traffic.",
                    "short",
                    (
                        (total("running_transfers", by="direction"), "{{direction}}"),
                        (total("queued_stores"), "stores in this tick"),
                        (total("waiting_loads"), "loads in line"),
                    ),
                ),
                Panel(
                    "Bytes in flight",
                    "Bytes of the transfers queued or copying.",
                    "At max_inflight_store_bytes stores are rejected, at max_inflight_load_bytes loads wait.",
                    "bytes",
                    ((total("inflight_bytes", by="direction"), "{{direction}}"),),
                ),
                Panel(
                    "GPU blocks held back",
                    "GPU blocks that copies touch, that their owner gave back early, or that a hung copy may touch.",
                    "quarantined blocks come back when the copy ends, or with the process.",
                    "short",
                    ((total("gpu_blocks", by="state"), "{{state}}"),),
                ),
            ),
        ),
        (
            "Faults",
            (
                Panel(
                    "Transfers and failures",
                    "Transfers that ended, and those that failed.",
                    "Any failure is a fault of device, driver or memory: see the log.",
                    EVENTS,
                    (
                        (rate("transfers", by="direction"), "{{direction}}"),
                        (rate("transfer_failures", by="direction"), "failed {{direction}}"),
                    ),
                ),
                Panel(
                    "Deadlines",
                    "Copies that did not end in time, and those of them that ended later.",
                    "Many late ones: the deadline is too short. Never late: the device is stuck.",
                    EVENTS,
                    (
                        (rate("deadlines", by="direction"), "missed {{direction}}"),
                        (rate("late_completions", by="direction"), "ended late {{direction}}"),
                    ),
                ),
                Panel(
                    "Hung jobs and ranks",
                    "Jobs whose copy outlived its deadline and still runs; ranks expected and up.",
                    "Ranks missing: every load misses until they are back.",
                    "short",
                    (
                        (total("hung_jobs"), "hung jobs"),
                        (total("ranks_expected"), "ranks expected"),
                        (total("ranks_up"), "ranks up"),
                    ),
                ),
            ),
        ),
    ),
)

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

DASHBOARDS = (OVERVIEW, CACHE, TRANSFERS, FEED)
