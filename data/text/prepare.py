"""
Your own text as a dataset:

    python data/text/prepare.py FILES... --name mine [--tokenizer gpt2|train:8192|PATH|hf:DIR] [--val_fraction 0.01]
    python train.py --dataset mine

FILES are .jsonl (one object with a `text` field a line: a document) or .txt (a document a file; a file longer than 16 KB is cut at
blank lines into documents of about that size), as they are or compressed. A document goes to validation by a hash of its text, so
equal texts never stand in both splits. Empty documents are left out and counted.
"""
import argparse, sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from data.prepare import DATA, cores, fraction, kind_of, progress, read_documents, run, write_dataset
from data.tokenizer import load_tokenizer, train_tokenizer

SAMPLE = 200_000_000  # bytes of text that a tokenizer is trained on, drawn evenly from a larger corpus
VALIDATION = 500_000  # bytes of text that validation should have: its default share follows, between 0.5 and 10 per cent


def main():
    parser = argparse.ArgumentParser(description="Your own text as a dataset for train.py --dataset NAME", allow_abbrev=False)
    parser.add_argument("files", nargs="+", metavar="FILE", help=".txt or .jsonl, possibly .gz, .bz2, .xz or .zst")
    parser.add_argument("--name", required=True, help="the dataset's folder under data/, or with a / in it any path")
    parser.add_argument("--tokenizer", default="train:8192", help="gpt2 or another published encoding, train:SIZE, the path of a tiktoken rank file or bpe.json, or hf:DIR, a Hugging Face folder")
    parser.add_argument("--val_fraction", type=float, help="share of the documents held out (default: about 500 KB of text, 0.5 to 10 per cent)")
    parser.add_argument("--workers", type=int, default=cores(), help="threads that tokenize; the result does not depend on it")
    args = parser.parse_args()
    folder, files = Path(args.name) if "/" in args.name else DATA / args.name, [Path(file) for file in args.files]
    if args.name in ("", ".", "..") or (folder / "prepare.py").exists():
        raise SystemExit(f"--name {args.name}: give another name; {folder} holds code")
    if (folder / "train.bin").exists():
        raise SystemExit(f"--name {args.name}: {folder} already holds a dataset; take another name, or delete its train.bin, val.bin "
                         f"and bpe.json")
    for file in files:
        if not file.is_file():
            raise SystemExit(f"{file}: {'a folder; give its files' if file.is_dir() else 'no such file'}")
        kind_of(file)
    total = sum(file.stat().st_size for file in files)
    share = args.val_fraction if args.val_fraction is not None else min(0.1, max(0.005, VALIDATION / max(total, 1)))
    if not 0 < share < 1:
        raise SystemExit(f"--val_fraction {share}: give a share between 0 and 1")
    if args.workers < 1:
        raise SystemExit(f"--workers {args.workers}: at least 1")
    empty = 0

    def documents():
        nonlocal empty
        before, empty = 0, 0
        for file in files:
            for text, position in read_documents(file):
                if text.isspace() or not text:
                    empty += 1
                else:
                    yield "val" if fraction(text) < share else "train", text, before + position
            before += file.stat().st_size

    def sample():
        drawn = SAMPLE / max(total, 1)
        with progress(total, f"training a BPE of {size:,} ids") as bar:
            for split, text, position in documents():
                bar.update(position - bar.n)
                if split == "train" and (drawn >= 1 or fraction(text, b"sample") < drawn):
                    yield text
            bar.update(total - bar.n)

    if args.tokenizer.startswith("train:"):
        try:
            size = int(args.tokenizer[6:])
        except ValueError:
            raise SystemExit(f"--tokenizer {args.tokenizer}: give a whole number of ids, as in train:8192") from None
        tokenizer = train_tokenizer(sample(), size)
        if tokenizer.n_ordinary < size - 3:
            print(f"the text holds only {tokenizer.n_ordinary:,} different pieces, so the vocabulary is smaller than {size:,}")
    else:
        tokenizer = load_tokenizer(args.tokenizer)
    out = write_dataset(folder, tokenizer, documents(), total, args.workers)
    if empty:
        print(f"left out: {empty:,} empty documents")
    for split, file in out.items():
        print(f"{file.path}: {file.n_documents:,} documents, {file.n_tokens:,} tokens of {tokenizer.name} ({file.dtype.name})")
    print(f"next: python train.py --dataset {args.name}")


if __name__ == "__main__":
    run(main)
