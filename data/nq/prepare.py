"""
Natural Questions as BEIR gives them (arXiv 2104.08663): the passage of Wikipedia that answers a question, of 2.7 million. To test on.

    python data/nq/prepare.py [--from DIR]
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from data.fetch import prepare

if __name__ == "__main__":
    prepare("nq", __doc__, [("https://public.ukp.informatik.tu-darmstadt.de/thakur/BEIR/datasets/nq.zip", "d4d3d2e48787a744b6f6e691ff534307")],
            {"qrels/test.tsv": ["test.tsv", "qrels/test.tsv"], "queries.jsonl": ["queries.jsonl"], "corpus.jsonl": ["corpus.jsonl"]})
