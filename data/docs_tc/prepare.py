"""
A task of token classification that needs no download, from the documentation of this Python installation:

    python data/docs_tc/prepare.py

A row is a signature and a sentence of its documentation, without markup. A word is tagged by what it is in the source: PARAM, a parameter of this
function; FUNC, a function of the same module, and CLASS, a class of it, where the documentation marks it as code or no English word is
spelt so; VALUE, a constant; O, anything else.
"""
import builtins, re, sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from data.docstrings.prepare import paragraphs
from data.documented import documented, task_folder, unseen
from data.metrics import entity_scores

WORD = re.compile(r"[^\W\d]\w*|\d+(?:\.\d+)?|[^\w\s]")
LONGEST = 80  # words


def tagged(entry, text):
    """[(word, tag)] of a piece of documentation."""
    out = []
    for match in WORD.finditer(text):
        word, before, after = match[0], text[:match.start()], text[match.end():]
        if word in "`*":
            continue
        code = before.endswith(("`", "*")) or after.startswith(("(", "`", "*")) or "_" in word or re.search(r"[a-z][A-Z]", word)
        kind = ("B-PARAM" if word in entry.parameters and (code or len(word) > 2 or word not in ("a", "A", "I")) else
                "B-CLASS" if word in entry.classes and (code or word[0].isupper() and before[-2:] not in (". ", "")) else
                "B-FUNC" if word in entry.functions and code else
                "B-VALUE" if word in ("None", "True", "False") or re.fullmatch(r"\d.*", word) or isinstance(getattr(builtins, word, None), type) and code else "O")
        out.append((word, kind))
    return out


def rows(entries):
    splits = {"train": [], "val": [], "test": []}
    for entry in entries:
        if not entry.parameters or "_vendor" in entry.module:
            continue
        head = [(entry.name, "B-CLASS" if entry.name in entry.classes else "B-FUNC")] + tagged(entry, f"({entry.signature})")
        sentences = [tagged(entry, sentence) for paragraph in paragraphs(entry.text) for sentence in re.split(r"(?<=[.!?:]) +", paragraph)]
        some = [sentence for sentence in sentences if any(tag != "O" for _, tag in sentence) and len(head) + len(sentence) <= LONGEST]
        if some:
            splits[entry.split].append(head + max(some, key=lambda sentence: sum(tag != "O" for _, tag in sentence)))
    return unseen(splits, lambda row: "".join(word for word, _ in row))


def main():
    folder = task_folder("docs_tc", "train.txt")
    splits = rows(documented())
    known = {}
    for row in splits["train"]:
        for word, tag in row:
            known.setdefault(word, Counter())[tag] += 1
    gold = [[tag for _, tag in row] for row in splits["test"]]
    found = [[known[word].most_common(1)[0][0] if word in known else "O" for word, _ in row] for row in splits["test"]]
    print(f"{folder}: " + ", ".join(f"{split} {len(part):,}" for split, part in splits.items())
          + f"; baseline on test: the commonest tag of each word, F1 {entity_scores(gold, found)['f1']:.1%}")
    for split in ("test", "val", "train"):
        (folder / f"{split}.txt").write_text("".join("".join(f"{word} {tag}\n" for word, tag in row) + "\n" for row in splits[split]), encoding="utf-8")


if __name__ == "__main__":
    main()
