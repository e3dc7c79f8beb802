"""
Results of fine-tuning: a line of results.jsonl for each cell (one rate and one seed), the statistics over the cells of a grid, a table, a figure.

A line holds task, family, main (the score that counts), rate, seed, val and test (test set -> scores), floor (the main score without learning), diverged,
init_from, changed (settings that are not the defaults), and cell: all that decides its result.
"""
import json, math, os
from pathlib import Path

import numpy as np

from data.prepare import read_lines


def read_results(folder):
    return read_lines(Path(folder) / "results.jsonl")


def append(path, line):
    """One write, so that what stands there stays whole; a line that was cut off is ended first."""
    text = json.dumps(line) + "\n"
    if path.exists() and path.stat().st_size:
        with open(path, "rb") as file:
            file.seek(-1, 2)
            text = text if file.read(1) == b"\n" else "\n" + text
    with open(path, "a") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def t_quantile(df):
    """97.5 % quantile of Student's t, from its distribution in closed form (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    def within(t):  # probability of [-t, t]
        angle = math.atan(t / math.sqrt(df))
        term, total = (math.cos(angle), 0) if df % 2 else (1, 0)
        for k in range(1 + df % 2, df, 2):
            total, term = total + term, term * math.cos(angle)**2 * k / (k + 1)
        return 2 / math.pi * (angle + math.sin(angle) * total) if df % 2 else math.sin(angle) * total
    low, high = 0.0, 1e3
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if within(middle) < 0.95 else (low, middle)
    return low


def interval(values):
    """(mean, half of its 95 % t-interval; None for a single value)."""
    n = len(values)
    return float(np.mean(values)), float(t_quantile(n - 1) * np.std(values, ddof=1) / math.sqrt(n)) if n > 1 else None


def best_rate(lines):
    """The rate with the highest mean validation score; one at which a seed diverged has none. Test scores are not looked at."""
    val = {}
    for line in lines:
        val.setdefault(line["rate"], []).append(-math.inf if line["diverged"] else line["val"][line["main"]])
    return max(sorted(val), key=lambda rate: np.mean(val[rate]))


def summary(lines, test):
    """Of the cells of one grid: the chosen rate, the test score there, and how much it hangs on seed and rate."""
    rate, score = best_rate(lines), lambda line: line["floor"][test] if line["diverged"] else line["test"][test][line["main"]]
    rates = sorted({line["rate"] for line in lines})
    mean, half = interval([score(line) for line in lines if line["rate"] == rate])
    seeds = [score(line) for line in lines if line["rate"] == rate]
    means = [np.mean([score(line) for line in lines if line["rate"] == r]) for r in rates]
    failed = [line["diverged"] or line["val"][line["main"]] <= line["floor"]["val"] for line in lines]
    return {"rate": rate, "n": len(seeds), "mean": mean, "half": half, "over_seeds": float(np.std(seeds, ddof=1)) if len(seeds) > 1 else None,
            "over_rates": float(np.ptp(means)) if len(rates) > 1 else None, "failed": sum(failed), "cells": len(lines)}


def grids(lines):
    """Lines of results -> [the lines of one grid: they differ in rate and seed only]."""
    found = {}
    for line in lines:
        key = {k: v for k, v in line["cell"].items() if k not in ("rate", "seed")}
        found.setdefault(json.dumps(key, sort_keys=True), {})[line["rate"], line["seed"]] = line
    return [list(cells.values()) for cells in found.values()]


def name_of(line):
    return ("random, as " if line["cell"]["random_weights"] else "") + line["init_from"]


def table(all_grids):
    """Markdown: a row for each grid and test set."""
    percent = lambda x: "" if x is None else f"{100 * x:.1f}"
    rows = ["| task | score | weights | rate | test, mean ± 95 % | seeds | floor | sd over seeds | range over rates | failed cells |",
            "|---" * 10 + "|"]
    for cells in sorted(all_grids, key=lambda cells: (cells[0]["task"], cells[0]["init_from"])):
        one = cells[0]
        weights = ", ".join([name_of(one)] + [f"{name} {value}" for name, value in one["changed"].items()])
        for test in [name for name in one["floor"] if name != "val"]:
            r = summary(cells, test)
            half = "" if r["half"] is None else f" ± {percent(r['half'])}"
            columns = [one["task"] + ("" if test == "test" else f" ({test})"), one["main"], weights, f"{r['rate']:g}", percent(r["mean"]) + half, str(r["n"]),
                       percent(one["floor"][test]), percent(r["over_seeds"]), percent(r["over_rates"]), f"{r['failed']} of {r['cells']}"]
            rows.append(f"| {' | '.join(columns)} |")
    return "\n".join(rows)


def report(folders):
    for folder in folders:
        if not (Path(folder) / "results.jsonl").is_file():
            raise SystemExit(f"--report {folder}: no results.jsonl there; give the --out_dir of runs of finetune.py")
    if not folders:
        raise SystemExit("--report: name one or more folders that hold a results.jsonl")
    found = grids([line for folder in folders for line in read_results(folder)])
    print(table(found))
    try:
        import matplotlib
    except ImportError:
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    tasks = sorted({cells[0]["task"] for cells in found})
    figure, axes = plt.subplots(1, len(tasks), figsize=(5 * len(tasks), 4), squeeze=False)
    for axis, name in zip(axes[0], tasks):
        for cells in (cells for cells in found if cells[0]["task"] == name):
            rates, test = sorted({line["rate"] for line in cells if line["test"]}), list(cells[0]["floor"])[1]
            bands = [interval([100 * line["test"][test][line["main"]] for line in cells if line["rate"] == rate and line["test"]]) for rate in rates]
            mean, half = np.array([b[0] for b in bands]), np.array([b[1] or 0 for b in bands])
            axis.plot(rates, mean, marker="o", label=name_of(cells[0]))
            axis.fill_between(rates, mean - half, mean + half, alpha=0.2)
        axis.set(xscale="log", xlabel="learning rate", ylabel=f"test {cells[0]['main']}, %", title=name)
        axis.legend(fontsize="small")
    figure.savefig(Path(folders[0]) / "rates.png", dpi=120, bbox_inches="tight")
    print(f"\ncurves: {Path(folders[0]) / 'rates.png'}")
