"""
Two tasks of sequence classification that need no download, from the documentation of this Python installation:

    python data/docs_sc/prepare.py

  data/docs_sc      which package does this sentence describe? Sentences that name a package are left out
  data/docs_pairs   does this paragraph belong to this summary line, or to another one of the same package?
"""
import random, re, sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from data.docstrings.prepare import PACKAGES, paragraphs, words_of
from data.documented import cell, documented, naive_bayes, task_folder, unseen, write_tsv

LABELS = ("numpy", "torch", "sympy", "networkx", "stdlib")  # every other package is "tools"
NAMES = {package.removesuffix(".py") for package in PACKAGES} | {"python", "pytorch", "cuda", "tensor", "tensors"}
MOST = 3000  # training rows of a label


def sentences(entries):
    splits = {"train": [], "val": [], "test": []}
    for entry in entries:
        if "_vendor" not in entry.module:
            for paragraph in paragraphs(entry.text):
                for sentence in re.split(r"(?<=[.!?:]) +", paragraph):
                    words = words_of(sentence)
                    if 6 <= len(words) <= 40 and not NAMES & set(words):
                        splits[entry.split].append((sentence, entry.package if entry.package in LABELS else "tools"))
    return unseen(splits, lambda row: "".join(words_of(row[0])))


def pairs(entries):
    entries = [entry for entry in entries if "_vendor" not in entry.module]
    parts = {"train": {}, "val": {}, "test": {}}
    for entry in entries:
        summary, *rest = entry.text.split("\n\n", 1)
        bodies = list(paragraphs(rest[0])) if rest else []
        if bodies and 4 <= len(words_of(summary)) <= 30:
            parts[entry.split].setdefault(entry.package, []).append((cell(summary), bodies[0]))
    splits, rng = {}, random.Random(0)
    for split, packages in parts.items():
        splits[split] = []
        for own in packages.values():
            for i, (summary, body) in enumerate(own):
                if len(own) > 1 and i % 2:
                    splits[split].append((summary, rng.choice([other for other in rng.sample(own, min(4, len(own))) if other[0] != summary] or own[:1])[1], "other"))
                else:
                    splits[split].append((summary, body, "own"))
    return unseen(splits, lambda row: "".join(words_of(row[0])))


def overlap_baseline(train, test):
    """Accuracy of one threshold on the share of the summary's words that the paragraph has, chosen on train."""
    share = lambda row: len((a := set(words_of(row[0]))) & set(words_of(row[1]))) / len(a)
    accuracy = lambda rows, shares, t: sum((s > t) == (row[2] == "own") for row, s in zip(rows, shares)) / len(rows)
    known = [share(row) for row in train]
    return accuracy(test, [share(row) for row in test], max((i / 50 for i in range(50)), key=lambda t: accuracy(train, known, t)))


def main():
    folders = task_folder("docs_sc", "train.tsv"), task_folder("docs_pairs", "train.tsv")
    entries, rng = documented(), random.Random(0)
    for folder, header, splits in zip(folders, (("text", "label"), ("text", "pair", "label")), (sentences(entries), pairs(entries))):
        kept, count = [], {}
        for row in rng.sample(splits["train"], len(splits["train"])):
            count[row[-1]] = count.get(row[-1], 0) + 1
            if folder.name != "docs_sc" or count[row[-1]] <= MOST:
                kept.append(row)
        splits["train"] = kept
        labels = [row[-1] for row in splits["test"]]
        common = max(set(labels), key=[row[-1] for row in kept].count)
        bag = naive_bayes(kept, splits["test"]) if len(header) == 2 else overlap_baseline(kept, splits["test"])
        print(f"{folder}: " + ", ".join(f"{split} {len(rows):,}" for split, rows in splits.items())
              + f"; baselines on test: majority {labels.count(common) / len(labels):.1%}, {'naive Bayes over words' if len(header) == 2 else 'shared words'} {bag:.1%}")
        for split in ("test", "val", "train"):  # train last: a folder that holds it is complete
            write_tsv(folder / f"{split}.tsv", [header, *splits[split]])


if __name__ == "__main__":
    main()
