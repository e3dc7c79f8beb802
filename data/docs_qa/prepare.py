"""
A task of extractive question answering that needs no download, from the documentation of this Python installation, in the format of SQuAD 2.0:

    python data/docs_qa/prepare.py

The context is a docstring that describes parameters (numpy's, Google's or Sphinx's style), its lines joined. The question asks what a parameter is; the
answer is the first sentence of its description. A quarter of the questions have none: they ask for a name that the docstring mentions but does not describe,
or, where there is no such name, for a parameter of another function.
"""
import json, random, re, sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from data.documented import documented, task_folder
from data.docstrings.prepare import words_of
from data.metrics import answer_scores

LONGEST = 1200  # characters of a docstring
MOST = 2        # described parameters asked for, of one docstring
HEADINGS = r"(Parameters|Args|Arguments|Keyword [Aa]rguments|Keyword args|Other Parameters):?"


def first_sentence(text):
    return re.match(r".*?(?:(?<!e\.g)(?<!i\.e)(?<!etc)\.(?= |$)|$)", text)[0]


def described(text):
    """(context, {parameter: (start, answer)}) of a docstring."""
    lines = [line for line in text.split("\n") if line.strip() and not re.fullmatch(r"\s*[-=~]{3,}\s*", line)]
    starts, context = [], ""
    for line in lines:
        starts.append(len(context))
        context += re.sub(r"\s+", " ", line.strip()) + " "
    context = context[:-1]
    indent = [len(line) - len(line.lstrip()) for line in lines]
    found, section = {}, None
    for i, line in enumerate(lines):
        if re.fullmatch(HEADINGS, line.strip()):
            section = indent[i], indent[i + 1] if i + 1 < len(lines) else 0
            continue
        if section and indent[i] < section[1]:
            section = None
        sphinx = re.match(r"\s*:param (?:[\w.\[\]]+ )?(\w+): *(?=\S)", line)
        inline = section and indent[i] == section[1] and re.match(r"\s*\*{0,2}(\w+)(?: ?\([^)]*\))? ?: +(?=\S)", line)
        after = i + 1
        while after < len(lines) and indent[after] > indent[i]:
            after += 1
        stop = starts[after] - 1 if after < len(lines) else len(context)
        numpys = section and indent[i] == section[1] and after > i + 1 and re.match(r"\s*`{0,2}(\w+)`{0,2}(?: ?: ?.*)?$", line)
        google = section and indent[i] == section[1] and section[1] > section[0]
        if sphinx or inline and (google or after == i + 1):
            match = sphinx or inline
            begin = starts[i] + len(re.sub(r"\s+", " ", match[0].lstrip()))
        elif numpys:
            match, begin = numpys, starts[i + 1]
        else:
            continue
        sentence = first_sentence(context[begin:stop])
        if len(words_of(sentence)) >= 3 and match[1] not in found:
            found[match[1]] = begin, sentence
    return context, found


def questions(entries):
    rng, splits, other = random.Random(0), {"train": [], "val": [], "test": []}, {}
    for entry in entries:
        context, found = described(entry.text) if len(entry.text) <= LONGEST and "_vendor" not in entry.module else ("", {})
        found = {name: answer for name, answer in found.items() if name in entry.parameters}
        if not found:
            continue
        names = rng.sample(sorted(found), min(MOST, len(found)))
        qas = [(name, *found[name]) for name in names]
        if rng.random() < len(names) / MOST:
            mentioned = sorted({word for word in re.findall(r"[`*(, ]([a-z_]\w{2,})[`*)=,]", context) if word not in found})
            pool = mentioned or [name for name in other.get(entry.package, ()) if name not in found]
            if pool:
                qas.append((rng.choice(pool), -1, ""))
        other.setdefault(entry.package, []).extend(names)
        splits[entry.split].append((entry, context, qas))
    return splits


def baseline(part):
    """F1 of the sentence behind the first place where the name stands; no answer where it does not stand."""
    f1 = []
    for _, context, qas in part:
        for name, _, answer in qas:
            place = re.search(rf"\b{re.escape(name)}\b[^ ]* ?:? ?", context)
            guess = first_sentence(context[place.end():]) if place else ""
            f1.append(answer_scores(guess, [answer] if answer else [], True)[1])
    return float(np.mean(f1))


def main():
    folder = task_folder("docs_qa", "train.json")
    splits = questions(documented())
    seen, sizes = set(), []
    for split in ("train", "val", "test"):  # no context in two splits
        splits[split] = [row for row in splits[split] if not (row[1] in seen or seen.add(row[1]))]
        starts = [start for row in splits[split] for _, start, _ in row[2]]
        none = sum(start < 0 for start in starts)
        sizes.append(f"{split} {len(starts):,} ({none:,} without an answer)")
    print(f"{folder}: {', '.join(sizes)}; baselines on test: no answer {none / len(starts):.1%}, the sentence behind the name F1 {baseline(splits['test']):.1%}")
    for split in ("test", "val", "train"):
        paragraphs = [{"context": context, "qas": [question(entry, *qa) for qa in qas]} for entry, context, qas in splits[split]]
        text = json.dumps({"version": "v2.0", "data": [{"title": "", "paragraphs": paragraphs}]}, ensure_ascii=False)
        (folder / f"{split}.json").write_text(text, encoding="utf-8")


def question(entry, name, start, answer):
    return {"id": f"{entry.module}.{entry.name}:{name}", "question": f"What is {name} of {entry.name}?", "is_impossible": start < 0,
            "answers": [] if start < 0 else [{"text": answer, "answer_start": start}]}


if __name__ == "__main__":
    main()
