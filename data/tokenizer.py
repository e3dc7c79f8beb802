"""
The tokenizer: a byte-level BPE that tiktoken runs, plus three special tokens of this project.

Where the merges come from:
  gpt2, cl100k_base, ...   an encoding that OpenAI published, through tiktoken's own cache
  PATH                     a tiktoken rank file (GPT-2's, Llama 3's, ...) or a bpe.json written here
  train:8192               trained on the corpus with rustbpe; the size counts the special tokens
  hf:DIR                   a Hugging Face folder's tokenizer.json (hf.py), with its own ids

The ordinary ids, those of text, are `n_ordinary` in a row from `first` on. `<|eos|>`, `<|pad|>` and `<|mask|>` take the first three ids
past them, unless a folder brings special tokens of its own. Text that spells "<|eos|>" is text: encoding never makes a special id.
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


def portable(pattern):
    """The same pattern with one meaning in all regex engines: Hugging Face's takes `{1,3}+` for a repeated group and `$` for the end of a line."""
    return re.sub(r"(?<!\\)\$", r"\\z", re.sub(r"(\{\d+,\d+\})\+", r"\1", pattern))


class Tokenizer:
    """name; pattern: the regex that splits text before merging; ranks: bytes -> id, first ... first + n_ordinary - 1, in the order of merging.

    special: name -> id of all special tokens, `roles` the names of those that stand for <|eos|>, <|pad|> and <|mask|>; vocab_size: rows of the
    embedding. Without these: three tokens past the ordinary ones, and rows rounded up to 64."""

    def __init__(self, name, pattern, ranks, special=None, roles=(EOS, PAD, MASK), vocab_size=None):
        self.first = min(ranks.values(), default=0)
        if sorted(ranks.values()) != list(range(self.first, self.first + len(ranks))) or self.first and not special:
            raise SystemExit(f"tokenizer {name}: its {len(ranks):,} ids are not {'in a row' if special else f'0 ... {len(ranks) - 1:,}'} without gaps; "
                             f"give a complete rank file")
        self.missing = [b for b in range(256) if bytes([b]) not in ranks]  # text loses these bytes, as it does in transformers
        if self.missing and not special:
            raise SystemExit(f"tokenizer {name}: byte {self.missing[0]} has no id, so some text could not be encoded; give a complete rank file")
        self.name, self.pattern, self.ranks, self.roles = name, portable(pattern), ranks, tuple(roles)
        self.n_ordinary = len(ranks)
        self.usual = special is None
        self.special = dict(zip(roles, range(self.n_ordinary, self.n_ordinary + 3))) if self.usual else special
        self.eos, self.pad, self.mask = (self.special[role] for role in self.roles)
        self.vocab_size = vocab_size or -(-(self.n_ordinary + 3) // 64) * 64  # rows past <|mask|> only round the matrix; no text has them
        self._bpe = tiktoken.Encoding(name, pat_str=self.pattern, mergeable_ranks=ranks | {bytes([b]): 2**31 + b for b in self.missing},
                                      special_tokens=self.special)
        self._known = {*ranks.values(), *self.special.values()}

    def encode(self, text):
        """str -> uint32 array of ordinary ids. Releases the GIL, so threads run in parallel."""
        parts = [self._bpe.encode_to_numpy(part, disallowed_special=()) for part in cut_white(text)]
        ids = parts[0] if len(parts) == 1 else np.concatenate(parts)
        if self.missing and (ids >= 2**31).any():  # as transformers does it: bytes without an id go before the merges, and their neighbours meet
            import regex  # comes with tiktoken
            pieces = (piece.encode().translate(None, bytes(self.missing)) for piece in regex.findall(self.pattern.replace(r"\z", r"\Z"), text))
            ids = np.array([i for piece in pieces if piece for i in self._bpe._encode_single_piece(piece)], np.uint32)
        return ids

    def decode(self, ids):
        return self._bpe.decode([int(i) for i in ids if int(i) in self._known])

    @cached_property
    def hash(self):
        """16 hex digits that change with any rank, with the pattern, and with special ids that are not the usual ones: equal hashes, equal ids."""
        digest = hashlib.sha256(self.pattern.encode())
        for piece in sorted(self.ranks, key=self.ranks.get):
            digest.update(len(piece).to_bytes(4, "little") + piece)
        if (self.first, self.eos, self.pad, self.mask) != (0, *range(self.n_ordinary, self.n_ordinary + 3)):
            digest.update(f"{self.first} {self.eos} {self.pad} {self.mask}".encode())
        return digest.hexdigest()[:16]

    def to_dict(self):
        """Plain strings, for bpe.json and for checkpoints."""
        pieces = (base64.b64encode(piece).decode() for piece in sorted(self.ranks, key=self.ranks.get))
        more = {} if self.usual else {"first": self.first, "special": self.special, "roles": list(self.roles), "vocab_size": self.vocab_size}
        return {"name": self.name, "pattern": self.pattern, "ranks": " ".join(pieces), **more}

    @classmethod
    def from_dict(cls, saved):
        pieces = saved["ranks"].split(" ")
        more = [saved[key] for key in ("special", "roles", "vocab_size") if key in saved]
        return cls(saved["name"], saved["pattern"], {base64.b64decode(piece): i for i, piece in enumerate(pieces, saved.get("first", 0))}, *more)

    def save(self, path):
        Path(path).write_text(json.dumps(self.to_dict()), encoding="utf-8")


def load_tokenizer(spec):
    """A published name, the path of a tiktoken rank file or of a bpe.json, or hf: and a Hugging Face folder."""
    if str(spec).startswith("hf:"):
        from data.hf import read_tokenizer
        return read_tokenizer(str(spec)[3:])
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
