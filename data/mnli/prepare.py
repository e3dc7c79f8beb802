"""
MNLI (arXiv 1704.05426) as GLUE gives it: does a sentence follow from another, contradict it, or neither? Tested on matched and mismatched genres.

    python data/mnli/prepare.py [--from DIR]
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from data.fetch import prepare

if __name__ == "__main__":
    prepare("mnli", __doc__, [("https://dl.fbaipublicfiles.com/glue/data/MNLI.zip", None)], {name: [name] for name in ("train.tsv", "dev_matched.tsv", "dev_mismatched.tsv")})
