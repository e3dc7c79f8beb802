"""
FineWeb-Edu (Penedo et al., arXiv 2406.17557), the corpus of the study, in either of two forms:

    python data/fineweb_edu/prepare.py shards --files 10                        GPT-2 tokens as published, 100 million a file, 200 MB
    python data/fineweb_edu/prepare.py parquet --files 2 --tokenizer gpt2       text, 10 billion tokens in 14 files of 2 GB; any tokenizer
    python train.py --dataset fineweb_edu

Files are fetched one by one; the same command goes on where it was stopped, and a larger --files adds to what is there. A machine
without network takes them from a folder: --from DIR. Either way validation stays what the first run made it: the published
validation shard, or documents of the first parquet file, chosen by a hash of their text, which are left out of any later file.
"""
import argparse, os, sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from data.fetch import fetch
from data.prepare import cores, dataset_folder, fraction, progress, run, tokenize
from data.tokenizer import load_tokenizer
from data.tokens import TokenFile, TokenWriter, open_split

HOST = os.environ.get("HF_ENDPOINT", "https://huggingface.co")  # or a mirror of it
SHARDS = "datasets/karpathy/fineweb-edu-100B-gpt2-token-shards/resolve/main"
PARQUET = "datasets/HuggingFaceFW/fineweb-edu/resolve/main/sample/10BT"
VAL_SHARD = "edu_fineweb_val_000000.bin"
VAL_DOCUMENTS = 1000  # about as many are held out, between 0.1 and 10 per cent of the first parquet file


def obtain(name, base, folder, source, check):
    """The path in `folder` of one file of the corpus, sound: there already, or in the folder `source` (a link to it is made), or fetched."""
    path = folder / name
    if not path.exists():
        path.unlink(missing_ok=True)  # a link whose file is gone
        if source:
            found = (source / name).resolve()
            if not found.is_file():
                raise SystemExit(f"--from {source}: has no {name}; fetch it from {HOST}/{base}/{name}")
            check(found)
            path.symlink_to(found)
        else:
            fetch(f"{HOST}/{base}/{name}", path, check)
    else:
        check(path)
    return path


def prepare_shards(folder, tokenizer, names, source):
    """Links or fetches the published token shards: nothing is converted."""
    if tokenizer.n_ordinary != 50256:
        raise SystemExit(f"--tokenizer {tokenizer.name}: the shards hold tokens of GPT-2; leave it out, or give the path of GPT-2's rank file")
    if any(folder.glob("train*.bin")):
        raise SystemExit(f"{folder}: holds another dataset; give another --name")
    save_tokenizer(tokenizer, folder)
    check = lambda path: TokenFile(path, tokenizer)
    for name in [VAL_SHARD] + names:
        obtain(name, SHARDS, folder, source, check)


def named(problem):
    """pyarrow's errors can be many lines, or none."""
    return ": ".join([type(problem).__name__, *str(problem).splitlines()[:1]])


def open_parquet(path):
    try:
        import pyarrow.parquet
    except ImportError:
        raise SystemExit(f"{path}: parquet files need pyarrow: pip install pyarrow; or take the form `shards`") from None
    try:
        file = pyarrow.parquet.ParquetFile(path, pre_buffer=False)  # a buffer would keep all of the file
    except Exception as problem:
        raise SystemExit(f"{path}: not a parquet file, or cut off ({named(problem)}); delete it and fetch it again") from None
    columns = {field.name: str(field.type) for field in file.schema_arrow}
    if columns.get("text") not in ("string", "large_string"):
        raise SystemExit(f"{path}: no column `text` of strings, only {', '.join(columns)}; give files of FineWeb-Edu")
    return file


def parquet_texts(path):
    """(text, bytes read so far), a slice of a row group in memory at a time."""
    with open_parquet(path) as file:
        rows, size = max(1, file.metadata.num_rows), path.stat().st_size
        done = 0
        try:
            for batch in file.iter_batches(batch_size=1000, columns=["text"]):
                for text in batch.column(0).to_pylist():
                    done += 1
                    yield text, done * size // rows
        except Exception as problem:
            raise SystemExit(f"{path}: damaged after row {done:,} of {rows:,} ({named(problem)}); "
                             f"delete it and fetch it again, what is complete is kept") from None


def texts_of(path, tokenizer):
    """The documents of a token file."""
    ids = TokenFile(path).ids
    for part in np.split(ids, np.flatnonzero(ids == tokenizer.eos) + 1)[:-1]:
        yield tokenizer.decode(part[:-1])


def prepare_parquet(folder, tokenizer, names, source, workers):
    """A token file for each parquet file; the first of them also makes val.bin."""
    if any(folder.glob("edu_fineweb_*.bin")) or (folder / "train.bin").exists():
        raise SystemExit(f"{folder}: holds another dataset; give another --name")
    save_tokenizer(tokenizer, folder)
    val = folder / "val.bin"
    for number, name in enumerate(names):
        path = folder / f"train_{number:06d}.bin"
        if path.exists():
            if TokenFile(path).about.get("source") != name:
                raise SystemExit(f"{path}: made of {TokenFile(path).about.get('source')}, not of {name}; take the same files as before, or another --name")
            continue
        parquet = obtain(name, PARQUET, folder, source, open_parquet)
        with open_parquet(parquet) as file:
            share = min(0.1, max(0.001, VAL_DOCUMENTS / max(1, file.metadata.num_rows)))
        first = not val.exists()
        held_out = set() if first else {fraction(text) for text in texts_of(val, tokenizer)}
        left_out = empty = 0

        def documents():
            nonlocal left_out, empty
            for text, position in parquet_texts(parquet):
                if text is None or not text or text.isspace():
                    empty += 1
                elif (place := fraction(text)) in held_out:
                    left_out += 1
                else:
                    yield "val" if first and place < share else "train", text, position

        out = {}
        try:
            out["train"] = TokenWriter(path, tokenizer, source=name)
            if first:
                out["val"] = TokenWriter(val, tokenizer, source=name)
            tokenize(out, documents(), parquet.stat().st_size, workers, name)
            for split, file in out.items():
                if not file.n_documents:
                    raise SystemExit(f"{parquet}: no document for {split}; give a file with more text")
            for split in reversed(out):  # val.bin first: where there is a training file, there is validation
                out[split].close()
        except OSError as problem:
            raise SystemExit(f"{path}: {problem.strerror or problem}; make room and start again, what is complete is kept") from None
        finally:
            for file in out.values():
                file.discard()
        print(f"{path}: {out['train'].n_documents:,} documents, {out['train'].n_tokens:,} tokens ({out['train'].dtype.name})"
              + (f"; left out: {left_out:,} that stand in validation" if left_out else "") + (f", {empty:,} empty" if empty else ""))


def save_tokenizer(tokenizer, folder):
    """bpe.json, or an error where another one is there."""
    path = folder / "bpe.json"
    if path.exists():
        if (there := load_tokenizer(path)).hash != tokenizer.hash:
            raise SystemExit(f"{folder}: its tokenizer is {there.name}, not {tokenizer.name}; give --tokenizer {path}, or another --name")
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        part = path.with_name("bpe.json.tmp")
        tokenizer.save(part)
        os.replace(part, path)
    except OSError as problem:
        raise SystemExit(f"{path}: {problem.strerror}") from None


def main():
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("form", choices=("shards", "parquet"), help="tokens as published, or text")
    parser.add_argument("--files", type=int, help="how many training files, in the order of their numbers (default: 1; with --from, all that are there)")
    parser.add_argument("--from", dest="source", type=Path, metavar="DIR", help="take the files from this folder, in place, instead of fetching them")
    parser.add_argument("--tokenizer", default="gpt2", help="for parquet: gpt2 or another published encoding, or the path of a tiktoken rank file (Llama 3's) or bpe.json")
    parser.add_argument("--name", default="fineweb_edu", help="the dataset's folder under data/, or any path")
    parser.add_argument("--workers", type=int, default=cores(), help="threads that tokenize; the result does not depend on it")
    args = parser.parse_args()
    most, pattern = (1001, "edu_fineweb_train_*.bin") if args.form == "shards" else (14, "*.parquet")
    names = [f"edu_fineweb_train_{i + 1:06d}.bin" if args.form == "shards" else f"{i:03d}_00000.parquet" for i in range(most)]
    if args.source:
        names = sorted(path.name for path in args.source.glob(pattern))
        if not names:
            raise SystemExit(f"--from {args.source}: no {pattern} there; put the files of {HOST}/{SHARDS if args.form == 'shards' else PARQUET} there")
    count = args.files if args.files is not None else len(names) if args.source else 1
    if not 1 <= count <= len(names):
        raise SystemExit(f"--files {count}: give 1 to {len(names)}")
    if args.workers < 1:
        raise SystemExit(f"--workers {args.workers}: at least 1")
    folder = dataset_folder(args.name)
    tokenizer = load_tokenizer(args.tokenizer)
    if args.form == "shards":
        prepare_shards(folder, tokenizer, names[:count], args.source)
    else:
        prepare_parquet(folder, tokenizer, names[:count], args.source, args.workers)
    train, val = (open_split(folder, split, tokenizer) for split in ("train", "val"))
    print(f"{folder}: {train.n_tokens:,} tokens to train on, {val.n_tokens:,} to validate on, of {tokenizer.name}; next: python train.py --dataset {args.name}")


if __name__ == "__main__":
    run(main)
