"""Plots the whole steps of a result file beside a peer's and the floor.

python kernels/bench/plot.py FILE.json FILE.png
"""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

GROUPS = ("projections", "attention plain", "attention v_only", "norms", "write_kv", "gelu_mul", "between kernels")


def main() -> None:
    source, target = Path(sys.argv[1]), Path(sys.argv[2])
    document = json.loads(source.read_text())
    steps: dict[tuple[str, int, int], dict[str, Any]] = {}
    for run in document["runs"]:  # the first run that has a case is the newest code
        for row in run["rows"]:
            if row["bench"] in ("decode", "prefill"):
                steps.setdefault((row["bench"], row["rows"], row["ctx"]), row)
    peers = {(row["bench"], row.get("rows", 1), row["ctx"]): row for row in document["peer"]["rows"]}
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(16, 5))

    decodes = sorted(key for key in steps if key[0] == "decode")
    names = [f"{rows} x {ctx}" for _, rows, ctx in decodes]
    _bars(
        left,
        names,
        {
            "floor": [steps[key]["floor_ms"] for key in decodes],
            "Gewell": [steps[key]["step_ms"] for key in decodes],
            document["peer"]["engine"]: [peers[key]["step_ms"] if key in peers else 0 for key in decodes],
        },
    )
    left.set_title("decode step, ms (rows x keys), less is better")

    prefills = sorted(key for key in steps if key[0] == "prefill")
    _bars(
        middle,
        [str(ctx) for _, _, ctx in prefills],
        {
            "floor": [ctx / steps[key]["floor_ms"] * 1e3 for key in prefills for ctx in key[2:]],
            "Gewell": [steps[key]["tok_s"] for key in prefills],
            document["peer"]["engine"]: [peers[key]["tok_s"] if key in peers else 0 for key in prefills],
        },
    )
    middle.set_title("prefill, tokens/s (prompt length), more is better")

    bottom = [0.0] * len(decodes)
    for group in (*GROUPS, "rest"):
        heights = []
        for key in decodes:
            parts = {name: ms for name, ms in steps[key]["groups_ms"].items() if name != "launches"}
            rest = sum(ms for name, ms in parts.items() if name not in GROUPS)
            heights.append(rest if group == "rest" else parts.get(group, 0.0))
        right.bar(names, heights, bottom=bottom, label=group)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    right.set_title("where a decode step's time goes, ms")
    right.tick_params(axis="x", rotation=20)
    right.legend(fontsize=8)
    figure.suptitle(f"Gemma 4 31B, bf16, random weights, {document['device']}, {document['date']}")
    figure.tight_layout()
    figure.savefig(target, dpi=90)


def _bars(axes: Any, names: list[str], series: dict[str, list[float]]) -> None:
    width = 0.8 / len(series)
    for i, (label, values) in enumerate(series.items()):
        places = [at + (i - 1) * width for at in range(len(names))]
        bars = axes.bar(places, values, width, label=label)
        axes.bar_label(
            bars,
            [(f"{value:,.0f}" if value > 999 else f"{value:.1f}") if value else "" for value in values],
            fontsize=6,
            rotation=90,
            padding=2,
        )
    axes.set_xticks(range(len(names)), names, rotation=20)
    axes.margins(y=0.15)
    axes.legend(fontsize=8)


if __name__ == "__main__":
    main()
