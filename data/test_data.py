"""What must stay true of text, tokens and batches. Run by `python -m pytest` from the top folder."""
import gzip, json, subprocess, sys, time
from pathlib import Path

import numpy as np
import pytest
import torch

from data import prepare
from data.batches import IGNORE, MIN_CHUNK, count_windows, make_batch, permute, prefetch
from data.docstrings import prepare as docstrings
from data.text import prepare as text_prepare
from data.tokenizer import WHITE, Tokenizer, load_tokenizer, train_tokenizer
from data.tokens import HEADER_BYTES, TokenFile, TokenWriter

ROOT = Path(__file__).resolve().parents[1]
WORDS = "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron pi rho sigma tau upsilon phi chi psi omega".split()


def byte_tokenizer(extra=0):
    """256 bytes and `extra` made-up pieces: a vocabulary of any size."""
    ranks = {bytes([i]): i for i in range(256)} | {b"\xff" + i.to_bytes(3, "big"): 256 + i for i in range(extra)}
    return Tokenizer(f"bytes+{extra}", r"\s+|\S+", ranks)


def token_file(path, lengths, tokenizer=None, seed=0):
    """Documents of these lengths (without <|eos|>), random ids."""
    tokenizer, rng = tokenizer or byte_tokenizer(), np.random.default_rng(seed)
    out = TokenWriter(path, tokenizer)
    out.write([rng.integers(0, tokenizer.n_ordinary, n).astype(np.uint32) for n in lengths])
    out.close()
    return TokenFile(path)


@pytest.fixture
def tokens(tmp_path):
    return token_file(tmp_path / "t.bin", np.random.default_rng(1).integers(1, 90, 400))


# --- order


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 63, 64, 65, 1000, 65537])
def test_permute_is_a_bijection(n):
    for key in (0, 1, 12345):
        assert sorted(permute(np.arange(n), n, key)) == list(range(n))


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = [tuple(permute(np.arange(1000), 1000, key)) for key in range(20)]
    assert len(set(orders)) == 20
    places = np.array(orders)
    assert abs(np.corrcoef(places).sum() - 20) < 20  # no order resembles another


def test_an_epoch_reads_every_token_once(tokens):
    T, n = 64, count_windows(tokens, 64)
    assert tokens.n_tokens % T  # the last window is a part of one
    rows = make_batch(tokens, np.arange(n), T, "clm")
    ids = rows.ids.numpy()
    seen = np.concatenate([row[row != tokens.pad] for row in ids])
    assert np.array_equal(np.sort(seen), np.sort(tokens.ids))
    assert rows.n_tokens == tokens.n_tokens


def test_a_row_does_not_depend_on_its_batch(tokens):
    """Ranks, micro-batches and resumes only group rows."""
    for objective in ("mlm", "clm"):
        for packing in ("documents", "random"):
            together = make_batch(tokens, np.arange(500, 512), 64, objective, packing=packing, seed=3)
            for i in range(12):
                alone = make_batch(tokens, [500 + i], 64, objective, packing=packing, seed=3)
                assert torch.equal(alone.ids[0], together.ids[i])
                place = slice(0, alone.n_targets) if objective == "mlm" else slice(None)
                if objective == "mlm":
                    mine = together.places // 64 == i
                    mine[together.n_targets:] = False
                    assert torch.equal(together.places[mine] - 64 * i, alone.places[place])
                    assert torch.equal(together.targets[mine], alone.targets[place])
                else:
                    assert torch.equal(together.targets.view(12, 64)[i], alone.targets)


def test_seed_and_epoch_change_order_and_masks(tokens):
    n = count_windows(tokens, 64)
    assert not torch.equal(make_batch(tokens, np.arange(8), 64, "clm", seed=0).ids, make_batch(tokens, np.arange(8), 64, "clm", seed=1).ids)
    first, second, other = (make_batch(tokens, np.arange(e * n, (e + 1) * n), 64, "mlm", seed=seed) for e, seed in ((0, 0), (1, 0), (0, 1)))
    masks = []
    for batch in (first, second, other):  # the mask of each window, windows in one order
        plain = batch.ids.view(-1).clone()
        plain[batch.places[:batch.n_targets]] = batch.targets[:batch.n_targets]
        masks.append({tuple(row.tolist()): tuple((row != seen).tolist()) for row, seen in zip(plain.view(-1, 64), batch.ids)})
    for mask in masks[1:]:
        assert masks[0].keys() == mask.keys()
        assert sum(masks[0][key] != mask[key] for key in mask) > 0.9 * n


# --- masks and targets


@pytest.mark.parametrize("ratio", [0.01, 0.15, 0.4, 0.99])
def test_mask_counts_are_exact_and_specials_are_never_chosen(tokens, ratio):
    n = count_windows(tokens, 64)
    plain = make_batch(tokens, np.arange(n), 64, "clm").ids
    batch = make_batch(tokens, np.arange(n), 64, "mlm", ratio)
    chosen = torch.zeros(n * 64, dtype=torch.bool)
    chosen[batch.places[:batch.n_targets]] = True
    assert chosen.sum() == batch.n_targets
    for row, picked in zip(plain, chosen.view(n, 64)):
        ordinary = row < tokens.n_ordinary
        assert picked.sum() == round(ratio * int(ordinary.sum()))
        assert not (picked & ~ordinary).any()
    assert torch.equal(batch.targets[:batch.n_targets], plain.view(-1)[chosen])
    assert torch.equal(batch.ids.view(-1) == tokens.mask, chosen)
    assert (batch.targets[batch.n_targets:] == IGNORE).all()
    assert len(batch.targets) == n * round(ratio * 64)  # the same for every batch: static shapes


def test_every_ordinary_place_is_chosen_equally_often(tokens):
    n = count_windows(tokens, 64)
    counts = np.zeros((n, 64))
    for epoch in range(200):
        batch = make_batch(tokens, epoch * n + np.arange(4), 64, "mlm", 0.4)
        np.add.at(counts.reshape(-1), batch.places[:batch.n_targets].numpy(), 1)
    share = counts[:4].sum() / (200 * 4 * 64)
    assert 0.36 < share < 0.41
    assert np.abs(counts[:4].sum(0) / 800 - share).max() < 0.08  # no place of the row is preferred


def test_mask_split(tmp_path):
    tokenizer = byte_tokenizer()
    tokens = token_file(tmp_path / "t.bin", [60] * 2000)
    batch = make_batch(tokens, np.arange(1800), 64, "mlm", 0.4, (0.8, 0.1, 0.1))
    seen, was = batch.ids.view(-1)[batch.places[:batch.n_targets]], batch.targets[:batch.n_targets]
    assert abs((seen == tokens.mask).double().mean() - 0.8) < 0.01
    assert abs((seen == was).double().mean() - 0.1) < 0.01
    drawn = seen[(seen != tokens.mask) & (seen != was)]
    assert set(drawn.tolist()) == set(range(tokenizer.n_ordinary))  # the whole ordinary vocabulary, id 0 and the last one too, and no special token


def test_clm_predicts_next_tokens_inside_a_document(tokens):
    n = count_windows(tokens, 64)
    batch = make_batch(tokens, np.arange(n), 64, "clm")
    ids, targets = batch.ids, batch.targets.view(n, 64)
    inside = ids[:, :-1] < tokens.n_ordinary
    assert torch.equal(targets[:, :-1][inside], ids[:, 1:][inside])
    assert (targets[ids >= tokens.n_ordinary] == IGNORE).all()  # <|eos|> predicts nothing, nor does padding
    assert batch.n_targets == tokens.n_tokens - tokens.n_documents  # each token but the first of its document, once
    assert (targets != IGNORE).sum() == batch.n_targets


def test_documents_are_what_lies_between_two_eos(tokens):
    batch = make_batch(tokens, np.arange(7), 64, "clm")
    bounds = batch.cu_seqlens.tolist()
    wanted = []
    for b, row in enumerate(batch.ids.tolist()):
        wanted += [b * 64 + t for t in range(64) if t == 0 or row[t - 1] == tokens.eos]
    assert bounds[:len(wanted)] == wanted and set(bounds[len(wanted):]) == {7 * 64}
    assert batch.cu_seqlens.dtype == torch.int32 and batch.max_seqlen == 64


def test_random_packing_cuts_as_the_paper_does(tmp_path):
    tokens = token_file(tmp_path / "t.bin", [31] * 400)  # a whole number of windows: no padding
    pieces = [make_batch(tokens, [row], 64, "clm", packing="random").cu_seqlens for row in range(4000)]
    lengths = np.concatenate([[64] if cu is None else np.diff(cu.numpy()) for cu in pieces])  # None: the row is one piece
    lengths = lengths[lengths > 0]
    assert lengths.min() == MIN_CHUNK and set(lengths) <= {*range(MIN_CHUNK, 64 - MIN_CHUNK + 1), 64}
    share = np.bincount(lengths, minlength=65)[MIN_CHUNK:64 - MIN_CHUNK + 1] / len(lengths)
    assert share.max() < 2 * share.min()  # uniform
    batch = make_batch(tokens, np.arange(10, 20), 64, "clm", packing="random")
    last = (batch.cu_seqlens[1:].long() - 1).unique()
    assert (batch.targets[last] == IGNORE).all()  # what follows a piece is hidden from it
    assert (batch.ids.view(-1)[batch.targets != IGNORE] == tokens.eos).any()  # documents inside a piece see each other


def test_a_padding_row_scores_nothing(tokens):
    for objective in ("mlm", "clm"):
        batch = make_batch(tokens, [-1, 5], 64, objective)
        assert (batch.ids[0] == tokens.pad).all()
        assert batch.n_targets == make_batch(tokens, [5], 64, objective).n_targets == (batch.targets != IGNORE).sum()


def test_prefetch_keeps_order_and_raises():
    assert list(prefetch(lambda i: i * i, range(50))) == [i * i for i in range(50)]
    with pytest.raises(ZeroDivisionError):
        list(prefetch(lambda i: 1 // (3 - i), range(10)))


def test_prefetch_works_ahead_but_not_without_bound():
    made = []
    stream = prefetch(lambda i: made.append(i) or i, range(50), depth=2)
    assert next(stream) == 0
    deadline = time.time() + 10
    while len(made) < 4 and time.time() < deadline:  # two lie ready, one more is in hand
        time.sleep(0.01)
    time.sleep(0.2)
    assert made == [0, 1, 2, 3]
    stream.close()


def test_one_number_means_no_target():
    import model
    assert model.IGNORE == IGNORE == torch.nn.CrossEntropyLoss().ignore_index


# --- token files


@pytest.mark.parametrize("vocabulary, dtype", [(65_472, "uint16"), (65_535, "uint16"), (65_536, "uint16"), (65_537, "uint32")])
def test_all_ids_are_stored_exactly(tmp_path, vocabulary, dtype):
    """Vocabulary sizes with the three special tokens counted, around the end of uint16."""
    tokenizer = byte_tokenizer(vocabulary - 256 - 3)
    assert tokenizer.mask == vocabulary - 1
    out = TokenWriter(tmp_path / "t.bin", tokenizer)
    out.write([np.array([0, vocabulary - 4], np.uint32)])
    out.close()
    file = TokenFile(tmp_path / "t.bin")
    assert file.ids.dtype.name == dtype and file.ids.tolist() == [0, vocabulary - 4, vocabulary - 3]


def test_bad_token_files_are_refused(tmp_path):
    path = tmp_path / "t.bin"
    good = token_file(path, [30, 40])
    data = path.read_bytes()
    cases = {"no header": [b"", b"x", b"\0" * 5000, b"[1]".ljust(2000)], "cut off or damaged": [data[:-1], data[:-2], data + b"\0\0", data[:HEADER_BYTES]],
             "do not fit": [data.replace(b'"vocab_size": 320', b'"vocab_size": 9e6')]}
    for message, contents in cases.items():
        for content in contents:
            path.write_bytes(content)
            with pytest.raises(SystemExit, match=message):
                TokenFile(path)
    with pytest.raises(SystemExit, match="no such token file"):
        TokenFile(tmp_path / "none.bin")
    assert good.n_tokens == 72


def test_empty_and_one_token_documents(tmp_path):
    out = TokenWriter(tmp_path / "t.bin", byte_tokenizer())
    out.write([np.array(ids, np.uint32) for ids in ([], [7], [], [1, 2])])
    out.close()
    file = TokenFile(tmp_path / "t.bin")
    assert file.ids.tolist() == [7, file.eos, 1, 2, file.eos] and file.n_documents == 2


# --- tokenizer


def test_trained_tokenizer_round_trip(tmp_path):
    texts = [" ".join(np.random.default_rng(i).choice(WORDS, 50)) for i in range(50)]
    tokenizer = train_tokenizer(texts, 310)
    assert tokenizer.n_ordinary == 307 and tokenizer.eos == 307 and tokenizer.vocab_size == 320
    assert train_tokenizer(texts, 310).hash == tokenizer.hash
    tokenizer.save(tmp_path / "bpe.json")
    again = load_tokenizer(tmp_path / "bpe.json")
    assert again.hash == tokenizer.hash
    for text in ["alpha beta", "", "naïve 中文 \U0001f600\n\n\t x", "a <|eos|> b<|mask|><|pad|>"]:
        ids = again.encode(text)
        assert again.decode(ids) == text
        assert (ids < again.n_ordinary).all()  # text that spells a special token is text


def test_rank_files_and_their_faults(tmp_path):
    import base64
    rows = [base64.b64encode(bytes([i])).decode() + f" {i}" for i in range(256)]
    path = tmp_path / "ranks.tiktoken"
    path.write_text("\n".join(rows) + "\n")
    assert load_tokenizer(path).encode("hi").tolist() == [104, 105]
    for content, message in (("\n".join(rows[:-1]), "byte 255 has no id"), ("\n".join(rows[1:]), "without gaps"), ("hello", "neither"), ("", "no ranks")):
        path.write_text(content)
        with pytest.raises(SystemExit, match=message):
            load_tokenizer(path)
    with pytest.raises(SystemExit, match="no such file and no published encoding"):
        load_tokenizer("gtp2")


def test_white_space_that_makes_tiktoken_panic():
    tokenizer = train_tokenizer(["a b  c"], 300)
    for text in (" " * 1_000_000 + "a", "x" + "\n" * (2 * WHITE) + "y", " " * WHITE):
        assert tokenizer.decode(tokenizer.encode(text)) == text


# --- prepare


def corpus(folder, n=300, name="corpus.jsonl"):
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(WORDS, rng.integers(1, 60))) for _ in range(n)]
    (folder / name).write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return texts


def run_prepare(monkeypatch, folder, *arguments):
    monkeypatch.setattr(text_prepare, "DATA", folder)
    monkeypatch.setattr(sys, "argv", ["prepare.py", *map(str, arguments)])
    text_prepare.main()


def documents_of(path, tokenizer):
    ids = TokenFile(path).ids
    return [tokenizer.decode(part[:-1]) for part in np.split(ids, np.flatnonzero(ids == tokenizer.eos) + 1) if len(part)]


def test_text_is_kept_whole_and_no_text_is_in_both_splits(tmp_path, monkeypatch):
    texts = corpus(tmp_path)
    texts += texts[:40]
    with open(tmp_path / "corpus.jsonl", "a") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in [*texts[:40], "", " \n"])
    run_prepare(monkeypatch, tmp_path, tmp_path / "corpus.jsonl", "--name", "x", "--tokenizer", "train:400")
    tokenizer = load_tokenizer(tmp_path / "x/bpe.json")
    train, val = (documents_of(tmp_path / f"x/{split}.bin", tokenizer) for split in ("train", "val"))
    assert sorted(train + val) == sorted(texts)
    assert not set(train) & set(val) and len(val) > 10
    assert [text for text in texts if text in set(train)] == train  # in the order of the files


def test_the_bytes_do_not_depend_on_the_number_of_workers(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "BATCH", 500)
    corpus(tmp_path)
    for workers in (1, 8):
        run_prepare(monkeypatch, tmp_path, tmp_path / "corpus.jsonl", "--name", f"w{workers}", "--tokenizer", "train:400", "--workers", workers)
    for name in ("train.bin", "val.bin", "bpe.json"):
        assert (tmp_path / "w1" / name).read_bytes() == (tmp_path / "w8" / name).read_bytes()


def test_long_text_files_are_cut_at_blank_lines_and_compressed_ones_read(tmp_path):
    paragraphs = ["\n".join(" ".join(WORDS) for _ in range(20)) for _ in range(40)]
    text = "\n\n".join(paragraphs)
    (tmp_path / "book.txt").write_text(text)
    with gzip.open(tmp_path / "book.txt.gz", "wt") as file:
        file.write(text)
    (tmp_path / "line.txt").write_text("x" * 300_000)
    for name, whole in (("book.txt", text), ("book.txt.gz", text), ("line.txt", "x" * 300_000)):
        pieces, positions = zip(*prepare.read_documents(tmp_path / name))
        assert "".join(pieces) == whole and len(pieces) > 4 and max(map(len, pieces)) <= 5 * prepare.PIECE
        assert list(positions) == sorted(positions) and positions[-1] == (tmp_path / name).stat().st_size
    assert all(piece.endswith("\n\n") for piece, _ in list(prepare.read_documents(tmp_path / "book.txt"))[:-1])


@pytest.mark.parametrize("content, name, message", [
    (b'{"text": "a"}\n{"text": 3}\n', "a.jsonl", "line 2: not a JSON object with a string"), (b'{"text": "a"}\nnonsense\n', "a.jsonl", "line 2"),
    (b'{"body": "a"}\n', "a.jsonl", "line 1"), (b"caf\xe9\n", "a.txt", "not UTF-8"), (b"x", "a.csv", "neither .txt nor .jsonl"),
    (b'{"text": ' + b"[" * 100_000, "a.jsonl", "line 1"), (b'{"text": ' + b"1" * 5000 + b"}", "a.jsonl", "line 1"),
    (gzip.compress(b"hello " * 1000)[:-20], "a.txt.gz", "cannot be read to its end"), (b"\x1f\x8b" + bytes(range(200)), "a.txt.gz", "cannot be read to its end"), (b"only one", "a.txt", "no document fell to"), (b"", "a.txt", "no document fell to")])
def test_bad_text_is_one_line_and_leaves_nothing_behind(tmp_path, monkeypatch, content, name, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SystemExit, match=message):
        run_prepare(monkeypatch, tmp_path, tmp_path / name, "--name", "x", "--tokenizer", "train:300")
    assert not (tmp_path / "x").exists()


def test_a_dataset_is_never_overwritten(tmp_path, monkeypatch):
    corpus(tmp_path)
    run_prepare(monkeypatch, tmp_path, tmp_path / "corpus.jsonl", "--name", "x", "--tokenizer", "train:300")
    with pytest.raises(SystemExit, match="already holds a dataset"):
        run_prepare(monkeypatch, tmp_path, tmp_path / "corpus.jsonl", "--name", "x", "--tokenizer", "train:300")
    (tmp_path / "code").mkdir()
    (tmp_path / "code/prepare.py").touch()
    for name in ("code", tmp_path / "code", "..", ""):
        with pytest.raises(SystemExit, match="holds code"):
            run_prepare(monkeypatch, tmp_path, tmp_path / "corpus.jsonl", "--name", name, "--tokenizer", "train:300")


def test_every_file_is_looked_at_before_the_first_is_read(tmp_path, monkeypatch):
    corpus(tmp_path)
    (tmp_path / "table.csv").touch()
    monkeypatch.setattr(text_prepare, "read_documents", None)
    with pytest.raises(SystemExit, match="table.csv: neither"):
        run_prepare(monkeypatch, tmp_path, tmp_path / "corpus.jsonl", tmp_path / "table.csv", "--name", "x", "--tokenizer", "train:300")


def test_lone_surrogates_and_crlf(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a\\ud800b"}\n')
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo")
    assert [text for text, _ in prepare.read_documents(tmp_path / "a.jsonl")] == ["a\ufffdb"]
    assert [text for text, _ in prepare.read_documents(tmp_path / "a.txt")] == ["one\ntwo"]


def test_the_command_runs_from_anywhere(tmp_path):
    done = subprocess.run([sys.executable, ROOT / "data/text/prepare.py", tmp_path / "none.txt", "--name", "x"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.strip().endswith("none.txt: no such file")


# --- docstrings


def test_docstrings_keep_prose():
    text = '''Return the sum of all the elements of an array along the given axis.

    Parameters
    ----------
    a : array_like, the values to be added up by the function in this example.

    >>> sum([1, 2]) and some more words to make this line long enough.

    A second paragraph goes
    over two lines and ends here.
    '''
    assert list(docstrings.paragraphs(text)) == ["Return the sum of all the elements of an array along the given axis.",
                                                 "A second paragraph goes over two lines and ends here."]


def test_docstring_splits_share_nothing(monkeypatch):
    monkeypatch.setattr(docstrings, "PACKAGES", ["numpy"])
    corpus = docstrings.read_corpus()
    paragraphs = {split: [p for side, document in corpus if side == split for p in document.split("\n")] for split in ("train", "val")}
    keys = {split: {"".join(docstrings.words_of(p)) for p in found} for split, found in paragraphs.items()}
    assert len(keys["train"]) == len(paragraphs["train"]) > 5000 and len(keys["val"]) == len(paragraphs["val"]) > 100
    assert not keys["train"] & keys["val"]
    known = set().union(*(docstrings.shingles(docstrings.words_of(p)) for p in paragraphs["train"]))
    for p in paragraphs["val"]:
        own = docstrings.shingles(docstrings.words_of(p))
        assert len(own & known) <= len(own) / 2
