"""
CoNLL-2003 (cs/0306050): persons, places, organizations and others in English news. --from also takes the original files, eng.train,
eng.testa and eng.testb, whose tags are IOB1.

    python data/conll2003/prepare.py [--from DIR]
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from data.fetch import prepare

if __name__ == "__main__":
    prepare("conll2003", __doc__, [("https://data.deepai.org/conll2003.zip", None)],
            {"train.txt": ["train.txt", "eng.train"], "valid.txt": ["valid.txt", "eng.testa"], "test.txt": ["test.txt", "eng.testb"]})
