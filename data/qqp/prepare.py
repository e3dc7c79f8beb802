"""
QQP as GLUE gives it: do two questions ask the same?

    python data/qqp/prepare.py [--from DIR]
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from data.fetch import prepare

if __name__ == "__main__":
    prepare("qqp", __doc__, [("https://dl.fbaipublicfiles.com/glue/data/QQP-clean.zip", None)], {"train.tsv": ["train.tsv"], "dev.tsv": ["dev.tsv"]})
