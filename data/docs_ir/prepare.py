"""
A task of retrieval that needs no download, from the documentation of this Python installation, in the format of MS MARCO:

    python data/docs_ir/prepare.py

A query is the summary line of a docstring, and the document that belongs to it is the rest of its prose. The corpus holds the documents of all splits.
"""
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from data.docstrings.prepare import paragraphs, words_of
from data.documented import BM25, cell, documented, task_folder, unseen, write_tsv
from data.metrics import ranking_scores


def main():
    folder = task_folder("docs_ir", "collection.tsv")
    splits = {"train": [], "val": [], "test": []}
    for entry in documented():
        summary, *rest = entry.text.split("\n\n", 1)
        body = " ".join(paragraphs(rest[0])) if rest and "_vendor" not in entry.module else ""
        if 4 <= len(words_of(summary)) <= 30 and len(words_of(body)) >= 12:
            splits[entry.split].append((cell(summary), body))
    splits = unseen(unseen(splits, lambda row: "".join(words_of(row[0]))), lambda row: "".join(words_of(row[1])))
    documents = [body for rows in splits.values() for _, body in rows]
    number = {body: i for i, body in enumerate(documents)}
    bm25 = BM25(documents)
    ranked = [np.argsort(-bm25.scores(summary), kind="stable")[:100].tolist() for summary, _ in splits["test"]]
    got = ranking_scores(ranked, [{number[body]: 1} for _, body in splits["test"]])
    print(f"{folder}: {len(documents):,} documents; queries: " + ", ".join(f"{split} {len(rows):,}" for split, rows in splits.items())
          + f"; baseline on test: BM25 NDCG@10 {got['ndcg@10']:.1%}, MRR@10 {got['mrr@10']:.1%}")
    for split, rows in splits.items():
        write_tsv(folder / f"queries.{split}.tsv", [(number[body], summary) for summary, body in rows])
        write_tsv(folder / f"qrels.{split}.tsv", [(number[body], 0, number[body], 1) for _, body in rows])
    write_tsv(folder / "collection.tsv", enumerate(documents))


if __name__ == "__main__":
    main()
