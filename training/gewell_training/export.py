"""Turns a training run's folder into a model folder, and its log into a CSV file and a picture.

PYTHONPATH=.:training python -m gewell_training.export RUN --model gewell/shipped/gewell-nano --log training/log
"""

import argparse
import csv
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gewell_training import nano
from gewell_training.train import TOKENIZER, read_state


def write_log(progress: Mapping[str, Any], out: Path) -> None:
    """metrics.json (last held-out scores), loss.csv, held_out.csv, training.png."""
    out.mkdir(parents=True, exist_ok=True)
    steps = [entry for entry in progress["log"] if "loss" in entry]
    tests = [entry for entry in progress["log"] if "held_out" in entry]
    names = ("step", "seconds", "tokens", "loss", "grad_norm", "lr_factor", "longest", "tokens_per_s", "waiting")
    tasks = list(steps[0]["train_accuracy"])
    _write_csv(
        out / "loss.csv",
        [*names, *(f"accuracy.{task}" for task in tasks)],
        [[*(entry[name] for name in names), *(entry["train_accuracy"][task] for task in tasks)] for entry in steps],
    )
    groups = list(tests[-1]["held_out"])
    _write_csv(
        out / "held_out.csv",
        ["step", "seconds", "tokens", *groups],
        [[e["step"], e["seconds"], e["tokens"], *(e["held_out"].get(g, "") for g in groups)] for e in tests],
    )
    last = tests[-1]
    metrics = {
        "steps": progress["num_steps"],
        "tokens": progress["num_tokens"],
        "training_seconds": round(progress["trained_seconds"], 1),
        "held_out": last["held_out"],
    }
    (out / "metrics.json").write_text(json.dumps(metrics, indent=1) + "\n")
    _draw(steps, tests, groups, out / "training.png")


def _write_csv(path: Path, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([header, *rows])


def _draw(steps: Sequence[Any], tests: Sequence[Any], groups: Sequence[str], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    tokens = [entry["tokens"] / 1e6 for entry in steps]
    left.semilogy(tokens, [entry["loss"] for entry in steps], color="#4477aa", linewidth=0.8)
    left.set_xlabel("million tokens")
    left.set_ylabel("loss")
    lengths = left.twinx()
    lengths.step(tokens, [entry["longest"] for entry in steps], color="#bbbbbb", where="post")
    lengths.set_ylabel("longest record text, tokens")
    for n, group in enumerate(groups):
        seen = [(entry["tokens"] / 1e6, 100 * entry["held_out"][group]) for entry in tests]
        style = "--" if group.startswith("niah") else "-"
        right.plot(*zip(*seen, strict=True), style, label=group, linewidth=1.2, color=f"C{n % 10}")
    right.set_xlabel("million tokens")
    right.set_ylabel("held-out answers right, %")
    right.legend(fontsize=7, ncols=2)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the folder that a training run wrote")
    parser.add_argument("--which", choices=("best", "last"), default="best")
    parser.add_argument("--model", type=Path, help="model folder to write")
    parser.add_argument("--log", type=Path, help="folder for the log")
    parser.add_argument("--tokenizer", type=Path, default=TOKENIZER)
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=N", help="as given to the run")
    a = parser.parse_args()
    if a.model is not None:
        changes: dict[str, Any] = {name: int(value) for name, value in (item.split("=") for item in a.set)}
        nano.export(read_state(a.run, a.which), a.model, **changes)
        if a.tokenizer.resolve() != (a.model / "tokenizer.json").resolve():
            shutil.copy(a.tokenizer, a.model / "tokenizer.json")
    if a.log is not None:
        write_log(json.loads((a.run / "progress.json").read_text()), a.log)


if __name__ == "__main__":
    main()
