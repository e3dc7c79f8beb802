"""
Fine-tunes a checkpoint of train.py on a task and scores it, as arXiv 2507.00994 does.

    python finetune.py --init_from out/mlm/last.pt --task docs_sc                  one rate, one seed
    torchrun --nproc_per_node=2 finetune.py --init_from out/mlm/last.pt --task squad --learning_rate 1e-5,1e-4 --seeds 5
    python finetune.py --report out/mlm/finetune out/clm/finetune                  a table of all that was run
    python finetune.py --init_from out/mlm/finetune/sst2.pt --predict FILE         a model saved by --save true, on new rows

Four families (data/tasks.py): SC, a label for a text or two; TC, a tag for each word; QA, a span of a context; IR, documents for a query.
A cell is one rate and one seed, trained from the same start. It becomes a line of OUT_DIR/results.jsonl; cells that stand there are not run
again. The rate is chosen on validation data; the test score is the mean over seeds at that rate, with its 95 % t-interval.
"""
import dataclasses, functools, hashlib, json, math, sys, time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from tqdm import tqdm

from data.batches import prefetch
from data.items import Item, answers, encode_qa, encode_sc, encode_tc, encode_text, joined, make_batch, scores
from data.metrics import ranking_scores
from data.results import append, read_results, report, table
from data.tasks import Task, candidates, floor, lines_of, load_task, read_qa, read_sc, read_tc
from data.tokenizer import Tokenizer
from model import Config, Transformer, load_checkpoint, save_checkpoint
from train import Team, command, parse, pick_attention, pick_device, pick_dtype, setting


@dataclass
class Settings:
    init_from: str = setting(None, "a checkpoint of train.py; with --predict, one that --save made", str)
    task: str = setting(None, "a folder under data/, or the path of any folder in a known format", str)
    learning_rate: str = setting(None, "highest rate, or several: 1e-5,1e-4 (default: 5e-4, for models of width 768 and more 5e-5)", str)
    seeds: str = setting("1", "how many seeds, from 0 on, or these: 3,4")
    batch_size: int = setting(32, "rows of a step, all processes together")
    max_iters: int = setting(1000, "most optimizer steps")
    epochs: float = setting(1.0, "most passes over the training rows")
    weight_decay: float = setting(0.1, "AdamW's, on all parameters")
    causal: bool = setting(False, "a token sees only what stands before it")
    pooling: str = setting("mean", "SC and IR: the text's vector is the mean, the first or the last of its tokens'")
    max_length: int = setting(None, "tokens of a text; longer ones are cut, or read in parts (default: 512, or the model's block_size)", int)
    doc_stride: int = setting(128, "QA: tokens that two windows on a context share")
    candidates: str = setting("all", "IR: rank all documents, or only the judged ones of the split (the study's reduced corpora)")
    test_on: str = setting(None, "IR: tasks to test on, as in msmarco,nq (default: the task itself)", str)
    random_weights: bool = setting(False, "the checkpoint's architecture and tokenizer, but weights from scratch: what pretraining is worth")
    out_dir: str = setting(None, "folder of results.jsonl and saved models (default: finetune beside the checkpoint)", str)
    save: bool = setting(False, "keep the model of the best cell, OUT_DIR/TASK.pt")
    predict: str = setting(None, "FILE in the format of the task (IR: a TSV of query ids and texts); FILE.predictions gets a line for each row", str)
    device: str = setting("auto", "auto, cpu, cuda or mps")
    dtype: str = setting("auto", "of matrix products: auto, float32 or bfloat16")
    attention: str = setting("auto", "triton (kernels/attention.py), sdpa (PyTorch's), or auto")


NOT_OF_A_CELL = {"init_from", "learning_rate", "seeds", "out_dir", "save", "predict", "device", "attention"}  # what does not change its result
MAIN = {"SC": "accuracy", "TC": "f1", "QA": "f1", "IR": "ndcg@10"}
TEMPERATURE = 20  # of cosines in InfoNCE
TOP = 100         # documents kept for a query


class Machine(NamedTuple):
    team: Team
    device: torch.device
    dtype: torch.dtype

    def autocast(self):
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)

    @property
    def tokens(self):  # of a batch that is only read
        return 4096 if self.device.type == "cpu" else 32768

    def bar(self, total, what, unit):
        return tqdm(total=total, desc=what, unit=unit, disable=not self.team.first, leave=False, mininterval=0.5 if sys.stderr.isatty() else 30)


# ---------------------------------------------------------------------------------------------------------------------------------
# the model


class Finetuned(nn.Module):
    """An encoder and, but for IR, one linear layer on it: outputs of SC labels, of TC tags, of QA two (start and end)."""

    def __init__(self, config, family, outputs, pooling="mean", causal=False):
        super().__init__()
        self.encoder = Transformer(dataclasses.replace(config, tie_embeddings=True))  # without pretraining's own head
        self.head = None if family == "IR" else nn.Linear(config.n_embd, outputs)
        self.family, self.pooling, self.causal = family, pooling, causal

    def forward(self, batch):
        """Batch -> fp32. SC: logits (n, labels). TC: logits (words, tags). QA: (n, L, 2), -inf but for the context and the last <|eos|>. IR: unit
        vectors (n, C)."""
        hidden = self.encoder(batch.ids, batch.cu_seqlens, batch.max_seqlen, self.causal).flatten(0, 1)  # (B T, C)
        with torch.autocast(hidden.device.type, enabled=False):
            hidden = hidden.float()
            if self.family == "TC":
                return self.head(hidden[batch.places])
            if self.family == "QA":
                place = torch.arange(batch.max_seqlen, device=hidden.device)  # (L,), L of the longest text
                scores = self.head(hidden)[(batch.starts[:, None] + place).clamp(max=len(hidden) - 1)]
                first, after = batch.places[:, :1], batch.places[:, 1:]
                allowed = (place >= first) & (place < after) | (place == batch.lengths[:, None] - 1)
                return scores.masked_fill(~allowed[:, :, None], -math.inf)
            if self.pooling == "mean":  # a product with a matrix of 0 and 1: the same sums in every run
                place = torch.arange(len(hidden), device=hidden.device)
                member = (place >= batch.starts[:, None]) & (place < (batch.starts + batch.lengths)[:, None])  # (n, B T)
                pooled = member.float() @ hidden / batch.lengths[:, None]
            else:
                pooled = hidden[batch.starts if self.pooling == "first" else batch.starts + batch.lengths - 1]
            return F.normalize(pooled, dim=-1) if self.family == "IR" else self.head(pooled)

    def reset(self, weights, seed):
        """The start of a cell: the encoder's weights, or random ones where there are none, and a new head."""
        torch.manual_seed(seed)
        with torch.no_grad():
            self.encoder.load_state_dict(weights or Transformer(self.encoder.config).state_dict())  # strict: every weight has its place
            if self.head is not None:
                self.head.weight.normal_(std=0.02)
                self.head.bias.zero_()


def summed_loss(family, logits, targets):
    """Sum over the targets; a QA target is a pair of places."""
    if family == "QA":
        return (F.cross_entropy(logits[..., 0], targets[:, 0], reduction="sum") + F.cross_entropy(logits[..., 1], targets[:, 1], reduction="sum")) / 2
    return F.cross_entropy(logits, targets, reduction="sum")


def info_nce(queries, documents, hidden_pairs):
    """Summed loss of queries (n, C) whose documents (n, C) stand at the same place. The others are negatives, but not where hidden_pairs (n, n)
    is true."""
    logits = TEMPERATURE * queries @ documents.t()
    return F.cross_entropy(logits.masked_fill(hidden_pairs, -math.inf), torch.arange(len(queries), device=queries.device), reduction="sum")


def everyones(vectors, n, team):
    """This process's vectors (its share, C) -> those of all processes (n, C), row i from process i % world. The gradient reaches the own ones only:
    with the whole loss on each process, the sum of the processes' gradients is that of one process with all rows."""
    if team.world == 1:
        return vectors
    most = math.ceil(n / team.world)
    own = F.pad(vectors, (0, 0, 0, most - len(vectors)))
    parts = [torch.empty_like(own) for _ in range(team.world)]
    dist.all_gather(parts, own.detach())
    parts[team.rank] = own
    return torch.stack(parts, 1).flatten(0, 1)[:n]


# ---------------------------------------------------------------------------------------------------------------------------------
# training


def n_steps(n_rows, s):
    return min(s.max_iters, max(1, math.ceil(round(s.epochs * n_rows / s.batch_size, 6))))


def rate_at(step, steps):
    """Share of the highest rate: linear up over the first tenth, linear down to 0."""
    warmup = math.ceil(steps / 10)
    return min((step + 1) / warmup, (steps - step) / max(1, steps - warmup))


def fit(model, task, items, s, m, tokenizer, rate, seed):
    """Trains in place. items: Items, or for IR pairs (query id, document's number). Returns {"steps", "loss" of the last tenth, "seconds",
    "cut" texts (IR), "diverged": whether a gradient was not finite}."""
    steps, per_epoch, world, rank = n_steps(len(items), s), math.ceil(len(items) / s.batch_size), m.team.world, m.team.rank
    order = functools.lru_cache(2)(lambda epoch: np.random.default_rng([seed, epoch]).permutation(len(items)))
    cut = 0

    def make(step):  # -> this process's share of a batch, targets of the whole batch, (IR) pairs that are no negatives
        nonlocal cut
        epoch, at = divmod(step, per_epoch)
        chosen = order(epoch)[at * s.batch_size:(at + 1) * s.batch_size]
        rows = [items[i] for i in chosen]
        if task.family == "IR":
            relevant = [task.qrels["train"][query] for query, _ in rows]
            hidden = torch.tensor([[i != j and grades.get(document, 0) > 0 for j, (_, document) in enumerate(rows)]
                                   for i, grades in enumerate(relevant)])
            texts = ["Query: " + task.rows["train"][query] for query, _ in rows[rank::world]]
            texts += ["Document: " + task.corpus[document] for _, document in rows[rank::world]]
            encoded = [encode_text(text, tokenizer, s.max_length) for text in texts]
            cut += sum(was_cut for _, was_cut in encoded)
            own, n, hidden = [Item(i, ids) for i, (ids, _) in enumerate(encoded)], len(rows), hidden.to(m.device)
        else:
            own, hidden = rows[rank::world], None
            n = sum(len(item.targets) for item in rows) if task.family == "TC" else len(rows)
        return make_batch(own, task.family, tokenizer.pad).to(m.device) if own else None, n, hidden, len(rows)

    optimizer = torch.optim.AdamW(model.parameters(), rate, (0.9, 0.95), 1e-5, s.weight_decay, fused=True)
    losses, finite, started = [], torch.ones((), device=m.device), time.perf_counter()
    bar = m.bar(steps * s.batch_size, f"{task.name}, rate {rate:g}, seed {seed}", "row")
    model.train()
    for step, (batch, n, hidden, n_rows) in zip(range(steps), prefetch(make, range(steps))):
        optimizer.param_groups[0]["lr"] = rate * rate_at(step, steps)
        with m.autocast():
            out = model(batch) if batch else torch.zeros(0, model.encoder.config.n_embd, device=m.device)
        if task.family == "IR":
            queries, documents = out.chunk(2) if batch else (out, out)
            loss = info_nce(everyones(queries, n, m.team), everyones(documents, n, m.team), hidden)
        else:
            loss = summed_loss(task.family, out, batch.targets) if batch else out.sum()
        if loss.requires_grad:
            (loss / n).backward()
        sum_gradients(model, m.team)
        finite *= nn.utils.clip_grad_norm_(model.parameters(), 1.0).isfinite()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach() / n)
        bar.update(n_rows)
    bar.close()
    loss = m.team.sum(float(torch.stack(losses[-max(1, steps // 10):]).mean()))[0] / (world if task.family == "IR" else 1)
    return {"steps": steps, "loss": loss if math.isfinite(loss) else None, "seconds": round(time.perf_counter() - started, 2),
            "cut": int(m.team.sum(cut)[0]), "diverged": not int(finite)}


def sum_gradients(model, team):
    """Over the processes, in one message; a process without rows adds nothing."""
    if team.world > 1:
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
        total = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(total)
        for p, grad in zip(model.parameters(), total.split([grad.numel() for grad in grads])):
            p.grad = grad.view_as(p)


# ---------------------------------------------------------------------------------------------------------------------------------
# outputs and scores


def group(items, tokens):
    """Lists of places in items, longest texts first, of at most about `tokens` tokens each."""
    groups, longest = [[]], 0
    for i in sorted(range(len(items)), key=lambda i: -len(items[i].ids)):
        if groups[-1] and (len(groups[-1]) + 1) * longest > tokens:
            groups.append([])
        longest = longest if groups[-1] else len(items[i].ids)
        groups[-1].append(i)
    return [g for g in groups if g]


@torch.no_grad()
def outputs(model, items, m, pad, limit=None, what="texts"):
    """One value for each item, on every process. SC: the label's number. TC: a tag's number for each word. QA: (score of the best span, score of no
    answer, places of the span's first and last token); IR: a vector. The batches, and so the values, are the same for any number of processes."""
    was_training, found = model.training, {}
    model.eval()
    mine = group(items, m.tokens)[m.team.rank::m.team.world]
    bar = m.bar(sum(map(len, mine)), what, "text")
    for chosen, batch in prefetch(lambda g: (g, make_batch([items[i] for i in g], model.family, pad).to(m.device)), mine):
        with m.autocast():
            out = model(batch)
        if model.family == "QA":
            values = best_spans(out, batch.lengths, limit)
        elif model.family == "TC":
            values = [part.tolist() for part in out.argmax(-1).cpu().split([len(items[i].places) for i in chosen])]
        else:
            values = out.argmax(-1).tolist() if model.family == "SC" else out.cpu()
        found.update(zip(chosen, values))
        bar.update(len(chosen))
    bar.close()
    model.train(was_training)
    for part in gather(found, m.team):
        found.update(part)
    return [found[i] for i in range(len(items))]


def gather(thing, team):
    """[what each process has], on all of them."""
    parts = [thing] * team.world
    if team.world > 1:
        dist.all_gather_object(parts, thing)
    return parts


def best_spans(logits, lengths, limit):
    """logits (n, L, 2), -inf where a span may not begin or end; the last token of each text means no answer. -> [(score of the best span of at most
    `limit` tokens, score of no answer, its first place, its last)], exact."""
    start, end = (logits[..., i].float() for i in (0, 1))
    n, L = start.shape
    last = lengths[:, None] - 1
    none = (start.gather(1, last) + end.gather(1, last))[:, 0]
    start, best = start.scatter(1, last, -math.inf), start.new_full((n,), -math.inf)
    end = end.scatter(1, last, -math.inf)
    first, width = torch.zeros(n, dtype=torch.int64, device=start.device), torch.zeros(n, dtype=torch.int64, device=start.device)
    for more in range(min(limit, L)):
        top, at = (start[:, :L - more] + end[:, more:]).max(1)
        better = top > best
        best, first, width = top.where(better, best), at.where(better, first), torch.full_like(width, more).where(better, width)
    return list(zip(best.tolist(), none.tolist(), first.tolist(), (first + width).tolist()))


@torch.no_grad()
def rank_documents(model, task, queries, numbers, relevant, s, m, tokenizer):
    """The TOP documents for each query text, exact: [[(document's number, cosine), ...]], best first; of equals a relevant one comes last.

    numbers: documents to rank; relevant: {document's number: places of the queries it is relevant for}. Documents are read longest first, in blocks
    whose vectors are dropped once they are scored, so memory does not grow with the corpus; each process reads every world-th block."""
    encoded = [encode_text("Query: " + text, tokenizer, s.max_length) for text in queries]
    if (cut := sum(was_cut for _, was_cut in encoded)) and m.team.first:
        tqdm.write(f"  {cut:,} of {len(queries):,} queries are cut at --max_length {s.max_length}")
    q = torch.stack(outputs(model, [Item(i, ids) for i, (ids, _) in enumerate(encoded)], m, tokenizer.pad)).to(m.device)
    numbers = np.asarray(numbers)[np.argsort(-task.corpus.lengths[numbers], kind="stable")]
    blocks = [numbers[i:i + 4096] for i in range(0, len(numbers), 4096)][m.team.rank::m.team.world]
    top = torch.full((len(q), TOP), -math.inf, device=m.device)
    best = torch.full((len(q), TOP), -1, device=m.device)
    was_training, cut = model.training, 0
    model.eval()
    bar = m.bar(sum(map(len, blocks)), "documents", "text")

    def make(block):
        items, short = [], 0
        for i, number in enumerate(block):
            ids, was_cut = encode_text("Document: " + task.corpus[number], tokenizer, s.max_length)
            items.append(Item(i, ids))
            short += was_cut
        return block, short, [(g, make_batch([items[i] for i in g], "IR", tokenizer.pad)) for g in group(items, m.tokens)]

    for block, short, batches in prefetch(make, blocks, 1):
        vectors = q.new_empty(len(block), q.size(1))
        for g, batch in batches:
            with m.autocast():
                vectors[g] = model(batch.to(m.device))
            bar.update(len(g))
        cut += short
        block_numbers = torch.from_numpy(block).to(m.device)
        pairs = np.array([(i, j) for j, number in enumerate(block.tolist()) for i in relevant.get(number, ())], np.int64).reshape(-1, 2)
        for at in range(0, len(q), 1024):
            part = q[at:at + 1024] @ vectors.t()
            i, j = torch.from_numpy(pairs[(pairs[:, 0] >= at) & (pairs[:, 0] < at + 1024)]).to(m.device).unbind(1)
            part[i - at, j] = torch.nextafter(part[i - at, j], part.new_tensor(-math.inf))  # below its equals
            both = torch.cat([top[at:at + 1024], part], 1)
            top[at:at + 1024], chosen = both.topk(TOP, 1)
            best[at:at + 1024] = torch.cat([best[at:at + 1024], block_numbers.expand(len(part), -1)], 1).gather(1, chosen)
    bar.close()
    model.train(was_training)
    cut = int(m.team.sum(cut)[0])
    if cut and m.team.first:
        tqdm.write(f"  {cut:,} of {len(numbers):,} documents are cut at --max_length {s.max_length}")
    tops, bests = zip(*gather((top.cpu(), best.cpu()), m.team))
    top, chosen = torch.cat(tops, 1).topk(TOP, 1)
    best = torch.cat(bests, 1).gather(1, chosen)
    return [[(number, cosine) for number, cosine in zip(row, cosines) if number >= 0] for row, cosines in zip(best.tolist(), top.tolist())]


def retrieval_scores(model, task, split, s, m, tokenizer):
    judged, queries = list(task.qrels[split].values()), list(task.rows[split].values())
    relevant = {}
    for i, grades in enumerate(judged):
        for document, grade in grades.items():
            if grade > 0:
                relevant.setdefault(document, []).append(i)
    ranked = rank_documents(model, task, queries, candidates(task, split, s.candidates), relevant, s, m, tokenizer)
    return ranking_scores([[number for number, _ in row] for row in ranked], judged)


# ---------------------------------------------------------------------------------------------------------------------------------
# the run


def numbers_of(name, text, kind):
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        raise SystemExit(f"--{name} {text}: give {'numbers' if kind is float else 'whole numbers'} with commas between") from None


def check(s, config):
    """Impossible settings end here. Returns (rates, seeds)."""
    def need(good, name, why):
        if not good:
            raise SystemExit(f"--{name} {getattr(s, name)}: {why}")

    s.learning_rate = s.learning_rate or ("5e-4" if config.n_embd < 768 else "5e-5")
    s.max_length = min(512, config.block_size) if s.max_length is None else s.max_length
    rates, seeds = numbers_of("learning_rate", s.learning_rate, float), numbers_of("seeds", s.seeds, int)
    seeds = list(range(seeds[0])) if len(seeds) == 1 else seeds
    need(all(0 < rate < math.inf for rate in rates), "learning_rate", "rates above 0")
    need(seeds and min(seeds) >= 0, "seeds", "at least 1 seed, none below 0")
    need(s.pooling in ("mean", "first", "last"), "pooling", "give mean, first or last")
    need(s.candidates in ("all", "judged"), "candidates", "give all or judged")
    need(s.dtype in ("auto", "float32", "bfloat16"), "dtype", "give auto, float32 or bfloat16")
    need(s.attention in ("auto", "sdpa", "triton"), "attention", "give auto, sdpa or triton")
    need(s.batch_size >= 1, "batch_size", "at least 1")
    need(s.max_iters >= 1, "max_iters", "at least 1")
    need(0 < s.epochs < math.inf, "epochs", "above 0")
    need(0 <= s.weight_decay < math.inf, "weight_decay", "not below 0")
    need(s.doc_stride >= 0, "doc_stride", "not below 0")
    need(8 <= s.max_length <= config.block_size, "max_length", f"from 8 to the model's block_size {config.block_size}")
    return sorted(set(rates)), sorted(set(seeds))


def encode(task, split, tokenizer, s):
    """(items of a split, what a person should know of them)."""
    notes, rows = [], task.rows[split]
    more = {"doc_stride": s.doc_stride} if task.family == "QA" else {}
    items = {"SC": encode_sc, "TC": encode_tc, "QA": encode_qa}[task.family](task, rows, tokenizer, s.max_length, notes, **more)
    return items, [f"{split}: {note}" for note in notes]


def weights_digest(weights):
    digest = hashlib.blake2b(digest_size=8)
    for name in sorted(weights):
        digest.update(name.encode() + weights[name].contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def open_task(s, tokenizer, say):
    """(task, tasks to test on {name: task}, items of each split). IR: the items are those of train, pairs (query id, document's number)."""
    task = load_task(s.task)
    if s.test_on and task.family != "IR":
        raise SystemExit(f"--test_on {s.test_on}: goes with a retrieval task, and {s.task} is {task.family}")
    others = {name: task if name == s.task else load_task(name, test_only=True) for name in s.test_on.split(",")} if s.test_on else {}
    for name, other in others.items():
        if other.family != "IR" or "test" not in other.rows:
            raise SystemExit(f"--test_on {name}: no retrieval task with something to test on")
    say(f"task    {task.name} ({task.family}): " + ", ".join(f"{split} {len(rows):,}" for split, rows in task.rows.items())
        + (f"; {len(task.corpus):,} documents" if task.corpus else "") + (f"; {len(task.labels)} labels" if task.labels else ""))
    items, notes = {}, list(task.notes)
    if task.family == "IR":
        items["train"] = [(query, d) for query, grades in task.qrels["train"].items() for d, grade in grades.items() if grade > 0 and d >= 0]
    else:
        for split in task.rows:
            items[split], more = encode(task, split, tokenizer, s)
            notes += more
    for note in notes:
        say(f"        {note}")
    return task, others or {"test": task}, items


def run_cell(model, task, others, items, s, m, tokenizer, limit, rate, seed):
    """Trains from where the model is, and scores. Returns (what `fit` says, scores on validation or None, {test set: scores})."""
    trained = fit(model, task, items["train"], s, m, tokenizer, rate, seed)
    if trained["diverged"]:
        return trained, None, {}
    if task.family == "IR":
        val = retrieval_scores(model, task, "val", s, m, tokenizer)
        return trained, val, {name: retrieval_scores(model, other, "test", s, m, tokenizer) for name, other in others.items()}
    found = {split: outputs(model, items[split], m, tokenizer.pad, limit, split) for split in ("val", *task.tests)}
    val = scores(task, task.rows["val"], items["val"], found["val"])
    return trained, val, {split: scores(task, task.rows[split], items[split], found[split], val.get("threshold")) for split in task.tests}


def sweep(s, m, state):
    """Runs the cells of the grid that are not in results.jsonl yet, and prints what they give."""
    plain = NOT_OF_A_CELL | {"task", "random_weights", "dtype"}
    changed = {f.name: getattr(s, f.name) for f in dataclasses.fields(s) if f.name not in plain and getattr(s, f.name) != f.default}
    config, tokenizer = Config(**state["config"]), Tokenizer.from_dict(state["tokenizer"])
    rates, seeds = check(s, config)
    out_dir = Path(s.out_dir) if s.out_dir else Path(s.init_from).parent / "finetune"
    say = functools.partial(print, flush=True) if m.team.first else lambda *_: None
    task, others, items = open_task(s, tokenizer, say)
    main_score = "accuracy" if task.family == "TC" and not task.entities else MAIN[task.family]
    floors = {"val": floor(task, "val", s.candidates)}
    floors |= {name: floor(others.get(name, task), "test" if task.family == "IR" else name, s.candidates) for name in (others if task.family == "IR" else task.tests)}
    limit = max(int(item.targets[1] - item.targets[0]) + 1 for item in items["train"]) if task.family == "QA" else None  # tokens of the longest answer

    # model
    weights = None if s.random_weights else {name: tensor.clone() for name, tensor in state["model"].items() if name != "head.weight"}
    model = Finetuned(config, task.family, 2 if task.family == "QA" else len(task.labels), s.pooling, s.causal).to(m.device)
    if weights and (odd := weights.keys() ^ model.encoder.state_dict().keys()):
        raise SystemExit(f"--init_from {s.init_from}: its weights are not those of its config; {sorted(odd)[0]} stands on one side only")
    model.encoder.kernel, attention = pick_attention(s, m.device, m.dtype, config)
    cell = {name: value for name, value in dataclasses.asdict(s).items() if name not in NOT_OF_A_CELL}
    cell |= {"dtype": str(m.dtype)[6:], "weights": "random" if s.random_weights else weights_digest(weights), "config": state["config"],
             "tokenizer": tokenizer.hash, "data": [task.digest] + [other.digest for other in others.values()], "rate": 0, "seed": 0}
    say(f"""model   {s.init_from}{", its shape with random weights" if s.random_weights else ""}
        {m.device.type}, {m.team.world} process{"es" * (m.team.world > 1)}, {cell["dtype"]}, {attention}
run     {n_steps(len(items["train"]), s):,} steps of {s.batch_size} a cell; rates {", ".join(f"{rate:g}" for rate in rates)}; seeds {", ".join(map(str, seeds))}
        {main_score} without learning: {", ".join(f"{name} {value:.1%}" for name, value in floors.items())}
output  {out_dir / "results.jsonl"}""")

    # cells
    kept = out_dir / f"{Path(task.name).name}.pt"
    if s.save and m.team.share(kept.exists) and load_checkpoint(kept, ("cell",))["cell"] != cell:
        raise SystemExit(f"--save true: {kept} is a model of other settings; take another --out_dir")
    m.team.share(lambda: out_dir.mkdir(parents=True, exist_ok=True))
    lines = [line for line in m.team.share(lambda: read_results(out_dir))
             if {**line["cell"], "rate": 0, "seed": 0} == cell and line["rate"] in rates and line["seed"] in seeds]
    if lines:
        say(f"        {len(lines)} of {len(rates) * len(seeds)} cells stand there already")
    standing = {(line["rate"], line["seed"]) for line in lines}
    for rate, seed in [(rate, seed) for rate in rates for seed in seeds if (rate, seed) not in standing]:
        model.reset(weights, seed)
        trained, val, test = run_cell(model, task, others, items, s, m, tokenizer, limit, rate, seed)
        line = {"task": task.name, "family": task.family, "main": main_score, "rate": rate, "seed": seed, "val": val, "test": test, "floor": floors, **trained, "init_from": s.init_from,
                "changed": changed, "processes": m.team.world, "device": m.device.type, "cell": {**cell, "rate": rate, "seed": seed}}
        if s.save and val and val[main_score] > max((other["val"][main_score] for other in lines if other["val"]), default=-math.inf):
            m.team.share(lambda: save_checkpoint(kept, {
                "model": model.state_dict(), "config": state["config"], "tokenizer": state["tokenizer"], "settings": dataclasses.asdict(s), "cell": cell,
                "rate": rate, "seed": seed, "family": task.family, "labels": task.labels, "unanswerable": task.unanswerable,
                "threshold": val.get("threshold"), "limit": limit}))
            line["saved"] = True
        m.team.share(lambda: append(out_dir / "results.jsonl", line))
        lines.append(line)
        shown = [f"{name} {some[main_score]:.4f}" for name, some in (("val", val), *test.items())] if val else ["diverged"]
        shown += [f"{trained['seconds']:.0f} s"] + [f"{trained['cut']:,} texts cut in training"] * (trained["cut"] > 0)
        say(f"rate {rate:g}, seed {seed}: {', '.join(shown)}")
    say("\n" + table([lines]))
    if s.save:
        best = max((line for line in lines if line["val"]), key=lambda line: line["val"][main_score], default=None)
        say(f"\nmodel: {kept}, of the cell with the best validation score (rate {best['rate']:g}, seed {best['seed']})" if best and best.get("saved")
            else "\nno model is saved: the best cell was trained by a run without --save true; take another --out_dir")


def predict(s, m, state):
    """Writes FILE.predictions: a line a row, in order."""
    now = {"predict": s.predict, "device": s.device, "dtype": s.dtype, "attention": s.attention, **({"task": s.task} if s.task else {})}
    s = Settings(**{**state["settings"], **now})
    path, out = Path(s.predict), Path(f"{s.predict}.predictions")
    if not path.is_file():
        raise SystemExit(f"--predict {path}: no such file")
    if m.team.share(out.exists):
        raise SystemExit(f"--predict {path}: {out} is there already; move it away")
    family, labels, tokenizer = state["family"], state["labels"], Tokenizer.from_dict(state["tokenizer"])
    model = Finetuned(Config(**state["config"]), family, 2 if family == "QA" else len(labels), s.pooling, s.causal)
    model.load_state_dict(state["model"])
    model.encoder.kernel, _ = pick_attention(s, m.device, m.dtype, model.encoder.config)
    model.to(m.device)
    notes, task = [], Task(s.task, family, {}, labels)
    if family == "IR":
        task = load_task(s.task, test_only=True)
        queries = [line.split("\t", 1) if "\t" in line else [str(n), line] for n, line in lines_of(path) if line]
        ids = list(task.corpus.number)
        ranked = rank_documents(model, task, [text for _, text in queries], np.arange(len(task.corpus)), {}, s, m, tokenizer)
        lines = [json.dumps({"id": query, "documents": [[ids[number], round(cosine, 4)] for number, cosine in row[:10]]})
                 for (query, _), row in zip(queries, ranked)]
    else:
        rows = read_tc(path, notes, tagged=False) if family == "TC" else {"SC": read_sc, "QA": read_qa}[family](path, notes)
        if family == "SC" and notes:  # a line for each row, or none
            raise SystemExit(f"--predict {notes[0]}; mend or remove them")
        for row in rows if family == "TC" else ():
            row["tags"] = []
        task.rows["predict"] = rows
        items, more = encode(task, "predict", tokenizer, s)
        found = outputs(model, items, m, tokenizer.pad, state["limit"], "predicting")
        if family == "QA":
            texts, margins = answers(rows, items, found)
            given = [not state["unanswerable"] or margin > state["threshold"] for margin in margins]
            lines = [json.dumps({"id": row["id"], "answer": text if some else ""}, ensure_ascii=False) for row, text, some in zip(rows, texts, given)]
        else:
            lines = [labels[i] for i in found] if family == "SC" else [" ".join(tags) for tags in joined(rows, items, found, labels)]
        notes += more
    m.team.share(lambda: out.write_text("".join(line + "\n" for line in lines), encoding="utf-8"))
    if m.team.first:
        print("\n".join([*notes, f"{out}: {len(lines):,} lines"]))


def main(argv):
    if argv[:1] == ["--report"]:
        return report(argv[1:])
    s = Settings(**parse(Settings, argv, __doc__))
    if not s.init_from or not (s.task or s.predict):
        raise SystemExit("give --init_from CHECKPOINT and --task NAME; --help lists all settings")
    team = Team()
    device = pick_device(s)
    torch.set_float32_matmul_precision("highest")  # heads and cosines are exact
    m = Machine(team, device, pick_dtype(s, device))
    state = load_checkpoint(s.init_from)
    if s.predict and "family" not in state:
        raise SystemExit(f"--init_from {s.init_from}: not fine-tuned yet; --predict needs a model that --save true kept")
    if not s.predict and "family" in state:
        raise SystemExit(f"--init_from {s.init_from}: fine-tuned already; give a checkpoint of train.py, or --predict FILE")
    (predict if s.predict else sweep)(s, m, state)


if __name__ == "__main__":
    command(main)
