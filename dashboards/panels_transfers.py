"""The dashboard *transfers*: where the time of a load goes."""

from __future__ import annotations

from panels import EVENTS, Dashboard, Panel, mean, of, quantile, rate, ratio, total

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
