"""
The study of arXiv 2507.00994 at a size that a machine can afford: pretrain with MLM, CLM, or one after the other, on equal steps, data order and
architecture; fine-tune all of them alike; say what can be concluded, and what cannot.

    python bench/study.py --budget laptop            about an hour on two CPU cores: a report and its plots in out/study/laptop
    python bench/study.py --budget smoke             two minutes: does everything run?
    python bench/study.py --budget gpu               about ten minutes on one large GPU
    python bench/study.py --budget paper --plan      the study's 38 models: commands, tokens, FLOPs, GPU hours; nothing is run
    python bench/study.py --budget laptop --check seed0/clm50     runs one cell again and compares its figures
    python bench/study.py --report bench/study/laptop             a report again, from its results.jsonl

The study is a list of cells, each one command of train.py or finetune.py. A cell starts when the one that it needs is done and a core (or GPU) is free;
what it found becomes lines of results.jsonl, and a study that was stopped goes on from there. To try an idea of your own, add a Model to `models` and its
name to a table of `write_report`.
"""
import argparse, dataclasses, itertools, json, math, os, shlex, signal, subprocess, sys, tempfile, time
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
import numpy as np
import torch
from tqdm import tqdm

from data.prepare import dataset_folder, read_lines
from data.results import append, t_quantile
from data.tokenizer import load_tokenizer
from model import SIZES, Config, count_parameters, flops_per_token
from train import PEAK_FLOPS, Settings, parse

MFU = 0.4  # assumed, for the hours of --plan

# ---------------------------------------------------------------------------------------------------------------------------------
# what is run


@dataclass
class Budget:
    sizes: tuple                    # of the model; all but the first only in question 1
    steps: tuple                    # lengths of pretraining, ascending; they share a plateau
    warmup: int                     # steps of warm-up
    decay: int                      # steps of decay, of every length
    further: tuple                  # lengths of continued pretraining
    further_warmup: int             # its warm-up
    train: str                      # flags of train.py
    ratios: tuple = (0.2, 0.3, 0.4, 0.5)
    splits: tuple = (25, 50, 75)    # per cent of CLM in a two-stage run
    split_all: bool = False         # at every length, not at the longest only
    decay_ratios: tuple = (0.4,)    # of MLM in the decay of the CLM run
    auto: bool = True               # a run with --objective auto
    seeds: int = 1                  # of pretraining
    tune_seeds: int = 1             # of fine-tuning, for each of these
    tasks: dict = field(default_factory=dict)  # task: flags of finetune.py
    rates: str = "5e-4,1.5e-3,5e-3"
    dataset: str = "docstrings"
    name: str = ""


DOCS = {"docs_sc": "--max_iters 60", "docs_tc": "--max_iters 50", "docs_qa": "--max_iters 30 --max_length 128",
        "docs_ir": "--max_iters 50 --max_length 96 --candidates judged"}
PAPER = {"sst2": "", "qqp": "", "mnli": "", "conll2003": "", "ontonotes": "", "uner": "", "squad": "", "squad_v2": "", "record": "",
         "msmarco": "--test_on msmarco,nq,mldr --candidates judged"}
BUDGETS = {
    "smoke": Budget(("micro",), (40, 100), 10, 10, (20,), 10, "--tokens_per_iter 512 --eval_tokens 1024 --device cpu", ratios=(0.2, 0.4), splits=(50,),
                    seeds=2, tasks={"docs_sc": "--max_iters 8 --max_length 32"}, rates="1e-3,4e-3"),
    "laptop": Budget(("micro",), (300, 600, 1200), 60, 120, (300,), 60, "--tokens_per_iter 2048 --block_size 128 --eval_interval 600 --device cpu",
                     seeds=3, tasks=DOCS),
    "gpu": Budget(("mini",), (300, 600, 1200), 60, 120, (300, 600), 60, "--tokens_per_iter 16384 --block_size 256 --eval_interval 600 --compile false",
                  split_all=True, seeds=2, tasks=DOCS),
    "paper": Budget(("610m", "210m", "1b"), (12000, 22000, 42000), 2000, 2000, (2000, 12000, 22000), 1000,
                    "--packing random --block_size 2048 --tokens_per_iter 2359296 --batch_size 8", split_all=True, decay_ratios=(0.2, 0.3, 0.4, 0.5),
                    auto=False, tune_seeds=5, tasks=PAPER, rates="1e-5,2e-5,5e-5,1e-4,2e-4,5e-4", dataset="fineweb_edu"),
}


class Model(NamedTuple):
    name: str
    size: str
    objective: str
    ratio: float
    steps: int            # that this run takes
    start: tuple = None   # (name of the model, step of its plateau, or None: its end) that it begins with
    of: int = 0           # steps from scratch to its end


def models(b):
    """The models of a budget. A run that begins with another's plateau takes its weights, its moments and its place in the data, without a new warm-up."""
    first, longest, found = b.sizes[0], b.steps[-1], []
    for size in b.sizes:
        tag = "" if size == first else f"{size}-"
        found += [Model(f"{tag}clm", size, "clm", 0.4, longest, of=longest)]
        found += [Model(f"{tag}mlm{ratio:.0%}"[:-1], size, "mlm", ratio, longest, of=longest) for ratio in b.ratios]
    for steps in b.steps[:-1]:  # the plateau of the longest, decayed early
        found += [Model(f"{name}-{steps}", first, name[:3], 0.4, b.decay, (name, steps - b.decay), steps) for name in ("clm", "mlm40")]
    for steps in b.steps if b.split_all else (longest,):
        for share in b.splits:
            at = steps * share // 100
            found.append(Model(f"clm{share}" + f"-{steps}" * (steps != longest), first, "mlm", 0.4, steps - at, ("clm", at), steps))
    found += [Model(f"decay-mlm{ratio:.0%}"[:-1], first, "mlm", ratio, b.decay, ("clm", longest - b.decay), longest) for ratio in b.decay_ratios]
    if b.auto:
        found.append(Model("auto", first, "auto", 0.4, longest, of=longest))
    for name in ("clm", "mlm40"):  # a decayed model needs a new warm-up
        found += [Model(f"{name}-further{steps}", first, "mlm", 0.4, steps, (name, None), longest + steps) for steps in b.further]
    return found


def train_flags(b, model, seed, folder):
    """The flags of train.py for a model. folder: that of the seed, where the models stand side by side."""
    branch = model.start and model.start[1]
    warmup = 0 if branch else b.further_warmup if model.start else b.warmup
    branches = [other.start[1] for other in models(b) if other.start and other.start[0] == model.name and other.start[1]]
    flags = ["--out_dir", folder / model.name, "--objective", model.objective, "--mask_ratio", model.ratio, "--max_iters", model.steps,
             "--warmup_iters", warmup, "--decay_iters", min(b.decay, model.steps - warmup), "--seed", seed, "--dataset", b.dataset, *b.train.split()]
    if model.start:
        flags += ["--init_from", folder / model.start[0] / (f"step_{branch}.pt" if branch else "last.pt")]
        flags += ["--init_optimizer", "true"] * bool(branch)
    else:
        flags += ["--size", model.size]
    return [str(flag) for flag in flags + ["--save_interval", math.gcd(*branches)] * bool(branches)]


class Cell(NamedTuple):
    name: str      # "seed0/clm", or "seed0/clm/docs_sc"
    command: list
    needs: str     # the cell before
    cost: int      # its time as tokens of pretraining, about


def cells(b, out):
    """All cells, in an order in which none waits for a later one."""
    found = []
    for seed in range(b.seeds):
        folder = out / f"seed{seed}"
        for m in models(b):
            flags = train_flags(b, m, seed, folder)
            tokens = int(flags[flags.index("--tokens_per_iter") + 1])
            needs = f"seed{seed}/{m.start[0]}" if m.start else None
            found.append(Cell(f"seed{seed}/{m.name}", ["train.py", *flags], needs, 60_000 + m.steps * tokens))
    order = {cell.name: cell for cell in found}
    for name, (task, flags) in itertools.product(list(order), b.tasks.items()):
        seed = name.split("/")[0][4:]
        tune = [str(int(seed) * b.tune_seeds + i) for i in range(b.tune_seeds)]
        command = ["finetune.py", "--init_from", f"{out / name}/last.pt", "--task", task, "--learning_rate", b.rates,
                   "--seeds", ",".join(tune + tune[:1]),  # a seed twice is once, and "3,3" is a list of one
                   "--out_dir", f"{out / name}/finetune", *flags.split()]
        found.append(Cell(f"{name}/{Path(task).name}", command, name, 60_000 + 90_000 * len(b.rates.split(",")) * len(tune)))
    return sorted(found, key=lambda cell: cell.name.split("/")[0])  # stable: a seed is whole before the next one begins


# ---------------------------------------------------------------------------------------------------------------------------------
# running it


def start(cell, slot, jobs, log):
    """The cell's command as a process of its own; a stopped pretraining run goes on."""
    command, out_dir = list(cell.command), Path(cell.command[cell.command.index("--out_dir") + 1])
    if command[0] == "train.py" and (out_dir / "last.pt").exists():
        command = ["train.py", "--out_dir", str(out_dir), "--init_from", "resume"]
    environment = {**os.environ, "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // jobs))}
    if (gpus := torch.cuda.device_count()) and "cpu" not in command:
        environment["CUDA_VISIBLE_DEVICES"] = str(slot % gpus)
    return subprocess.Popen([sys.executable, *command], cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)


def lines_of(cell):
    """What a finished cell found, as lines of results.jsonl: its scores for each rate, seed and test set, or its last validation losses."""
    seed, model, *task = cell.name.split("/")
    base = {"cell": cell.name, "model": model, "seed": int(seed[4:])}
    folder = Path(cell.command[cell.command.index("--out_dir") + 1])
    if not task:
        log = [line for line in read_lines(folder / "metrics.jsonl") if "val_loss_mlm" in line or "val_loss_clm" in line]
        return [base | {key: value for key, value in log[-1].items() if key.startswith("val_")} | {"steps": log[-1]["iter"]}
                | {"switch": line["switch"] for line in log if "switch" in line}]
    found = []
    for line in read_lines(folder / "results.jsonl"):
        if Path(line["task"]).name == task[0]:
            for test in [name for name in line["floor"] if name != "val"]:  # a cell that diverged has learnt nothing
                found.append(base | {"task": task[0] + ("" if test == "test" else f" ({test})"), "family": line["family"], "score": line["main"],
                                     "rate": line["rate"], "tune_seed": line["seed"], "val": -1 if line["diverged"] else line["val"][line["main"]], "floor": line["floor"][test],
                                     "test": line["floor"][test] if line["diverged"] else line["test"][test][line["main"]]})
    return found


def run(b, out, jobs):
    """Runs the cells that results.jsonl does not hold yet, `jobs` at a time."""
    todo, results = cells(b, out), out / "results.jsonl"
    done = {line["cell"] for line in read_lines(results)}
    waiting, running, free = [cell for cell in todo if cell.name not in done], {}, list(range(jobs))
    bar = tqdm(total=sum(cell.cost for cell in todo), initial=sum(cell.cost for cell in todo if cell.name in done),
               bar_format="{l_bar}{bar}| {elapsed}, {remaining} left{postfix}", mininterval=1 if sys.stderr.isatty() else 60)
    bar.set_postfix_str(f"{len(waiting)} cells to run")
    try:
        while waiting or running:
            ready = [cell for cell in waiting if cell.needs is None or cell.needs in done]
            for cell in ready[:len(free)]:
                log = out / "logs" / (cell.name.replace("/", "-") + ".txt")
                log.parent.mkdir(parents=True, exist_ok=True)
                slot = free.pop()
                running[cell.name] = cell, start(cell, slot, jobs, open(log, "w")), slot, log
                waiting.remove(cell)
            time.sleep(0.2)
            for name, (cell, process, slot, log) in list(running.items()):
                if process.poll() is None:
                    continue
                if process.returncode:
                    last = (log.read_text().strip().splitlines() or ["nothing"])[-1]
                    raise SystemExit(f"{name} ended with status {process.returncode}: {last} ({log}); "
                                     f"mend it and give the same command again, what is done is kept")
                for line in lines_of(cell):
                    append(results, line)
                done.add(name)
                del running[name]
                free.append(slot)
                bar.set_postfix_str(f"{len(waiting) + len(running)} cells to run, {name} done", refresh=False)
                bar.update(cell.cost)
    finally:
        for _, process, _, _ in running.values():
            process.send_signal(signal.SIGTERM)
        for _, process, _, _ in running.values():
            process.wait()
        bar.close()


def check_again(b, out, name, jobs):
    """Runs one cell again, in a folder of its own, and compares with what stands in results.jsonl."""
    one = next((cell for cell in cells(b, out) if cell.name == name), None)
    lines = read_lines(out / "results.jsonl")
    stands = [line for line in lines if line["cell"] == name]
    if not one or not stands:
        raise SystemExit(f"--check {name}: no such cell in {out / 'results.jsonl'}; it has {', '.join(sorted({line['cell'] for line in lines})[:5])}, ...")
    with tempfile.TemporaryDirectory() as folder:
        command = list(one.command)
        command[command.index("--out_dir") + 1] = folder
        again = one._replace(command=command)
        with open(Path(folder) / "log.txt", "w") as log:
            if start(again, 0, jobs, log).wait():
                raise SystemExit(f"{name}: {Path(log.name).read_text().strip().splitlines()[-1]}")
        found = lines_of(again)
    print(f"{name}: {'the same figures' if found == stands else 'OTHER FIGURES'}")
    for old, new in zip(stands, found):
        print("  before", json.dumps(old), "\n  again ", json.dumps(new))
    if found != stands:
        raise SystemExit(1)


# ---------------------------------------------------------------------------------------------------------------------------------
# what can be concluded


class Scores:
    """Scores of one task: values[model] over the seeds, in per cent, at the rate that is best on validation data (its mean over seeds).

    Three seeds say little about the spread of one model, so the spread is pooled over all models of the task, as in an analysis of variance: `spread`
    within a model, over the seeds; `paired` what remains of it when a seed's common part is taken away (equal seeds share the order of the data)."""

    def __init__(self, values):
        self.values = values
        table = np.array(list(values.values()))  # (models, seeds)
        self.n = table.shape[1] if values else 0
        self.spread = self.paired = None
        if self.n > 1:
            rest = table - table.mean(1, keepdims=True)
            self.df = table.shape[0] * (self.n - 1)
            self.spread = math.sqrt((rest**2).sum() / self.df)
            if len(table) > 1:
                rest = rest - rest.mean(0)
                self.df_paired = (table.shape[0] - 1) * (self.n - 1)
                self.paired = math.sqrt((rest**2).sum() / self.df_paired)

    def mean(self, name):
        """(mean, half of the 95 % interval or None)"""
        return float(np.mean(self.values[name])), self.spread and t_quantile(self.df) * self.spread / math.sqrt(self.n)

    def difference(self, a, b):
        half = self.paired and t_quantile(self.df_paired) * self.paired * math.sqrt(2 / self.n)
        return float(np.mean(self.values[a]) - np.mean(self.values[b])), half


def collect(lines):
    """({task: Scores at the best rate}, {task: Scores of the range over the rates}, {task: {model: {rate: values}}}) of the models that all seeds have.
    With several pretraining seeds the mean over the fine-tuning seeds of each is one value."""
    best, ranges, by_rate = {}, {}, {}
    replica = "seed" if len({line["seed"] for line in lines}) > 1 else "tune_seed"
    for task in dict.fromkeys(line["task"] for line in lines if "task" in line):
        mine, grid = [line for line in lines if line.get("task") == task], {}
        for line in mine:
            grid.setdefault(line["model"], {}).setdefault(line["rate"], {}).setdefault(line[replica], []).append((line["val"], 100 * line["test"]))
        seeds, rates = sorted({line[replica] for line in mine}), sorted({line["rate"] for line in mine})
        table = {model: np.array([[np.mean(of[rate][seed], axis=0) for seed in seeds] for rate in rates]) for model, of in grid.items()
                 if all(seed in of.get(rate, {}) for rate in rates for seed in seeds)}  # (rates, seeds, (val, test))
        by_rate[task] = {model: dict(zip(rates, values[:, :, 1])) for model, values in table.items()}
        best[task] = Scores({model: values[values[:, :, 0].mean(1).argmax(), :, 1] for model, values in table.items()})
        ranges[task] = Scores({model: np.ptp(values[:, :, 1], axis=0) for model, values in table.items()})
    return best, ranges, by_rate


def pm(mean, half, sign=""):
    return f"{mean:{sign}.1f}" + (f" ± {half:.1f}" if half is not None else "")


def verdict(scores, a, b, what, paper=None, verb="beats"):
    """A line on the difference of two models. paper: 1 where it finds a ahead, -1 where it finds b ahead, 0 where it finds them close, None: nothing."""
    difference, half = scores.difference(a, b)
    if half is None:
        return f"{a} against {b} on {what}: {difference:+.1f} points, one seed: nothing can be concluded"
    if abs(difference) <= half:
        agrees = ": agrees with the paper" if paper == 0 else ""
        return f"{a} against {b} on {what}: no difference beyond noise at this size ({pm(difference, half, '+')}){agrees}"
    ahead, behind = (a, b) if difference > 0 else (b, a)
    agrees = {None: "", 0: ": the paper finds them close", np.sign(difference): ": agrees with the paper"}.get(paper, ": contradicts the paper")
    return f"**{ahead} {verb} {behind} by {pm(abs(difference), half)} points on {what}{agrees}**"


def write_report(b, out, command):
    lines = read_lines(out / "results.jsonl")
    best, ranges, by_rate = collect(lines)
    if not best:
        raise SystemExit(f"{out / 'results.jsonl'}: no scores yet, so there is nothing to report")
    family, floor = ({line["task"]: line[key] for line in lines if "task" in line} for key in ("family", "floor"))
    losses = {}
    for line in lines:
        if "task" not in line:
            losses.setdefault(line["model"], []).append(line)
    longest, seeds, n = b.steps[-1], len({line["seed"] for line in lines}), max(scores.n for scores in best.values())
    text, judged = [], []  # judged: verdicts on what the paper has a finding about

    def rows(head, names):
        text.append(f"| {head} | loss of masked tokens, nats | " + " | ".join(best) + " | n |\n|" + "---|" * (len(best) + 3))
        for name, label in names:
            values = [line["val_loss_mlm"] for line in losses.get(name, []) if "val_loss_mlm" in line]
            shown = [pm(*scores.mean(name)) if name in scores.values else "" for scores in best.values()]
            text.append(f"| {label} | {f'{np.mean(values):.3f}' if values else ''} | " + " | ".join(shown) + f" | {n} |")
        text.append("| *floor: nothing learnt* | | " + " | ".join(f"*{100 * floor[task]:.1f}*" for task in best) + " | |\n")

    def verdicts(a, other, paper={}, tables=best, what="{}"):
        """A line for each task. paper: {family: who is ahead there}."""
        for task, scores in tables.items():
            if a in scores.values and other in scores.values:
                line = verdict(scores, a, other, what.format(task), paper.get(family[task]))
                judged.extend([line] * (family[task] in paper))
                text.append(f"- {line}")
        text.append("")

    everywhere = lambda sign: dict.fromkeys(("SC", "TC", "QA", "IR"), sign)
    ratios, splits = [f"mlm{100 * ratio:.0f}" for ratio in b.ratios], [f"clm{share}" for share in b.splits]
    text.append("""## 1. CLM, and MLM at several ratios

The paper: MLM beats CLM on SC, QA and IR, CLM is competitive on TC; no ratio is best everywhere. (A loss is that of the ratio that the model was trained with.)
""")
    rows("model", [("clm", "CLM")] + [(name, f"MLM {name[3:]} %") for name in ratios])
    verdicts("mlm40", "clm", everywhere(1) | {"TC": 0})
    for task, scores in best.items():
        ranked = sorted((name for name in ratios if name in scores.values), key=lambda name: -scores.mean(name)[0])
        if len(ranked) > 1:
            text.append(f"- best and worst ratio: {verdict(scores, ranked[0], ranked[-1], task)}")
    text.append("\n![score against mask ratio](ratio.png)\n")

    text.append("""## 2. CLM against MLM along the way

The paper: CLM is ahead early, MLM overtakes. Each length is decayed to 0, from one plateau for all.
""")
    along = [(steps, *(name if steps == longest else f"{name}-{steps}" for name in ("clm", "mlm40"))) for steps in b.steps]
    rows("steps, objective", [(name, f"{steps:,}, {label}") for steps, *pair in along for name, label in zip(pair, ("CLM", "MLM 40 %"))])
    for steps, clm, mlm in along[:-1]:
        verdicts(mlm, clm, everywhere(-1) if steps == b.steps[0] else {})
    text.append("![score against steps](steps.png)\n")

    text.append("""## 3. CLM, then MLM

The paper: this beats MLM alone at equal steps; a quarter or a half of CLM is best. `auto` is not in the paper: `--objective auto` trains with CLM, in
the last fifth of each twentieth of the run with MLM, and with MLM alone from the first of these at which MLM's validation loss has fallen by more than
CLM's since the one before.
""")
    switches = [line["switch"] for line in losses.get("auto", []) if "switch" in line]
    decays = [m.name for m in models(b) if m.name.startswith("decay")]
    rows("model", [("mlm40", "MLM 40 % alone")] + [(name, f"{name[3:]} % CLM, then MLM") for name in splits]
         + [(name, f"CLM, MLM {name[9:]} % in the decay") for name in decays]
         + [("auto", f"auto: MLM alone from step {', '.join(map(str, switches))} on")] * bool(switches) + [("clm", "CLM alone")])
    for name in splits:
        verdicts(name, "mlm40", everywhere(1))
    for task, scores in best.items():
        there = [name for name in splits if name in scores.values]
        if "auto" in scores.values and there:
            text.append(f"- auto and the best fixed split: {verdict(scores, 'auto', max(there, key=lambda name: scores.mean(name)[0]), task)}")
    text.append("\n![score against share of CLM](split.png)\n")

    text.append("## 4. Continued pretraining\n\nThe paper: MLM from a finished CLM model beats MLM from a finished MLM model.\n")
    rows("further steps of MLM, from", [(f"{name}-further{steps}", f"{steps:,}, {label}") for steps in b.further
                                        for name, label in (("clm", "CLM"), ("mlm40", "MLM 40 %"))])
    for steps in b.further:
        verdicts(f"clm-further{steps}", f"mlm40-further{steps}", everywhere(1))

    text.append("""## 5. Sensitivity to the fine-tuning rate

The paper: CLM models are less sensitive. The range: a model's test score at its best rate less that at its worst, in points, the mean over seeds.
""")
    text.append("| model | " + " | ".join(ranges) + " |\n|" + "---|" * (len(ranges) + 1))
    for name in ("clm", "mlm40", *splits[:1]):
        text.append(f"| {name} | " + " | ".join(pm(*scores.mean(name)) if name in scores.values else "" for scores in ranges.values()) + " |")
    text.append("")
    for task, scores in ranges.items():
        if {"clm", "mlm40"} <= scores.values.keys():
            judged.append(verdict(scores, "mlm40", "clm", f"{task}", 1, "varies more than"))
            text.append(f"- {judged[-1]}")
    text.append("\n![score against rate](rate.png)\n")

    count = lambda part: sum(part in line for line in judged)
    agree, contradict, close = count("agrees with the paper"), count("contradicts the paper"), count("finds them close")
    variance = ("pretraining and fine-tuning seeds together: the weights' start, the order of the data, the masks, the new head, the order of the rows"
                if seeds > 1 else
                "fine-tuning seeds alone: the new head and the order of the rows. Pretraining was done once; another seed of it may turn a verdict")
    tuning = "; ".join(f"`{f'{task} {flags}'.strip()}`" for task, flags in b.tasks.items())
    head = f"""# Should we still pretrain encoders with masked language modelling? At the size `{b.name}`

    {command}

Of {len(judged)} comparisons about which the paper has a finding, {agree} agree with it, {contradict} contradict it, {close} show a difference where it finds
none, and {len(judged) - agree - contradict - close} are within noise at this size.

Model `{b.sizes[0]}`, {longest:,} steps of pretraining, {b.warmup} of them up and {b.decay} down, on `{b.dataset}` (`{b.train}`);
{len(losses)} models for each of {seeds} pretraining seed{"s" * (seeds > 1)}. Fine-tuned on {tuning}, rates {b.rates}.
Made from `results.jsonl` beside this file.

A score is the test score in per cent at the rate that is best on validation data, the mean over n seeds, with a 95 % interval. The interval holds the
variance over {variance}.
It does not hold that over test texts, data sets, sizes or longer training. It is Student's, with a spread that is pooled over all models of a task, since
a few seeds say little about the spread of one; that of a difference leaves out what a seed does to all models alike. Of 20 comparisons without a true
difference about one shows one.
"""
    (out / "report.md").write_text("\n".join([head, *text]).rstrip() + "\n")
    print(f"report: {out / 'report.md'}")
    draw(b, out, best, by_rate, along, ratios, splits, switches)


BLUE, ORANGE, GREEN, PINK = "#0072B2", "#D55E00", "#009E73", "#CC79A7"  # Okabe and Ito's, for all eyes


def draw(b, out, best, by_rate, along, ratios, splits, switches):
    """The plots as the paper draws them, a panel a task, bands of 95 %; left out, with a line, where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        print("plots: left out, matplotlib is not installed")
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    def panels(name, xlabel, fill, **axis_settings):
        figure, axes = plt.subplots(1, len(best), figsize=(3.6 * len(best) + 0.6, 3.7), squeeze=False)
        for axis, (task, scores) in zip(axes[0], best.items()):
            fill(axis, task, scores)
            axis.set(xlabel=xlabel, title=task, **axis_settings)
            axis.grid(alpha=0.3)
        axes[0][0].set_ylabel("test score, %")
        handles, labels = axes[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="upper center", ncols=len(labels), frameon=False, bbox_to_anchor=(0.5, 1.08))
        figure.tight_layout()
        figure.savefig(out / f"{name}.png", dpi=110, bbox_inches="tight")
        plt.close(figure)

    def line(axis, x, bands, color, label, marker="o"):
        mean, half = np.array([band[0] for band in bands]), np.array([band[1] or 0 for band in bands])
        axis.plot(x, mean, color=color, marker=marker, label=label)
        axis.fill_between(x, mean - half, mean + half, color=color, alpha=0.18, lw=0)

    def level(axis, band, color, label):
        axis.axhline(band[0], color=color, ls="--", label=label)
        axis.axhspan(band[0] - (band[1] or 0), band[0] + (band[1] or 0), color=color, alpha=0.1, lw=0)

    def against_ratio(axis, task, scores):
        there = [name for name in ratios if name in scores.values]
        line(axis, [int(name[3:]) for name in there], [scores.mean(name) for name in there], BLUE, "MLM")
        if "clm" in scores.values:
            level(axis, scores.mean("clm"), ORANGE, "CLM")

    def against_steps(axis, task, scores):
        two = [(steps, f"clm50-{steps}" if steps != b.steps[-1] else "clm50") for steps in b.steps]
        for names, color, label, marker in (([(steps, clm) for steps, clm, _ in along], ORANGE, "CLM", "s"),
                                            ([(steps, mlm) for steps, _, mlm in along], BLUE, "MLM 40 %", "o"), (two, GREEN, "50 % CLM, then MLM", "^")):
            there = [(steps, name) for steps, name in names if name in scores.values]
            if there:
                line(axis, [steps for steps, _ in there], [scores.mean(name) for _, name in there], color, label, marker)

    def against_split(axis, task, scores):
        there = [(share, name) for share, name in [(0, "mlm40"), *((int(name[3:]), name) for name in splits), (100, "clm")] if name in scores.values]
        line(axis, [share for share, _ in there], [scores.mean(name) for _, name in there], GREEN, "CLM, then MLM")
        if "decay-mlm40" in scores.values:
            mean, half = scores.mean("decay-mlm40")
            axis.errorbar([100 * (1 - b.decay / b.steps[-1])], [mean], [half or 0], color=PINK, marker="D", capsize=3, ls="", label="MLM in the decay only")
        if "auto" in scores.values and switches:
            mean, half = scores.mean("auto")
            axis.errorbar([100 * np.mean(switches) / b.steps[-1]], [mean], [half or 0], color="black", marker="*", ms=10, capsize=3, ls="", label="auto")

    def against_rate(axis, task, scores):
        for name, color, label, marker in (("clm", ORANGE, "CLM", "s"), ("mlm40", BLUE, "MLM 40 %", "o"), (splits[0], GREEN, f"{splits[0][3:]} % CLM, then MLM", "^")):
            if name in by_rate[task]:
                rates = list(by_rate[task][name])
                at = [Scores({other: values[rate] for other, values in by_rate[task].items()}).mean(name) for rate in rates]
                line(axis, rates, at, color, label, marker)

    panels("ratio", "mask ratio, %", against_ratio)
    panels("steps", "steps of pretraining", against_steps)
    panels("split", "share of CLM in the steps, %", against_split)
    panels("rate", "highest fine-tuning rate", against_rate, xscale="log")
    print(f"plots: {out}/ratio.png, steps.png, split.png, rate.png")


# ---------------------------------------------------------------------------------------------------------------------------------
# the command


def print_plan(b, out):
    """What would be run: each model with its tokens, FLOPs and GPU hours, and the commands."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # | head
    vocabulary = dataset_folder(b.dataset) / "bpe.json"
    vocabulary = load_tokenizer(vocabulary).vocab_size if vocabulary.exists() else 50304  # GPT-2's
    settings = argparse.Namespace(**parse(Settings, b.train.split()))
    row, tokens = getattr(settings, "block_size", Settings.block_size) or 128, settings.tokens_per_iter
    context = row * 2 / 3 if "random" in b.train else row  # keys a token sees in both directions: of a row cut at a uniform place, or at most
    hours = lambda flops: flops / (MFU * PEAK_FLOPS["H100"]) / 3600
    figures = lambda tokens, flops, hours: " ".join(f"{f'{x:,.0f}' if x >= 100 else f'{x:.3g}':>10}" for x in (tokens / 1e6, flops / 1e15, hours))
    print(f"{'model':28} {'steps':>7}  {'begins with':28} {'M tokens':>10} {'PFLOPs':>10} {'GPU hours':>10}")
    total, alone, disk = np.zeros(3), np.zeros(3), 0
    for m in models(b):
        config = Config(vocab_size=vocabulary, **SIZES[m.size])
        clm, mlm = flops_per_token(config, context / 2, 1), flops_per_token(config, context, m.ratio)
        flops = m.steps * tokens * (mlm if m.objective == "mlm" else clm)
        total += m.steps * tokens, flops, hours(flops)
        share = 0 if not m.start or m.start[1] is None else m.start[1]  # steps of the other model
        before = clm if m.start and m.start[0].endswith("clm") else mlm
        flops_alone = flops + share * tokens * before
        alone += (m.steps + share) * tokens, flops_alone, hours(flops_alone)
        flags = train_flags(b, m, 0, out)
        kept = m.steps // int(flags[flags.index("--save_interval") + 1]) if "--save_interval" in flags else 0
        disk += (kept + 2) * 12 * sum(count_parameters(config))  # last.pt, best.pt and step_N.pt: weights and two moments in fp32
        begins = "random weights" if not m.start else f"{m.start[0]}, step {m.start[1]:,}" if m.start[1] else f"{m.start[0]}, finished"
        print(f"{m.size + ' ' + m.name:28} {m.steps:7,}  {begins:28} {figures(m.steps * tokens, flops, hours(flops))}")
    print(f"{f'{len(models(b))} models, shared beginnings trained once':66} {figures(*total)}")
    print(f"{'the same, each from its own beginning':66} {figures(*alone)}")
    n, rates, plural = len(models(b)), len(b.rates.split(",")), lambda n, what: f"{n:,} {what}{'s' * (n != 1)}"
    print(f"""
x {plural(b.seeds, "pretraining seed")}; then {plural(n * len(b.tasks) * rates * b.tune_seeds * b.seeds, "fine-tuning run")}: {n} models x {plural(len(b.tasks), "task")} x {plural(rates, "rate")} x {plural(b.seeds * b.tune_seeds, "seed")}.
FLOPs: flops_per_token of model.py, {vocabulary:,} ids, {context:,.0f} keys a token. Hours: of an H100 at {MFU:.0%} of its {PEAK_FLOPS["H100"] / 1e12:.0f} TFLOP/s in bf16, assumed, not measured.
Checkpoints: {disk / 1e9:,.0f} GB a pretraining seed; a step_N.pt may go once the runs that begin with it have begun.
""")
    prefix = "torchrun --nproc_per_node=8 " if b.name == "paper" else "python "
    for cell in cells(b, out):
        print(prefix + shlex.join(map(str, cell.command)))


def prepared(b):
    """Makes what the default data and tasks need, once; other data must be there."""
    for name, file, flag in [(b.dataset, "train.bin", "--dataset"), *((task, "train.*", "--tasks") for task in b.tasks)]:
        folder, recipe = dataset_folder(name), ROOT / "data" / name / "prepare.py"
        if any(folder.glob(file)) or any(folder.glob("corpus.jsonl")) or any(folder.glob("collection.tsv")) or any(folder.glob("*_train_*.bin")):
            continue
        if not name.startswith("docs"):
            raise SystemExit(f"{flag} {name}: {folder} has no {file}" + (f"; python data/{name}/prepare.py makes it" if recipe.exists() else ""))
        subprocess.run([sys.executable, recipe], check=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", choices=BUDGETS, default="laptop")
    parser.add_argument("--plan", action="store_true", help="print what would be run")
    parser.add_argument("--dataset", help="instead of the budget's")
    parser.add_argument("--tasks", nargs="+", help="instead of the budget's, each with its flags: --tasks sst2 'squad --max_iters 200'")
    parser.add_argument("--rates", help="of fine-tuning, instead of the budget's")
    parser.add_argument("--seeds", type=int, help="of pretraining, instead of the budget's")
    parser.add_argument("--tune_seeds", type=int, help="of fine-tuning, for each of these")
    parser.add_argument("--jobs", type=int, help="cells at a time (default: one a core, with GPUs at most eight on each)")
    parser.add_argument("--out_dir", type=Path, help="default: out/study/BUDGET")
    parser.add_argument("--check", metavar="CELL", help="run this cell again and compare")
    parser.add_argument("--report", metavar="DIR", type=Path, help="write the report again, from DIR/results.jsonl and DIR/study.json")
    args = parser.parse_args()
    if args.report:
        if not (args.report / "study.json").exists():
            raise SystemExit(f"--report {args.report}: no study.json there; give the folder of a study")
        saved = json.loads((args.report / "study.json").read_text())
        return write_report(Budget(**saved["budget"]), args.report, saved["command"])

    given = {name: getattr(args, name) for name in ("dataset", "rates", "seeds", "tune_seeds") if getattr(args, name) is not None}
    if args.tasks:
        given["tasks"] = {name: flags for name, _, flags in (task.partition(" ") for task in args.tasks)}
    b = dataclasses.replace(BUDGETS[args.budget], name=args.budget, **given)
    for name in ("seeds", "tune_seeds"):
        if getattr(b, name) < 1:
            raise SystemExit(f"--{name} {getattr(b, name)}: at least 1")
    out = (args.out_dir or ROOT / "out/study" / b.name).resolve()
    if args.plan:
        return print_plan(b, args.out_dir or Path("out/study") / b.name)
    if b.name == "paper":
        raise SystemExit("--budget paper: 38 models are more than one machine runs; --plan prints their commands, for a scheduler of your own")
    cores, gpus = len(os.sched_getaffinity(0)), torch.cuda.device_count()
    jobs = args.jobs or min(cores, 8 * gpus if gpus and "cpu" not in b.train else cores)
    if args.check:
        return check_again(b, out, args.check, jobs)
    prepared(b)
    study = {"budget": json.loads(json.dumps(dataclasses.asdict(b))), "command": "python bench/study.py " + shlex.join(sys.argv[1:])}
    out.mkdir(parents=True, exist_ok=True)
    if (out / "study.json").exists() and json.loads((out / "study.json").read_text())["budget"] != study["budget"]:
        raise SystemExit(f"{out}: holds a study of other settings ({out / 'study.json'}); take another --out_dir")
    if not (out / "study.json").exists():
        (out / "study.json").write_text(json.dumps(study, indent=1) + "\n")
    run(b, out, jobs)
    write_report(b, out, study["command"])


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit("stopped; the same command goes on") from None
