"""
The token file: a corpus as one flat array of ids, of which rows are read when they are asked for.

    bytes 0 ... 1023   one line of JSON, padded with spaces (`head -c 1024 train.bin` shows it)
    bytes 1024 ...     the ids, little-endian uint16 or uint32 by the size of the vocabulary, one <|eos|> after each document

Shards of GPT-2 tokens as llm.c made them (https://github.com/karpathy/llm.c) are read as they are: 256 int32 (magic 20240520,
version 1, number of tokens), then uint16 ids, <|eos|> (50256) before each document.

A split of a dataset is one such file, train.bin, or many, ..._train_000001.bin, ..._train_000002.bin, ...: then it is what they are
one after the other, in the order of their names.
"""
import fcntl, hashlib, json, os, re
from functools import cached_property
from pathlib import Path

import numpy as np

HEADER_BYTES = 1024
FORMAT = "encoder tokens 1"
SHARD_MAGIC, SHARD_VERSION, SHARD_ORDINARY = 20240520, 1, 50256
PROBE = 1 << 15   # ids at either end of a shard that its digest covers


class TokenWriter:
    """Appends documents to a temporary file; only `close` gives it its name, so a file that has its name is whole."""

    def __init__(self, path, tokenizer, **about):
        """about: plain values that the header holds besides its own."""
        self.path, self.tokenizer, self.about = Path(path), tokenizer, about
        self.dtype = np.dtype("<u2" if tokenizer.vocab_size <= 2**16 else "<u4")
        self.n_tokens = self.n_documents = 0
        self.digest = hashlib.blake2b(digest_size=8)
        self.part = self.path.with_name(f"{self.path.name}.tmp")
        self.file = open(self.part, "ab")  # what a killed process left there goes, once it is sure that none is at work
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(self.file.fileno()), os.stat(self.part)):
                raise BlockingIOError
        except (BlockingIOError, FileNotFoundError):
            raise SystemExit(f"{self.part}: another process is writing it; wait for that one, or stop it") from None
        self.file.truncate(0)
        self.file.write(b" " * HEADER_BYTES)

    def pack(self, documents):
        """(ids as they stand in the file, number of documents) of a list of arrays of ids without their <|eos|>. An empty document is
        left out: it has nothing to learn from."""
        documents = [ids for ids in documents if len(ids)]
        eos = np.array([self.tokenizer.eos], self.dtype)
        parts = [part for ids in documents for part in (ids, eos)]
        return (np.concatenate(parts, dtype=self.dtype, casting="unsafe") if parts else eos[:0]), len(documents)

    def append(self, ids, n_documents):
        """Writes what `pack` made."""
        self.file.write(ids.data)
        self.digest.update(ids.data)
        self.n_tokens += len(ids)
        self.n_documents += n_documents

    def write(self, documents):
        """documents: a list of arrays of ids, without their <|eos|>."""
        self.append(*self.pack(documents))

    def close(self):
        tokenizer = self.tokenizer
        about = {"format": FORMAT, "dtype": self.dtype.name, "n_tokens": self.n_tokens, "n_documents": self.n_documents,
                 "digest": self.digest.hexdigest(),
                 "tokenizer": tokenizer.name, "tokenizer_hash": tokenizer.hash, "vocab_size": tokenizer.vocab_size,
                 "first": tokenizer.first, "n_ordinary": tokenizer.n_ordinary, "eos": tokenizer.eos, "pad": tokenizer.pad, "mask": tokenizer.mask,
                 **self.about}
        self.file.flush()
        with open(self.part, "r+b") as file:  # self.file only appends
            file.write(json.dumps(about).encode().ljust(HEADER_BYTES - 1) + b"\n")
        os.fsync(self.file.fileno())
        os.replace(self.part, self.path)
        self.file.close()

    def discard(self):
        """Removes the temporary file; nothing, if `close` has named it already."""
        if not self.file.closed:
            self.part.unlink(missing_ok=True)
            try:
                self.file.close()
            except OSError:  # a full disk refuses what was still to be written
                pass


class TokenFile:
    """The ids of one file, with what its header says of them as attributes. Between two reads no file is open."""

    def __init__(self, path, tokenizer=None):
        """tokenizer: the one of a published shard, whose header names none."""
        self.path = path = Path(path)
        again = "delete it and prepare the data again"
        if not path.is_file():
            raise SystemExit(f"{path}: no such token file; a prepare.py under data/ makes it")
        size = path.stat().st_size
        with open(path, "rb") as file:
            head = file.read(HEADER_BYTES)
        shard = np.frombuffer(head[:12].ljust(12), "<i4")
        try:
            if shard[0] == SHARD_MAGIC:
                about = self._shard(shard, tokenizer)
            else:
                about = json.loads(head)
                if about["format"] != FORMAT:
                    raise ValueError
            self.about = about
            self.n_tokens = int(about["n_tokens"])
            self.tokenizer, self.tokenizer_hash = about["tokenizer"], about["tokenizer_hash"]
            self.vocab_size, self.first, self.n_ordinary = int(about["vocab_size"]), int(about.get("first", 0)), int(about["n_ordinary"])
            self.eos, self.pad, self.mask = int(about["eos"]), int(about["pad"]), int(about["mask"])
            self.dtype = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}[about["dtype"]]
            if shard[0] != SHARD_MAGIC:
                self.n_documents = int(about["n_documents"])
                self.digest = about["digest"]  # of the ids: the same text by the same tokenizer, or not
        except (ValueError, KeyError, TypeError):
            raise SystemExit(f"{path}: not a token file of this project ({size:,} bytes, no header '{FORMAT}'); {again}") from None
        if size != HEADER_BYTES + self.n_tokens * self.dtype.itemsize:
            raise SystemExit(f"{path}: {size:,} bytes, but its header counts {self.n_tokens:,} tokens of {self.dtype.name}, which "
                             f"are {HEADER_BYTES + self.n_tokens * self.dtype.itemsize:,}: cut off or damaged; {again}")
        special, last = {self.eos, self.pad, self.mask}, self.first + self.n_ordinary
        if (self.vocab_size > 2 ** (8 * self.dtype.itemsize) or len(special) < 3
                or any(self.first <= i < last or i >= self.vocab_size for i in special)):
            raise SystemExit(f"{path}: {self.dtype.name} ids, vocabulary {self.vocab_size:,}, special ids {self.eos, self.pad, self.mask} "
                             f"do not fit together; {again}")
        if shard[0] == SHARD_MAGIC:
            self._probe(shard)

    def _shard(self, shard, tokenizer):
        """What our own header would say; a published one holds no more than the number of tokens."""
        if shard[1] != SHARD_VERSION or shard[2] < 0:
            raise SystemExit(f"{self.path}: a shard of version {shard[1]} with {shard[2]:,} tokens; only version {SHARD_VERSION} (uint16, GPT-2) can be read")
        if tokenizer is None or tokenizer.n_ordinary != SHARD_ORDINARY:
            raise SystemExit(f"{self.path}: a shard of GPT-2 tokens, which needs GPT-2's bpe.json beside it; data/fineweb_edu/prepare.py makes it")
        return {"n_tokens": shard[2], "dtype": "uint16", "tokenizer": tokenizer.name, "tokenizer_hash": tokenizer.hash,
                **{name: getattr(tokenizer, name) for name in ("vocab_size", "first", "n_ordinary", "eos", "pad", "mask")}}

    def _probe(self, shard):
        """digest and n_documents of a published shard, from both of its ends: all of it would be 200 GB to read at every start."""
        ends = [np.fromfile(self.path, self.dtype, min(PROBE, self.n_tokens), offset=HEADER_BYTES + self.dtype.itemsize * place)
                for place in (0, max(0, self.n_tokens - PROBE))]
        ids = np.concatenate(ends)
        if len(ids) and ids.max() > self.eos:
            raise SystemExit(f"{self.path}: holds the id {ids.max()}, and GPT-2 has none beyond {self.eos}; these are other tokens")
        self.digest = hashlib.blake2b(shard.tobytes() + ids.tobytes(), digest_size=8).hexdigest()
        self.n_documents = max(1, round(self.n_tokens * float((ids == self.eos).mean()))) if len(ids) else 0  # an estimate

    @cached_property
    def ids(self):
        """(n_tokens,) uint16 or uint32, as a read-only memory map."""
        return np.memmap(self.path, self.dtype, "r", offset=HEADER_BYTES, shape=(self.n_tokens,)) if self.n_tokens else np.empty(0, self.dtype)

    def read(self, start, n):
        """ids[start:start + n], fewer at the end; not through the map, where each place that is new would cost a whole read-ahead."""
        n = max(0, min(n, self.n_tokens - start))
        try:
            ids = np.fromfile(self.path, self.dtype, n, offset=HEADER_BYTES + start * self.dtype.itemsize)
        except OSError as problem:
            raise SystemExit(f"{self.path}: {problem.strerror}; put the data back and go on with the run") from None
        if len(ids) < n:
            raise SystemExit(f"{self.path}: was cut off while it was in use; put the data back and go on with the run")
        if n and ids.max() >= self.vocab_size:
            raise SystemExit(f"{self.path}: damaged, token {start + ids.argmax():,} is {ids.max()}, beyond the vocabulary of {self.vocab_size:,}; fetch or prepare it again")
        return ids


class Corpus:
    """Token files of one tokenizer as their concatenation."""

    def __init__(self, files):
        first = files[0]
        for file in files:
            if file.tokenizer_hash != first.tokenizer_hash:
                raise SystemExit(f"{file.path}: tokens of {file.tokenizer}, but {first.path} has those of {first.tokenizer}; put them into folders of their own")
        self.path, self.files = first.path.parent, files
        for name in ("tokenizer", "tokenizer_hash", "vocab_size", "first", "n_ordinary", "eos", "pad", "mask"):
            setattr(self, name, getattr(first, name))
        self.n_documents = sum(file.n_documents for file in files)
        self.ends = np.cumsum([file.n_tokens for file in files])  # (files,) the number of tokens up to the end of each
        self.n_tokens = int(self.ends[-1])
        self.digest = hashlib.blake2b(" ".join(f"{file.digest}:{file.n_tokens}" for file in files).encode(), digest_size=8).hexdigest()

    def read(self, start, n):
        """ids[start:start + n] of the concatenation: fewer at the end."""
        parts = []
        for i in range(int(np.searchsorted(self.ends, start, "right")), len(self.files)):
            file = self.files[i]
            place = start - (int(self.ends[i]) - file.n_tokens)
            parts.append(file.read(max(place, 0), n + min(place, 0)))
            if start + n <= self.ends[i]:
                break
        return parts[0] if len(parts) == 1 else np.concatenate(parts or [np.empty(0, self.files[0].dtype)])


def open_split(folder, split, tokenizer):
    """train.bin or val.bin of a folder, or all of its numbered files of that split as one corpus."""
    numbered = sorted(path for path in folder.glob("*.bin") if re.fullmatch(rf"(.+_)?{split}_\d+\.bin", path.name))
    single = folder / f"{split}.bin"
    if numbered and single.exists():
        raise SystemExit(f"{folder}: holds both {single.name} and {numbered[0].name}; which is meant? Move one away")
    files = [TokenFile(path, tokenizer) for path in numbered or [single]]
    return files[0] if len(files) == 1 else Corpus(files)
