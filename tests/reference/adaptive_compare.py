"""Prefix hits of the adaptive policy beside those of the plain reference of its algorithm, cell by cell.

    python -m tests.reference.adaptive_compare TRACE.jsonl... [--capacity 1%,2%,5%,10%,20%] [--prototype FOLDER]

Capacities in % of a trace's unique blocks; second halves. The rows go from the algorithm as it was first measured to
the manager as it runs, and each changes one thing. FOLDER holds a Python package `prototypes`, whose policy is put on
top.
"""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from pathlib import Path

from kvoffload.cli.values import capacity
from kvoffload.simulate.simulator import SimulatedTrace, simulate

from .adaptive_driver import PolicyAtOnce
from .adaptive_reference import AdaptiveReference


def requests_of(trace):
    """Return keys, seconds since the start and answer length of each request."""
    start = trace.requests[0].arrival_seconds
    return [(request.keys, request.arrival_seconds - start, request.output_tokens) for request in trace.requests]


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m tests.reference.adaptive_compare", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("traces", nargs="+", type=Path, metavar="TRACE")
    parser.add_argument("--capacity", default="1%,2%,5%,10%,20%")
    parser.add_argument("--prototype", type=Path, metavar="FOLDER")
    arguments = parser.parse_args(argv)
    for path in arguments.traces:
        trace = SimulatedTrace(path)
        sizes = [capacity(text).resolve(trace.unique_blocks) for text in arguments.capacity.split(",")]
        print(path.name, "; blocks:", *sizes)
        if arguments.prototype is not None:
            hits = [prototype_hits(arguments.prototype, path, size) for size in sizes]
            report("prototype", trace, hits)
        for ghosts, foresight in ((8, True), (4, True), (4, False)):
            rows = [serve(AdaptiveReference(s, ghosts_per_block=ghosts, foresight=foresight), trace) for s in sizes]
            answers = "answers known" if foresight else "answers unknown"
            report(f"reference, {answers}, ghosts {ghosts}x", trace, [[one.hits for one in row] for row in rows])
        longest = max(len(request.keys) for request in trace.requests)
        policy = [serve(PolicyAtOnce(size, longest), trace) for size in sizes]
        report("adaptive, whole requests", trace, [[one.hits for one in row] for row in policy])
        unequal = [sum(a != b for a, b in zip(*pair, strict=True)) for pair in zip(policy, rows, strict=True)]
        print(f"{'  decided unlike the row above it':44}", *(f"{count:6}" for count in unequal))
        ratios = (100 * simulate(trace, "adaptive", size).prefix_hit_ratio for size in sizes)
        print(f"{'adaptive, manager, steps of 16':44}", *(f"{ratio:6.2f}" for ratio in ratios), flush=True)


def serve(cache, trace):
    return [cache.serve(*request) for request in requests_of(trace)]


def report(name, trace, hits_by_size):
    first = trace.first_measured(0.5)
    asked = sum(request.num_blocks for request in trace.requests[first:])
    print(f"{name:44}", *(f"{100 * sum(hits[first:]) / asked:6.2f}" for hits in hits_by_size), flush=True)


def prototype_hits(folder, path, size):
    """Return how many leading blocks each request found in the other implementation."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    run = import_module("prototypes.run")
    requests, _ = run.load(path)
    policy = run.REG["tailrank-final"](size, requests)
    return [policy.request(request)[0] for request in requests]


if __name__ == "__main__":
    main()
