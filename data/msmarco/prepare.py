"""
MS MARCO passages (arXiv 1611.09268): the passage that answers a question, of 8.8 million. Tested on the small development set.

    python data/msmarco/prepare.py [--from DIR]
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from data.fetch import prepare

if __name__ == "__main__":
    prepare("msmarco", __doc__, [("https://msmarco.z22.web.core.windows.net/msmarcoranking/collectionandqueries.tar.gz", "31644046b18952c1386cd4564ba2ae69")],
            {**{name: [name] for name in ("queries.train.tsv", "qrels.train.tsv")}, "queries.dev.tsv": ["queries.dev.small.tsv", "queries.dev.tsv"],
             "qrels.dev.tsv": ["qrels.dev.small.tsv", "qrels.dev.tsv"], "collection.tsv": ["collection.tsv"]})
