"""
OntoNotes 5.0, 18 types of names in English. The corpus has a licence (LDC2013T19), so there is no address: --from takes a folder with
train, development and test in columns, as word ... tag, or the *_conll files of CoNLL-2012 joined into one each.

    python data/ontonotes/prepare.py [--from DIR]
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from data.fetch import prepare


def convert(source, target):
    """CoNLL-2012 has the word in its fourth column and names as brackets in its eleventh, "(ORG*", "*", "*)"; other files are taken as they are."""
    with open(source, encoding="utf-8") as lines, open(target, "w", encoding="utf-8") as out:
        brackets, inside = False, None
        for line in lines:
            if line.startswith("#"):
                brackets = brackets or line.startswith("#begin document")
                continue
            cells = line.split()
            if brackets and cells:
                name = cells[10]
                begins = name.startswith("(")
                inside = name.strip("(*)") if begins else inside
                out.write(f"{cells[3]} {'O' if inside is None else ('B-' if begins else 'I-') + inside}\n")
                inside = None if name.endswith(")") else inside
            else:
                out.write(line)


if __name__ == "__main__":
    prepare("ontonotes", __doc__, [], {"train.txt": ["train.txt", "train.conll"], "dev.txt": ["dev.txt", "dev.conll", "development.conll"],
            "test.txt": ["test.txt", "test.conll"]}, convert, "https://catalog.ldc.upenn.edu/LDC2013T19")
