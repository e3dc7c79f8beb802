"""
Scores, as the field's own scripts count them. All are shares between 0 and 1.

  classification  accuracy and macro F1 (scikit-learn's, over the labels that occur)
  entities        precision, recall and F1 of whole entities (conlleval: an entity counts if its bounds and its type are right)
  answers         exact match and word-overlap F1 (the SQuAD scripts, 1.1 and 2.0)
  rankings        NDCG@10, MRR@10, recall@100 (trec_eval; a tie counts against: the relevant document comes after its equals)
"""
import re, string
from collections import Counter

import numpy as np


def classification(gold, predicted):
    """Two equally long lists of labels -> {"accuracy", "macro_f1"}."""
    gold, predicted = np.asarray(gold), np.asarray(predicted)
    f1 = []
    for label in set(gold.tolist()) | set(predicted.tolist()):
        right = ((gold == label) & (predicted == label)).sum()
        f1.append(2 * right / ((gold == label).sum() + (predicted == label).sum()))
    return {"accuracy": float((gold == predicted).mean()), "macro_f1": float(np.mean(f1))}


# --- entities


def is_entities(tags):
    """Whether a set of tags names entities (O, B-PER, I-PER, ...) and not, say, parts of speech."""
    return any(tag[1:2] == "-" for tag in tags) and all(tag == "O" or re.match(r"[BIESLU]-.", tag) for tag in tags)


def entities(tags):
    """[(type, first word, word after the last)] of the tags of a sentence, by conlleval's rule: in IOB1, IOB2 and IOBES alike, and in any order of
    tags, an entity goes on only through I-, E- or L- of its own type."""
    found, before, kind_before = [], "O", ""
    for i, tag in enumerate([*tags, "O"]):
        prefix, _, kind = tag.partition("-")
        goes_on = before in "BI" and prefix in "IEL" and kind == kind_before
        if before != "O" and not goes_on:
            found[-1] += (i,)
        if prefix != "O" and not goes_on:
            found.append((kind, i))
        before, kind_before = prefix, kind
    return found


def to_iob2(tags):
    """The same entities, each as B- and then I-."""
    out = ["O"] * len(tags)
    for kind, first, after in entities(tags):
        out[first:after] = [f"B-{kind}"] + [f"I-{kind}"] * (after - first - 1)
    return out


def entity_scores(gold, predicted):
    """Lists of sentences' tags -> {"f1", "precision", "recall", "accuracy"}; accuracy is that of single words."""
    right = n_gold = n_predicted = 0
    for a, b in zip(gold, predicted, strict=True):
        a, b = set(entities(a)), set(entities(b))
        right, n_gold, n_predicted = right + len(a & b), n_gold + len(a), n_predicted + len(b)
    return {"f1": 2 * right / max(1, n_gold + n_predicted), "precision": right / max(1, n_predicted), "recall": right / max(1, n_gold),
            "accuracy": word_accuracy(gold, predicted)}


def word_accuracy(gold, predicted):
    pairs = [(a, b) for x, y in zip(gold, predicted, strict=True) for a, b in zip(x, y, strict=True)]
    return sum(a == b for a, b in pairs) / max(1, len(pairs))


# --- answers


def normal_words(text):
    """Lower case, no punctuation, no articles: the words that SQuAD's scripts compare."""
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def answer_scores(predicted, golds, unanswerable=False):
    """(exact match, F1) of a predicted answer, the best over the gold ones; "" is no answer. unanswerable: the data has questions without an
    answer, and the script for SQuAD 2.0 counts: golds that hold no word are dropped, and no answer matches no answer."""
    guess, best = normal_words(predicted), (0.0, 0.0)
    golds = [normal_words(gold) for gold in golds]
    if unanswerable:
        golds = [gold for gold in golds if gold] or [[]]
    for gold in golds:
        exact, common = float(gold == guess), sum((Counter(gold) & Counter(guess)).values())
        if unanswerable and not (gold and guess):
            f1 = exact
        else:
            f1 = 2 * common / (len(gold) + len(guess)) if common else 0.0
        best = max(best[0], exact), max(best[1], f1)
    return best


def best_threshold(margins, f1_answer, f1_none):
    """The margin (score of the best answer less that of no answer) above which to answer, so that the mean F1 is greatest. f1_answer, f1_none: what
    a question gets with its best answer and with none."""
    order = np.argsort(-np.asarray(margins), kind="stable")
    margins, gains = np.asarray(margins, float)[order], (np.asarray(f1_answer, float) - np.asarray(f1_none, float))[order]
    total = np.concatenate([[0], gains.cumsum()])           # [n]: the n questions of greatest margin are answered
    cuts = [0, *(n for n in range(1, len(margins)) if margins[n] < margins[n - 1]), len(margins)]  # equal margins go together
    n = max(cuts, key=lambda n: total[n])
    if n == 0:
        return float(margins[0]) if len(margins) else 0.0
    return float((margins[n - 1] + margins[n]) / 2) if n < len(margins) else float(margins[-1]) - 1.0


# --- rankings


def ranking_scores(ranked, judged):
    """ranked: for each query its documents, best first; judged: for each query {document: grade}, relevant where the grade is above 0.
    -> means over the queries; one without a relevant document counts 0, as in trec_eval."""
    ndcg, mrr, recall = [], [], []
    for documents, grades in zip(ranked, judged, strict=True):
        gains = [max(0, grades.get(document, 0)) for document in documents]
        ideal = sorted((grade for grade in grades.values() if grade > 0), reverse=True)
        dcg = lambda gains: sum(gain / np.log2(i + 2) for i, gain in enumerate(gains[:10]))
        ndcg.append(dcg(gains) / dcg(ideal) if ideal else 0.0)
        mrr.append(next((1 / (i + 1) for i, gain in enumerate(gains[:10]) if gain), 0.0))
        recall.append(sum(gain > 0 for gain in gains[:100]) / len(ideal) if ideal else 0.0)
    return {"ndcg@10": float(np.mean(ndcg)), "mrr@10": float(np.mean(mrr)), "recall@100": float(np.mean(recall))}
