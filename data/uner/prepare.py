"""
UNER English-EWT (arXiv 2311.09122): persons, places and organizations in web text.

    python data/uner/prepare.py [--from DIR]
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from data.fetch import prepare

NAMES = {split: f"en_ewt-ud-{split}.iob2" for split in ("train", "dev", "test")}


def convert(source, target):
    """Lines of number, word, tag and two more columns -> word and tag."""
    with open(source, encoding="utf-8") as lines, open(target, "w", encoding="utf-8") as out:
        for line in lines:
            cells = line.rstrip("\n").split("\t")
            if len(cells) > 1 or not line.strip():
                out.write("\t".join(cells[1:3]) + "\n")


if __name__ == "__main__":
    prepare("uner", __doc__, [(f"https://raw.githubusercontent.com/UniversalNER/UNER_English-EWT/master/{name}", None) for name in NAMES.values()],
            {f"{split}.txt": [name] for split, name in NAMES.items()}, convert)
