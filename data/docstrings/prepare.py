"""
A corpus of real English that needs no download: the documentation strings of this Python installation.

    python data/docstrings/prepare.py         # train.py runs it by itself where the data is not there

Read with `ast` (nothing is imported): the standard library, its topics (`help("LOOPING")`), and the packages that
requirements.txt brings. Of each documentation string the paragraphs of prose stay; code, tables, signatures and field lists go.
A document is what is left of one string. A module goes to validation as a whole, and what validation shares with train, to the
letter or nearly so, is taken out of it. Which versions are installed decides the exact size: about 7 MB, 1.7 million tokens.
"""
import ast, inspect, multiprocessing, re, signal, sys, sysconfig, warnings
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from data.prepare import DATA, cores, fraction, progress, run, write_dataset
from data.tokenizer import train_tokenizer
from data.tokens import TokenFile

PACKAGES = """numpy torch functorch torchgen sympy mpmath networkx jinja2 markupsafe fsspec filelock triton tiktoken regex requests urllib3
idna charset_normalizer tqdm pytest _pytest pluggy iniconfig packaging pygments setuptools pip typing_extensions.py""".split()
VOCAB_SIZE = 4096
VALIDATION = 0.05     # share of the modules
SHINGLE = 6           # words; a validation paragraph with over half of its runs of six words in train is nearly equal to something there


def source_files():
    """(module name, path) of all .py files to read, in a fixed order; tests are left out."""
    library, site = Path(sysconfig.get_paths()["stdlib"]), Path(sysconfig.get_paths()["purelib"])
    roots = [(library, path) for path in sorted(library.rglob("*.py")) if not {"site-packages", "dist-packages", "idlelib"} & set(path.parts)]
    for package in PACKAGES:
        base = site if (site / package).exists() else Path(sysconfig.get_paths()["platlib"])
        roots += [(base, path) for path in ([base / package] if package.endswith(".py") else sorted((base / package).rglob("*.py")))]
    for base, path in roots:
        module = path.relative_to(base).with_suffix("")
        if not any(re.fullmatch(r"_?tests?|testing|test_.*|conftest", part) for part in module.parts):
            yield ".".join(module.parts), path


def documentation(tree):
    """The strings that document something: docstrings, the texts given to add_docstr and add_newdoc, and pydoc's topics."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node, clean=False)
            if text:
                yield text
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in ("add_docstr", "add_newdoc", "_add_docstr"):
            yield from (part.value for part in ast.walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str) and "\n" in part.value)
        elif isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "topics" and isinstance(node.value, ast.Dict):
            yield from (value.value for value in node.value.values if isinstance(value, ast.Constant))


def paragraphs(text):
    """The paragraphs of prose in a documentation string, each on one line."""
    for block in re.split(r"\n\s*\n", inspect.cleandoc(text)):
        lines = block.split("\n")
        line = re.sub(r"\s+", " ", block).strip()
        words = line.split(" ")
        if (len(words) >= 8 and line[-1] in ".!?:" and line[0] not in ".-*|:@>#+=" and ">>>" not in line
                and not any(re.fullmatch(r"\s*[-=~^]{3,}\s*", row) for row in lines)          # an underlined heading
                and not re.match(r"(Args|Arguments|Parameters|Returns?|Raises|Yields|Keyword [Aa]rguments|Example|Examples)\b.{0,20}:", line)
                and sum(c.isalpha() or c == " " for c in line) > 0.88 * len(line)):
            yield line


def words_of(paragraph):
    return re.findall(r"[a-z]+", paragraph.lower())


def shingles(words):
    return {hash(tuple(words[i:i + SHINGLE])) for i in range(max(1, len(words) - SHINGLE + 1))}


def read_file(path):
    """[[paragraph, ...] of each documentation string] of one .py file."""
    warnings.simplefilter("ignore")  # other people's escape sequences
    try:
        return [list(paragraphs(text)) for text in documentation(ast.parse(path.read_bytes()))]
    except (SyntaxError, ValueError):  # templates, and files kept broken on purpose
        return []


def usual_signals():
    """In a worker of the pool: Ctrl-C is the parent's business, and SIGTERM ends it, whatever the parent has made of these."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def read_corpus():
    """[(split, document)], in a fixed order: no paragraph twice, and nothing in validation that is nearly equal to something in train."""
    corpus, seen = [], set()
    modules, paths = zip(*source_files())
    sizes = [path.stat().st_size for path in paths]
    with multiprocessing.Pool(cores(), usual_signals) as pool, progress(sum(sizes), "reading documentation") as bar:
        for module, size, strings in zip(modules, sizes, pool.imap(read_file, paths, chunksize=16)):
            bar.update(size)
            for text in strings:
                document = []
                for paragraph in text:
                    key = "".join(words_of(paragraph))
                    if key not in seen:
                        seen.add(key)
                        document.append(paragraph)
                if document:
                    corpus.append(("val" if fraction(module) < VALIDATION else "train", document))
    known = set()
    for split, document in corpus:
        if split == "train":
            known.update(*(shingles(words_of(paragraph)) for paragraph in document))
    for split, document in corpus:
        if split == "val":
            document[:] = [p for p in document if (own := shingles(words_of(p))) and 2 * len(own & known) <= len(own)]
    return [(split, "\n".join(document)) for split, document in corpus if document]


def main():
    folder = DATA / "docstrings"
    if (folder / "train.bin").exists():
        raise SystemExit(f"{folder}: train.bin is already there; delete it to make the data again")
    corpus = read_corpus()
    print("training a tokenizer on it ...", flush=True)
    tokenizer = train_tokenizer((text for split, text in corpus if split == "train"), VOCAB_SIZE)
    total = sum(len(text.encode()) for _, text in corpus)

    def documents():
        position = 0
        for split, text in corpus:
            position += len(text.encode())
            yield split, text, position

    out = write_dataset(folder, tokenizer, documents(), total)
    for split, file in out.items():
        print(f"{file.path}: {file.n_documents:,} documents, {file.n_tokens:,} tokens ({file.dtype.name})")
    seen, asked = (np.bincount(TokenFile(out[split].path).ids, minlength=tokenizer.vocab_size)[:tokenizer.n_ordinary] for split in ("train", "val"))
    loss = -(asked * np.log((seen + 1) / (seen + 1).sum())).sum() / asked.sum()
    print(f"the frequencies of single tokens alone: {loss:.2f} nats a held-out token, {asked[seen.argmax()] / asked.sum():.1%} guessed right")


if __name__ == "__main__":
    run(main)
