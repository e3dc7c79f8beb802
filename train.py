"""
Pretrains the model of model.py with MLM, CLM, or one after the other on the same weights.

    python train.py --objective mlm --mask_ratio 0.4                      one process: a CPU, or one GPU
    torchrun --nproc_per_node=8 train.py --size 210m --dataset mine       DDP: nccl on GPUs, gloo on CPUs
    python train.py --objective clm:0.25,mlm:0.75                         two phases on one clock

The file reads from top to bottom: settings and their checks, machine, data, what a person sees, the run. Flags are made from the settings.
A run writes OUT_DIR/metrics.jsonl, last.pt (the newest weights) and best.pt (the lowest validation loss of the last objective).
"""
import argparse, contextlib, dataclasses, difflib, fcntl, gc, importlib.util, json, math, os, re, shutil, signal, sys, time, warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from tqdm import tqdm

from data.batches import MIX, Mixture, count_windows, make_batch, prefetch, stream_key
from data.prepare import dataset_folder, read_lines
from data.tokenizer import load_tokenizer
from data.tokens import open_split
from model import (SIZES, Config, Transformer, count_parameters, flops_per_token, from_checkpoint, load_checkpoint, save_checkpoint, score,
                   training_bytes)

# ---------------------------------------------------------------------------------------------------------------------------------
# settings


def setting(default, text, kind=None):
    return dataclasses.field(default=default, metadata={"help": text, "kind": kind or type(default)})


@dataclass
class Settings:
    objective: str = setting("mlm", "mlm, clm, phases with their shares of max_iters, as in clm:0.25,mlm:0.75, or auto: CLM, then MLM from where that learns faster")
    mask_ratio: float = setting(0.4, "share of a row's ordinary tokens that MLM predicts")
    mask_split: str = setting("1.0,0,0", "shares of these that become <|mask|>, become a random token, stay as they are")
    packing: str = setting("documents", "documents: a token sees its own document; random: rows are cut in two at random, a piece sees all of itself")
    size: str = setting("mini", "model: " + ", ".join(SIZES))
    tie_embeddings: bool = setting(None, "the output head is the embedding matrix (default: the size's)", bool)
    dropout: float = setting(0.0, "share of units dropped")
    dataset: str = setting("docstrings", "a folder under data/ (or any path) with train.bin, val.bin and bpe.json; or several by weight, as in a:0.7,b:0.3")
    batch_size: int = setting(None, "rows of a micro-batch on one process (default: what fits tokens_per_iter, at most 32)", int)
    block_size: int = setting(None, "tokens of a row (default: 128 on a CPU, 512 on a GPU)", int)
    tokens_per_iter: int = setting(None, "tokens of a step, all processes and micro-batches (default: about 4,096 on a CPU, 65,536 on a GPU)", int)
    max_iters: int = setting(None, "optimizer steps (default: 1,400 on a CPU, 2,000 on a GPU)", int)
    learning_rate: float = setting(None, "rate of the plateau (default: 1.5e-3 for micro and mini, 5e-4 for the others)", float)
    warmup_iters: int = setting(None, "steps of linear warm-up (default: 5%% of max_iters, at most 2,000)", int)
    decay_iters: int = setting(None, "steps of linear decay at the end (default: 25%% of max_iters, at most 2,000)", int)
    weight_decay: float = setting(0.1, "AdamW's, on all parameters")
    beta1: float = setting(0.9, "AdamW's")
    beta2: float = setting(0.95, "AdamW's")
    adam_eps: float = setting(1e-5, "AdamW's")
    grad_clip: float = setting(1.0, "greatest gradient norm; 0: no clipping")
    eval_interval: int = setting(None, "steps between evaluations, each with a last.pt (default: a tenth of max_iters, from 10 to 1,000)", int)
    eval_tokens: int = setting(65536, "validation tokens an evaluation reads; 0: all")
    save_interval: int = setting(0, "steps between checkpoints that are kept, step_N.pt, from step 0 on; 0: none")
    log_interval: int = setting(10, "steps between lines of metrics.jsonl")
    out_dir: str = setting(None, "folder of the run (default: out/ and the objective's name, numbered where that is taken)", str)
    init_from: str = setting("scratch", "scratch; resume: go on with the run in out_dir; PATH or hf:DIR (a Hugging Face folder): a new run from these weights")
    init_optimizer: bool = setting(False, "with --init_from PATH: take AdamW's moments along")
    device: str = setting("auto", "auto, cpu, cuda or mps")
    dtype: str = setting("auto", "of matrix products: auto, float32 or bfloat16")
    compile: bool = setting(None, "torch.compile (default: yes on an NVIDIA or AMD GPU)", bool)
    attention: str = setting("auto", "triton (kernels/attention.py), sdpa (PyTorch's), or auto: triton where it can serve, on a GPU")
    seed: int = setting(1337, "of the weights, the order of the data and the masks")


# What a resumed run may change: where and how it runs, what it reports, and how long it goes on.
FREE_AT_RESUME = {"dataset", "init_optimizer", "batch_size", "max_iters", "warmup_iters", "decay_iters", "eval_interval", "save_interval",
                  "log_interval", "out_dir", "init_from", "device", "dtype", "compile", "attention"}


def parse(settings, argv, about=__doc__):
    """Command line -> {name: value} of the flags of this dataclass that were given."""
    def whole(text):
        value = int(text) if text.lstrip("+-").isdigit() else float(text)
        if value != int(value):
            raise ValueError
        return int(value)

    truth = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
    kinds = {int: (whole, "a whole number"), float: (float, "a number"), bool: (lambda text: truth[text.lower()], "true or false"), str: (str, "text")}

    class Parser(argparse.ArgumentParser):
        def error(self, message):
            raise SystemExit(message)

    parser = Parser(description=about, allow_abbrev=False, argument_default=argparse.SUPPRESS, formatter_class=argparse.RawDescriptionHelpFormatter)
    fields = {field.name: field for field in dataclasses.fields(settings)}
    for name, field in fields.items():
        default = "" if field.default is None else f" (default: {field.default})"
        kind = field.metadata["kind"]
        more = dict(nargs="?", const="true", metavar="true|false") if kind is bool else dict(metavar=kind.__name__)
        parser.add_argument(f"--{name}", help=field.metadata["help"] + default, **more)
    given, unknown = parser.parse_known_args(argv)
    if unknown:
        near = difflib.get_close_matches(unknown[0].split("=")[0].lstrip("-"), fields, 1, 0.6)
        raise SystemExit(f"{unknown[0]}: no such setting" + (f"; did you mean --{near[0]}?" if near else "; --help lists them"))
    values = {}
    for name, text in vars(given).items():
        convert, wanted = kinds[fields[name].metadata["kind"]]
        try:
            values[name] = convert(text)
        except (ValueError, KeyError, OverflowError):
            raise SystemExit(f"--{name} {text}: give {wanted}") from None
    return values


PROBES = 20  # of --objective auto


def names_of(objective):
    """"clm:0.25,mlm:0.75" -> ["clm", "mlm"]."""
    return ["clm", "mlm"] if objective == "auto" else [name for name, _, _ in phases_of(objective, 10**9)]


def phases_of(objective, max_iters, switch=None):
    """"clm:0.25,mlm:0.75" -> [("clm", first iteration, iteration after the last), ("mlm", ...)]. "auto": CLM in which the last fifth of each
    twentieth of the run is a probe with MLM, up to the iteration `switch` (None: it is not known yet), then MLM."""
    if objective == "auto":
        every = max_iters // PROBES
        if every < 5:
            raise SystemExit(f"--objective auto: needs --max_iters of {5 * PROBES} or more, not {max_iters}")
        last = max_iters if switch is None else switch
        parts = [part for at in range(every, last + 1, every) for part in (("clm", at - every, at - every // 5), ("mlm", at - every // 5, at))]
        return parts + [("mlm", last, max_iters)]
    parts = [part.partition(":") for part in objective.split(",")]
    names = [name for name, _, _ in parts]
    try:
        shares = [float(share) if colon else 1.0 for _, colon, share in parts]
    except ValueError:
        shares = [math.nan]
    if not set(names) <= {"mlm", "clm"} or not all(share > 0 for share in shares):
        raise SystemExit(f"--objective {objective}: give mlm, clm, auto, or phases with shares above 0, as in clm:0.25,mlm:0.75")
    if abs(sum(shares) - 1) > 1e-6:
        raise SystemExit(f"--objective {objective}: the shares add up to {sum(shares):g}, not to 1")
    bounds = [round(max_iters * sum(shares[:i])) for i in range(len(shares))] + [max_iters]
    for name, first, after in zip(names, bounds, bounds[1:]):
        if after <= first:
            raise SystemExit(f"--objective {objective}: the phase {name} gets no step of --max_iters {max_iters}; "
                             f"give more steps or a larger share")
    return list(zip(names, bounds, bounds[1:]))


def objective_at(iteration, phases):
    return next(name for name, first, after in phases if iteration < after)


def switch_of(probes, s):
    """The iteration from which --objective auto trains with MLM alone, or None while that is open. probes: (iteration, CLM loss, MLM loss) on validation
    data after each probe. It is the first at which MLM's loss has fallen by more than CLM's since the probe before; at the latest the decay's first."""
    for (_, clm_before, mlm_before), (at, clm, mlm) in zip([(0, math.inf, -math.inf), *probes], probes):
        if mlm_before - mlm > clm_before - clm or at + s.max_iters // PROBES > s.max_iters - s.decay_iters:
            return at
    return None


def learning_rate_at(iteration, s):
    """Warm-up, plateau, decay (WSD, arXiv 2404.06395): the rate of the step with this number, counted from 0."""
    up = (iteration + 1) / s.warmup_iters if s.warmup_iters else 1
    down = (s.max_iters - iteration) / s.decay_iters if s.decay_iters else 1
    return s.learning_rate * min(1, up, down)


def adapt(s, device, world):
    """Fills in the settings whose defaults depend on the machine, the model and the length of the run."""
    gpu = device.type != "cpu"
    default = lambda value, other: other if value is None else value
    s.block_size = default(s.block_size, 512 if gpu else 128)
    row_step = max(1, s.block_size * world * (s.batch_size or 1))
    s.tokens_per_iter = default(s.tokens_per_iter, math.ceil((65536 if gpu else 4096) / row_step) * row_step)
    rows = s.tokens_per_iter // max(1, s.block_size * world)
    s.batch_size = default(s.batch_size, next((n for n in range(min(32, rows), 1, -1) if rows % n == 0), 1))
    s.max_iters = default(s.max_iters, 2000 if gpu else 1400)
    s.learning_rate = default(s.learning_rate, 1.5e-3 if s.size in ("micro", "mini") else 5e-4)
    s.warmup_iters = default(s.warmup_iters, max(0, min(2000, s.max_iters // 20, s.max_iters - (s.decay_iters or 0))))
    s.decay_iters = default(s.decay_iters, max(0, min(2000, s.max_iters // 4, s.max_iters - s.warmup_iters)))
    s.eval_interval = default(s.eval_interval, max(10, min(1000, s.max_iters // 10)))


def check(s, world):
    """Impossible settings end here, in one line, before any work. Returns mask_split as numbers."""
    def need(good, name, why):
        if not good:
            raise SystemExit(f"--{name} {getattr(s, name)}: {why}")

    for name, choices in {"size": SIZES if s.init_from == "scratch" else (*SIZES, "hf"), "packing": ("documents", "random"), "dtype": ("auto", "float32", "bfloat16"),
                          "attention": ("auto", "sdpa", "triton")}.items():
        need(getattr(s, name) in choices, name, f"give {', '.join(choices)}")
    for name in ("batch_size", "block_size", "tokens_per_iter", "max_iters", "eval_interval", "log_interval"):
        need(getattr(s, name) >= 1, name, "at least 1")
    for name in ("warmup_iters", "decay_iters", "save_interval", "eval_tokens", "weight_decay", "grad_clip", "seed"):
        need(0 <= getattr(s, name) < 2**62, name, "not below 0, and not beyond 4e18")
    for name in ("learning_rate", "adam_eps"):
        need(0 < getattr(s, name) < math.inf, name, "give a number above 0")
    for name in ("dropout", "beta1", "beta2"):
        need(0 <= getattr(s, name) < 1, name, "give a number from 0 up to but not including 1")
    need(not s.init_optimizer or s.init_from not in ("scratch", "resume"), "init_optimizer", "goes with --init_from PATH")
    need(0 < s.mask_ratio < 1, "mask_ratio", "give a share between 0 and 1")
    need(round(s.mask_ratio * s.block_size) >= 1, "mask_ratio", f"chooses no token of a row of --block_size {s.block_size}")
    try:
        split = tuple(float(share) for share in s.mask_split.split(","))
    except ValueError:
        split = ()
    need(len(split) == 3 and min(split) >= 0 and abs(sum(split) - 1) < 1e-6, "mask_split",
         "give three shares that add up to 1, as in 0.8,0.1,0.1")
    need(s.warmup_iters + s.decay_iters <= s.max_iters, "warmup_iters",
         f"with --decay_iters {s.decay_iters} more than --max_iters {s.max_iters}")
    need(s.block_size <= Config.block_size or s.init_from != "scratch", "block_size", f"the models read at most {Config.block_size:,} tokens")
    step = s.batch_size * s.block_size * world
    nearest = max(step, s.tokens_per_iter // step * step)
    need(s.tokens_per_iter % step == 0, "tokens_per_iter",
         f"no multiple of {step} (batch_size {s.batch_size} x block_size {s.block_size} x {world} process{'es' * (world > 1)}); "
         f"the nearest are {nearest} and {nearest + step}")
    return split


# ---------------------------------------------------------------------------------------------------------------------------------
# machine

PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "H800": 989e12, "B200": 2250e12, "A100": 312e12, "A800": 312e12, "L40S": 362e12,
              "L4": 121e12, "A10G": 70e12, "A10": 125e12, "3090": 71e12, "4090": 165e12, "5090": 210e12}  # dense bf16, data sheets


def peak_flops(device, dtype):
    """What the card could do at most, for MFU, or None where that is not known."""
    words = re.split(r"[\s-]+", torch.cuda.get_device_name(device)) if device.type == "cuda" and dtype == torch.bfloat16 else []
    if {"Laptop", "NVL", "PCIe"} & set(words):  # slower cards of the same name
        return None
    return next((PEAK_FLOPS[word] for word in words if word in PEAK_FLOPS), None)


def pick_device(s):
    kind = s.device if s.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    there = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if kind not in there:
        raise SystemExit(f"--device {kind}: give auto, cpu, cuda or mps")
    if not there[kind]:
        raise SystemExit(f"--device {kind}: this machine, or this build of PyTorch ({torch.__version__}), has none")
    if kind != "cuda":
        return torch.device(kind)
    local_rank, processes = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if processes > torch.cuda.device_count():
        raise SystemExit(f"{processes} processes, but {torch.cuda.device_count()} GPUs on this machine; lower --nproc_per_node")
    torch.cuda.set_device(local_rank)
    torch.set_float32_matmul_precision("high")  # what stays fp32 may use tf32
    return torch.device(kind, local_rank)


def pick_dtype(s, device):
    able = {"cuda": lambda: torch.cuda.get_device_capability() >= (8, 0) or bool(torch.version.hip),
            "cpu": getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False), "mps": lambda: False}[device.type]()
    if s.dtype == "bfloat16" and not able and device.type == "cuda":
        raise SystemExit("--dtype bfloat16: this GPU has no bf16 matrix units; leave --dtype auto")
    return torch.bfloat16 if s.dtype == "bfloat16" or s.dtype == "auto" and able else torch.float32


def pick_compile(s, device):
    compiler = any(shutil.which(name) for name in (os.environ.get("CXX", "c++"), "g++", "clang++"))
    able = compiler and (device.type != "cuda" or importlib.util.find_spec("triton") is not None)
    if s.compile and not able:
        raise SystemExit(f"--compile true: torch.compile needs {'the package triton' if compiler else 'a C++ compiler'}, and there is none here")
    return able and device.type == "cuda" if s.compile is None else s.compile


def pick_attention(s, device, dtype, config):
    """(whether our kernel serves, what the plan says of it)."""
    reason = "the package triton is not installed"
    if s.attention == "sdpa" or s.attention == "auto" and device.type != "cuda":
        return False, "attention by PyTorch"
    if importlib.util.find_spec("triton"):
        from kernels.attention import INTERPRETED, unsupported
        reason = unsupported(device, dtype, config.head_dim)
        if INTERPRETED and dtype == torch.bfloat16:
            reason = "Triton's interpreter gets products of bfloat16 wrong; give --dtype float32"
    if s.attention == "triton" and reason:
        raise SystemExit(f"--attention triton: {reason}; leave --attention auto")
    return not reason, f"attention by PyTorch ({reason})" if reason else "attention by our kernel"


class Team:
    """The processes of this run, as torchrun made them; a single process needs no torchrun."""

    def __init__(self):
        self.rank, self.world, self.local_rank = (int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0)))
        self.first = self.rank == 0
        if self.world > 1:  # gloo carries what lives on the CPU, so that no device waits for it
            dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")

    def sum(self, *numbers):
        """The sums over all processes of a few CPU numbers."""
        if self.world == 1:
            return numbers
        total = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(total)
        return total.tolist()

    def share(self, make):
        """Runs make() on the first process. What it returns, all return; where it ends with an error, all end with it."""
        box = [None, None]
        if self.first:
            try:
                box[0] = make()
            except SystemExit as end:
                box[1] = end.code
            except OSError as problem:
                box[1] = str(problem)
        if self.world > 1:
            dist.broadcast_object_list(box, 0, device=torch.device("cpu"))
        if box[1] is not None:
            raise SystemExit(box[1])
        return box[0]


# ---------------------------------------------------------------------------------------------------------------------------------
# data


def sources_of(dataset):
    """"a:0.7,b:0.3" -> (["a", "b"], [0.7, 0.3]); "a" -> (["a"], [1.0])."""
    parts = [part.rpartition(":") if ":" in part or "," in dataset else (part, ":", "1") for part in dataset.split(",")]
    names = [name for name, _, _ in parts]
    try:
        weights = [float(weight) for _, _, weight in parts]
    except ValueError:
        weights = [math.nan]
    if not all(names) or len(set(names)) < len(names) or not all(1 / MIX <= weight <= 1 and abs(weight * MIX - round(weight * MIX)) < 1e-6 for weight in weights):
        raise SystemExit(f"--dataset {dataset}: give a name, or different names with weights in thousandths, as in a:0.7,b:0.3")
    if abs(sum(weights) - 1) > 1e-6:
        raise SystemExit(f"--dataset {dataset}: the weights add up to {sum(weights):g}, not to 1")
    return names, weights


def open_dataset(s, team):
    """(training tokens, validation tokens, tokenizer); tokens are a TokenFile, a Corpus of many files, or a Mixture of several datasets."""
    names, weights = sources_of(s.dataset)
    opened = [open_source(name, s, team) for name in names]
    if len(names) == 1:
        return opened[0]
    train, val = (Mixture(names, weights, [splits[i] for splits in opened]) for i in (0, 1))
    return train, val, opened[0][2]


def open_source(dataset, s, team):
    folder = dataset_folder(dataset)
    if dataset == "docstrings" and not team.share((folder / "train.bin").exists):
        from data.docstrings.prepare import main as prepare
        if team.first:
            print(f"{folder} has no train.bin yet: making it from the documentation of this Python installation", flush=True)
        team.share(prepare)
    tokenizer = load_tokenizer(folder / "bpe.json") if (folder / "bpe.json").exists() else None
    train, val = (open_split(folder, split, tokenizer) for split in ("train", "val"))
    if tokenizer is None or not tokenizer.hash == train.tokenizer_hash == val.tokenizer_hash:
        raise SystemExit(f"{folder}: train.bin, val.bin and bpe.json are not of one tokenizer; delete them and prepare the data again")
    for file in (train, val):
        if file.n_tokens < s.block_size:
            raise SystemExit(f"{file.path}: {file.n_tokens:,} tokens, fewer than one row of --block_size {s.block_size}; give more text or shorter rows")
    return train, val, tokenizer


def training_batches(s, split, tokens, device, team, phases, first_iter, first_row):
    """A list of this process's micro-batches for each iteration from first_iter on, made and moved ahead in a thread."""
    rows_per_iter = s.tokens_per_iter // s.block_size

    def make(iteration):
        rows = first_row + iteration * rows_per_iter + np.arange(rows_per_iter).reshape(-1, team.world, s.batch_size)[:, team.rank]
        return [make_batch(tokens, micro, s.block_size, objective_at(iteration, phases), s.mask_ratio, split, s.packing, s.seed).to(device) for micro in rows]

    return prefetch(make, range(first_iter, s.max_iters))


def evaluate(model, head_weight, s, split, tokens, device, autocast, team, objectives):
    """{val_loss_clm, val_loss_mlm, val_accuracy_mlm}: means over fixed windows with fixed masks, each target once, for any number of processes.
    Of a mixture: of each source, as val_loss_mlm/NAME, and their means by weight."""
    if isinstance(tokens, Mixture):
        each = [evaluate(model, head_weight, s, split, source, device, autocast, team, objectives) for source in tokens.sources]
        means = {key: sum(weight * results[key] for weight, results in zip(tokens.weights, each)) for key in each[0]}
        return means | {f"{key}/{name}": value for name, results in zip(tokens.names, each) for key, value in results.items()}
    n = count_windows(tokens, s.block_size)
    n = min(n, math.ceil(s.eval_tokens / s.block_size)) if s.eval_tokens else n
    step = team.world * s.batch_size
    rows = np.full(math.ceil(n / step) * step, -1)  # -1 is a row of padding: all batches have one shape
    rows[:n] = np.arange(n)
    rows = rows.reshape(-1, team.world, s.batch_size)[:, team.rank]
    results = {}
    for objective in dict.fromkeys(objectives):
        loss = right = count = 0
        for batch in prefetch(lambda i: make_batch(tokens, rows[i], s.block_size, objective, s.mask_ratio, split, s.packing, seed=0).to(device), range(len(rows))):
            with torch.no_grad(), autocast():
                hidden = model(batch.ids, batch.cu_seqlens, batch.max_seqlen, objective == "clm").flatten(0, 1)
                part, hits = score(hidden if batch.places is None else hidden[batch.places], head_weight, batch.targets)
            loss = loss + (part if device.type == "mps" else part.double())  # which has no float64
            right, count = right + hits, count + batch.n_targets
        loss, right, count = team.sum(float(loss), int(right), count)
        results[f"val_loss_{objective}"] = loss / count if count else math.nan
        if objective == "mlm":
            results["val_accuracy_mlm"] = right / count if count else math.nan
    return results


# ---------------------------------------------------------------------------------------------------------------------------------
# what a person sees


def print_plan(s, team, device, dtype, attention, compiled, train, val, config, phases, first_row, out_dir):
    blocks, embedding, head = count_parameters(config)
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type}, {torch.get_num_threads()} threads"
    micro = s.batch_size * s.block_size
    scored = 1 if any(name == "clm" for name, _, _ in phases) else s.mask_ratio
    tokens = s.max_iters * s.tokens_per_iter
    mixed = "".join(f"\n        {weight:.1%} of the rows from {name}, {source.n_tokens:,} tokens, {weight * tokens / source.n_tokens:.2g} times"
                    for name, weight, source in zip(train.names, train.weights, train.sources)) if isinstance(train, Mixture) else ""
    print(f"""device  {machine}, {team.world} process{'es' * (team.world > 1)}; {str(dtype)[6:]}; {attention}; {'torch.compile' if compiled else 'not compiled'}
model   {s.size}, {(blocks + embedding + head) / 1e6:.1f}M parameters: blocks {blocks / 1e6:.1f}M, embedding {embedding / 1e6:.1f}M, head {f'{head / 1e6:.1f}M' if head else 'tied to it'}
data    {s.dataset}, {train.n_tokens:,} tokens to train on, {val.n_tokens:,} to validate on; vocabulary {train.vocab_size:,} ({train.tokenizer}){mixed}
step    {s.tokens_per_iter:,} tokens = {team.world} x {s.tokens_per_iter // micro // team.world} micro-batches of {s.batch_size} rows of {s.block_size}; at least {training_bytes(config, micro, s.block_size, scored, dtype.itemsize) / 1e9:.1f} GB a process
run     {s.max_iters:,} steps, {tokens / 1e6:,.1f}M tokens, {tokens / train.n_tokens:.2g} times the data{f' from row {first_row:,} on' if first_row else ''}; rate {s.learning_rate:g}, {s.warmup_iters} steps up, {s.decay_iters} down
phases  {', '.join(f"{name} {first:,} - {after:,}{f' (mask ratio {s.mask_ratio:g})' if name == 'mlm' else ''}" for name, first, after in phases) if s.objective != "auto" else f"clm with a probe of mlm every {s.max_iters // PROBES} steps, then mlm (mask ratio {s.mask_ratio:g})"}
output  {out_dir}""", flush=True)


@torch.no_grad()
def show_guesses(model, tokenizer, val, causal, device, autocast, sentences=4, words=3):
    """Held-out sentences in which a few words are hidden, and what the model takes them for."""
    ids = (val.sources[0] if isinstance(val, Mixture) else val).read(0, 500_000).astype(np.int64)
    ends = np.flatnonzero(ids == val.eos)
    rng = np.random.default_rng(0)
    shown = 0
    for i in rng.permutation(max(0, len(ends) - 1)):
        if shown == sentences:
            break
        document = ids[ends[i] + 1:ends[i + 1]][:48]
        pieces = [tokenizer.decode([token]) for token in document]
        whole = [n for n, (piece, after) in enumerate(zip(pieces, pieces[1:] + [" "]))
                 if n and len(piece) > 4 and piece[0] == " " and piece[1:].isalpha() and not after[:1].isalpha()]
        if len(document) < 16 or len(whole) < 2 * words:
            continue
        if shown == 0:
            print(f"held-out sentences; what the model puts at the numbered places, from {'the words before' if causal else 'the words on both sides'}:")
        shown += 1
        places = np.sort(rng.choice(whole, words, replace=False))
        hidden = document.copy()
        if not causal:
            hidden[places] = tokenizer.mask
        with autocast():
            states = model(torch.from_numpy(hidden)[None].to(device), causal=causal)[0, places - causal]
            chances = (states @ model.head_weight[tokenizer.first:tokenizer.first + tokenizer.n_ordinary].t()).float().softmax(-1)
        for n, place in enumerate(places):
            pieces[place] = f" ({n + 1})"
        print('  "' + re.sub(r"[\x00-\x1f\x7f]+", " ", "".join(pieces)) + '"')
        for n, (place, row) in enumerate(zip(places, chances)):
            top = row.topk(4)
            guesses = ", ".join(f"{tokenizer.decode([tokenizer.first + i]).strip()!r} {chance:.0%}"
                                for chance, i in zip(top.values.tolist(), top.indices.tolist()))
            print(f"     ({n + 1}) {tokenizer.decode(document[place:place + 1]).strip():14} guesses: {guesses}")
    if shown == 0:
        print("no held-out sentence of words between spaces to show")


def plot(out_dir):
    """curves.png from metrics.jsonl, if matplotlib is there."""
    try:
        import matplotlib
    except ImportError:
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    lines = read_lines(out_dir / "metrics.jsonl")
    figure, axis = plt.subplots(figsize=(8, 5))
    for key, look in {"loss": dict(color="0.75", label="training loss"), "val_loss_clm": dict(marker="o"), "val_loss_mlm": dict(marker="o")}.items():
        points = [(line["iter"], line[key]) for line in lines if key in line]
        if points:
            axis.plot(*zip(*points), **{"label": key, **look})
    axis.set(xlabel="iteration", ylabel="nats a token", title=str(out_dir))
    axis.legend()
    figure.savefig(out_dir / "curves.png", dpi=120, bbox_inches="tight")
    plt.close(figure)
    print(f"curves: {out_dir / 'curves.png'}")


# ---------------------------------------------------------------------------------------------------------------------------------
# the run


def find_out_dir(s):
    """--out_dir; without it out/mlm, or out/mlm-2, ... where that is taken, and to resume the newest of these."""
    folder = Path(s.out_dir or "out/" + ("auto" if s.objective == "auto" else "-".join(names_of(s.objective))))
    taken = lambda path: any(path.glob("*.pt")) or locked(path / "metrics.jsonl")
    if s.out_dir is None:
        numbered = lambda n: folder if n == 1 else folder.with_name(f"{folder.name}-{n}")
        newest = max((n for n in range(1, 1000) if taken(numbered(n))), default=0)
        return numbered(max(1, newest) if s.init_from == "resume" else newest + 1)
    if s.init_from != "resume" and taken(folder):
        raise SystemExit(f"--out_dir {folder}: holds a run already; go on with it by --init_from resume, take another folder, "
                         f"or delete it")
    return folder


def lock(file):
    """Whether this process now holds the file alone; it does so until it ends."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:
        return False


def locked(path):
    """Whether a run that is alive writes this log."""
    if not path.exists():
        return False
    with open(path) as file:
        return not lock(file)


def starting_point(given, team):
    """(settings, folder of the run, checkpoint to go on from or None) from the flags that were given."""
    s = Settings(**given)
    out_dir = team.share(lambda: find_out_dir(s))
    if s.init_from == "scratch":
        return s, out_dir, None
    whole = ("model", "config", "tokenizer", "settings", "data", "iter", "tokens", "first_row", "best", "optimizer")
    if s.init_from == "resume":
        state = load_checkpoint(out_dir / "last.pt", whole)
        saved = state["settings"]
        s = Settings(**{**saved, **given, "init_optimizer": False})
        fixed = given.keys() - FREE_AT_RESUME | ({"max_iters"} if len(names_of(s.objective)) > 1 else set())
        for name in fixed & given.keys():
            if given[name] != saved[name]:
                raise SystemExit(f"--{name} {given[name]}: the run in {out_dir} has {saved[name]}; to change it, start a new run "
                                 f"from these weights with --init_from {out_dir / 'last.pt'}")
        if s.max_iters < state["iter"]:
            raise SystemExit(f"--max_iters {s.max_iters}: the run in {out_dir} is at iteration {state['iter']} already")
        if "batch_size" not in given and s.tokens_per_iter % (s.batch_size * s.block_size * team.world):
            s.batch_size = None  # it was written by another number of processes
        return s, out_dir, state
    state = load_checkpoint(s.init_from, whole if s.init_optimizer else whole[:-1])
    s.size = given.get("size", state["settings"]["size"])
    s.tie_embeddings = given.get("tie_embeddings", state["config"]["tie_embeddings"])
    for name, value in {**SIZES.get(s.size, {}), "tie_embeddings": s.tie_embeddings}.items():
        if state["config"][name] != value:
            raise SystemExit(f"--size {s.size} --tie_embeddings {s.tie_embeddings}: the weights of --init_from {s.init_from} have "
                             f"{name} {state['config'][name]}; leave these out")
    return s, out_dir, state


class Output:
    """The folder of a run: metrics.jsonl and the checkpoints. Only the first process writes; an error there ends all."""

    def __init__(self, folder, team):
        self.folder, self.team, self.log = folder, team, None
        self.path = folder / "metrics.jsonl"

    def entries(self):
        """The lines of the log as dicts."""
        return self.team.share(lambda: read_lines(self.path))

    def open(self, iteration, evaluates):
        """Begins to write. Of a log that is there, the lines go that a resumed run writes again."""
        lines = self.entries()
        done = lambda line: line["iter"] < iteration or line["iter"] == iteration and ("loss" in line or not evaluates)
        kept = [line for line in lines if done(line)]

        def begin():
            self.folder.mkdir(parents=True, exist_ok=True)
            self.log = open(self.path, "a", buffering=1)
            if not lock(self.log):
                raise SystemExit(f"--out_dir {self.folder}: another run is writing there; take another folder")
            if len(kept) < len(lines):
                print(f"{self.path}: {len(lines) - len(kept)} lines from iteration {iteration} on are dropped, since that part runs again")
            text = "".join(json.dumps(line) + "\n" for line in kept)
            if text != self.path.read_text():  # such lines, or one that was cut off
                part = self.folder / "metrics.tmp"
                part.write_text(text)
                new = open(part, "a", buffering=1)
                lock(new)
                os.replace(part, self.path)
                self.log = new
        self.team.share(begin)
        return kept

    def record(self, **entry):
        if self.team.first:
            try:
                self.log.write(json.dumps(entry) + "\n")
            except OSError as problem:
                raise SystemExit(f"{self.path}: {problem.strerror}; {self.folder / 'last.pt'} is intact") from None

    def save(self, make_state):
        """Writes make_state() as last.pt."""
        self.team.share(lambda: save_checkpoint(self.folder / "last.pt", make_state()))

    def keep(self, name):
        """Gives last.pt a second name, which stays when last.pt is replaced."""
        def link():
            part = self.folder / "kept.tmp"
            part.unlink(missing_ok=True)
            try:
                os.link(self.folder / "last.pt", part)
            except OSError:  # a file system without links
                shutil.copyfile(self.folder / "last.pt", part)
            os.replace(part, self.folder / name)
            part.unlink(missing_ok=True)  # a rename onto a name of the same file leaves both
        self.team.share(link)


def main(argv):
    given = parse(Settings, argv)
    team = Team()
    s, out_dir, state = starting_point(given, team)
    resumed = s.init_from == "resume"
    device = pick_device(s)
    adapt(s, device, team.world)
    split, probes = check(s, team.world), [tuple(probe) for probe in state.get("probes", [])] if resumed else []
    phases = phases_of(s.objective, s.max_iters, switch_of(probes, s))
    dtype, compiled = pick_dtype(s, device), pick_compile(s, device)
    autocast = lambda: torch.autocast(device.type, dtype, enabled=dtype != torch.float32)
    if s.size in SIZES:
        pick_attention(s, device, dtype, Config(**SIZES[s.size]))  # --attention triton that cannot be met ends here, before any data is made
    iteration = state["iter"] if resumed else 0
    output = Output(out_dir, team)
    goal = f"val_loss_{phases[-1][0]}"  # best.pt is its minimum
    if iteration == s.max_iters and any(goal in entry and entry["iter"] == iteration for entry in output.entries()):
        if team.first:
            print(f"{out_dir}: finished, at iteration {iteration:,} of {s.max_iters:,}; no step to take. To go on with a larger --max_iters, "
                  f"back at the rate of the plateau: --init_from resume; from a step_N.pt of the plateau: --init_from PATH")
        return

    # data
    train, val, tokenizer = open_dataset(s, team)
    data = {"tokenizer_hash": train.tokenizer_hash, "digest": train.digest, "val_digest": val.digest, "seed": s.seed, "block_size": s.block_size}
    first_row = 0
    if state:
        if state["data"]["tokenizer_hash"] != train.tokenizer_hash:
            raise SystemExit(f"--dataset {s.dataset}: its tokenizer ({train.tokenizer}) is not that of the checkpoint "
                             f"({state['tokenizer']['name']}); prepare the text with --tokenizer "
                             f"{s.init_from if s.init_from.startswith('hf:') else 'and the path of the bpe.json of its data'}")
        if resumed and state["data"] != data:
            raise SystemExit(f"--dataset {s.dataset}: not the text, or not the weights, that the run in {out_dir} began with")
        if state["data"] == data:  # the data goes on where it stood
            first_row = state["first_row"]
            if not resumed:
                first_row += state["iter"] * (state["settings"]["tokens_per_iter"] // s.block_size)
        elif state["data"]["digest"] == data["digest"] and team.first:
            print("the data begins anew, since --seed or --block_size is not that of the checkpoint")

    # model and optimizer
    torch.manual_seed(s.seed)
    if state:
        raw = from_checkpoint(state, dropout=s.dropout)
        if s.block_size > raw.config.block_size:
            raise SystemExit(f"--block_size {s.block_size}: the model of --init_from {s.init_from} reads at most {raw.config.block_size:,} tokens")
    else:
        tied = {} if s.tie_embeddings is None else {"tie_embeddings": s.tie_embeddings}
        raw = Transformer(Config(vocab_size=train.vocab_size, dropout=s.dropout, **SIZES[s.size] | tied))
    config = raw.to(device).config
    s.tie_embeddings = config.tie_embeddings
    raw.kernel, attention = pick_attention(s, device, dtype, config)
    optimizer = torch.optim.AdamW(raw.parameters(), s.learning_rate, (s.beta1, s.beta2), s.adam_eps, s.weight_decay, fused=True)
    if resumed or s.init_optimizer:
        optimizer.load_state_dict(state["optimizer"])
        optimizer.param_groups[0].update(betas=(s.beta1, s.beta2), eps=s.adam_eps, weight_decay=s.weight_decay)
    best, tokens_seen = (state["best"], state["tokens"]) if resumed else (math.inf, 0)
    del state
    model = network = torch.compile(raw) if compiled else raw
    if team.world > 1:
        warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated")  # its successor is not in PyTorch 2.11
        model = torch.nn.parallel.DistributedDataParallel(network, [device] if device.type == "cuda" else None,
                                                          gradient_as_bucket_view=True, broadcast_buffers=False)

    # records
    probes_here = lambda: s.objective == "auto" and iteration and iteration % (s.max_iters // PROBES) == 0 and switch_of(probes, s) is None
    evaluates = lambda: iteration % s.eval_interval == 0 or iteration == s.max_iters or probes_here()
    keeps = lambda: s.save_interval and iteration % s.save_interval == 0
    if team.first:
        print_plan(s, team, device, dtype, attention, compiled, train, val, config, phases, first_row, out_dir)
    log = output.open(iteration, evaluates())
    best = min([best] + [line[goal] for line in log if line.get(goal, math.inf) < math.inf])
    peak = peak_flops(device, dtype)
    bad_iteration = torch.full((), -1, device=device)  # whose gradient was not finite; read only where the device is waited for anyway
    bar = tqdm(total=s.max_iters, initial=iteration, unit="step", disable=not team.first, mininterval=0.5 if sys.stderr.isatty() else 30)

    def stop_if_diverged():
        if (at := int(bad_iteration)) >= 0:
            raise SystemExit(f"diverged: the gradient of iteration {at} is not finite; what is saved in {out_dir} is from before it. "
                             f"Lower --learning_rate {s.learning_rate:g}")

    def save():
        stop_if_diverged()
        output.save(lambda: {
            "model": raw.state_dict(), "config": dataclasses.asdict(config), "optimizer": optimizer.state_dict(),
            "settings": dataclasses.asdict(s), "tokenizer": tokenizer.to_dict(), "data": data, "first_row": first_row,
            "iter": iteration, "tokens": tokens_seen, "best": best, "probes": probes})

    signals = []

    def on_signal(number, _):  # the first one asks, a second one ends
        signals.append(number)
        signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)

    # the loop
    stream = training_batches(s, split, train, device, team, phases, iteration, first_row)
    begun, clock, timed_tokens = iteration, time.perf_counter(), 0
    while True:
        if (keeps() or evaluates()) and (iteration > begun or not resumed):
            save()  # before the evaluation: whatever happens there, the work is kept
        if keeps():
            output.keep(f"step_{iteration}.pt")
        if evaluates():
            raw.eval()
            results = evaluate(network, raw.head_weight, s, split, val, device, autocast, team, names_of(s.objective))
            raw.train()
            if results[goal] < best:  # never true of a NaN
                best = results[goal]
                output.keep("best.pt")
            if isinstance(train, Mixture) and iteration:  # of the rows that this run has drawn
                results |= {f"share/{name}": share for name, share in train.shares(first_row, iteration * s.tokens_per_iter // s.block_size, s.seed).items()}
            if probes_here():
                probes.append((iteration, results["val_loss_clm"], results["val_loss_mlm"]))
                if switch_of(probes, s) is not None:
                    results["switch"] = iteration
                    phases = phases_of(s.objective, s.max_iters, iteration)
                    stream.close()
                    stream = training_batches(s, split, train, device, team, phases, iteration, first_row)
            output.record(iter=iteration, **results)
            if team.first:
                shown = (f"{name} {value:.1%}" if "accuracy" in name or "share" in name else f"{name} {value:.4f}" if "loss" in name else f"{name} here"
                         for name, value in results.items())
                tqdm.write(f"iter {iteration:6,} | {' | '.join(shown)}")
            clock, timed_tokens = time.perf_counter(), 0
        if iteration == s.max_iters:
            break

        batches = next(stream)
        count = lambda name: sum(getattr(b, name) for b in batches)
        n_targets, n_tokens, n_pairs, stop = team.sum(count("n_targets"), count("n_tokens"), count("n_pairs"), len(signals))
        if stop:
            break
        if s.dropout:  # the same units after a resume, others on each process
            torch.manual_seed(int(stream_key(s.seed, iteration, team.rank)[0] >> 1))
        causal = objective_at(iteration, phases) == "clm"
        rate = optimizer.param_groups[0]["lr"] = learning_rate_at(iteration, s)
        loss_sum = torch.zeros((), device=device)
        for b in batches:
            with contextlib.nullcontext() if b is batches[-1] or team.world == 1 else model.no_sync():
                with autocast():
                    loss = model(b.ids, b.cu_seqlens, b.max_seqlen, causal, b.places, b.targets)
                # DDP takes the mean over processes: together the mean over all targets
                (loss * (team.world / max(n_targets, 1))).backward()
            loss_sum += loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(raw.parameters(), s.grad_clip or math.inf)
        bad_iteration = torch.where((bad_iteration < 0) & ~norm.isfinite(), iteration + 1, bad_iteration)
        optimizer.step()
        optimizer.zero_grad()
        iteration += 1
        tokens_seen += int(n_tokens)
        timed_tokens += int(n_tokens)
        if iteration % s.log_interval == 0 or iteration == s.max_iters:
            stop_if_diverged()
            loss = team.sum(float(loss_sum))[0] / max(n_targets, 1)
            speed = timed_tokens / (time.perf_counter() - clock)
            work = flops_per_token(config, n_pairs / n_tokens / (1 + causal), n_targets / n_tokens)
            mfu = work * speed / peak / team.world if peak else None
            output.record(iter=iteration, loss=loss, lr=rate, grad_norm=float(norm), tokens=tokens_seen, tokens_per_s=round(speed), mfu=mfu)
            bar.set_postfix_str(f"loss {loss:.3f}, rate {rate:.1e}, {speed:,.0f} tokens/s, MFU {f'{mfu:.1%}' if peak else 'n/a'}", refresh=False)
            clock, timed_tokens = time.perf_counter(), 0
        bar.update(1)

    bar.close()
    stream.close()
    if iteration < s.max_iters:
        save()
        if team.first:
            print(f"stopped at iteration {iteration:,}; {out_dir / 'last.pt'} is saved. "
                  f"To go on: the same command with --init_from resume --out_dir {out_dir}")
        raise SystemExit(128 + (signals or [signal.SIGTERM])[0])  # as a shell counts it: what follows with && does not run
    if team.first:
        raw.eval()
        show_guesses(raw, tokenizer, val, phases[-1][0] == "clm", device, autocast)
        print(f"weights: {out_dir / 'last.pt'} (iteration {iteration:,}), {out_dir / 'best.pt'} ({goal} {best:.4f})")
        plot(out_dir)


def command(main):
    """main(arguments) from the command line: bad input is one line, and the processes part in order."""
    try:
        main(sys.argv[1:])
    except SystemExit as end:
        if isinstance(end.code, str):  # from one process of each machine
            if os.environ.get("LOCAL_RANK", "0") == "0":
                print(f"error: {end.code}", file=sys.stderr)
            end.code = 1
        raise
    except KeyboardInterrupt:
        raise SystemExit("interrupted before the first step") from None
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
            gc.collect()  # frees DDP's cycles, and with them gloo's threads, which must not outlive the interpreter


if __name__ == "__main__":
    command(main)
