"""
SST-2 (Socher et al. 2013) as GLUE gives it: is a sentence of a film review positive?

    python data/sst2/prepare.py [--from DIR]
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from data.fetch import prepare

if __name__ == "__main__":
    prepare("sst2", __doc__, [("https://dl.fbaipublicfiles.com/glue/data/SST-2.zip", None)], {"train.tsv": ["train.tsv"], "dev.tsv": ["dev.tsv"]})
