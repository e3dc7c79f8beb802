"""
A task of sequence classification that needs no download, from the documentation of this Python installation:

    python data/docs_sc/prepare.py

Which package does this sentence describe? Sentences that name a package are left out.
"""
import random, re, sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from data.docstrings.prepare import PACKAGES, paragraphs, words_of
from data.documented import documented, naive_bayes, task_folder, unseen, write_tsv

LABELS = ("numpy", "torch", "sympy", "networkx", "stdlib")  # every other package is "tools"
NAMES = {package.removesuffix(".py") for package in PACKAGES} | {"python", "pytorch", "cuda", "tensor", "tensors"}
MOST = 3000  # training rows of a label


def sentences(entries):
    """{split: [(sentence, label)]}"""
    splits = {"train": [], "val": [], "test": []}
    for entry in entries:
        label = entry.package if entry.package in LABELS else "tools"
        for paragraph in paragraphs(entry.text) if "_vendor" not in entry.module else ():
            for sentence in re.split(r"(?<=[.!?:]) +", paragraph):
                words = words_of(sentence)
                if 6 <= len(words) <= 40 and not NAMES & set(words):
                    splits[entry.split].append((sentence, label))
    return unseen(splits, lambda row: "".join(words_of(row[0])))


def main():
    folder, splits = task_folder("docs_sc", "train.tsv"), sentences(documented())
    shuffled, count = random.Random(0).sample(splits["train"], len(splits["train"])), dict.fromkeys((*LABELS, "tools"), 0)
    splits["train"] = []
    for sentence, label in shuffled:
        count[label] += 1
        if count[label] <= MOST:
            splits["train"].append((sentence, label))
    labels = [label for _, label in splits["test"]]
    print(f"{folder}: " + ", ".join(f"{split} {len(rows):,}" for split, rows in splits.items())
          + f"; baselines on test: commonest label {max(map(labels.count, labels)) / len(labels):.1%}, "
          + f"naive Bayes over words {naive_bayes(splits['train'], splits['test']):.1%}")
    for split in ("test", "val", "train"):  # train last: a folder that holds it is complete
        write_tsv(folder / f"{split}.tsv", [("text", "label"), *splits[split]])


if __name__ == "__main__":
    main()
