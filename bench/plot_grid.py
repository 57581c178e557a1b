#!/usr/bin/env python3
"""Draws the grid of `mla bench --device cuda --json`: time over floor of each cell, ours and the peers'.

    python3 -m venv build/plot && build/plot/bin/pip install -r bench/requirements.txt
    build/plot/bin/python bench/plot_grid.py bench/results/h200/grid.json docs/kernels/grid.svg

1 is the floor, the time to read the keys or to make the products (docs/cli.md says how it is measured). One panel
for each head count of the equal decode cells, one for the others of the group `grid`.
"""

import json
import sys

import matplotlib

matplotlib.use("svg")
matplotlib.rcParams.update({"svg.hashsalt": "libmla", "svg.fonttype": "none", "font.size": 8})
import matplotlib.pyplot as plt  # noqa: E402  after the backend is chosen

OURS = "libmla"
MARKERS = "osD^v"  # one a name, as many as colours
COLOURS = ["#0b5fa5", "#d1495b", "#e09f3e", "#3a7d44", "#7b5ea7"]  # ours first


def times(cell):
    """Microseconds of a cell by name; peers that did not serve it, or were wrong, are left out."""
    return {OURS: cell["us"], **{p["name"]: p["us"] for p in cell["peers"] if p["us"] is not None}}


def short(count):
    """A power of two as it is spoken of: 65536 is 64k."""
    return f"{count // 1024}k" if count % 1024 == 0 else str(count)


def panels(cells):
    """(title, [(label, cell)]) of the group `grid`, in the file's order."""
    grid = [c for c in cells if c["group"] == "grid" and c.get("floor_us")]
    decode = [c for c in grid if c["q"] == 1 and c["lengths"] == "equal"]
    for heads in sorted({c["heads"] for c in decode}):
        chosen = [c for c in decode if c["heads"] == heads]
        yield (
            f"{heads} heads, requests x cached tokens",
            [(f"{c['rows']} x {short(c['kv'])}", c) for c in chosen],
        )
    others = [c for c in grid if c not in decode]
    if others:
        yield (
            "heads: requests x cached tokens, query tokens or uneven lengths",
            [
                (
                    f"{c['heads']}: {c['rows']} x {short(c['kv'])}, q {c['q']}"
                    if c["lengths"] == "equal"
                    else f"{c['heads']}: {c['rows']}, {c['lengths']}",
                    c,
                )
                for c in others
            ],
        )


def draw_panel(axes, title, labelled, names, top):
    for place, (name, colour) in enumerate(zip(names, COLOURS)):
        points = [
            (i, times(c)[name] / c["floor_us"])
            for i, (_, c) in enumerate(labelled)
            if name in times(c)
        ]
        if not points:
            continue
        axes.plot(
            *zip(*points),
            MARKERS[place],
            color=colour,
            label=name,
            markersize=5 if name == OURS else 4,
            zorder=3 if name == OURS else 2,
        )
    axes.axhline(1, color="#444444", linewidth=0.8)
    axes.set_title(title, loc="left", fontsize=8)
    axes.set_yscale("log")
    ticks = [t for t in (1, 1.5, 2, 3, 5, 10, 20, 50) if t < top]
    axes.set_yticks(ticks, [f"{t:g}" for t in ticks])
    axes.minorticks_off()
    axes.set_ylim(0.9, top)
    axes.set_xticks(range(len(labelled)), [label for label, _ in labelled], rotation=40, ha="right")
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)


def draw(result, path):
    shown = list(panels(result["cells"]))
    if not shown:
        sys.exit("plot_grid: no cell of the group grid has a floor")
    names = list(
        dict.fromkeys(name for _, labelled in shown for _, c in labelled for name in times(c))
    )
    if len(names) > len(COLOURS):
        sys.exit(f"plot_grid: {len(names) - 1} peers, expected at most {len(COLOURS) - 1}")
    top = 1.2 * max(
        us / c["floor_us"] for _, labelled in shown for _, c in labelled for us in times(c).values()
    )
    figure, axes = plt.subplots(len(shown), 1, figsize=(8, 2.3 * len(shown)), squeeze=False)
    for panel, (title, labelled) in zip(axes[:, 0], shown):
        draw_panel(panel, title, labelled, names, top)
        panel.set_ylabel("time / floor")
    axes[0, 0].legend(ncols=len(names), loc="lower right", bbox_to_anchor=(1, 1), frameon=False)
    figure.suptitle(
        f"{result['card']}, {result['date'][:10]}, {result['commit']}: bf16, 512+64, pages of 64",
        x=0.01,
        ha="left",
    )
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    with open(sys.argv[1], encoding="utf-8") as file:
        grid = json.load(file)
    if "cells" not in grid:
        sys.exit(f"plot_grid: {sys.argv[1]} has no cells: expected what `mla bench --device cuda --json` writes")
    draw(grid, sys.argv[2])
