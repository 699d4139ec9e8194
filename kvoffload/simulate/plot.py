"""A picture of a sweep: hit ratio over capacity, one line per policy and hint. Needs the extra `plot`."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from kvoffload.errors import UnsupportedError
from kvoffload.simulate.simulator import BELADY, SimulationResult

METRICS = {"prefix": "prefix_hit_ratio", "block": "block_hit_ratio"}


def require_matplotlib() -> None:
    """Check that plots can be drawn.

    Raises:
        UnsupportedError: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise UnsupportedError("--plot needs matplotlib: pip install 'kvoffload[plot]'")


def formats() -> list[str]:
    """Return the suffixes, without their dot, of the pictures that can be drawn.

    Raises:
        UnsupportedError: matplotlib is not installed.
    """
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    return sorted(FigureCanvasAgg.get_supported_filetypes())


def plot(results: Sequence[SimulationResult], metric: str, path: Path) -> None:
    """Draw one panel per trace into a file; its suffix names the format.

    Raises:
        UnsupportedError: matplotlib is not installed, or does not know the format.
    """
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    traces = list(dict.fromkeys(result.trace for result in results))
    figure = Figure(figsize=(6.5 * len(traces), 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, trace in zip(figure.subplots(1, len(traces), squeeze=False)[0], traces, strict=True):
        rows: dict[tuple[str, str | None], list[SimulationResult]] = {}
        for result in results:
            if result.trace == trace:
                rows.setdefault((result.policy, result.hint), []).append(result)
        for (policy, hint), row in rows.items():
            ordered = sorted(row, key=lambda result: result.capacity_blocks)
            axes.plot(
                [result.capacity_blocks for result in ordered],
                [100 * getattr(result, METRICS[metric]) for result in ordered],
                label=f"{policy}, {hint}" if hint else policy,
                marker="o",
                markersize=4,
                linestyle="--" if policy == BELADY else "-",
                color="black" if policy == BELADY else None,
            )
        axes.set(title=trace, xscale="log", xlabel="host memory (blocks)", ylabel=f"{metric} hits (%)")
        axes.set_ylim(bottom=0)
        axes.grid(visible=True, which="both", alpha=0.25)
        axes.legend(fontsize="small")
    try:
        figure.savefig(path, dpi=150)
    except ValueError as error:
        raise UnsupportedError(f"cannot draw {path}: {error}") from None
