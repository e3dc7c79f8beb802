"""
Text to a dataset: a folder with train.bin, val.bin (token files, see tokens.py) and bpe.json (the tokenizer).

The prepare.py of each corpus yields documents and calls `write_dataset`, which tokenizes on all cores. The bytes written do not
depend on the number of cores, memory does not grow with the corpus, and train.bin gets its name last: a folder that
holds it is complete.
"""
import bz2, contextlib, gzip, hashlib, io, json, lzma, os, signal, sys
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tqdm import tqdm

from data.tokens import TokenWriter

BATCH = 1 << 18       # characters tokenized by one thread at a time
PIECE = 1 << 14       # a longer .txt file is cut into documents of about this many characters
DATA = Path(__file__).parent


def dataset_folder(dataset):
    """--dataset: the name of a folder under data/, or the path of any folder."""
    return DATA / dataset if "/" not in dataset and ((DATA / dataset).exists() or not Path(dataset).exists()) else Path(dataset)


def run(main):
    """A prepare script's main, from the command line: Ctrl-C and SIGTERM end it in one line and leave no half-written file."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit("interrupted; nothing was kept") from None


def read_lines(path):
    """The lines of a .jsonl log as dicts; one that was cut off when its process was killed is left out."""
    lines = []
    for line in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(json.JSONDecodeError):
            lines.append(json.loads(line))
    return lines


def cores():
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def progress(total, description, **more):
    """A bar in megabytes with throughput and time left."""
    return tqdm(total=total, desc=description, unit="B", unit_scale=True, mininterval=0.5, **more)


def fraction(text, salt=b""):
    """A number in [0, 1) that depends on the text alone: equal texts always fall on the same side of a split."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8, salt=salt).digest(), "little") / 2**64


def tokenize(out, documents, total, workers=None, description="tokenizing"):
    """Appends documents to the files of `out`, {split: TokenWriter}, in their order, on all cores.

    documents: iterator of (split, text, bytes read so far of `total`)."""
    workers = workers or cores()
    encode = next(iter(out.values())).tokenizer.encode
    pending = deque()  # batches in the order of the documents; bounded, so reading cannot run away from tokenizing

    def packed(batch):
        ids = [(split, encode(text)) for split, text in batch]
        return {split: file.pack([x for side, x in ids if side == split]) for split, file in out.items()}

    def write_first():
        position, ids = pending.popleft()
        for split, part in ids.result().items():
            out[split].append(*part)
        bar.update(position - bar.n)

    with ThreadPoolExecutor(workers) as pool, progress(total, description) as bar:
        batch, size = [], 0
        for split, text, position in documents:
            batch.append((split, text))
            size += len(text)
            if size >= BATCH:
                pending.append((position, pool.submit(packed, batch)))
                batch, size = [], 0
                if len(pending) > 2 * workers + 16:  # a thread that the machine holds up must not idle the others
                    write_first()
        pending.append((total, pool.submit(packed, batch)))
        while pending:
            write_first()


def write_dataset(folder, tokenizer, documents, total, workers=None):
    """documents: iterator of (split "train" | "val", text, bytes read so far of `total`). Returns {split: its TokenWriter}."""
    folder.mkdir(parents=True, exist_ok=True)
    out = {}
    try:
        out.update((split, TokenWriter(folder / f"{split}.bin", tokenizer)) for split in ("train", "val"))
        tokenize(out, documents, total, workers)
        for split, file in out.items():
            if not file.n_documents:
                raise SystemExit(f"{folder}: no document fell to {split} (train has {out['train'].n_documents:,}, val {out['val'].n_documents:,}); "
                                 f"give more text or another --val_fraction")
        tokenizer.save(folder / "bpe.json")
        out["val"].close()
        out["train"].close()
    except OSError as problem:
        raise SystemExit(f"{folder}: {problem.strerror or problem}; nothing was kept, make room and start again") from None
    finally:
        for file in out.values():
            file.discard()
        if len(out) == 2 and not (folder / "train.bin").exists():
            for name in ("val.bin", "bpe.json"):
                (folder / name).unlink(missing_ok=True)
        if not any(folder.iterdir()):
            folder.rmdir()
    return out


def kind_of(path):
    """(".txt" or ".jsonl", the function that opens its compression) by the name of a file."""
    kind, packing = path.suffix, None
    if kind in (".gz", ".bz2", ".xz", ".zst"):
        kind, packing = Path(path.stem).suffix, kind
    if kind not in (".txt", ".jsonl"):
        raise SystemExit(f"{path}: neither .txt nor .jsonl (possibly .gz, .bz2, .xz or .zst); rename or convert it")
    openers = {None: lambda raw: raw, ".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
    if packing == ".zst":
        try:
            from compression import zstd
        except ImportError:
            version = f"{sys.version_info.major}.{sys.version_info.minor}"
            raise SystemExit(f"{path}: Python {version} reads no zst (3.14 does); unpack it with zstd -d") from None
        openers[".zst"] = zstd.open
    return kind, openers[packing]


def read_documents(path):
    """(document, bytes of the file read so far) of a .txt file (one, or pieces of about PIECE characters cut at blank lines) or a .jsonl file (its
    field `text`), either of them compressed (.gz, .bz2, .xz; .zst from Python 3.14 on)."""
    path = Path(path)
    kind, opened = kind_of(path)
    n_lines = 0
    try:
        with open(path, "rb") as raw:
            text = io.TextIOWrapper(opened(raw), encoding="utf-8")
            lines, size = [], 0
            while line := text.readline(-1 if kind == ".jsonl" else 4 * PIECE):
                n_lines += 1
                if n_lines == 1:
                    line = line.removeprefix("\ufeff")  # a byte order mark
                if kind == ".txt":
                    lines.append(line)
                    size += len(line)
                    if size >= PIECE and line.isspace() or size >= 4 * PIECE:
                        yield "".join(lines), raw.tell()
                        lines, size = [], 0
                elif not line.isspace():
                    try:
                        document = json.loads(line)["text"]
                        if "\\u" in line:  # a lone surrogate is no character
                            document = document.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
                        elif not isinstance(document, str):
                            raise TypeError
                    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                        raise SystemExit(f'{path}, line {n_lines:,}: not a JSON object with a string "text"; mend or remove the line') from None
                    yield document, raw.tell()
            if lines:
                yield "".join(lines), raw.tell()
    except UnicodeDecodeError as problem:
        byte = problem.object[problem.start]
        raise SystemExit(f"{path}: not UTF-8 after line {n_lines:,} (byte 0x{byte:02x}); convert it, e.g. with iconv -t utf-8") from None
    except Exception as problem:  # each format has errors of its own for a file that is cut off or damaged
        raise SystemExit(f"{path}: cannot be read to its end ({type(problem).__name__}: {problem}); fetch it again") from None
