"""
From a token file to training batches, with no state: a batch is a pure function of (seed, row numbers).

The corpus is cut into windows of block_size tokens, the last one filled up with <|pad|>. Row r of the training stream is
window `permute(r mod n)` of epoch `r div n`, for every number of processes and micro-batches and after every resume; an
optimizer step takes the next rows. The choice of masked tokens depends on (seed, epoch, window) in the same way.

Random numbers come from SplitMix64 (Steele, Lea, Flood, OOPSLA 2014): the i-th number of a stream is a hash of (key, i),
so any of them can be had without those before it.
"""
import queue, threading
from dataclasses import dataclass

import numpy as np
import torch

IGNORE = -100     # a target that counts nothing: PyTorch's ignore_index
MIX = 1000        # a mixture is exact in every run of this many rows
MIN_CHUNK = 12    # shortest chunk of --packing random (arXiv 2507.00994's training code)


@dataclass
class Batch:
    """One micro-batch of B rows of T tokens. Attention never leaves a document, and no document leaves its row."""
    ids: torch.Tensor          # (B, T) int64, <|mask|> already in place
    cu_seqlens: torch.Tensor | None  # (documents + 1,) int32: document i is ids.view(-1)[cu[i]:cu[i+1]], the end repeated to keep the shape static;
                               # None: each row is one document
    max_seqlen: int            # T, an upper bound for the length of a document
    places: torch.Tensor | None  # (N,) int64 places in ids.view(-1) that are scored; None: all of them
    targets: torch.Tensor      # (N,) int64 ids to predict there, or IGNORE
    n_targets: int             # how many of them count
    n_tokens: int              # tokens of text in ids: all but padding
    n_pairs: int               # (query, key) pairs of attention, if not causal: the sum of the squared lengths of the documents

    def to(self, device):
        """The same on `device`, copied without waiting where pinned memory allows it."""
        def move(value):
            if not isinstance(value, torch.Tensor):
                return value
            return value.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else value.to(device)
        return Batch(**{name: move(value) for name, value in vars(self).items()})


def mix(z):
    """SplitMix64's finaliser on a uint64 array, in place: every input bit changes every output bit with probability one half."""
    z ^= z >> np.uint64(30)
    z *= np.uint64(0xBF58476D1CE4E5B9)
    z ^= z >> np.uint64(27)
    z *= np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return z


def stream_key(*parts):
    """Hash of integers or equal-shaped integer arrays: the key of an independent stream of random numbers."""
    key = np.zeros(1, np.uint64)
    for part in parts:
        key = mix(key + np.uint64(0x9E3779B97F4A7C15) ^ np.asarray(part).astype(np.uint64))
    return key


def random_bits(key, n):
    """key (B,) -> (B, n) uint64, uniform."""
    return mix(key[:, None] + np.arange(1, n + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))


def permute(index, n, key):
    """A bijection of 0 ... n-1, chosen by `key`, at every place of `index`; takes no memory, however large n is.

    A four-round Feistel network permutes the next power of four; values past n go round again (cycle walking)."""
    half = np.uint64(max(1, (n - 1).bit_length() + 1 >> 1))
    low = np.uint64((1 << int(half)) - 1)
    rounds = random_bits(stream_key(key), 4)[0]
    x = np.array(index, dtype=np.uint64)
    walk = np.ones(x.shape, bool)
    while walk.any():
        left, right = x[walk] >> half, x[walk] & low
        for salt in rounds:
            left, right = right, left ^ mix(right + salt) & low
        x[walk] = left << half | right
        walk &= x >= n
    return x.astype(np.int64)


def count_windows(tokens, block_size):
    return -(-tokens.n_tokens // block_size)


def read_windows(tokens, windows, block_size):
    """ids (B, block_size + 1) int64 of the windows, each with the token that follows it; <|pad|> past the end, and all through where window < 0."""
    ids = np.full((len(windows), block_size + 1), tokens.pad, np.int64)
    for row, window in zip(ids, windows.tolist()):
        if window >= 0:
            part = tokens.read(window * block_size, block_size + 1)
            row[:len(part)] = part
    return ids


class Mixture:
    """Several corpora of one tokenizer, from which rows are drawn by weight.

    Of each 1,000 rows of the stream, source i has exactly 1000 x weight i, in an order that depends on the seed; they are the next rows of its
    own stream, so each source goes through its windows in epochs of its own. Row r needs no rows before it, as without a mixture."""

    def __init__(self, names, weights, sources):
        """weights: positive, in thousandths, with the sum 1. sources: a TokenFile or Corpus each."""
        first = sources[0]
        for name, source in zip(names, sources):
            if source.tokenizer_hash != first.tokenizer_hash:
                raise SystemExit(f"--dataset {name}: its tokenizer ({source.tokenizer}) is not that of {names[0]} ({first.tokenizer}); "
                                 f"prepare both with the same one, e.g. --tokenizer PATH of one's bpe.json")
        self.names, self.weights, self.sources = names, weights, sources
        self.counts = np.rint(np.array(weights) * MIX).astype(np.int64)  # (sources,) rows of each in MIX rows
        for name in ("path", "tokenizer", "tokenizer_hash", "vocab_size", "first", "n_ordinary", "eos", "pad", "mask"):
            setattr(self, name, getattr(first, name))
        self.n_tokens = sum(source.n_tokens for source in sources)
        self.n_documents = round(self.n_tokens * sum(w * source.n_documents / source.n_tokens for w, source in zip(weights, sources)))
        self.digest = " ".join(f"{count}:{source.digest}" for count, source in zip(self.counts, sources))

    def split(self, rows, seed):
        """(B,) rows of the stream -> (which source, row of that source's own stream), (B,) each; a row -1 stays -1."""
        block, place = np.divmod(np.maximum(rows, 0), MIX)
        for b in np.unique(block):
            place[block == b] = permute(place[block == b], MIX, stream_key(seed, b, MIX)[0])
        ends = np.cumsum(self.counts)
        which = np.searchsorted(ends, place, "right")
        row = block * self.counts[which] + place - (ends - self.counts)[which]
        return which, np.where(rows < 0, -1, row)

    def shares(self, first_row, n_rows, seed):
        """{name: share of the n_rows rows from first_row on that came from it}."""
        def drawn(n):  # rows of each source among the first n
            block, rest = divmod(n, MIX)
            which, _ = self.split(block * MIX + np.arange(rest), seed)
            return block * self.counts + np.bincount(which, minlength=len(self.counts))
        return dict(zip(self.names, ((drawn(first_row + n_rows) - drawn(first_row)) / max(n_rows, 1)).tolist()))


def draw(tokens, rows, block_size, seed):
    """(B,) rows of the stream -> (ids (B, block_size + 1) as read_windows gives them, (B,) uint64 keys for the random numbers of each row)."""
    if isinstance(tokens, Mixture):
        which, own = tokens.split(rows, seed)
        ids, key = np.empty((len(rows), block_size + 1), np.int64), np.empty(len(rows), np.uint64)
        for i in np.unique(which):
            mine = which == i
            ids[mine], key[mine] = draw(tokens.sources[i], own[mine], block_size, stream_key(seed, i + 1)[0])
        return ids, key
    n_windows = count_windows(tokens, block_size)
    epoch, place = np.divmod(np.maximum(rows, 0), n_windows)
    windows = np.empty(len(rows), np.int64)
    for e in np.unique(epoch):
        windows[epoch == e] = permute(place[epoch == e], n_windows, stream_key(seed, e)[0])
    windows[rows < 0] = -1
    return read_windows(tokens, windows, block_size), stream_key(seed, epoch, windows)


def choose(ids, tokens, ratio, key):
    """Boolean (B, T): exactly round(ratio x ordinary tokens) of each row, drawn evenly without replacement; never a special token."""
    T = ids.shape[1]
    ordinary = (ids >= tokens.first) & (ids < tokens.first + tokens.n_ordinary)
    count = np.rint(ratio * ordinary.sum(1)).astype(np.int64)
    draw = random_bits(key, T)
    draw[~ordinary] = np.iinfo(np.uint64).max
    order = np.sort(draw, axis=1)
    last = np.take_along_axis(order, np.maximum(count - 1, 0)[:, None], 1)  # the count-th smallest draw of each row
    return (draw <= last) & (count > 0)[:, None] & ordinary


def make_batch(tokens, rows, block_size, objective, mask_ratio=0.4, mask_split=(1.0, 0.0, 0.0), packing="documents", seed=0):
    """The micro-batch of the given row numbers (B,) of the stream. Row -1 is all padding and scores nothing.

    mlm: `mask_ratio` of the ordinary tokens of each row are targets at their own place; mask_split says which shares of them
         become <|mask|>, a random ordinary token, or stay.
    clm: each token is a target at the place before it, if both are of one document.
    packing "documents": a document is what lies between two <|eos|>. "random": a window is cut once, at a uniform place, so that
         pieces have lengths uniform in [12, block_size - 12] (or it stays whole); a piece counts as one document.
    """
    B, T = len(rows), block_size
    read, key = draw(tokens, np.asarray(rows, np.int64), T, seed)
    ids, next_ids = read[:, :-1], read[:, 1:].copy()
    starts = np.zeros((B, T + 1), bool)  # starts[b, t]: token t is the first of a document; the last column is the next window's
    starts[:, 0] = True
    starts[:, 1:] = (read[:, 1:] == tokens.pad) & (ids != tokens.pad)
    if packing == "documents":
        starts[:, 1:] |= ids == tokens.eos
    else:
        cut = MIN_CHUNK + (random_bits(stream_key(key, 1), 1)[:, 0] % np.uint64(max(1, T - MIN_CHUNK + 1))).astype(np.int64)
        two = cut <= T - MIN_CHUNK
        starts[np.flatnonzero(two), cut[two]] = True
        starts[:, T] = True
    cu_seqlens = np.flatnonzero(starts[:, :T])
    n_pairs = int((np.diff(cu_seqlens, append=B * T) ** 2).sum())
    # The length of cu_seqlens is part of a compiled graph: room for twice the documents that B rows hold on average, so that it hardly ever changes.
    usual = 2 * B * (2 + T * tokens.n_documents // tokens.n_tokens) if packing == "documents" else 3 * B
    room = usual if len(cu_seqlens) <= usual else 1 << len(cu_seqlens).bit_length()
    bounds = np.concatenate([cu_seqlens, np.full(room + 1 - len(cu_seqlens), B * T)]).astype(np.int32) if len(cu_seqlens) > B else None

    if objective == "clm":
        places = None
        targets = np.where(starts[:, 1:] | (ids == tokens.pad), IGNORE, next_ids).reshape(-1)
        n_targets = int((targets != IGNORE).sum())
    else:
        chosen = choose(ids, tokens, mask_ratio, key)
        where = np.flatnonzero(chosen)
        n_targets = len(where)
        places, targets = np.zeros((2, B * round(mask_ratio * T)), np.int64)
        targets[n_targets:] = IGNORE  # rows with special tokens have fewer targets; their places are kept, so that shapes are static
        places[:n_targets] = where
        flat = ids.reshape(-1).copy()
        targets[:n_targets] = flat[where]
        as_mask, as_random, _ = mask_split
        if as_mask == 1:
            flat[where] = tokens.mask
        else:
            dice, word = random_bits(stream_key(key, 2), 2 * T).reshape(B, 2, T).transpose(1, 0, 2)[:, chosen]
            dice = (dice >> np.uint64(11)) * 2.0**-53  # uniform in [0, 1)
            flat[where[dice < as_mask]] = tokens.mask
            drawn = (dice >= as_mask) & (dice < as_mask + as_random)
            flat[where[drawn]] = (word[drawn] % np.uint64(tokens.n_ordinary)).astype(np.int64) + tokens.first
        ids = flat.reshape(B, T)
    n_tokens = int((read[:, :-1] != tokens.pad).sum())
    wrap = torch.from_numpy
    return Batch(wrap(np.ascontiguousarray(ids)), bounds if bounds is None else wrap(bounds), T, places if places is None else wrap(places), wrap(targets),
                 n_targets, n_tokens, n_pairs)


def prefetch(make, steps, depth=2):
    """make(step) for each step of `steps`, run ahead in a thread by at most `depth`; an error in it is raised here."""
    ready, stop = queue.Queue(depth), threading.Event()

    def put(item):
        while not stop.is_set():
            try:
                return ready.put(item, timeout=0.1)
            except queue.Full:
                continue

    def work():
        try:
            for step in steps:
                put((make(step), None))
                if stop.is_set():
                    return
            put(None)
        except BaseException as problem:
            put((None, problem))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        while (item := ready.get()) is not None:
            if item[1] is not None:
                raise item[1]
            yield item[0]
    finally:
        stop.set()
        thread.join()  # a thread that PyTorch's code runs in must not outlive the interpreter
