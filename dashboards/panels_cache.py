"""The dashboard *cache*: what is kept, and why blocks are missed, refused or evicted."""

from __future__ import annotations

from panels import BLOCKS, EVENTS, READY_BYTES, RED, YELLOW, Dashboard, Panel, of, quantile, rate, ratio, total

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
