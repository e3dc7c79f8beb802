"""
A task of sequence classification with two texts that needs no download, from the documentation of this Python installation:

    python data/docs_pairs/prepare.py

Does this paragraph belong to this summary line, or to another one of the same package?
"""
import random, sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from data.docstrings.prepare import paragraphs, words_of
from data.documented import cell, documented, task_folder, unseen, write_tsv


def pairs(entries):
    """{split: [(summary, paragraph, "own" or "other")]}, every other row with the paragraph of another summary."""
    packages = {"train": {}, "val": {}, "test": {}}
    for entry in entries:
        summary, *rest = entry.text.split("\n\n", 1)
        body = next(paragraphs(rest[0]), None) if rest and "_vendor" not in entry.module else None
        if body and 4 <= len(words_of(summary)) <= 30:
            packages[entry.split].setdefault(entry.package, []).append((cell(summary), body))
    splits, rng = {}, random.Random(0)
    for split, found in packages.items():
        splits[split] = []
        for rows in found.values():
            for i, (summary, body) in enumerate(rows):
                others = [row for row in rng.sample(rows, min(4, len(rows))) if row[0] != summary]
                foreign = i % 2 and others
                splits[split].append((summary, others[0][1] if foreign else body, "other" if foreign else "own"))
    return unseen(splits, lambda row: "".join(words_of(row[0])))


def baseline(train, test):
    """Accuracy of a threshold on the share of the summary's words that the paragraph has, chosen on train."""
    def accuracy(rows, threshold):
        words = [(set(words_of(summary)), set(words_of(body)), label) for summary, body, label in rows]
        return sum((len(a & b) > threshold * len(a)) == (label == "own") for a, b, label in words) / len(rows)
    return accuracy(test, max((i / 20 for i in range(20)), key=lambda threshold: accuracy(train, threshold)))


def main():
    folder, splits = task_folder("docs_pairs", "train.tsv"), pairs(documented())
    labels = [label for *_, label in splits["test"]]
    print(f"{folder}: " + ", ".join(f"{split} {len(rows):,}" for split, rows in splits.items())
          + f"; baselines on test: commonest label {max(map(labels.count, labels)) / len(labels):.1%}, "
          + f"words in common {baseline(splits['train'], splits['test']):.1%}")
    for split in ("test", "val", "train"):  # train last: a folder that holds it is complete
        write_tsv(folder / f"{split}.tsv", [("text", "pair", "label"), *splits[split]])


if __name__ == "__main__":
    main()
