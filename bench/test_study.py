"""What must stay true of the study: its cells are what they are called, and its statistics say what they hold."""
import json, subprocess, sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from bench import study
import train
from data.results import interval
from test_model import dataset, environment, here, same, weights  # noqa: F401  (dataset is a fixture)


def test_the_papers_38_models():
    found = study.models(study.BUDGETS["paper"])
    names = [m.name for m in found]
    assert len(found) == len(set(names)) == 38
    assert {"clm", "mlm40", "1b-mlm50", "clm-12000", "mlm40-22000", "clm75-12000", "clm25", "decay-mlm20", "clm-further22000", "mlm40-further2000"} <= set(names)
    assert sum(m.of == 42000 for m in found) == 15 + 3 + 4 and sum(m.of == 12000 for m in found) == sum(m.of == 22000 for m in found) == 5


@pytest.mark.parametrize("name, objective, steps", [("clm50", "clm:0.5,mlm:0.5", 24), ("clm-12", "clm", 12), ("decay-mlm40", "clm:0.75,mlm:0.25", 24)])
def test_a_branch_equals_the_run_from_its_own_beginning(dataset, tmp_path, name, objective, steps):
    """To the bit: shared prefixes save work and change nothing."""
    b = study.Budget(("micro",), (12, 24), 3, 6, (4,), 2, "--tokens_per_iter 128 --block_size 64 --eval_interval 24 --device cpu --dtype float32",
                     splits=(50,), auto=False, dataset=str(dataset))
    for m in [m for m in study.models(b) if m.name in ("clm", name)]:
        train.main(study.train_flags(b, m, 5, tmp_path))
    here(dataset, tmp_path / "alone", size="micro", objective=objective, max_iters=steps, warmup_iters=3, decay_iters=6, seed=5, tokens_per_iter=128, eval_interval=24)
    assert same(weights(tmp_path / name / "last.pt"), weights(tmp_path / "alone/last.pt"))


def test_intervals():
    """Of two models the interval of a difference is the paired one; more models pool their spread."""
    rng = np.random.default_rng(0)
    one, other = rng.normal(size=4) + 1, rng.normal(size=4)
    mean, half = study.Scores({"one": one, "other": other}).difference("one", "other")
    assert (mean, half) == pytest.approx(interval(one - other))
    assert study.Scores({"one": one}).mean("one") == pytest.approx(interval(one))
    common = rng.normal(size=4) * 100  # what a seed does to all models alike is no difference between them
    assert study.Scores({"one": one + common, "other": other + common}).difference("one", "other") == pytest.approx((mean, half))
    assert study.Scores({"one": [1.0], "other": [2.0]}).difference("one", "other") == (-1.0, None)
    inside = 0  # a 95 % interval holds the truth in 95 of 100 cases
    for _ in range(1000):
        seeds = rng.normal(size=3)
        mean, half = study.Scores({name: shift + seeds + rng.normal(size=3) for name, shift in zip("abcdef", range(6))}).difference("c", "b")
        inside += abs(mean - 1) <= half
    assert 920 < inside < 980


def test_the_rate_is_chosen_on_validation_data():
    lines = [{"cell": "", "model": "m", "seed": seed, "tune_seed": tune, "task": "t", "family": "SC", "rate": rate, "val": val, "test": test + 0.01 * seed + 0.001 * tune}
             for rate, val, test in ((1e-4, 0.5, 0.9), (1e-3, 0.6, 0.4)) for seed in (0, 1) for tune in (0, 1)]
    best, ranges, _ = study.collect(lines)
    assert best["t"].values["m"] == pytest.approx([40.05, 41.05]) and ranges["t"].values["m"] == pytest.approx([50, 50])
    best, _, _ = study.collect([line for line in lines if line["seed"] == 0])  # one pretraining seed: the fine-tuning seeds are what varies
    assert best["t"].values["m"] == pytest.approx([40, 40.1])
    best, _, _ = study.collect(lines[:-1])  # a model that lacks a cell is left out
    assert "m" in best["t"].values
    best, _, _ = study.collect([line for line in lines if (line["seed"], line["rate"]) != (1, 1e-3)])
    assert not best["t"].values


@pytest.mark.parametrize("a, b, paper, wanted", [
    ([3, 3.1, 2.9], [1, 1.1, 0.9], 1, "**a beats b by 2.0 ± 0.0 points on t: agrees with the paper**"), ([3, 3.1, 2.9], [1, 1.1, 0.9], -1, "contradicts the paper"),
    ([3, 3.1, 2.9], [1, 1.1, 0.9], 0, "the paper finds them close"), ([1, 1.1, 0.9], [3, 3.1, 2.9], -1, "**b beats a by 2.0 ± 0.0 points on t: agrees"),
    ([1, 2, 3], [3, 2, 1.5], 1, "no difference beyond noise at this size"), ([1, 2, 3], [3, 2, 1.5], 0, "noise at this size (-0.2 ± 4.4): agrees"),
    ([1], [2], 1, "one seed: nothing can be concluded")])
def test_verdicts(a, b, paper, wanted):
    assert wanted in study.verdict(study.Scores({"a": a, "b": b}), "a", "b", "t", paper)


def test_smoke(dataset, tmp_path):
    """The smallest study from its command to its report; what is done is kept, and a cell gives the same figures again."""
    task, out = tmp_path / "task", tmp_path / "study"
    task.mkdir()
    rng = np.random.default_rng(0)
    for split, n in (("train", 300), ("test", 100)):
        rows = [{"text": " ".join(rng.choice(["quick fox", "lazy dog"][i % 2].split() + ["the", "over"], 5)), "label": str(i % 2)} for i in range(n)]
        (task / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def command(*more):
        words = [sys.executable, "bench/study.py", "--budget", "smoke", "--seeds", "1", "--dataset", dataset, "--tasks", f"{task} --max_iters 8", "--out_dir", out, *more]
        return subprocess.run(words, capture_output=True, text=True, env=environment(), cwd=ROOT)

    done = command()
    assert done.returncode == 0, done.stdout + done.stderr
    report, results = (out / "report.md").read_text(), out / "results.jsonl"
    whole = results.read_text().splitlines()
    assert len(whole) == 10 * (1 + 2) and "MLM 40 % alone" in report and "auto: MLM alone from step" in report and "one seed: nothing can be concluded" in report
    results.write_text("\n".join(whole[:-2]) + "\n" + whole[-2][:20])  # stopped in the middle of a write
    done = command()
    assert done.returncode == 0 and [line for line in results.read_text().splitlines() if line[-1] == "}"] == whole, done.stdout + done.stderr
    assert report == (out / "report.md").read_text()
    done = command("--check", "seed0/clm50")
    assert done.returncode == 0 and "the same figures" in done.stdout, done.stdout + done.stderr
    changed = json.loads(whole[0]) | {"val_loss_clm": 1.0}
    results.write_text("\n".join([json.dumps(changed), *whole[1:]]) + "\n")
    done = command("--check", changed["cell"])
    assert done.returncode == 1 and "OTHER FIGURES" in done.stdout
    done = command("--rates", "1e-3")
    assert done.returncode == 1 and "holds a study of other settings" in done.stderr
