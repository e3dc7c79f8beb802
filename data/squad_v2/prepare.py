"""
SQuAD 2.0 (arXiv 1806.03822): SQuAD with questions that the paragraph does not answer.

    python data/squad_v2/prepare.py [--from DIR]
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from data.fetch import prepare

if __name__ == "__main__":
    prepare("squad_v2", __doc__, [(f"https://rajpurkar.github.io/SQuAD-explorer/dataset/{name}", None) for name in ("train-v2.0.json", "dev-v2.0.json")],
            {"train.json": ["train-v2.0.json"], "dev.json": ["dev-v2.0.json"]})
