"""
Rows of a task become items (ids that the model reads in one go), items become batches, and what a model says of items becomes scores.
"""
import math
from typing import NamedTuple

import numpy as np
import torch

from data.metrics import answer_scores, best_threshold, classification, entity_scores, word_accuracy


class Item(NamedTuple):
    """A text that the model reads in one go. It ends with <|eos|>, as the documents of pretraining do."""
    row: int                 # which row it belongs to
    ids: np.ndarray          # (L,) int64
    places: np.ndarray = ()  # TC: places in ids of the words' first pieces. QA: the first place of the context, the place after it
    targets: np.ndarray = () # SC: the label. TC: the tags. QA: the places of the answer's first and last token, both L - 1 where it is not here
    spans: np.ndarray = ()   # QA: (tokens of the context here, 2) first character of each in the context, and the one after


def encode_sc(task, rows, tokenizer, max_length, notes):
    """text <|eos|>, or text <|eos|> pair <|eos|>; the longer of two is shortened."""
    items, cut = [], 0
    for i, row in enumerate(rows):
        parts = [tokenizer.encode(text) for text in (row["text"], row["pair"]) if text is not None]
        room = max_length - len(parts)
        if sum(map(len, parts)) > room:
            cut += 1
            least = min(map(len, parts)) if len(parts) == 2 else 0
            long = max(room - least, room - room // 2) if len(parts) == 2 else room
            short = room - long
            first = len(parts) == 1 or len(parts[0]) >= len(parts[1])
            parts = [part[:long if (n == 0) == first else short] for n, part in enumerate(parts)]
        ids = np.concatenate([piece for part in parts for piece in (part, [tokenizer.eos])]).astype(np.int64)
        target = [] if row["label"] is None or row["label"] not in task.labels else [task.labels.index(row["label"])]
        items.append(Item(i, ids, (), np.array(target, np.int64)))
    if cut:
        notes.append(f"{cut:,} of {len(rows):,} rows are cut at --max_length {max_length}")
    return items


def encode_tc(task, rows, tokenizer, max_length, notes):
    """The words of a sentence with a space before each but the first. A sentence that is too long becomes several items, cut between words."""
    items, known, several, cut = [], {}, 0, 0
    number = {tag: i for i, tag in enumerate(task.labels)}
    for i, row in enumerate(rows):
        begun, ids, places, tags = len(items), [], [], []

        def close():
            items.append(Item(i, np.array(ids + [tokenizer.eos], np.int64), np.array(places, np.int64), np.array(tags, np.int64)))

        for n, word in enumerate(row["words"]):
            text = word if n == 0 else " " + word
            if text not in known:
                known[text] = tokenizer.encode(text).tolist()
            pieces = known[text][:max_length - 1]
            cut += len(pieces) < len(known[text])
            if ids and len(ids) + len(pieces) > max_length - 1:
                close()
                ids, places, tags = [], [], []
            places.append(len(ids))
            ids += pieces
            if row["tags"]:
                tags.append(number[row["tags"][n]])
        close()
        several += len(items) - begun > 1
    if several:
        notes.append(f"{several:,} of {len(rows):,} sentences are longer than --max_length {max_length} and read in parts")
    if cut:
        notes.append(f"{cut:,} words are longer than --max_length {max_length} and cut")
    return items


def character_spans(text, ids, tokenizer):
    """(len(ids), 2): the first character of each token in text, and the one after its last. A character of several tokens is in all of them."""
    lengths = np.zeros(tokenizer.vocab_size, np.int64)
    for piece, i in tokenizer.ranks.items():
        lengths[i] = len(piece)
    code = np.frombuffer(text.encode("utf-32-le"), "<u4")
    ends = (1 + (code >= 0x80) + (code >= 0x800).astype(np.int64) + (code >= 0x10000)).cumsum()  # of each character, in bytes
    after = lengths[ids].cumsum()
    return np.stack([np.searchsorted(ends, after - lengths[ids], "right"), np.searchsorted(ends, after - 1, "right") + 1], 1)


def encode_qa(task, rows, tokenizer, max_length, notes, doc_stride=128):
    """question <|eos|> context <|eos|>; a context that is too long is read in windows that overlap by doc_stride tokens. The last <|eos|> stands
    for "no answer here"."""
    items, windows, cut, inside, nowhere, spans_of = [], 0, 0, 0, 0, {}
    for i, row in enumerate(rows):
        question, context = tokenizer.encode(row["question"]).astype(np.int64), row["context"]
        if len(question) > max_length // 2:
            question, cut = question[:max_length // 2], cut + 1
        if context not in spans_of:
            spans_of.clear()  # questions on one context stand together
            ids = tokenizer.encode(context).astype(np.int64)
            spans_of[context] = ids, character_spans(context, ids, tokenizer)
        ids, spans = spans_of[context]
        answers = []
        for answer in row["answers"]:
            if answer["start"] >= 0:
                first = int(np.searchsorted(spans[:, 1], answer["start"], "right"))
                last = int(np.searchsorted(spans[:, 0], answer["start"] + len(answer["text"]))) - 1
                inside += context[spans[first, 0]:spans[last, 1]].strip() != answer["text"].strip()
                answers.append((first, last))
        room = max_length - len(question) - 2
        step, begun = max(1, room - min(doc_stride, room // 2)), len(items)
        for at in range(0, max(1, len(ids)), step):
            part, first = ids[at:at + room], len(question) + 1
            whole_ids = np.concatenate([question, [tokenizer.eos], part, [tokenizer.eos]]).astype(np.int64)
            here = [(first + a - at, first + b - at) for a, b in answers if a >= at and b < at + room]
            target = here[0] if here else (len(whole_ids) - 1,) * 2
            items.append(Item(i, whole_ids, np.array([first, first + len(part)]), np.array(target), spans[at:at + room]))
            if at + room >= len(ids):
                break
        windows += len(items) - begun > 1
        nowhere += bool(answers) and all(item.targets[0] == len(item.ids) - 1 for item in items[begun:])
    if windows:
        notes.append(f"{windows:,} of {len(rows):,} contexts are longer than --max_length {max_length} and read in windows")
    if cut:
        notes.append(f"{cut:,} questions are cut at half of --max_length {max_length}")
    if nowhere:
        notes.append(f"{nowhere:,} answers are whole in no window; give a larger --doc_stride")
    if inside:
        notes.append(f"{inside:,} answers begin or end inside a token, so no span of tokens is exactly them")
    return items


def encode_text(text, tokenizer, max_length):
    """(ids (L,) int64 with <|eos|>, whether the text was cut)."""
    ids = tokenizer.encode(text).astype(np.int64)
    return np.append(ids[:max_length - 1], tokenizer.eos), len(ids) > max_length - 1


# ---------------------------------------------------------------------------------------------------------------------------------
# items to batches


class Batch(NamedTuple):
    """Texts laid end to end in rows; what is left of a row is a document of padding, scored nowhere."""
    ids: torch.Tensor         # (B, T) int64
    cu_seqlens: torch.Tensor  # (documents + 1,) int32, see model.py
    max_seqlen: int
    starts: torch.Tensor      # (n,) where each text begins in ids.view(-1), in the order they were given
    lengths: torch.Tensor     # (n,)
    places: torch.Tensor      # of the items: TC (words,) in ids.view(-1); QA (n, 2)
    targets: torch.Tensor     # SC (n,), TC (words,), QA (n, 2)

    def to(self, device):
        if device.type != "cuda":
            return Batch(*(x.to(device) if isinstance(x, torch.Tensor) else x for x in self))
        return Batch(*(x.pin_memory().to(device, non_blocking=True) if isinstance(x, torch.Tensor) else x for x in self))


def make_batch(items, family, pad):
    """Rows are as long as the longest text; the longest texts are laid first, each into the first row that has room."""
    lengths = np.array([len(item.ids) for item in items])
    T = lengths.max()
    room, starts = np.full(len(items), T), np.empty(len(items), np.int64)
    for i in np.argsort(-lengths, kind="stable"):
        row = int(np.argmax(room >= lengths[i]))
        starts[i] = (row + 1) * T - room[row]
        room[row] -= lengths[i]
    B = int((room < T).sum())
    ids = np.full(B * T, pad, np.int64)
    for item, start in zip(items, starts):
        ids[start:start + len(item.ids)] = item.ids
    cu_seqlens = np.unique(np.concatenate([starts, (np.arange(B) + 1) * T - room[:B], [B * T]]))
    places = [item.places + start if family == "TC" else item.places for item, start in zip(items, starts)]
    shape = (-1, 2) if family == "QA" else (-1,)
    wrap = lambda parts: torch.from_numpy(np.concatenate(parts).astype(np.int64).reshape(shape))
    return Batch(torch.from_numpy(ids.reshape(B, T)), torch.from_numpy(cu_seqlens.astype(np.int32)), int(T), torch.from_numpy(starts),
                 torch.from_numpy(lengths), wrap(places), wrap([item.targets for item in items]))


# ---------------------------------------------------------------------------------------------------------------------------------
# outputs to scores

def answers(rows, items, found):
    """(text of the best span, its margin over no answer) for each row. Of several windows the best span counts, and the least sure "no answer"."""
    best, none, text = [-math.inf] * len(rows), [math.inf] * len(rows), [""] * len(rows)
    for item, (score, no_answer, first, last) in zip(items, found):
        none[item.row] = min(none[item.row], no_answer)
        if score > best[item.row]:
            spans, before = item.spans, item.places[0]
            best[item.row], text[item.row] = score, rows[item.row]["context"][spans[first - before, 0]:spans[last - before, 1]].strip()
    return text, [b - n for b, n in zip(best, none)]


def joined(rows, items, found, labels):
    """Tags of the words of each row, from its parts."""
    tags = [[] for _ in rows]
    for item, numbers in zip(items, found):
        tags[item.row] += [labels[i] for i in numbers]
    return tags


def scores(task, rows, items, found, threshold=None):
    """What `outputs` found -> {name: share}. QA with unanswerable questions: answered are those whose margin is above the threshold; without one, the
    one that is best for these rows is taken, and returned."""
    if task.family == "SC":
        return classification([task.labels.index(row["label"]) for row in rows], found)
    if task.family == "TC":
        gold, tags = [row["tags"] for row in rows], joined(rows, items, found, task.labels)
        return entity_scores(gold, tags) if task.entities else {"accuracy": word_accuracy(gold, tags)}
    texts, margins = answers(rows, items, found)
    golds = [[answer["text"] for answer in row["answers"]] for row in rows]
    result = {}
    if task.unanswerable:
        if threshold is None:
            f1 = [[answer_scores(text, gold, True)[1] for text, gold in zip(some, golds)] for some in (texts, [""] * len(rows))]
            threshold = best_threshold(margins, *f1)
        texts, result = [text if margin > threshold else "" for text, margin in zip(texts, margins)], {"threshold": threshold}
    exact, f1 = np.mean([answer_scores(text, gold, task.unanswerable) for text, gold in zip(texts, golds)], 0).tolist()
    return {"f1": f1, "exact_match": exact, **result}
