"""
The token file: a corpus as one flat array of ids that is memory-mapped, never loaded.

    bytes 0 ... 1023   one line of JSON, padded with spaces (`head -c 1024 train.bin` shows it)
    bytes 1024 ...     the ids, little-endian uint16 or uint32 by the size of the vocabulary, one <|eos|> after each document
"""
import hashlib, json, os
from pathlib import Path

import numpy as np

HEADER_BYTES = 1024
FORMAT = "encoder tokens 1"


class TokenWriter:
    """Appends documents to a temporary file; only `close` gives it its name, so a file that has its name is whole."""

    def __init__(self, path, tokenizer):
        self.path, self.tokenizer = Path(path), tokenizer
        self.dtype = np.dtype("<u2" if tokenizer.vocab_size <= 2**16 else "<u4")
        self.n_tokens = self.n_documents = 0
        self.digest = hashlib.blake2b(digest_size=8)
        self.part = self.path.with_name(f"{self.path.name}.{os.getpid()}.tmp")
        self.file = open(self.part, "wb")
        self.file.write(b" " * HEADER_BYTES)

    def write(self, documents):
        """documents: a list of arrays of ids, without their <|eos|>. An empty document is left out: it has nothing to learn from."""
        documents = [ids for ids in documents if len(ids)]
        if documents:
            eos = np.array([self.tokenizer.eos], np.uint32)
            ids = np.concatenate([part for ids in documents for part in (ids, eos)])
            data = ids.astype(self.dtype).tobytes()
            self.file.write(data)
            self.digest.update(data)
            self.n_tokens += len(ids)
            self.n_documents += len(documents)

    def close(self):
        tokenizer = self.tokenizer
        about = {"format": FORMAT, "dtype": self.dtype.name, "n_tokens": self.n_tokens, "n_documents": self.n_documents,
                 "digest": self.digest.hexdigest(),
                 "tokenizer": tokenizer.name, "tokenizer_hash": tokenizer.hash, "vocab_size": tokenizer.vocab_size,
                 "first": tokenizer.first, "n_ordinary": tokenizer.n_ordinary, "eos": tokenizer.eos, "pad": tokenizer.pad, "mask": tokenizer.mask}
        self.file.seek(0)
        self.file.write(json.dumps(about).encode().ljust(HEADER_BYTES - 1) + b"\n")
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        os.replace(self.part, self.path)

    def discard(self):
        self.file.close()
        self.part.unlink(missing_ok=True)


class TokenFile:
    """The ids of one file as a read-only memory map, with what the header says of them as attributes."""

    def __init__(self, path):
        self.path = path = Path(path)
        again = "delete it and prepare the data again"
        if not path.is_file():
            raise SystemExit(f"{path}: no such token file; a prepare.py under data/ makes it")
        size = path.stat().st_size
        with open(path, "rb") as file:
            head = file.read(HEADER_BYTES)
        try:
            about = json.loads(head)
            if about["format"] != FORMAT:
                raise ValueError
            self.n_tokens, self.n_documents = int(about["n_tokens"]), int(about["n_documents"])
            self.digest = about["digest"]  # of the ids: the same text by the same tokenizer, or not
            self.tokenizer, self.tokenizer_hash = about["tokenizer"], about["tokenizer_hash"]
            self.vocab_size, self.first, self.n_ordinary = int(about["vocab_size"]), int(about.get("first", 0)), int(about["n_ordinary"])
            self.eos, self.pad, self.mask = int(about["eos"]), int(about["pad"]), int(about["mask"])
            dtype = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}[about["dtype"]]
        except (ValueError, KeyError, TypeError):
            raise SystemExit(f"{path}: not a token file of this project ({size:,} bytes, no header '{FORMAT}'); {again}") from None
        if size != HEADER_BYTES + self.n_tokens * dtype.itemsize:
            raise SystemExit(f"{path}: {size:,} bytes, but its header counts {self.n_tokens:,} tokens of {dtype.name}, which "
                             f"are {HEADER_BYTES + self.n_tokens * dtype.itemsize:,}: cut off or damaged; {again}")
        special, last = {self.eos, self.pad, self.mask}, self.first + self.n_ordinary
        if self.vocab_size > 2 ** (8 * dtype.itemsize) or len(special) < 3 or any(self.first <= i < last or i >= self.vocab_size for i in special):
            raise SystemExit(f"{path}: {dtype.name} ids, vocabulary {self.vocab_size:,}, special ids {self.eos, self.pad, self.mask} "
                             f"do not fit together; {again}")
        self.ids = np.memmap(path, dtype, "r", offset=HEADER_BYTES, shape=(self.n_tokens,)) if self.n_tokens else np.empty(0, dtype)
