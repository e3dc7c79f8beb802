"""
The tokenizer: a byte-level BPE that tiktoken runs, plus three special tokens of this project.

Where the merges come from:
  gpt2, cl100k_base, ...   an encoding that OpenAI published, through tiktoken's own cache
  PATH                     a tiktoken rank file (GPT-2's, Llama 3's, ...) or a bpe.json written here
  train:8192               trained on the corpus with rustbpe; the size counts the special tokens

`<|eos|>`, `<|pad|>` and `<|mask|>` take the first three ids past the ordinary ones, so an id below
`n_ordinary` is text and any other is not. Text that spells "<|eos|>" is text: encoding never makes a special id.
"""
import base64, hashlib, json, re
from functools import cached_property
from pathlib import Path

import numpy as np
import tiktoken

EOS, PAD, MASK = "<|eos|>", "<|pad|>", "<|mask|>"
GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
GPT4_PATTERN = r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s"""
LLAMA3_PATTERN = r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
O200K_PATTERN = "|".join((
    r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
    r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
    r"""\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"""))
PATTERNS = {50256: GPT2_PATTERN, 100256: GPT4_PATTERN, 128000: LLAMA3_PATTERN, 199998: O200K_PATTERN}  # by number of ranks: a rank file names none
PUBLISHED = {"gpt2": ("r50k_base", "gpt2")}  # the same ids under two names: one file to fetch, or two
WHITE = 50_000  # longest run of white space encoded in one go: tiktoken's regex overflows its stack near a million


def cut_white(text):
    """[text], or its parts where a run of white space is too long for the regexes of tiktoken and rustbpe."""
    if len(text) >= WHITE and any(text[i:i + WHITE].isspace() for i in range(0, len(text), WHITE)):  # sees every run of 2 * WHITE
        return [part for part in re.split(rf"(\s{{{WHITE}}})", text) if part]
    return [text]


class Tokenizer:
    """name; pattern (the regex that splits text before merging); ranks: bytes -> id, 0 ... n_ordinary - 1."""

    def __init__(self, name, pattern, ranks):
        if sorted(ranks.values()) != list(range(len(ranks))):
            raise SystemExit(f"tokenizer {name}: its {len(ranks):,} ids are not 0 ... {len(ranks) - 1:,} without gaps; give a complete rank file")
        missing = [b for b in range(256) if bytes([b]) not in ranks]
        if missing:
            raise SystemExit(f"tokenizer {name}: byte {missing[0]} has no id, so some text could not be encoded; give a complete rank file")
        self.name, self.pattern, self.ranks = name, pattern, ranks
        self.n_ordinary = len(ranks)
        self.eos, self.pad, self.mask = range(self.n_ordinary, self.n_ordinary + 3)
        self.vocab_size = -(-(self.n_ordinary + 3) // 64) * 64  # rows past <|mask|> only round the matrix; no text has them
        self._bpe = tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks,
                                      special_tokens={EOS: self.eos, PAD: self.pad, MASK: self.mask})

    def encode(self, text):
        """str -> uint32 array of ordinary ids. Releases the GIL, so threads run in parallel."""
        parts = [self._bpe.encode_to_numpy(part, disallowed_special=()) for part in cut_white(text)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def decode(self, ids):
        return self._bpe.decode([int(i) for i in ids if i < self.n_ordinary + 3])

    @cached_property
    def hash(self):
        """16 hex digits that change with any rank or with the pattern: equal hashes, equal ids."""
        digest = hashlib.sha256(self.pattern.encode())
        for piece in sorted(self.ranks, key=self.ranks.get):
            digest.update(len(piece).to_bytes(4, "little") + piece)
        return digest.hexdigest()[:16]

    def to_dict(self):
        """Plain strings, for bpe.json and for checkpoints."""
        pieces = (base64.b64encode(piece).decode() for piece in sorted(self.ranks, key=self.ranks.get))
        return {"name": self.name, "pattern": self.pattern, "ranks": " ".join(pieces)}

    @classmethod
    def from_dict(cls, saved):
        pieces = saved["ranks"].split(" ")
        return cls(saved["name"], saved["pattern"], {base64.b64decode(piece): i for i, piece in enumerate(pieces)})

    def save(self, path):
        Path(path).write_text(json.dumps(self.to_dict()), encoding="utf-8")


def load_tokenizer(spec):
    """A published name, or the path of a tiktoken rank file or of a bpe.json."""
    path = Path(spec)
    if path.is_file():
        text = path.read_text(encoding="utf-8", errors="replace")
        try:
            if text.startswith("{"):
                return Tokenizer.from_dict(json.loads(text))
            ranks = {base64.b64decode(piece, validate=True): int(rank) for piece, rank in (line.split() for line in text.splitlines() if line)}
        except (ValueError, KeyError) as problem:
            raise SystemExit(f"{path}: neither a tiktoken rank file (lines of base64 and rank) nor a bpe.json ({problem})") from None
        if not ranks:
            raise SystemExit(f"{path}: no ranks in this file; give a complete tiktoken rank file")
        if len(ranks) not in PATTERNS:
            print(f"{path}: {len(ranks):,} ranks of no known vocabulary, so text is split by GPT-4's pattern")
        return Tokenizer(path.stem, PATTERNS.get(len(ranks), GPT4_PATTERN), ranks)
    known = [name for name in tiktoken.list_encoding_names() if not name.startswith("p50k")]  # p50k's ids have a gap
    if spec not in known:
        raise SystemExit(f"--tokenizer {spec}: no such file and no published encoding; give a path, train:SIZE, or one of {', '.join(known)}")
    for name in PUBLISHED.get(spec, (spec,)):
        try:
            published = tiktoken.get_encoding(name)
        except OSError:  # requests' errors are OSErrors: no network, and not in the cache
            continue
        return Tokenizer(spec, published._pat_str, published._mergeable_ranks)
    file = f"{PUBLISHED.get(spec, (spec,))[0]}.tiktoken"
    raise SystemExit(f"--tokenizer {spec}: not in tiktoken's cache and not to be had from the network; fetch "
                     f"https://openaipublic.blob.core.windows.net/encodings/{file} elsewhere and give its path: --tokenizer {file}")


def train_tokenizer(texts, vocab_size):
    """BPE of `vocab_size` ids (the three special ones included) from an iterator of str, read once; the same for any number of cores."""
    try:
        import rustbpe
    except ImportError:
        raise SystemExit(f"--tokenizer train:{vocab_size} needs rustbpe: pip install rustbpe, or give --tokenizer gpt2 or a rank file") from None
    if vocab_size < 256 + 3:
        raise SystemExit(f"--tokenizer train:{vocab_size}: at least 259 are needed, for 256 bytes and 3 special tokens")
    bpe = rustbpe.Tokenizer()
    bpe.train_from_iterator((part for text in texts for part in cut_white(text)), vocab_size - 3, pattern=GPT4_PATTERN)
    return Tokenizer(f"train:{vocab_size}", GPT4_PATTERN, {bytes(piece): rank for piece, rank in bpe.get_mergeable_ranks()})
