"""What must stay true of tasks, scores and fine-tuning. Run by `python -m pytest` from the top folder."""
import dataclasses, gzip, hashlib, http.server, importlib.util, json, math, os, subprocess, sys, threading
from pathlib import Path

import numpy as np
import pytest
import torch

import finetune
from data.documented import Documented, unseen
from data import fetch as fetch_file
from data.fetch import checksum, fetch
from data.items import Item, character_spans, encode_qa, encode_sc, encode_tc, encode_text, make_batch, scores
from data.metrics import answer_scores, best_threshold, classification, entities, entity_scores, ranking_scores, to_iob2
from data.results import best_rate, interval, read_results, summary, t_quantile
from data.tasks import floor, load_task, read_qa, read_tc
from data.test_data import byte_tokenizer
from data.tokenizer import GPT2_PATTERN, Tokenizer
from model import Config, Transformer, info, load_checkpoint, save_checkpoint

ROOT = Path(__file__).resolve().parents[1]
torch.set_num_threads(1)
CPU = torch.device("cpu")
TINY = dict(block_size=256, n_layer=2, n_head=2, n_kv_head=1, n_embd=16, intermediate_size=24, tie_embeddings=True)


class Alone:
    """The team of one process."""
    rank, world, first = 0, 1, True
    sum = staticmethod(lambda *numbers: numbers)
    share = staticmethod(lambda make: make())


MACHINE = finetune.Machine(Alone(), CPU, torch.float32)


def word_tokenizer():
    """Bytes and a few whole words with a space before them, as byte-level BPE has them."""
    ranks = {bytes([i]): i for i in range(256)}
    for word in (" the", " of", " Norm", " Normandy", " é", " 10"):
        for end in range(2, len(word.encode()) + 1):
            ranks.setdefault(word.encode()[:end], len(ranks))
    return Tokenizer("words", GPT2_PATTERN, ranks)


def settings(**changes):
    return finetune.Settings(**{**dict(init_from="x", task="t", max_length=64, max_iters=4, batch_size=4), **changes})


def write(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_DOT_", ".")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return str(folder)


def tsv(*rows):
    return "".join("\t".join(map(str, row)) + "\n" for row in rows)


def sentiment(folder, n=60):
    """A task that a tiny model learns: which of two words a text holds."""
    rows = [(f"{'good' if i % 2 else 'bad'} text {i}", ["no", "yes"][i % 2]) for i in range(n)]
    return write(folder, train_DOT_tsv=tsv(("text", "label"), *rows), dev_DOT_tsv=tsv(("text", "label"), *rows[:20]))


def squad(*rows):
    """rows: (context, question, answer or None, start)."""
    return json.dumps({"data": [{"paragraphs": [{"context": c, "qas": [{"id": f"q{i}", "question": q, "answers": [] if a is None else [
        {"text": a, "answer_start": c.index(a) if start is None else start}]}]} for i, (c, q, a, start) in enumerate(rows)]}]})


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("pre") / "last.pt"
    tokenizer = byte_tokenizer()
    torch.manual_seed(0)
    config = Config(vocab_size=tokenizer.vocab_size, **TINY)
    save_checkpoint(path, {"model": Transformer(config).state_dict(), "config": dataclasses.asdict(config), "tokenizer": tokenizer.to_dict(), "settings": {}})
    return path


def run(*argv):
    finetune.main([str(a) for a in argv])


# --- scores, worked by hand


def test_classification():
    gold, found = [0, 0, 1, 1, 2], [0, 1, 1, 1, 0]
    assert classification(gold, found) == {"accuracy": 3 / 5, "macro_f1": pytest.approx((2 * 1 / 4 + 2 * 2 / 5 + 0) / 3)}


def test_entities_by_conlleval():
    assert entities("B-PER I-PER O B-LOC".split()) == [("PER", 0, 2), ("LOC", 3, 4)]
    assert entities("I-PER I-PER I-LOC B-LOC I-LOC".split()) == [("PER", 0, 2), ("LOC", 2, 3), ("LOC", 3, 5)]  # IOB1
    assert entities("S-PER B-PER E-PER I-PER".split()) == [("PER", 0, 1), ("PER", 1, 3), ("PER", 3, 4)]         # IOBES
    assert entities("O I-LOC O".split()) == [("LOC", 1, 2)]
    assert entities([]) == []
    assert to_iob2("I-PER I-PER O I-LOC B-LOC".split()) == "B-PER I-PER O B-LOC B-LOC".split()
    gold, found = ["B-PER I-PER O B-LOC".split(), "B-ORG O".split()], ["B-PER I-PER O B-ORG".split(), "O O".split()]
    assert entity_scores(gold, found) == {"f1": 2 * 1 / (3 + 2), "precision": 1 / 2, "recall": 1 / 3, "accuracy": 4 / 6}


def test_answers_as_squad_counts_them():
    assert answer_scores("the Normans!", ["Normans"]) == (1, 1)
    assert answer_scores("in Normandy, France", ["Normandy", "France"]) == (0, 0.5)
    assert answer_scores("10th and 11th", ["10th and 11th centuries"]) == (0, pytest.approx(2 * 3 / 7))
    assert answer_scores("", [], True) == (1, 1) and answer_scores("x", [], True) == (0, 0) and answer_scores("", ["x"], True) == (0, 0)
    assert answer_scores("the", ["a"]) == (1, 0) and answer_scores("the", ["a"], True) == (1, 1)  # the scripts 1.1 and 2.0 differ here
    assert answer_scores("a a b", ["a b b"])[1] == pytest.approx(2 * 1 / (1 + 2))                # articles go, words count as often as they stand


def test_threshold_is_the_best_there_is():
    rng = np.random.default_rng(0)
    for n in (1, 2, 7, 30):
        margins, a, b = rng.integers(-3, 4, n).astype(float), rng.random(n), rng.random(n)
        mean = lambda t: np.where(margins > t, a, b).mean()
        assert mean(best_threshold(margins, a, b)) == pytest.approx(max(mean(t) for t in [-99, *(margins), 99]))


def test_rankings_as_trec_eval_counts_them():
    judged = [{1: 2, 2: 1, 3: 0, 9: 1}, {5: 1}, {7: 0}]
    ranked = [[3, 2, 1], [4, 6, 5], [7]]
    got = ranking_scores(ranked, judged)
    first = (1 / math.log2(3) + 2 / math.log2(4)) / (2 + 1 / math.log2(3) + 1 / math.log2(4))
    assert got["ndcg@10"] == pytest.approx((first + 1 / math.log2(4) + 0) / 3)   # a query without a relevant document counts 0
    assert got["mrr@10"] == pytest.approx((1 / 2 + 1 / 3 + 0) / 3)
    assert got["recall@100"] == pytest.approx((2 / 3 + 1 + 0) / 3)
    assert ranking_scores([[8] * 10 + [5]], [{5: 1}]) == {"ndcg@10": 0, "mrr@10": 0, "recall@100": 1}


def test_scores_equal_those_of_known_packages():
    metrics = pytest.importorskip("sklearn.metrics", reason="scikit-learn is not installed")
    rng = np.random.default_rng(0)
    gold, found = rng.integers(0, 5, 200), rng.integers(0, 6, 200)
    got = classification(gold, found)
    assert got["accuracy"] == pytest.approx(metrics.accuracy_score(gold, found)) and got["macro_f1"] == pytest.approx(metrics.f1_score(gold, found, average="macro"))


def test_entity_f1_equals_seqevals():
    seqeval = pytest.importorskip("seqeval.metrics", reason="seqeval is not installed")
    rng = np.random.default_rng(0)
    tags = np.array(["O", "B-A", "I-A", "B-B", "I-B"])
    gold, found = ([tags[rng.integers(0, 5, n)].tolist() for n in range(1, 60)] for _ in range(2))
    got = entity_scores(gold, found)
    assert got["f1"] == pytest.approx(seqeval.f1_score(gold, found)) and got["precision"] == pytest.approx(seqeval.precision_score(gold, found))


def test_rankings_equal_trec_evals():
    trec = pytest.importorskip("pytrec_eval", reason="pytrec_eval is not installed")
    rng = np.random.default_rng(0)
    qrels = {f"q{q}": {f"d{d}": int(rng.integers(0, 3)) for d in rng.choice(300, 20, False)} for q in range(30)} | {"none": {"d1": 0}}
    run = {q: {f"d{d}": float(rng.random()) for d in rng.choice(300, 150, False)} for q in qrels}
    theirs = trec.RelevanceEvaluator(qrels, {"ndcg_cut.10", "recall.100"}).evaluate(run)
    ours = ranking_scores([sorted(run[q], key=run[q].get, reverse=True) for q in qrels], list(qrels.values()))
    for name, their in (("ndcg@10", "ndcg_cut_10"), ("recall@100", "recall_100")):
        assert ours[name] == pytest.approx(np.mean([theirs[q][their] for q in qrels]))


# --- files


def test_quotes_short_rows_and_missing_labels(tmp_path):
    train = tsv(("id", "question1", "question2", "is_duplicate"), (1, 'say "so', "he", 1), (2, "broken"), (3, 'a "b" c', "d\u2028e", 0), *[(4, f'x{i}"', "y", i % 2) for i in range(9)])
    name = write(tmp_path / "t", train_DOT_tsv=train, dev_DOT_tsv=tsv(("id", "question1", "question2", "is_duplicate"), (7, "x", "y", 1)),
                 test_DOT_tsv=tsv(("id", "question1", "question2"), (0, "x", "y")))
    task = load_task(name)
    everything = task.rows["train"] + task.rows["val"]
    assert sorted(row["text"] for row in everything)[:2] == ['a "b" c', 'say "so'] and len(everything) == 11
    assert {row["pair"] for row in everything} == {"he", "d\u2028e", "y"}
    assert any("1 rows left out" in note for note in task.notes) and any("no labels" in note for note in task.notes)
    assert task.tests == ["test"] and len(task.rows["test"]) == 1


@pytest.mark.parametrize("bad, said", [("maybe", "maybe"), ("-1", "no label"), ("", "empty label")])
def test_wrong_labels_end_before_training(tmp_path, bad, said):
    name = write(tmp_path / "t", train_DOT_tsv=tsv(("text", "label"), *[(f"t{i}", "no yes".split()[i % 2]) for i in range(9)]),
                 test_DOT_tsv=tsv(("text", "label"), ("a", "yes"), ("b", bad)))
    with pytest.raises(SystemExit, match=said):
        load_task(name)


def test_labels_keep_the_order_of_their_numbers(tmp_path):
    rows = [(f"t{i}", i % 11) for i in range(60)]
    task = load_task(write(tmp_path / "t", train_DOT_tsv=tsv(("sentence", "label"), *rows), dev_DOT_tsv=tsv(("sentence", "label"), *rows)))
    assert task.labels == [str(i) for i in range(11)]


def test_mnli_has_two_tests_and_columns_by_name(tmp_path):
    rows = [(i, "x", f"p{i}", f"h{i}", "neutral", ["entailment", "neutral", "contradiction", "-"][i % 4]) for i in range(40)]
    head = ("index", "genre", "sentence1", "sentence2", "label1", "gold_label")
    name = write(tmp_path / "t", train_DOT_tsv=tsv(head, *rows), dev_matched_DOT_tsv=tsv(head, *rows[:8]), dev_mismatched_DOT_tsv=tsv(head, *rows[8:12]),
                 test_matched_DOT_tsv=tsv(head[:-2], *[row[:-2] for row in rows]))
    task = load_task(name)
    assert {split: len(rows) for split, rows in task.rows.items()} == {"train": 28, "val": 2, "matched": 6, "mismatched": 3}
    assert task.labels == ["contradiction", "entailment", "neutral"] and task.rows["matched"][0] == {"text": "p0", "pair": "h0", "label": "entailment"}


def test_iob1_and_iob2_are_one_task(tmp_path):
    one = "-DOCSTART- -X- -X- O\n\nEU NNP I-NP I-ORG\n# # O O\nrejects VBZ I-VP O\nParis NNP I-NP I-LOC\nRome NNP I-NP B-LOC\n\n" + "a DT O O\n\n" * 9
    two = one.replace("I-ORG", "B-ORG").replace("I-LOC", "B-LOC").replace("-DOCSTART- -X- -X- O\n\n", "")
    tasks = [load_task(write(tmp_path / name, train_DOT_txt=text, valid_DOT_txt=text, test_DOT_txt=text)) for name, text in (("1", one), ("2", two))]
    assert tasks[0].rows == tasks[1].rows and tasks[0].labels == ["O", "B-LOC", "I-LOC", "B-ORG", "I-ORG"] and tasks[0].entities
    assert tasks[0].rows["test"][0] == {"words": ["EU", "#", "rejects", "Paris", "Rome"], "tags": ["B-ORG", "O", "O", "B-LOC", "B-LOC"]}


def test_record_ends_are_inclusive(tmp_path):
    path = tmp_path / "train.json"
    path.write_text(json.dumps({"data": [{"id": "p", "passage": {"text": "Él saw Rome."}, "qas": [{"id": "q", "query": "@placeholder", "answers": [{"start": 7, "end": 10}]}]}]}))
    assert read_qa(path, [])[0]["answers"] == [{"text": "Rome", "start": 7}]


def test_msmarco_and_beir_are_one_task(tmp_path):
    documents, queries = [f"document {i}" for i in range(30)], [f"query {i}" for i in range(30)]
    qrels = {"train": [(i, i) for i in range(20)], "dev": [(i, i) for i in range(20, 30)] + [(20, 3)]}
    a = write(tmp_path / "a", collection_DOT_tsv=tsv(*enumerate(documents)),
              **{f"queries.{s}.tsv": tsv(*[(q, queries[q]) for q in dict(pairs)]) for s, pairs in qrels.items()},
              **{f"qrels.{s}.tsv": tsv(*[(q, 0, d, 1) for q, d in pairs]) for s, pairs in qrels.items()})
    b = write(tmp_path / "b", corpus_DOT_jsonl="".join(json.dumps({"_id": str(i), "title": "", "text": t}) + "\n" for i, t in enumerate(documents)),
              queries_DOT_jsonl="".join(json.dumps({"_id": str(i), "text": t}) + "\n" for i, t in enumerate(queries)),
              **{f"qrels__{s}_DOT_tsv": tsv(("query-id", "corpus-id", "score"), *[(q, d, 1) for q, d in pairs]) for s, pairs in qrels.items()})
    a, b = load_task(a), load_task(b)
    assert a.rows == b.rows and a.qrels == b.qrels and [a.corpus[i] for i in range(30)] == [b.corpus[i] for i in range(30)] == documents
    assert a.qrels["test"]["20"] == {20: 1, 3: 1} and len(a.rows["val"]) == 1 and not a.qrels["train"].keys() & a.qrels["val"].keys()


def test_equal_texts_are_never_on_both_sides(tmp_path):
    rows = [(f"text {i % 30}", i % 2) for i in range(600)]
    task = load_task(write(tmp_path / "t", train_DOT_tsv=tsv(("text", "label"), *rows), dev_DOT_tsv=tsv(("text", "label"), *rows)))
    sides = [{row["text"] for row in task.rows[split]} for split in ("train", "val")]
    assert not sides[0] & sides[1] and len(sides[0] | sides[1]) == 30 and 30 <= len(task.rows["val"]) <= 60


# --- oracles: perfect logits through decoding and scoring


def test_oracle_tags_give_f1_1(tmp_path):
    """Sentences far longer than max_length, words longer than it, words of letters that are no ASCII."""
    rng = np.random.default_rng(0)
    words = ["Köln", "x" * 200, "a", "日本", "Rome", "'s"]
    text = "".join("".join(f"{words[rng.integers(6)]} {'B-A I-A O B-B I-B'.split()[rng.integers(5)]}\n" for _ in range(n)) + "\n" for n in [1, 2, 50, 200, 3] * 4)
    task = load_task(write(tmp_path / "t", train_DOT_txt=text, valid_DOT_txt=text, test_DOT_txt=text))
    notes = []
    items = encode_tc(task, task.rows["test"], byte_tokenizer(), 40, notes)
    assert max(len(item.ids) for item in items) <= 40 and len(notes) == 2
    assert [sum(len(item.places) for item in items if item.row == i) for i in range(20)] == [1, 2, 50, 200, 3] * 4  # one tag a word
    order = np.random.default_rng(1).permutation(len(items))
    batch = make_batch([items[i] for i in order], "TC", 258)
    logits = torch.nn.functional.one_hot(batch.targets, len(task.labels)).float()
    parts = dict(zip(order.tolist(), (part.tolist() for part in logits.argmax(-1).split([len(items[i].places) for i in order]))))
    got = scores(task, task.rows["test"], items, [parts[i] for i in range(len(items))])
    assert got["f1"] == 1 and got["accuracy"] == 1


CONTEXTS = ["the Norsemen of Normandy – naïve café 日本 🎉 in the 10th century", "é " * 150 + "late answer" + " ü" * 150, "first word", "", "emoji 🎉🎉 at the end 🎉"]
ANSWERS = [("Normandy", "naïve café", "日本", "🎉", "10th", "the", "century"), ("late answer", "ü ü"), ("first", "word", "first word"), (None,), ("🎉🎉", "end 🎉", None)]


@pytest.mark.parametrize("tokenizer", [byte_tokenizer(), word_tokenizer()], ids=["bytes", "words"])
@pytest.mark.parametrize("max_length", [32, 64, 256])
def test_oracle_spans_give_exact_match_1(tmp_path, tokenizer, max_length):
    """Answers after a space, in late windows, of several bytes a letter, and no answer."""
    rows = [(context, "who?", answer, None) for context, some in zip(CONTEXTS, ANSWERS) for answer in some]
    task = load_task(write(tmp_path / "t", train_DOT_json=squad(*rows), dev_DOT_json=squad(*rows)))
    assert task.unanswerable
    items = encode_qa(task, task.rows["test"], tokenizer, max_length, [], doc_stride=16)
    assert max(len(item.ids) for item in items) <= max_length
    batch = make_batch(items, "QA", tokenizer.pad)
    logits = torch.full((len(items), int(batch.lengths.max()), 2), -9.0)
    for i, (first, last) in enumerate(batch.targets.tolist()):
        logits[i, first, 0] = logits[i, last, 1] = 9
    place = torch.arange(logits.size(1))
    allowed = (place >= batch.places[:, :1]) & (place < batch.places[:, 1:]) | (place == batch.lengths[:, None] - 1)
    found = finetune.best_spans(logits.masked_fill(~allowed[:, :, None], -math.inf), batch.lengths, 64)
    got = scores(task, task.rows["test"], items, found)
    assert got["f1"] == 1 and got["exact_match"] == 1
    assert scores(task, task.rows["test"], items, found, threshold=0.0)["exact_match"] == 1


def test_every_token_of_a_context_is_in_a_window_and_each_answer_whole_in_one(tmp_path):
    context = " ".join(str(i) for i in range(300))
    rows = [(context, "q", str(i), context.index(f" {i} ") + 1) for i in range(1, 299, 7)]
    task = load_task(write(tmp_path / "t", dev_DOT_json=squad(*rows)), test_only=True)
    items = encode_qa(task, task.rows["test"], byte_tokenizer(), 80, [], doc_stride=20)
    for i, row in enumerate(task.rows["test"]):
        spans = [tuple(span) for item in items if item.row == i for span in item.spans.tolist()]
        assert set(spans) == {(c, c + 1) for c in range(len(context))}
        assert any(item.targets[1] < len(item.ids) - 1 for item in items if item.row == i)


def test_character_spans_cover_the_text():
    text, tokenizer = "a é日🎉 the Normandy\u00a010", word_tokenizer()
    ids = tokenizer.encode(text).astype(np.int64)
    for (a, b), i in zip(character_spans(text, ids, tokenizer), ids):
        piece = next(p for p, n in tokenizer.ranks.items() if n == i)
        assert piece in text[a:b].encode() and len(text[a:b].encode()) < len(piece) + 4


def test_best_span_is_the_best_of_all():
    rng = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 12, 2, generator=rng)
    lengths = torch.tensor([12, 9, 5, 3, 2])
    logits[torch.arange(12) >= lengths[:, None]] = -math.inf
    logits[torch.arange(12).expand(5, -1) < 1] = -math.inf  # the question
    for limit in (1, 3, 12):
        for i, (best, none, first, last) in enumerate(finetune.best_spans(logits, lengths, limit)):
            n, x = int(lengths[i]), logits[i]
            spans = [(float(x[a, 0] + x[b, 1]), a, b) for a in range(1, n - 1) for b in range(a, min(a + limit, n - 1))]
            assert none == pytest.approx(float(x[n - 1].sum()))
            assert (best, first, last) == max(spans) if spans else best == -math.inf


class Oracle(torch.nn.Module):
    """A model that gives each text the vector of the number it ends in, so that a query and its document have the same one."""
    family, config = "IR", None

    def __init__(self, constant=False):
        super().__init__()
        self.constant = constant

    def forward(self, batch):
        out = torch.zeros(len(batch.starts), 64)
        for i, (start, length) in enumerate(zip(batch.starts.tolist(), batch.lengths.tolist())):
            text = bytes(batch.ids.view(-1)[start:start + length - 1].tolist()).decode()
            out[i, 0 if self.constant else int(text.split()[-1]) % 64] = 1
        return out


def retrieval(folder, n=40, extra=((3, 4),)):
    return write(folder, collection_DOT_tsv=tsv(*[(f"d{i}", f"document {i}") for i in range(n)]), queries_DOT_dev_DOT_tsv=tsv(*[(f"q{i}", f"query {i}") for i in range(n)]),
                 qrels_DOT_dev_DOT_tsv=tsv(*[(f"q{i}", 0, f"d{i}", 1) for i in range(n)], *[(f"q{a}", 0, f"d{b}", 1) for a, b in extra]))


@pytest.mark.parametrize("which", ["all", "judged"])
def test_perfect_vectors_rank_first_and_constant_ones_do_not_win(tmp_path, which):
    task, s = load_task(retrieval(tmp_path / "t", extra=()), test_only=True), settings(candidates=which)
    got = finetune.retrieval_scores(Oracle(), task, "test", s, MACHINE, byte_tokenizer())
    assert got == {"ndcg@10": 1, "mrr@10": 1, "recall@100": 1}
    got = finetune.retrieval_scores(Oracle(constant=True), task, "test", s, MACHINE, byte_tokenizer())
    assert got == {"ndcg@10": 0, "mrr@10": 0, "recall@100": 1}  # the relevant one comes 40th of 40 equals


def test_constant_vectors_find_nothing_among_many(tmp_path):
    task = load_task(retrieval(tmp_path / "t", n=300), test_only=True)
    assert finetune.retrieval_scores(Oracle(constant=True), task, "test", settings(), MACHINE, byte_tokenizer())["recall@100"] == 0


def test_ranking_in_blocks_equals_one_matrix_product(tmp_path, monkeypatch):
    torch.manual_seed(0)
    task, tokenizer = load_task(retrieval(tmp_path / "t", n=150), test_only=True), byte_tokenizer()
    model = finetune.Finetuned(Config(vocab_size=tokenizer.vocab_size, **TINY), "IR", 0).eval()
    ranked = finetune.rank_documents(model, task, list(task.rows["test"].values()), np.arange(150), {}, settings(), MACHINE, tokenizer)
    encode = lambda texts: torch.stack(finetune.outputs(model, [Item(i, encode_text(t, tokenizer, 64)[0]) for i, t in enumerate(texts)], MACHINE, tokenizer.pad))
    cosines = encode(f"Query: query {i}" for i in range(150)) @ encode(f"Document: document {i}" for i in range(150)).t()
    for row, got in zip(cosines, ranked):
        assert torch.allclose(row.sort(descending=True)[0][:100], torch.tensor([cosine for _, cosine in got]), atol=1e-5)
        assert torch.allclose(row[[number for number, _ in got]], torch.tensor([cosine for _, cosine in got]), atol=1e-5)


# --- the model


def test_a_text_alone_equals_the_same_text_among_others():
    torch.manual_seed(0)
    tokenizer = byte_tokenizer()
    rng = np.random.default_rng(0)
    items = [Item(i, np.append(rng.integers(0, 256, n), tokenizer.eos), np.array([0, n // 2] if n > 1 else [0])) for i, n in enumerate([1, 5, 60, 2, 33, 7, 7])]
    for family in ("SC", "TC", "IR", "QA"):
        some = [item._replace(places=np.array([0, len(item.ids) - 1])) if family == "QA" else item for item in items]
        for pooling in ("mean", "first", "last"):
            model = finetune.Finetuned(Config(vocab_size=tokenizer.vocab_size, **TINY), family, 3 if family != "QA" else 2, pooling).eval()
            for p in model.parameters():
                torch.nn.init.normal_(p, std=0.3)
            with torch.no_grad():
                together = model(make_batch(some, family, tokenizer.pad))
                alone = [model(make_batch([item], family, tokenizer.pad)) for item in some]
            if family == "TC":
                together = together.split([len(item.places) for item in some])
            for item, a, b in zip(some, together, alone):
                assert torch.allclose(a[:len(item.ids)] if family == "QA" else a, b if family == "TC" else b[0], atol=1e-5), (family, pooling)


def test_packing_lays_each_text_once():
    rng = np.random.default_rng(0)
    for _ in range(20):
        items = [Item(i, rng.integers(0, 256, rng.integers(1, 50))) for i in range(rng.integers(1, 40))]
        batch = make_batch(items, "SC", 257)
        T, flat, bounds = batch.ids.size(1), batch.ids.view(-1), batch.cu_seqlens.tolist()
        assert bounds[0] == 0 and bounds[-1] == len(flat) and all(a < b for a, b in zip(bounds, bounds[1:]))
        assert all(a // T == (b - 1) // T for a, b in zip(bounds, bounds[1:]))  # no document goes over the end of a row
        for item, start, length in zip(items, batch.starts.tolist(), batch.lengths.tolist()):
            assert flat[start:start + length].tolist() == item.ids.tolist() and start in bounds and start + length in bounds
        assert (flat == 257).sum() == len(flat) - sum(len(item.ids) for item in items)


def test_a_renamed_weight_is_an_error(checkpoint):
    state = torch.load(checkpoint, weights_only=True)
    model = finetune.Finetuned(Config(**state["config"]), "SC", 2)
    weights = dict(state["model"])
    weights["blocks.0.renamed"] = weights.pop("blocks.0.mlp.down.weight")
    with pytest.raises(RuntimeError, match="renamed"):
        model.reset(weights, 0)


def test_a_checkpoint_with_a_renamed_weight_is_refused(tmp_path, checkpoint):
    state = torch.load(checkpoint, weights_only=True)
    state["model"]["blocks.0.renamed"] = state["model"].pop("blocks.0.mlp.down.weight")
    torch.save(state, tmp_path / "odd.pt")
    with pytest.raises(SystemExit, match="blocks.0.mlp.down.weight"):
        run("--init_from", tmp_path / "odd.pt", "--task", sentiment(tmp_path / "t"), "--out_dir", tmp_path / "out")


def test_training_mode_comes_back():
    model = finetune.Finetuned(Config(vocab_size=320, **TINY), "SC", 2).train()
    finetune.outputs(model, [Item(0, np.array([1, 2]))], MACHINE, 257)
    assert model.training


def test_pairs_lose_from_the_longer_side():
    task = finetune.Task("t", "SC", {}, ["0"])
    row = lambda a, b: {"text": "a" * a, "pair": "b" * b, "label": "0"}
    for a, b, wanted in ((3, 50, (3, 15)), (50, 3, (15, 3)), (50, 60, (9, 9)), (60, 50, (9, 9)), (9, 9, (9, 9)), (8, 20, (8, 10))):
        notes = []
        ids = encode_sc(task, [row(a, b)], byte_tokenizer(), 20, notes)[0].ids
        assert ((ids == ord("a")).sum(), (ids == ord("b")).sum()) == wanted and bool(notes) == (a + b > 18), (a, b)


# --- training


@pytest.mark.parametrize("steps", [1, 2, 3, 10, 11, 1000])
def test_schedule(steps):
    rates = [finetune.rate_at(step, steps) for step in range(steps)]
    warmup = math.ceil(steps / 10)
    assert max(rates) == 1 and rates[warmup - 1] == 1 and all(0 < rate <= 1 for rate in rates)
    assert np.allclose(np.diff(rates[warmup:]), -1 / max(1, steps - warmup))


def test_number_of_steps():
    count = lambda n, **changes: finetune.n_steps(n, settings(batch_size=32, **changes))
    assert count(100_000, max_iters=1000) == 1000 and count(65, max_iters=1000) == 3 and count(64, max_iters=1000) == 2 and count(1) == 1
    assert count(64, epochs=10.0, max_iters=1000) == 20


def test_info_nce_by_hand():
    q, d = torch.eye(3), torch.tensor([[1.0, 0, 0], [0, 1, 0], [1, 0, 0]])
    free = torch.zeros(3, 3, dtype=torch.bool)
    e = math.exp(-20)
    assert float(finetune.info_nce(q, d, free)) == pytest.approx(math.log(2 + e) + math.log(1 + 2 * e) + math.log(3), rel=1e-5)
    free[0, 2] = True  # the third document is relevant for the first query, so no negative
    assert float(finetune.info_nce(q, d, free)) == pytest.approx(math.log(1 + e) + math.log(1 + 2 * e) + math.log(3), rel=1e-5)


def test_a_sweep_is_kept_and_goes_on(tmp_path, checkpoint, capsys):
    name = sentiment(tmp_path / "t")
    flags = ["--init_from", checkpoint, "--task", name, "--out_dir", tmp_path / "out", "--max_iters", 3, "--dtype", "float32"]
    run(*flags, "--learning_rate", "1e-3,1e-2", "--seeds", 2)
    first = (tmp_path / "out/results.jsonl").read_text()
    assert len(first.splitlines()) == 4
    run(*flags, "--learning_rate", "1e-3,1e-2", "--seeds", 2)
    assert (tmp_path / "out/results.jsonl").read_text() == first and "4 of 4 cells stand there" in capsys.readouterr().out
    lines = first.splitlines(keepends=True)
    (tmp_path / "out/results.jsonl").write_text("".join(lines[:2]) + lines[2][:50])  # killed while it wrote
    run(*flags, "--learning_rate", "1e-3,1e-2", "--seeds", 2)
    again = read_results(tmp_path / "out")
    same = lambda line: {k: v for k, v in line.items() if k != "seconds"}
    assert [same(line) for line in again] == [same(json.loads(line)) for line in lines]  # the same to the last bit
    run(*flags, "--learning_rate", "1e-3", "--seeds", 1, "--batch_size", 8)  # another setting is another cell
    assert len(read_results(tmp_path / "out")) == 5
    run("--report", tmp_path / "out")
    out = capsys.readouterr().out
    assert out.count(f"| {name} |") == 4 and "batch_size 8" in out


def line(rate, seed, val, test, diverged=False):
    return {"rate": rate, "seed": seed, "main": "accuracy", "val": None if diverged else {"accuracy": val}, "test": {} if diverged else {"test": {"accuracy": test}},
            "diverged": diverged, "floor": {"val": 0.5, "test": 0.5}}


def test_the_choice_never_sees_test_data():
    lines = [line(r, s, v, t) for r, v, t in ((1e-5, 0.7, 0.1), (1e-4, 0.6, 0.9)) for s in range(3)]
    assert best_rate(lines) == 1e-5 and summary(lines, "test")["mean"] == pytest.approx(0.1)
    assert best_rate(lines + [line(1e-5, 3, 0, 0, diverged=True)]) == 1e-4  # a rate that diverges is not chosen
    assert best_rate([line(1e-5, 0, 0, 0, diverged=True)]) == 1e-5


def test_statistics():
    for df, wanted in {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 9: 2.262, 30: 2.042}.items():
        assert t_quantile(df) == pytest.approx(wanted, abs=5e-4)
    mean, half = interval([0.70, 0.72, 0.74, 0.71, 0.73])
    assert mean == pytest.approx(0.72) and half == pytest.approx(2.776 * 0.0158114 / math.sqrt(5), rel=1e-3)
    assert interval([0.7]) == (0.7, None)
    r = summary([line(1e-5, s, 0.5, 0.5) for s in range(2)] + [line(1e-4, s, 0.9, 0.8 + s / 10) for s in range(2)] + [line(1e-3, 0, 0, 0, True)], "test")
    assert r["failed"] == 3 and r["cells"] == 5 and r["rate"] == 1e-4 and r["over_seeds"] == pytest.approx(np.std([0.8, 0.9], ddof=1))
    assert r["over_rates"] == pytest.approx(0.35)


def test_it_learns_is_saved_and_predicts(tmp_path, checkpoint, capsys):
    name = sentiment(tmp_path / "t", 400)
    run("--init_from", checkpoint, "--task", name, "--out_dir", tmp_path / "out", "--epochs", 4, "--learning_rate", "1e-2", "--save", "true", "--dtype", "float32")
    result = read_results(tmp_path / "out")[0]
    assert result["test"]["test"]["accuracy"] > 0.9 and result["steps"] == math.ceil(4 * 380 / 32)
    (tmp_path / "new.tsv").write_text(tsv(("text",), *[(f"{'good' if i % 3 else 'bad'} text {i}",) for i in range(40)]))
    run("--init_from", tmp_path / "out/t.pt", "--predict", tmp_path / "new.tsv")
    lines = (tmp_path / "new.tsv.predictions").read_text().splitlines()
    info(load_checkpoint(tmp_path / "out/t.pt"), "t.pt")
    assert "fine-tuned for SC, rate 0.01, seed 0; labels no, yes" in capsys.readouterr().out
    assert len(lines) == 40 and np.mean([got == ("yes" if i % 3 else "no") for i, got in enumerate(lines)]) > 0.9
    with pytest.raises(SystemExit, match="there already"):
        run("--init_from", tmp_path / "out/t.pt", "--predict", tmp_path / "new.tsv")
    with pytest.raises(SystemExit, match="other settings"):
        run("--init_from", checkpoint, "--task", name, "--out_dir", tmp_path / "out", "--max_iters", 1, "--save", "true")
    (tmp_path / "odd.tsv").write_text(tsv(("text", "label"), ("a", "yes"), ("b",)))
    with pytest.raises(SystemExit, match="1 rows left out"):
        run("--init_from", tmp_path / "out/t.pt", "--predict", tmp_path / "odd.tsv")
    assert torch.load(tmp_path / "out/t.pt", weights_only=True)["labels"] == ["no", "yes"]


def test_every_family_trains_and_predicts(tmp_path, checkpoint):
    tags = "".join(f"in O\nRome{i} B-LOC\n\n" for i in range(40))
    rows = [(f"the city {i} is Rome", "which?", "Rome" if i % 3 else None, None) for i in range(40)]
    qrels = {s: [(i, i) for i in part] for s, part in (("train", range(30)), ("dev", range(30, 40)))}
    names = [write(tmp_path / "tc", train_DOT_txt=tags, dev_DOT_txt=tags), write(tmp_path / "qa", train_DOT_json=squad(*rows), dev_DOT_json=squad(*rows)),
             write(tmp_path / "ir", collection_DOT_tsv=tsv(*[(i, f"document {i}") for i in range(40)]),
                   **{f"queries.{s}.tsv": tsv(*[(q, f"query {q}") for q, _ in pairs]) for s, pairs in qrels.items()},
                   **{f"qrels.{s}.tsv": tsv(*[(q, 0, d, 1) for q, d in pairs]) for s, pairs in qrels.items()})]
    files = [tmp_path / "tc/dev.txt", tmp_path / "qa/dev.json", tmp_path / "ir/queries.dev.tsv"]
    for name, file, n in zip(names, files, (40, 40, 10)):
        run("--init_from", checkpoint, "--task", name, "--out_dir", tmp_path / "out", "--max_iters", 2, "--batch_size", 8, "--max_length", 64, "--save", "true")
        run("--init_from", tmp_path / f"out/{Path(name).name}.pt", "--predict", file)
        assert len(Path(f"{file}.predictions").read_text().splitlines()) == n
    assert {result["main"] for result in read_results(tmp_path / "out")} == {"f1", "ndcg@10"}


@pytest.mark.parametrize("flags, said", [
    (["--learning_rate", "fast"], "numbers"), (["--learning_rate", "0"], "above 0"), (["--seeds", "0"], "at least 1"), (["--pooling", "max"], "mean"),
    (["--max_length", "9999"], "block_size"), (["--task", "nowhere"], "no such folder"), (["--lerning_rate", "1"], "learning_rate"), (["--test_on", "nq"], "retrieval"),
    (["--init_from", "nowhere.pt"], "no such checkpoint"), (["--predict", "x"], "not fine-tuned"), (["--batch_size", "0"], "at least 1"), (["--epochs", "0"], "above 0")])
def test_bad_settings_end_in_one_line(tmp_path, checkpoint, flags, said):
    name = sentiment(tmp_path / "t")
    with pytest.raises(SystemExit, match=said) as end:
        run("--init_from", checkpoint, "--task", name, "--out_dir", tmp_path / "out", *flags)
    assert "\n" not in str(end.value) and not (tmp_path / "out").exists()


# --- prepare scripts


def test_a_download_that_broke_off_goes_on(tmp_path, monkeypatch):
    content, asked = bytes(range(256)) * 4000, []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.headers.get("Range"))
            first = int(asked[-1][6:-1]) if asked[-1] else 0
            self.send_response(206 if first else 200)
            self.send_header("Content-Length", str(len(content) - first))
            if first:
                self.send_header("Content-Range", f"bytes {first}-{len(content) - 1}/{len(content)}")
            self.end_headers()
            self.wfile.write(content[first:] if len(asked) > 1 else content[:100_000])

        log_message = lambda *_: None

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url, path = f"http://127.0.0.1:{server.server_port}/x.bin", tmp_path / "d/x.bin"
        monkeypatch.setattr(fetch_file, "TRIES", 1)
        with pytest.raises(SystemExit, match="ended after 100,000 of"):
            fetch(url, path, checksum(hashlib.md5(content).hexdigest()))
        assert not path.exists()
        fetch(url, path, checksum(hashlib.md5(content).hexdigest()))
        assert path.read_bytes() == content and asked == [None, "bytes=100000-"]
        with pytest.raises(SystemExit, match="checksum"):
            fetch(url, tmp_path / "d/y.bin", checksum("0" * 32))
        assert sorted(p.name for p in (tmp_path / "d").iterdir()) == ["x.bin"]
        server.shutdown()


def script(task):
    spec = importlib.util.spec_from_file_location(f"prepare_{task}", ROOT / f"data/{task}/prepare.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_conversions_of_prepare_scripts(tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.txt"
    source.write_text("# newdoc id = x\n# sent_id = 1\n# text = New York!\n1\tNew\tB-LOC\t-\t-\n2\tYork\tI-LOC\t-\t-\n3\t#\tO\t-\t-\n\n")
    script("uner").convert(source, target)
    assert read_tc(target, []) == [{"words": ["New", "York", "#"], "tags": ["B-LOC", "I-LOC", "O"]}]
    names = ("(ORG*", "*)", "*", "(PERSON)", "(DATE*)")
    source.write_text("#begin document (x); part 000\n" + "".join(f"x 0 {i} w{i} NN * - - - - {name} -\n" for i, name in enumerate(names)) + "\n#end document\n")
    script("ontonotes").convert(source, target)
    assert read_tc(target, [])[0]["tags"] == ["B-ORG", "I-ORG", "O", "B-PERSON", "B-DATE"]
    source.write_text("".join(json.dumps({"passage": {"text": "In Rome."}, "idx": i, "qas": [{"query": "@placeholder", "idx": i, "answers": [{"start": 3, "end": 6}]}]}) + "\n" for i in (0, 1)))
    script("record").convert(source, target)
    assert [row["answers"][0]["text"] for row in read_qa(target, [])] == ["Rome", "Rome"]
    with gzip.open(tmp_path / "t.gz", "wt") as file:
        file.write(json.dumps({"query_id": "q", "query": "who?", "positive_passages": [{"docid": "d"}], "negative_passages": []}) + "\n")
    with gzip.open(tmp_path / "c.gz", "wt") as file:
        file.write(json.dumps({"docid": "d", "text": "me"}) + "\n")
    (tmp_path / "m/qrels").mkdir(parents=True)
    for packed, name in (("t.gz", "queries.jsonl"), ("t.gz", "qrels/test.tsv"), ("c.gz", "corpus.jsonl")):
        script("mldr").convert(tmp_path / packed, tmp_path / "m" / name)
    task = load_task(str(tmp_path / "m"), test_only=True)
    assert task.rows == {"test": {"q": "who?"}} and task.qrels == {"test": {"q": {0: 1}}} and task.corpus[0] == "me"


def test_docstrings_describe_their_parameters():
    described = script("docs_qa").described
    for text in ("Sum.\n\nParameters\n----------\nx : array\n    What to sum, e.g. numbers. More.\naxis : int\n    The axis\n    to sum over.\n\nReturns\n-------\ny : int\n    It all.",
                 "Sum.\n\nArgs:\n    x (array): What to sum, e.g. numbers. More.\n    axis: The axis\n        to sum over.\n\nReturns:\n    y: It all.",
                 "Sum.\n\n:param x: What to sum, e.g. numbers. More.\n:param int axis: The axis\n  to sum over.\n:return: It all."):
        context, found = described(text)
        assert {name: answer for name, (_, answer) in found.items()} == {"x": "What to sum, e.g. numbers.", "axis": "The axis to sum over."}
        assert all(context[start:start + len(answer)] == answer for start, answer in found.values())


def test_scores_without_learning(tmp_path):
    task = finetune.Task("t", "SC", {"val": [{"label": label} for label in "abbbc"]}, ["a", "b", "c"])
    assert floor(task, "val", "all") == 3 / 5
    task = finetune.Task("t", "QA", {"val": [{"answers": []}, {"answers": [1]}, {"answers": [1]}]})
    assert floor(task, "val", "all") == 1 / 3
    task, rng = load_task(retrieval(tmp_path / "t", n=60), test_only=True), np.random.default_rng(0)
    judged = list(task.qrels["test"].values())
    chance = np.mean([ranking_scores([rng.permutation(60).tolist() for _ in judged], judged)["ndcg@10"] for _ in range(100)])
    assert floor(task, "test", "all") == pytest.approx(chance, rel=0.1)


def test_no_text_is_in_two_splits():
    splits = unseen({"train": ["a", "b", "a"], "val": ["b", "c"], "test": ["c", "d", "a"]}, str)
    assert splits == {"train": ["a", "b"], "val": ["c"], "test": ["d"]}


def test_words_are_tagged_by_what_they_are_in_the_source():
    entry = Documented("m", "total", ("axis", "a"), "a, axis=None", frozenset({"total", "mean"}), frozenset({"Table"}), "")
    words = dict(script("docs_tc").tagged(entry, "Like `mean` over axis of a Table, see total(); None means what the mean is."))
    assert words == {"Like": "O", "mean": "O", "over": "O", "axis": "B-PARAM", "of": "O", "a": "O", "Table": "B-CLASS", ",": "O", "see": "O", "total": "B-FUNC", "(": "O",
                     ")": "O", ";": "O", "None": "B-VALUE", "means": "O", "what": "O", "the": "O", "is": "O", ".": "O"}  # the last "mean" is no code
    assert ("mean", "B-FUNC") in script("docs_tc").tagged(entry, "`mean`")


# --- several processes


WORKER = """
import gc, sys, json, torch, numpy as np
sys.path.insert(0, {root!r})
import finetune
from data.items import Item, encode_sc, encode_text, make_batch
from data.tasks import load_task
from data.test_data import byte_tokenizer
from data.test_tasks import TINY, settings, retrieval
from model import Config
team = finetune.Team()
m = finetune.Machine(team, torch.device("cpu"), torch.float32)
torch.manual_seed(0)
tokenizer, result = byte_tokenizer(), {{}}
model = finetune.Finetuned(Config(vocab_size=tokenizer.vocab_size, **TINY), "SC", 3)
for p in model.parameters():
    torch.nn.init.normal_(p, std=0.3)
rng = np.random.default_rng(0)
for n in (1, 3, 9, 10):
    rows = [dict(text="x" * int(rng.integers(1, 60)), pair=None, label=str(i % 3)) for i in range(n)]
    task = finetune.Task("t", "SC", {{"train": rows}}, ["0", "1", "2"])
    items = encode_sc(task, rows, tokenizer, 64, [])
    m_small = finetune.Machine(team, torch.device("cpu"), torch.float32)
    found = finetune.outputs(model, items, m_small, tokenizer.pad)
    result[n] = [found, finetune.scores(task, rows, items, found)]
task, s = load_task({folder!r}), settings(batch_size=8)
pairs = [(q, d) for q, grades in task.qrels["train"].items() for d in grades]
ir = finetune.Finetuned(model.encoder.config, "IR", 0)
ir.encoder.load_state_dict(model.encoder.state_dict())
result["retrieval"] = finetune.retrieval_scores(ir, task, "test", s, m, tokenizer)
chosen = pairs[:7]
own = chosen[team.rank::team.world]
texts = [task.rows["train"][q] for q, _ in own] + [task.corpus[d] for _, d in own]
out = ir(make_batch([Item(i, encode_text(t, tokenizer, 64)[0]) for i, t in enumerate(texts)], "IR", tokenizer.pad))
vectors = [finetune.everyones(part, 7, team) for part in out.chunk(2)]
loss = finetune.info_nce(*vectors, torch.zeros(7, 7, dtype=torch.bool))
loss.backward()
finetune.sum_gradients(ir, team)
result["loss"] = [float(loss)] + [float(p.grad.double().norm()) for p in ir.parameters()] + ir.encoder.blocks[0].mlp.down.weight.grad.flatten().tolist()
ir.zero_grad()
for steps, name in ((1, "first"), (3, "after")):
    for family, net, items in (("IR", ir, pairs[:17]), ("SC", model, items[:9])):  # the last batch has one row: a process has none
        task.family = family
        finetune.fit(net, task, items, settings(batch_size=8, max_iters=steps, epochs=9.0), m, tokenizer, 1e-3, 0)
        result[name + family] = [float(p.double().abs().sum()) for p in net.parameters()] + net.encoder.embed.weight.double()[97].tolist()
if team.first:
    print("RESULT" + json.dumps(result))
if team.world > 1:
    torch.distributed.destroy_process_group()
    gc.collect()
"""


def test_two_processes_equal_one(tmp_path, monkeypatch):
    """Outputs and scores to the last digit, for 1, 3, 9 and 10 rows; training (InfoNCE with negatives of all, 1 to 8 rows a batch) up to rounding."""
    n = 20
    qrels = {"train": [(i, i) for i in range(n)] + [(0, 1)], "dev": [(i, i) for i in range(n)]}
    folder = write(tmp_path / "t", collection_DOT_tsv=tsv(*[(i, f"document {i * i}") for i in range(n)]),
                   **{f"queries.{s}.tsv": tsv(*[(q, f"query {q}") for q in dict(pairs)]) for s, pairs in qrels.items()},
                   **{f"qrels.{s}.tsv": tsv(*[(q, 0, d, 1) for q, d in pairs]) for s, pairs in qrels.items()})
    script = tmp_path / "worker.py"
    script.write_text(WORKER.format(root=str(ROOT), folder=folder))
    results = []
    for launch in ([sys.executable], [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--master_port=29611"]):
        done = subprocess.run([*launch, str(script)], capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, cwd=ROOT)
        assert done.returncode == 0, done.stderr[-3000:]
        results.append(json.loads(next(l for l in done.stdout.splitlines() if l.startswith("RESULT"))[6:]))
    one, two = results
    for key in ("1", "3", "9", "10", "retrieval"):
        assert one[key] == two[key]
    assert np.allclose(one["loss"], two["loss"], rtol=1e-4, atol=1e-6)
    for key in ("firstIR", "firstSC", "afterIR", "afterSC"):
        assert np.allclose(one[key], two[key], rtol=1e-3, atol=1e-3), key
