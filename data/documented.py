"""
What this Python installation documents, for the tasks that need no download (data/docs_*/prepare.py).

Read with `ast` from the files that data/docstrings reads. The test modules are those whose text is held out of pretraining too; another share
of the modules validates. A text of train is in no other split.
"""
import ast, inspect, math, multiprocessing, re, sys, warnings
from collections import Counter
from typing import NamedTuple

import numpy as np

from data.docstrings.prepare import VALIDATION, source_files, words_of
from data.prepare import DATA, cores, fraction, progress


class Documented(NamedTuple):
    """A function, method or class with a docstring."""
    module: str
    name: str
    parameters: tuple   # names, without self and cls
    signature: str      # "(x, axis=None)", of a class that of __init__
    functions: frozenset  # names of all functions that its module defines
    classes: frozenset
    text: str           # the docstring, cleaned of indentation

    @property
    def package(self):
        top = self.module.split(".")[0]
        return "stdlib" if top in sys.stdlib_module_names else top

    @property
    def split(self):
        share = fraction(self.module)
        return "test" if share < VALIDATION else "val" if share < 2 * VALIDATION else "train"


def read_module(module_and_path):
    warnings.simplefilter("ignore")  # other people's escape sequences
    module, path = module_and_path
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return []
    definitions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))]
    classes = frozenset(node.name for node in definitions if isinstance(node, ast.ClassDef))
    functions, found = frozenset(node.name for node in definitions) - classes, []
    for node in definitions:
        if text := ast.get_docstring(node, clean=False):
            maker = node
            if isinstance(node, ast.ClassDef):
                maker = next((part for part in node.body if isinstance(part, ast.FunctionDef) and part.name == "__init__"), None)
            a = maker.args if maker else ast.arguments([], [], None, [], [], None, [])
            names = [arg.arg for arg in [*a.posonlyargs, *a.args, *([a.vararg] if a.vararg else []), *a.kwonlyargs, *([a.kwarg] if a.kwarg else [])]]
            try:
                signature = ast.unparse(a)
            except (ValueError, RecursionError):
                signature = ", ".join(names)
            found.append(Documented(module, node.name, tuple(name for name in names if name not in ("self", "cls")), signature, functions, classes, inspect.cleandoc(text)))
    return found


def documented():
    """All of them, in a fixed order, each text once."""
    files, seen, found = list(source_files()), set(), []
    with multiprocessing.Pool(cores()) as pool, progress(sum(path.stat().st_size for _, path in files), "reading documentation") as bar:
        for (_, path), part in zip(files, pool.imap(read_module, files, chunksize=16)):
            bar.update(path.stat().st_size)
            for entry in part:
                if (key := "".join(words_of(entry.text))) not in seen:
                    seen.add(key)
                    found.append(entry)
    return found


def unseen(splits, key):
    """Rows of {"train", "val", "test"} without those whose key stands in an earlier split (train first), or earlier in their own."""
    seen, out = set(), {}
    for split in ("train", "val", "test"):
        out[split] = [row for row in splits[split] if not (key(row) in seen or seen.add(key(row)))]
    return out


def task_folder(name, first):
    folder = DATA / name
    if (folder / first).exists():
        raise SystemExit(f"{folder}: {first} is already there; delete it to make the task again")
    folder.mkdir(exist_ok=True)
    return folder


def cell(text):
    return re.sub(r"\s+", " ", text).strip()


def write_tsv(path, rows):
    path.write_text("".join("\t".join(cell(str(value)) for value in row) + "\n" for row in rows), encoding="utf-8")


def naive_bayes(train, test):
    """Accuracy of naive Bayes over words, the bag-of-words baseline. Rows are (text, label)."""
    counts, totals, labels = {}, Counter(), Counter(label for _, label in train)
    for text, label in train:
        for word in words_of(text):
            counts.setdefault(word, Counter())[label] += 1
            totals[label] += 1

    def guess(text):
        known = [counts[word] for word in words_of(text) if word in counts]
        return max(labels, key=lambda label: math.log(labels[label]) + sum(math.log((c[label] + 1) / (totals[label] + len(counts))) for c in known))

    return sum(guess(text) == label for text, label in test) / len(test)


class BM25:
    """Okapi BM25 (k1 0.9, b 0.4) over the words of documents."""

    def __init__(self, documents):
        self.postings, lengths = {}, np.array([len(words_of(text)) for text in documents])
        for i, text in enumerate(documents):
            for word, n in Counter(words_of(text)).items():
                self.postings.setdefault(word, []).append((i, n))
        self.norm = 0.9 * (1 - 0.4 + 0.4 * lengths / lengths.mean())

    def scores(self, query):
        total, N = np.zeros(len(self.norm)), len(self.norm)
        for word in words_of(query):
            if word in self.postings:
                i, n = np.array(self.postings[word]).T
                total[i] += math.log(1 + (N - len(i) + 0.5) / (len(i) + 0.5)) * n * 1.9 / (n + self.norm[i])
        return total
