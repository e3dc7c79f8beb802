"""
Tasks: a folder of files in a format of the field, read as rows of text.

The format says the family, and the beginning of a file's name its split (train; val, valid, validation or dev; test):
  SC  .tsv or .jsonl with a column `label` and one or two columns of text (names: TEXTS); GLUE's files as they are
  TC  .txt, .conll, .iob2 or .bio: a word a line, its tag in the last column, an empty line after each sentence
  QA  .json: SQuAD 1.1 and 2.0, ReCoRD
  IR  collection.tsv, queries.SPLIT.tsv, qrels.SPLIT.tsv (MS MARCO), or corpus.jsonl, queries.jsonl, qrels/SPLIT.tsv (BEIR)

As in arXiv 2507.00994, a task without a labelled test file is tested on its validation file, and then, as where there is no validation file,
5 % of train is held out to validate on. What is left out, cut or held out is said in `notes`.
"""
import hashlib, json, math, re
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from tqdm import tqdm

from data.metrics import entities, is_entities, to_iob2
from data.prepare import DATA, dataset_folder, fraction

SUFFIXES = {".tsv": "SC", ".jsonl": "SC", ".txt": "TC", ".conll": "TC", ".iob2": "TC", ".bio": "TC", ".json": "QA"}
SPLITS = {"train": "train", "val": "val", "valid": "val", "validation": "val", "dev": "val", "test": "test"}
LABELS = ("gold_label", "is_duplicate", "label")
TEXTS = (("sentence1", "sentence2"), ("question1", "question2"), ("question", "sentence"), ("question", "passage"), ("premise", "hypothesis"),
         ("text", "pair"), ("sentence",), ("text",))
HELD_OUT = 0.05  # of train, to validate on


@dataclass
class Task:
    name: str
    family: str                                  # SC, TC, QA or IR
    rows: dict                                   # split -> rows; "train", "val", and one or more to test on. IR: {query id: text}
    labels: list = field(default_factory=list)   # SC: of a text; TC: tags of a word
    entities: bool = False                       # TC: the tags name entities
    unanswerable: bool = False                   # QA: some questions have no answer
    corpus: object = None                        # IR: Corpus
    qrels: dict = field(default_factory=dict)    # IR: split -> {query id: {document's number in the corpus: grade}}
    digest: str = ""                             # changes with any of this
    notes: list = field(default_factory=list)    # what a person should know, a line each

    @property
    def tests(self):
        return [split for split in self.rows if split not in ("train", "val")]


# ---------------------------------------------------------------------------------------------------------------------------------
# files to rows


def load_task(name, test_only=False):
    """The task in the folder data/NAME, or in any folder. test_only: a train file need not be there."""
    folder = dataset_folder(name)
    recipe = DATA / name / "prepare.py" if "/" not in name else None
    remedy = f"python data/{name}/prepare.py makes it" if recipe and recipe.exists() else "give a folder under data/ or the path of one"
    if not folder.is_dir():
        raise SystemExit(f"--task {name}: no such folder; {remedy}")
    if (folder / "collection.tsv").exists() or (folder / "corpus.jsonl").exists():
        task = load_retrieval(name, folder)
    else:
        files = {}
        for path in sorted(folder.iterdir()):
            found = re.fullmatch(r"([a-z]+)(?:[-_.](.*))?", path.stem)
            if path.suffix in SUFFIXES and found and found[1] in SPLITS:
                files.setdefault(SPLITS[found[1]], {})[found[2] or ""] = path
        if not files or "train" not in files and not test_only:
            raise SystemExit(f"--task {name}: {folder} has no train file of a known format (train.tsv, .jsonl, .txt, .json, ...); {remedy}")
        if len(families := {SUFFIXES[path.suffix] for paths in files.values() for path in paths.values()}) > 1:
            raise SystemExit(f"--task {name}: {folder} mixes formats of {' and '.join(sorted(families))}; keep one task a folder")
        task = Task(name, families.pop(), {})
        read = {"SC": read_sc, "TC": read_tc, "QA": read_qa}[task.family]
        rows = {split: {part: read(path, task.notes) for part, path in paths.items()} for split, paths in files.items()}
        if task.family == "SC":
            for part in [part for part, some in rows.get("test", {}).items() if all(row["label"] is None for row in some)]:
                task.notes.append(f"{files['test'][part].name} has no labels, so it is no test")
                del rows["test"][part]
        tests = rows.get("test") or rows.pop("val", {})
        for split in {"train", "val"} & rows.keys():
            if len(rows[split]) > 1:
                several = ", ".join(path.name for path in files[split].values())
                raise SystemExit(f"--task {name}: {folder} holds several {split} files ({several}); leave one")
        task.rows["train"] = rows["train"].popitem()[1] if "train" in rows else []
        if "val" in rows:
            task.rows["val"] = rows["val"].popitem()[1]
        for part, some in tests.items():
            task.rows["test" if len(tests) == 1 or part in ("", "train", "val") else part] = some
    if task.rows.get("train"):
        if "val" not in task.rows:
            hold_out(task)
        if not task.tests:
            raise SystemExit(f"--task {name}: {folder} has nothing to test on; give a file dev.* or test.*")
    for split, rows in task.rows.items():
        if not rows and not (split in ("train", "val") and test_only):
            raise SystemExit(f"--task {name}: no row for {split} in {folder}; give more data")
    check_labels(task)
    told = [task.rows, task.labels, task.qrels, task.corpus and task.corpus.size]
    task.digest = hashlib.blake2b(json.dumps(told).encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
    return task


def hold_out(task):
    """5 % of train to validate on, the same ones always; rows with the same text, or question on the same context, stay together."""
    train, key = task.rows["train"], {"SC": "text", "TC": "words", "QA": "context"}.get(task.family)
    keys = list(train.values()) if key is None else [" ".join(row[key]) if key == "words" else row[key] for row in train]
    count, wanted, chosen = Counter(keys), HELD_OUT * len(keys), set()
    for text in sorted(count, key=fraction):
        if wanted <= 0 or len(chosen) == len(count) - 1:
            break
        chosen.add(text)
        wanted -= count[text]
    if not chosen:
        raise SystemExit(f"--task {task.name}: {len(keys)} rows to train on, too few to hold some out; give a file val.*")
    rows = list(train.items()) if key is None else train
    parts = [[row for row, k in zip(rows, keys) if (k in chosen) == side] for side in (False, True)]
    train, val = map(dict, parts) if key is None else parts
    task.rows = {"train": train, "val": val, **{split: rows for split, rows in task.rows.items() if split != "train"}}
    if key is None:
        task.qrels["val"] = {q: task.qrels["train"].pop(q) for q in task.rows["val"]}
    task.notes.append(f"validation: {len(parts[1]):,} of {len(keys):,} training rows, held out")


def check_labels(task):
    """Fills in `labels`, from train, and what follows from them; a label that train does not have ends here."""
    everything = lambda f: [f(row) for split in task.rows for row in task.rows[split]]
    if task.family == "QA":
        task.unanswerable = any(everything(lambda row: not row["answers"]))
    if task.family == "TC":
        tags = {tag for row in task.rows["train"] for tag in row["tags"]}
        task.entities = is_entities(tags)
        if task.entities:
            for rows in task.rows.values():
                for row in rows:
                    row["tags"] = to_iob2(row["tags"])
            kinds = sorted({kind for row in task.rows["train"] for kind, *_ in entities(row["tags"])})
            task.labels = ["O"] + [f"{prefix}-{kind}" for kind in kinds for prefix in "BI"]
        else:
            task.labels = sorted(tags)
    if task.family == "SC":
        labels = {row["label"] for row in task.rows["train"]} - {None}
        whole = all(re.fullmatch(r"-?\d+", label) for label in labels)
        task.labels = sorted(labels, key=int) if whole else sorted(labels)
    if task.family in ("SC", "TC") and task.rows["train"]:
        for split, rows in task.rows.items():
            for i, row in enumerate(rows):
                for label in [row["label"]] if task.family == "SC" else row["tags"]:
                    if label not in task.labels:
                        what = "no label" if label is None else f"label {label!r}"
                        raise SystemExit(f"--task {task.name}: {what} in row {i + 1} of {split}; "
                                         f"the labels of train are {', '.join(task.labels[:40])}")
        if len(task.labels) < 2:
            raise SystemExit(f"--task {task.name}: train has the one label {task.labels[0] if task.labels else ''!r}; nothing to learn")


def lines_of(path):
    """(number, line) of a UTF-8 file. Only a line feed ends a line."""
    number = 0
    try:
        with open(path, encoding="utf-8-sig", newline="\n") as file:
            for number, line in enumerate(file, 1):
                yield number, line.rstrip("\r\n")
    except UnicodeDecodeError:
        raise SystemExit(f"{path}: not UTF-8 after line {number:,}; convert it, e.g. with iconv -t utf-8") from None


def json_of(text, where):
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise SystemExit(f"{where}: not JSON ({problem}); mend it or fetch it again") from None


def whole(text):
    """text with a lone surrogate, which JSON can spell but is no character, replaced by one that is."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def read_sc(path, notes):
    """[{"text", "pair" or None, "label" or None}]. A quote in a .tsv is a letter like any other. No label: -1, or no such column."""
    lines, odd, undecided, rows = lines_of(path), 0, 0, []
    if path.suffix == ".tsv":
        header = next(lines, (0, ""))[1].split("\t")
        cells = ((n, line.split("\t")) for n, line in lines if line)
        records = ((n, dict(zip(header, row)) if len(row) == len(header) else None) for n, row in cells)
    else:
        records = ((n, json_of(line, f"{path}, line {n:,}")) for n, line in lines if line.strip())
        header = None
    for n, record in records:
        if record is None:
            odd += 1
            continue
        if not isinstance(record, dict):
            raise SystemExit(f"{path}, line {n:,}: not a JSON object; give one with a text and a label")
        columns = next((names for names in TEXTS if set(names) <= record.keys()), None)
        if columns is None:
            raise SystemExit(f"{path}, line {n:,}: the columns {', '.join(record)[:200]} hold no text; name them text (and pair), and label")
        texts = [record[name] for name in columns]
        if not all(isinstance(text, str) for text in texts):
            raise SystemExit(f"{path}, line {n:,}: {' or '.join(columns)} is no text")
        label = next((record[name] for name in LABELS if name in record), None)
        label = None if label is None else str(label).lower() if isinstance(label, bool) else str(label).strip()
        if label == "-":  # MNLI's annotators did not agree
            undecided += 1
            continue
        if label == "":
            raise SystemExit(f"{path}, line {n:,}: an empty label; fill it in, or give -1 throughout a file without labels")
        rows.append({"text": whole(texts[0]), "pair": whole(texts[1]) if len(texts) > 1 else None, "label": None if label == "-1" else label})
    if odd:
        notes.append(f"{path.name}: {odd:,} rows left out that have not the {len(header)} columns of the first line")
    if undecided:
        notes.append(f"{path.name}: {undecided:,} rows left out whose label is -")
    return rows


def read_tc(path, notes, tagged=True):
    """[{"words", "tags"}]. -DOCSTART- lines and comments (# key = value) are no words. tagged=False: the tag may be missing."""
    rows, words, tags = [], [], []
    for n, line in [*lines_of(path), (0, "")]:
        cells = [cell for cell in re.split("\t" if "\t" in line else " +", line.strip(" \t")) if cell]
        if not cells or cells[0] == "-DOCSTART-":
            if words:
                rows.append({"words": words, "tags": tags})
            words, tags = [], []
        elif not re.match(r"# ?(\S+ ?=|\S+ id =|newdoc|newpar)", line):
            if len(cells) < 2 and tagged:
                raise SystemExit(f"{path}, line {n:,}: {line[:60]!r} has no tag; give a word and its tag on each line")
            words.append(cells[0])
            tags.append(cells[-1])
    return rows


def read_qa(path, notes):
    """[{"id", "question", "context", "answers": [{"text", "start"}]}]; start counts characters of the context, -1 where the answer is not there."""
    rows, astray = [], 0
    try:
        for article in json_of(path.read_text(encoding="utf-8-sig"), path)["data"]:
            for paragraph in [article] if "passage" in article else article["paragraphs"]:
                record = "passage" in paragraph  # ReCoRD
                context = whole(paragraph["passage"]["text"] if record else paragraph["context"])
                for qa in paragraph["qas"]:
                    answers = []
                    for answer in [] if qa.get("is_impossible") else qa.get("answers", []):
                        start = answer["start"] if record else answer["answer_start"]
                        text = whole(answer["text"] if "text" in answer else context[start:answer["end"] + 1])  # ReCoRD's end is the last character
                        if text and context[start:start + len(text)] == text and start >= 0:
                            answers.append({"text": text, "start": start})
                        else:
                            astray += 1
                            answers.append({"text": text, "start": -1})
                    rows.append({"id": str(qa.get("id", qa.get("idx"))), "question": whole(qa["query"] if record else qa["question"]),
                                 "context": context, "answers": answers})
    except (KeyError, TypeError) as problem:
        raise SystemExit(f"{path}: not SQuAD's or ReCoRD's JSON ({type(problem).__name__}: {problem})") from None
    except UnicodeDecodeError:
        raise SystemExit(f"{path}: not UTF-8; convert it, e.g. with iconv -t utf-8") from None
    if astray:
        notes.append(f"{path.name}: {astray:,} answers are not where they should start; they are scored, not trained on")
    return rows


class Corpus:
    """The documents of a retrieval task: the lines of collection.tsv or corpus.jsonl, mapped into memory and read when asked for."""

    def __init__(self, path):
        self.path = path
        self.data = np.memmap(path, np.uint8, "r") if path.stat().st_size else np.empty(0, np.uint8)
        self.size, block = len(self.data), 1 << 26
        ends = [np.flatnonzero(self.data[i:i + block] == 10) + i for i in range(0, self.size, block)]
        if self.size and self.data[-1] != 10:
            ends.append([self.size])
        ends = np.concatenate(ends).astype(np.int64) if ends else np.empty(0, np.int64)
        self.starts = np.concatenate([[0], ends[:-1] + 1]).astype(np.int64)[:len(ends)]
        self.lengths = ends - self.starts  # in bytes
        keep = self.lengths > 0
        self.starts, self.lengths = self.starts[keep], self.lengths[keep]
        bar = tqdm(range(len(self)), desc=f"reading {path}", unit="document", disable=len(self) < 200_000)
        self.number = {self.read(i)[0]: i for i in bar}  # document's id -> number
        if len(self.number) < len(self):
            raise SystemExit(f"{path}: {len(self) - len(self.number):,} ids stand there twice; an id is one document")

    def __len__(self):
        return len(self.starts)

    def read(self, i):
        """(id, text) of document i."""
        try:
            line = bytes(self.data[self.starts[i]:self.starts[i] + self.lengths[i]]).decode("utf-8-sig").rstrip("\r")
        except UnicodeDecodeError:
            raise SystemExit(f"{self.path}, document {i + 1:,}: not UTF-8; convert it, e.g. with iconv -t utf-8") from None
        if self.path.suffix == ".tsv":
            name, tab, text = line.partition("\t")
            if not tab:
                raise SystemExit(f"{self.path}, document {i + 1:,}: no tab after the id")
            return name, text
        record = json_of(line, f"{self.path}, document {i + 1:,}")
        if not isinstance(record, dict) or "_id" not in record or "text" not in record:
            raise SystemExit(f"{self.path}, document {i + 1:,}: no _id or no text")
        return str(record["_id"]), whole(f"{record.get('title') or ''} {record['text']}".strip())

    def __getitem__(self, i):
        return self.read(i)[1]


def load_retrieval(name, folder):
    task, found = Task(name, "IR", {}), {}
    beir = (folder / "corpus.jsonl").exists()
    for path in sorted(folder.glob("qrels/*.tsv" if beir else "qrels.*.tsv")):
        part = (path.stem if beir else path.name[6:-4]).split(".")[0]
        if part in SPLITS:
            found.setdefault(SPLITS[part], []).append(path)
    if not found:
        raise SystemExit(f"--task {name}: {folder} has no relevance judgements ({'qrels/test.tsv' if beir else 'qrels.dev.tsv'}, ...)")
    task.corpus = Corpus(folder / ("corpus.jsonl" if beir else "collection.tsv"))
    for split, paths in found.items():
        if len(paths) > 1:
            raise SystemExit(f"--task {name}: several judgements for {split} ({', '.join(path.name for path in paths)}); leave one")
        texts = {}
        for path in [folder / "queries.jsonl"] if beir else sorted(folder.glob(f"{paths[0].name.replace('qrels', 'queries', 1)[:-4]}.tsv")):
            for n, line in lines_of(path):
                if line:
                    query, _, text = line.partition("\t") if not beir else ((r := json_of(line, f"{path}, line {n}"))["_id"], "", whole(r["text"]))
                    texts[str(query)] = text
        qrels, lost = {}, 0
        for n, line in lines_of(paths[0]):
            cells = line.split()
            if not cells or n == 1 and cells[-1] == "score":
                continue
            try:
                query, document, grade = cells[0], cells[-2], int(cells[-1])
            except (IndexError, ValueError):
                raise SystemExit(f"{paths[0]}, line {n:,}: {line[:60]!r} is no judgement (query, document, grade)") from None
            if query not in texts:
                raise SystemExit(f"{paths[0]}, line {n:,}: query {query} has no text in {folder}")
            lost += document not in task.corpus.number
            qrels.setdefault(query, {})[task.corpus.number.get(document, -1 - n)] = grade  # a number below 0 is never found
        if lost:
            task.notes.append(f"{paths[0].name}: {lost:,} judged documents are not in the corpus; a relevant one counts as not found")
        if split == "train":  # pairs to learn from
            qrels = {q: grades for q, grades in qrels.items() if any(d >= 0 and grade > 0 for d, grade in grades.items())}
        task.qrels[split], task.rows[split] = qrels, {query: texts[query] for query in qrels}
    if "test" not in task.rows and "val" in task.rows:
        for part in (task.rows, task.qrels):
            part["test"] = part.pop("val")
    if "train" in task.rows and "val" not in task.rows:
        hold_out(task)
    task.rows = {split: task.rows[split] for split in ("train", "val", "test") if split in task.rows}
    return task


def candidates(task, split, which):
    """Numbers of the documents that are ranked: "all", or the "judged" ones of the split. Validation, which only chooses the rate, ranks the
    judged ones."""
    if which == "all" and split != "val":
        return np.arange(len(task.corpus))
    return np.array(sorted({d for grades in task.qrels[split].values() for d in grades if d >= 0}), np.int64)


def floor(task, split, which):
    """The main score without learning: of the commonest label or tag of these rows (entities: none), of no answer throughout, of documents in
    random order."""
    rows = task.rows[split]
    if task.family == "TC" and task.entities:
        return 0.0
    if task.family in ("SC", "TC"):
        labels = [row["label"] for row in rows] if task.family == "SC" else [tag for row in rows for tag in row["tags"]]
        return Counter(labels).most_common(1)[0][1] / len(labels)
    if task.family == "QA":
        return sum(not row["answers"] for row in rows) / len(rows)
    n, dcg = max(1, len(candidates(task, split, which))), lambda k: sum(1 / math.log2(i + 2) for i in range(min(k, 10)))
    counts = [sum(grade > 0 for grade in grades.values()) for grades in task.qrels[split].values()]
    return float(np.mean([min(1, k / n) * dcg(n) / dcg(k) if k else 0 for k in counts]))
