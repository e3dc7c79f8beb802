"""
Text to token file, end to end, against tiktoken's own `encode_ordinary_batch` on the same text and cores:

    python bench/tokenizing.py corpus.jsonl --tokenizer gpt2 [--pairs 5] [--memory 2000]

tiktoken has its texts in memory and keeps its ids there; our side reads the file, hashes each document, tokenizes, writes and syncs the token
files. With pyarrow installed, the same text as parquet too. The sides take turns in one process; what is quoted is the median of the ratios of
turns, with their quartiles. --memory N (Linux): peak memory of data/text/prepare.py in a process of its own, on the text repeated to N MB.
"""
import argparse, contextlib, io, json, os, subprocess, sys, tempfile, time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import numpy as np

from data.fineweb_edu.prepare import prepare_parquet
from data.prepare import cores, fraction, read_documents, write_dataset
from data.tokenizer import load_tokenizer

ROOT = Path(__file__).resolve().parents[1]
PEAK = """
import re, sys
sys.path.insert(0, sys.argv.pop(1))
from data.text import prepare
prepare.main()
print(1024 * int(re.search(r"VmHWM:\\s*(\\d+)", open("/proc/self/status").read())[1]))  # of this program alone: ru_maxrss begins at the parent's
"""


def from_jsonl(path, folder, tokenizer, workers):
    documents = (("val" if fraction(text) < 0.01 else "train", text, position) for text, position in read_documents(path))
    out = write_dataset(folder, tokenizer, documents, path.stat().st_size, workers)
    return sum(file.n_tokens - file.n_documents for file in out.values())


def from_parquet(path, folder, tokenizer, workers):
    with contextlib.redirect_stdout(io.StringIO()):
        prepare_parquet(folder, tokenizer, [path.name], path.parent, workers)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, metavar="FILE", help=".jsonl, a document a line in the field `text`")
    parser.add_argument("--tokenizer", default="gpt2", help="gpt2 or another published encoding, or the path of a rank file")
    parser.add_argument("--pairs", type=int, default=5, help="turns of each side")
    parser.add_argument("--workers", type=int, default=cores(), help="threads of each side")
    parser.add_argument("--memory", type=int, help="MB of text for the measurement of memory")
    args = parser.parse_args()
    tokenizer, workers = load_tokenizer(args.tokenizer), args.workers
    texts = [text for text, _ in read_documents(args.file)]
    size = sum(len(text.encode()) for text in texts) / 1e6
    print(f"{args.file}: {len(texts):,} documents, {size:.1f} MB of text; {tokenizer.name}; {workers} threads")
    with tempfile.TemporaryDirectory() as tmp, open(os.devnull, "w") as quiet:
        tmp = Path(tmp)
        sides = {"jsonl": (from_jsonl, args.file)}
        with contextlib.suppress(ImportError):
            import pyarrow, pyarrow.parquet
            pyarrow.parquet.write_table(pyarrow.table({"text": texts}), tmp / "text.parquet", row_group_size=1000)
            sides["parquet"] = (from_parquet, tmp / "text.parquet")
        speeds = {name: [] for name in ["tiktoken", *sides]}
        for turn in range(args.pairs):
            begun = time.perf_counter()
            ids = tokenizer._bpe.encode_ordinary_batch(texts, num_threads=workers)
            speeds["tiktoken"].append(size / (time.perf_counter() - begun))
            n_tokens = sum(map(len, ids))
            del ids
            for name, (prepare, path) in sides.items():
                begun = time.perf_counter()
                with contextlib.redirect_stderr(quiet):
                    written = prepare(path, tmp / f"{name}{turn}", tokenizer, workers)
                speeds[name].append(size / (time.perf_counter() - begun))
                assert written in (None, n_tokens), "the two sides made different numbers of tokens"
        for name, values in speeds.items():
            low, middle, high = np.percentile(np.divide(values, speeds["tiktoken"]), [25, 50, 75])
            print(f"{name:9} {np.median(values):6.2f} MB/s; {middle:.2f} ({low:.2f} - {high:.2f}) times tiktoken's")
        if args.memory:
            big = tmp / "big.jsonl"
            with open(big, "w") as file:
                while file.tell() < args.memory * 1e6:
                    file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
            tokenizer.save(tmp / "bpe.json")
            done = subprocess.run([sys.executable, "-c", PEAK, ROOT, big, "--name", tmp / "big", "--tokenizer", tmp / "bpe.json"],
                                  check=True, stdout=subprocess.PIPE, text=True)
            print(f"memory    {int(done.stdout.split()[-1]) / 1e6:,.0f} MB at most, for {big.stat().st_size / 1e6:,.0f} MB of JSON lines")


if __name__ == "__main__":
    main()
