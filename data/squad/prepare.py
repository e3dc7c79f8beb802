"""
SQuAD 1.1 (arXiv 1606.05250): the span of a paragraph of Wikipedia that answers a question.

    python data/squad/prepare.py [--from DIR]
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from data.fetch import prepare

if __name__ == "__main__":
    prepare("squad", __doc__, [(f"https://rajpurkar.github.io/SQuAD-explorer/dataset/{name}", None) for name in ("train-v1.1.json", "dev-v1.1.json")],
            {"train.json": ["train-v1.1.json"], "dev.json": ["dev-v1.1.json"]})
