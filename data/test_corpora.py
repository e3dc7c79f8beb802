"""What must stay true of corpora of many files, of mixtures, and of what is downloaded."""
import fcntl, hashlib, http.server, json, os, subprocess, sys, threading, time
from pathlib import Path

import numpy as np
import pytest
import torch

from data import fetch, prepare
from data.batches import MIX, Mixture, count_windows, make_batch
from data.fineweb_edu import prepare as fineweb
from data.test_data import ROOT, WORDS, byte_tokenizer, documents_of, run_prepare as run_text_prepare, token_file
from data.tokens import HEADER_BYTES, TokenFile, TokenWriter, open_split

SHARD_BYTES = lambda ids: np.array([20240520, 1, len(ids)] + [0] * 253, "<i4").tobytes() + np.asarray(ids, "<u2").tobytes()


def like_gpt2():
    """As many ids as GPT-2 has."""
    return byte_tokenizer(50256 - 256)


def shard_ids(lengths, seed=0):
    """<|eos|> before each document, as published."""
    rng = np.random.default_rng(seed)
    return np.concatenate([np.r_[50256, rng.integers(0, 50256, n)] for n in lengths])


def batch_of(tokens, rows, objective="mlm", **more):
    batch = make_batch(tokens, rows, 64, objective, **more)
    return batch.ids, batch.targets, batch.places


# --- many files


def test_the_order_of_the_data_is_what_it_always_was(tmp_path):
    """A checkpoint goes on with the same rows and masks under any later version: this value must not change."""
    out, h = TokenWriter(tmp_path / "t.bin", byte_tokenizer()), hashlib.sha256()
    out.write([(np.arange(n) * 7 + n) % 256 for n in np.arange(1, 200)])
    out.close()
    for objective in ("mlm", "clm"):
        for packing in ("documents", "random"):
            for split in ((1.0, 0.0, 0.0), (0.8, 0.1, 0.1)):
                batch = make_batch(TokenFile(out.path), np.arange(300, 640), 64, objective, 0.4, split, packing, 5)
                for value in vars(batch).values():
                    h.update(value.numpy().tobytes() if isinstance(value, torch.Tensor) else repr(value).encode())
    assert h.hexdigest()[:16] == "5af154dda36a4a9a"


def split_file(folder, tokens, cuts):
    """The ids of a token file again as numbered files, cut at these places."""
    tokenizer = byte_tokenizer()
    for i, part in enumerate(np.split(np.asarray(tokens.ids), cuts)):
        out = TokenWriter(folder / f"train_{i:06d}.bin", tokenizer)
        out.append(part.copy(), int((part == tokens.eos).sum()))
        out.close()


@pytest.mark.parametrize("cuts", [[5000], [1, 2, 63, 64, 65, 129, 130, 9000], [0, 0, 640], range(1, 12000, 90)])
def test_many_files_are_their_concatenation(tmp_path, cuts):
    """Cuts inside documents, files shorter than a row, empty ones: no batch changes."""
    whole = token_file(tmp_path / "all.bin", np.random.default_rng(1).integers(1, 90, 400))
    split_file(tmp_path, whole, cuts)
    corpus = open_split(tmp_path, "train", None)
    assert len(corpus.files) == len(cuts) + 1
    assert (corpus.n_tokens, corpus.n_documents) == (whole.n_tokens, whole.n_documents)
    assert np.array_equal(corpus.read(0, 10**9), whole.ids)
    assert len(corpus.read(whole.n_tokens, 5)) == 0
    rows = np.arange(2 * count_windows(whole, 64))
    for objective in ("mlm", "clm"):
        for mine, wanted in zip(batch_of(corpus, rows, objective), batch_of(whole, rows, objective)):
            assert mine is wanted is None or torch.equal(mine, wanted)


def test_a_file_that_shrinks_or_goes_while_it_is_read_is_one_line(tmp_path):
    tokens = token_file(tmp_path / "t.bin", [100] * 10)
    os.truncate(tmp_path / "t.bin", HEADER_BYTES + 2 * 500)
    assert len(tokens.read(400, 100)) == 100
    with pytest.raises(SystemExit, match="t.bin: was cut off while it was in use"):
        tokens.read(450, 100)
    (tmp_path / "t.bin").unlink()
    with pytest.raises(SystemExit, match="t.bin: No such file"):
        tokens.read(0, 100)


def test_files_of_two_tokenizers_are_no_corpus(tmp_path):
    token_file(tmp_path / "train_0.bin", [30])
    token_file(tmp_path / "train_1.bin", [30], byte_tokenizer(1))
    with pytest.raises(SystemExit, match="train_1.bin: tokens of bytes.1, but .*train_0.bin has those of bytes.0"):
        open_split(tmp_path, "train", None)
    (tmp_path / "train_1.bin").unlink()
    token_file(tmp_path / "train.bin", [30])
    with pytest.raises(SystemExit, match="holds both train.bin and train_0.bin"):
        open_split(tmp_path, "train", None)


def test_the_digest_of_a_corpus_tells_its_text(tmp_path):
    digests = set()
    for i, lengths in enumerate(([30, 40], [40, 30], [30, 41], [30])):
        folder = tmp_path / str(i)
        folder.mkdir()
        for n, length in enumerate(lengths):
            token_file(folder / f"train_{n}.bin", [length])
        digests.add(open_split(folder, "train", None).digest)
    assert len(digests) == 4


# --- published shards


def test_a_published_shard_is_read_in_place(tmp_path):
    ids = shard_ids([100] * 80)
    (tmp_path / "s.bin").write_bytes(SHARD_BYTES(ids))
    file = TokenFile(tmp_path / "s.bin", like_gpt2())
    assert np.array_equal(file.ids, ids) and file.n_documents == 80
    assert (file.eos, file.pad, file.mask, file.vocab_size) == (50256, 50257, 50258, 50304)
    batch = make_batch(file, [0, 1], 64, "clm")
    assert (batch.targets[batch.ids.view(-1) == 50256] == -100).all()  # nothing is predicted across documents


def test_damage_in_the_middle_of_a_shard_is_one_line(tmp_path):
    ids = shard_ids([1000] * 100)
    ids[50_000] = 60_000
    (tmp_path / "s.bin").write_bytes(SHARD_BYTES(ids))
    file = TokenFile(tmp_path / "s.bin", like_gpt2())
    assert len(file.read(0, 50_000)) == 50_000
    with pytest.raises(SystemExit, match="s.bin: damaged, token 50,000 is 60000"):
        file.read(49_000, 2000)


def test_bad_shards_are_refused(tmp_path):
    path, good = tmp_path / "s.bin", SHARD_BYTES(shard_ids([100] * 8))
    wrong_version = np.frombuffer(good, "<i4", 256).copy()
    wrong_version[1] = 2
    for content, message in ((good[:-2], "cut off"), (good[:500], "cut off"), (good + b"\0", "cut off"), (wrong_version.tobytes(), "version 2"),
                             (SHARD_BYTES([1, 50257]), "holds the id 50257")):
        path.write_bytes(content)
        with pytest.raises(SystemExit, match=message) as end:
            TokenFile(path, like_gpt2())
        assert "\n" not in str(end.value) and str(path) in str(end.value)
    path.write_bytes(good)
    for tokenizer in (None, byte_tokenizer()):
        with pytest.raises(SystemExit, match="needs GPT-2's bpe.json"):
            TokenFile(path, tokenizer)


START = """
import re, resource, sys, time
sys.path.insert(0, sys.argv[1])
import numpy as np
from pathlib import Path
from data.batches import make_batch
from data.test_data import byte_tokenizer
from data.tokens import open_split
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
tokenizer = byte_tokenizer(50000)

def peak():
    try:
        return 1024 * int(re.search(r"VmHWM:\\s*(\\d+)", open("/proc/self/status").read())[1])
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

before = peak()
begun = time.perf_counter()
tokens = open_split(Path(sys.argv[2]), "train", tokenizer)
opened = time.perf_counter() - begun
for step in range(20):
    batch = make_batch(tokens, step * 48 + np.arange(48), 2048, "mlm")
print(tokens.n_tokens, opened, time.perf_counter() - begun - opened, before / 1e6, peak() / 1e6)
"""


def test_a_hundred_billion_tokens_start_in_seconds(tmp_path):
    """1,000 shards of 100 million tokens, sparse, in a process that may open no more than 256 files."""
    header = SHARD_BYTES([])[:8] + np.array([100_000_000], "<i4").tobytes()
    for i in range(1000):
        with open(tmp_path / f"edu_fineweb_train_{i + 1:06d}.bin", "wb") as file:
            file.write(header)
            file.truncate(HEADER_BYTES + 2 * 100_000_000)
    done = subprocess.run([sys.executable, "-c", START, ROOT, tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    n_tokens, opened, drawn, before, peak = map(float, done.stdout.split())
    print(f"{n_tokens:,.0f} tokens: open in {opened:.2f} s, 20 batches of 48 x 2,048 in {drawn:.2f} s; "
          f"{before:.0f} MB before, {peak:.0f} MB at most")
    assert n_tokens == 100e9
    assert opened < 10 and peak < 1000 and peak - before < 300


# --- mixtures


@pytest.fixture
def mixture(tmp_path):
    sources = [token_file(tmp_path / f"{name}.bin", [50] * n, seed=n) for name, n in (("a", 300), ("b", 90), ("c", 40))]
    return Mixture(["a", "b", "c"], [0.7, 0.2, 0.1], sources)


def origin(tokens, rows):
    """Which source each row is from, found by its text."""
    windows = [{tuple(make_batch(source, [r], 64, "clm").ids[0].tolist()) for r in range(count_windows(source, 64))} for source in tokens.sources]
    ids = make_batch(tokens, rows, 64, "clm").ids.tolist()
    found = [[i for i, known in enumerate(windows) if tuple(row) in known] for row in ids]
    assert all(len(sources) == 1 for sources in found)
    return np.array(found)[:, 0]


def test_a_mixture_draws_by_weight(mixture):
    """The shares are exact in each 1,000 rows, the order is mixed, and what is logged is what was drawn."""
    which = origin(mixture, np.arange(2 * MIX))
    for part in which.reshape(2, MIX):
        assert np.bincount(part).tolist() == [700, 200, 100]
    assert abs(np.bincount(which[:200], minlength=3) / 200 - [0.7, 0.2, 0.1]).max() < 0.1
    for first, n in ((0, 137), (512, 900), (999, 2)):
        drawn = np.bincount(origin(mixture, first + np.arange(n)), minlength=3) / n
        assert np.allclose(list(mixture.shares(first, n, 0).values()), drawn)


def test_each_source_of_a_mixture_goes_through_its_own_epochs(mixture):
    for i, source in enumerate(mixture.sources):
        n = count_windows(source, 64)
        which, own = mixture.split(np.arange(4 * MIX), 0)
        mine = np.sort(own[which == i])
        assert np.array_equal(mine, np.arange(len(mine))) and len(mine) > n  # no row twice, none left out


def test_a_row_of_a_mixture_does_not_depend_on_its_batch(mixture):
    """Ranks, micro-batches and resumes only group rows, also across the thousandth."""
    rows = np.arange(990, 1010)
    together = make_batch(mixture, rows, 64, "clm", seed=3)
    for i, row in enumerate(rows):
        alone = make_batch(mixture, [row], 64, "clm", seed=3)
        assert torch.equal(alone.ids[0], together.ids[i]) and torch.equal(alone.targets, together.targets.view(20, 64)[i])
    assert not torch.equal(together.ids, make_batch(mixture, rows, 64, "clm", seed=4).ids)
    padded = make_batch(mixture, [-1, 5], 64, "mlm")
    assert (padded.ids[0] == mixture.pad).all() and padded.n_targets == make_batch(mixture, [5], 64, "mlm").n_targets


@pytest.mark.parametrize("dataset, message", [("a:0.7,b:0.2", "add up to 0.9"), ("a:0.7,b", "give a name"), ("a:0.7,a:0.3", "different names"), ("a:1.5,b:-0.5", "give a name"),
                                              ("a:0.33333,b:0.66667", "thousandths"), ("a:x,b:0.3", "give a name"), (",", "give a name"), ("a:nan,b:0.5", "give a name")])
def test_bad_weights(dataset, message):
    from train import sources_of
    with pytest.raises(SystemExit, match=message):
        sources_of(dataset)


def test_weights():
    from train import sources_of
    assert sources_of("docstrings") == (["docstrings"], [1.0])
    assert sources_of("x/a:0.7,b:0.3") == (["x/a", "b"], [0.7, 0.3])


def dataset_of(folder, seed, tokenizer=None, lengths=(40,) * 200):
    folder.mkdir()
    tokenizer = tokenizer or byte_tokenizer()
    for split in ("train", "val"):
        token_file(folder / f"{split}.bin", lengths, tokenizer, seed + (split == "val") * 1000)
    tokenizer.save(folder / "bpe.json")
    return folder


def train(*arguments):
    from train import main
    main([str(a) for a in arguments])


def lines_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


SMALL = ["--device", "cpu", "--dtype", "float32", "--block_size", 16, "--batch_size", 4, "--tokens_per_iter", 64, "--eval_interval", 4, "--eval_tokens", 256, "--log_interval", 1]


def test_training_on_a_mixture_resumes_exactly_and_logs_each_source(tmp_path):
    """3 + 3 iterations end with the weights of 6; shares and losses of each source are in the log."""
    a, b = dataset_of(tmp_path / "a", 1), dataset_of(tmp_path / "b", 2)
    common = [*SMALL, "--dataset", f"{a}:0.75,{b}:0.25", "--warmup_iters", 1, "--decay_iters", 0]
    train(*common, "--max_iters", 6, "--out_dir", tmp_path / "one")
    train(*common, "--max_iters", 3, "--out_dir", tmp_path / "two")
    train(*common, "--max_iters", 6, "--out_dir", tmp_path / "two", "--init_from", "resume")
    one, two = (torch.load(tmp_path / name / "last.pt", weights_only=True) for name in ("one", "two"))
    assert all(torch.equal(one["model"][name], two["model"][name]) for name in one["model"])
    last = [line for line in lines_of(tmp_path / "one") if "val_loss_mlm" in line][-1]
    each = [last[f"val_loss_mlm/{name}"] for name in (a, b)]
    assert each[0] != each[1] and np.isclose(last["val_loss_mlm"], 0.75 * each[0] + 0.25 * each[1])
    assert sum(last[f"share/{name}"] for name in (a, b)) == 1
    with pytest.raises(SystemExit, match="not the text, or not the weights"):
        train(*SMALL, "--dataset", f"{a}:0.5,{b}:0.5", "--max_iters", 7, "--out_dir", tmp_path / "one", "--init_from", "resume")
    other = dataset_of(tmp_path / "c", 3, byte_tokenizer(1))
    with pytest.raises(SystemExit, match="its tokenizer .bytes.1. is not that of"):
        train(*SMALL, "--dataset", f"{a}:0.5,{other}:0.5", "--max_iters", 2, "--out_dir", tmp_path / "three")


# --- downloads: a server that fails on purpose


class Server(http.server.BaseHTTPRequestHandler):
    """Serves `files`; `plan` is what goes wrong with each request in turn: a status, "short", "stall", "no length" or "all" (Range is ignored)."""
    files, plan, log = {}, [], []

    def do_GET(self):
        data, fault = self.files.get(self.path.rpartition("/")[2]), self.plan.pop(0) if self.plan else None
        first = int(self.headers.get("Range", "bytes=0-")[6:-1]) if fault != "all" else 0
        self.log.append((self.path.rpartition("/")[2], first))
        if data is None or isinstance(fault, int):
            return self.send_error(fault or 404)
        if first >= len(data):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(data)}")
            self.end_headers()
            return
        self.send_response(206 if first else 200)
        if first:
            self.send_header("Content-Range", f"bytes {first}-{len(data) - 1}/{len(data)}")
        if fault != "no length":
            self.send_header("Content-Length", str(len(data) - first))
        self.end_headers()
        rest = data[first:]
        self.wfile.write(rest[:len(rest) // 2] if fault in ("short", "stall") else rest)
        self.wfile.flush()
        if fault == "stall":
            time.sleep(1.5)

    def log_message(self, *_):
        pass


@pytest.fixture
def server(monkeypatch, tmp_path):
    Server.files, Server.plan, Server.log = {}, [], []
    serving = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=serving.serve_forever, args=(0.02,), daemon=True).start()
    monkeypatch.setattr(fineweb, "HOST", f"http://127.0.0.1:{serving.server_port}")
    monkeypatch.setattr(fetch, "TIMEOUT", 0.5)
    monkeypatch.setattr(fetch, "WAIT", 0.01)
    for i in range(4):
        Server.files[f"edu_fineweb_{'train' if i else 'val'}_{i:06d}.bin"] = SHARD_BYTES(shard_ids([200] * 500, seed=i))
    like_gpt2().save(tmp_path / "gpt2.json")
    yield Server
    serving.shutdown()
    serving.server_close()


def run_prepare(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["prepare.py", *map(str, arguments)])
    fineweb.main()


def shards(monkeypatch, tmp_path, n):
    run_prepare(monkeypatch, "shards", "--files", n, "--tokenizer", tmp_path / "gpt2.json", "--name", tmp_path / "d")


def test_shards_are_fetched_resumed_and_trained_on(server, monkeypatch, tmp_path):
    """Breaks, stalls and errors of the server are gone over, at the byte where they happened; more files leave validation as it is."""
    server.plan = ["short", "stall", 503, None, "short", "all"]
    shards(monkeypatch, tmp_path, 1)
    half = len(server.files["edu_fineweb_val_000000.bin"]) // 2
    assert [first for _, first in server.log[:2]] == [0, half] and server.log[2][1] == server.log[3][1] > half
    val = (tmp_path / "d/edu_fineweb_val_000000.bin").read_bytes()
    server.log.clear()
    shards(monkeypatch, tmp_path, 3)
    assert {name for name, _ in server.log} == {"edu_fineweb_train_000002.bin", "edu_fineweb_train_000003.bin"}  # what is there stays
    for name, data in server.files.items():
        assert (tmp_path / "d" / name).read_bytes() == data
    assert (tmp_path / "d/edu_fineweb_val_000000.bin").read_bytes() == val
    assert not list((tmp_path / "d").glob("*.part"))
    train(*SMALL, "--dataset", tmp_path / "d", "--max_iters", 2, "--out_dir", tmp_path / "out")
    assert lines_of(tmp_path / "out")[-1]["iter"] == 2


@pytest.mark.parametrize("plan, message", [(["short"] * 5, "ended after .* of 202,024 bytes, 5 times"), (["stall"] * 5, "no byte for 0.5 seconds"), ([404], r"HTTP error 404 \(Not Found\); check"),
                                           ([500] * 5, "HTTP error 500"), ([403], "HTTP error 403"), (["no length"] * 5, "does not say how long the file is, 5 times")])
def test_a_download_that_fails_is_one_line_and_leaves_nothing_to_use(server, monkeypatch, tmp_path, plan, message):
    server.plan = [None] + plan  # validation arrives
    with pytest.raises(SystemExit, match=message) as end:
        shards(monkeypatch, tmp_path, 2)
    assert "\n" not in str(end.value) and "edu_fineweb_train_000001.bin" in str(end.value)
    assert sorted(path.name for path in (tmp_path / "d").glob("*.bin")) == ["edu_fineweb_val_000000.bin"]
    server.plan.clear()
    shards(monkeypatch, tmp_path, 2)
    assert (tmp_path / "d/edu_fineweb_train_000001.bin").read_bytes() == server.files["edu_fineweb_train_000001.bin"]


def test_a_server_that_is_not_there(server, monkeypatch, tmp_path):
    monkeypatch.setattr(fineweb, "HOST", "http://127.0.0.1:9")
    with pytest.raises(SystemExit, match="Connection refused.*5 times"):
        shards(monkeypatch, tmp_path, 1)


def test_a_download_killed_before_its_name_was_given(server, monkeypatch, tmp_path):
    (tmp_path / "d").mkdir()
    for left, name in ((0, "val_000000"), (999, "train_000001")):  # complete; and longer than the file is
        name = f"edu_fineweb_{name}.bin"
        (tmp_path / "d" / f"{name}.part").write_bytes(server.files[name] + bytes(left))
    shards(monkeypatch, tmp_path, 1)
    for name in ("edu_fineweb_val_000000.bin", "edu_fineweb_train_000001.bin"):
        assert (tmp_path / "d" / name).read_bytes() == server.files[name]


def test_two_processes_do_not_fetch_one_file(server, monkeypatch, tmp_path):
    (tmp_path / "d").mkdir()
    with open(tmp_path / "d/edu_fineweb_val_000000.bin.part", "wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(SystemExit, match="another process is fetching it"):
            shards(monkeypatch, tmp_path, 1)


def test_a_server_that_sends_something_else(server, monkeypatch, tmp_path):
    server.files["edu_fineweb_train_000001.bin"] = b"<html>please log in</html>"
    with pytest.raises(SystemExit, match="not a token file.*deleted, start again"):
        shards(monkeypatch, tmp_path, 1)
    assert not list((tmp_path / "d").glob("*train*"))


def test_shards_that_are_there_are_used_in_place(server, monkeypatch, tmp_path):
    there = tmp_path / "there"
    there.mkdir()
    for name, data in server.files.items():
        (there / name).write_bytes(data)
    monkeypatch.setattr(fineweb, "HOST", "http://127.0.0.1:9")
    arguments = ["shards", "--from", there, "--tokenizer", tmp_path / "gpt2.json", "--name", tmp_path / "d"]
    run_prepare(monkeypatch, *arguments, "--files", 2)
    run_prepare(monkeypatch, *arguments)
    assert len(list((tmp_path / "d").glob("*train*.bin"))) == 3 and all(path.is_symlink() for path in (tmp_path / "d").glob("*.bin"))
    (there / "edu_fineweb_train_000002.bin").write_bytes(server.files["edu_fineweb_train_000002.bin"][:-2])
    with pytest.raises(SystemExit, match="train_000002.bin.*cut off"):
        run_prepare(monkeypatch, *arguments)
    with pytest.raises(SystemExit, match="the shards hold tokens of GPT-2"):
        byte_tokenizer().save(tmp_path / "other.json")
        run_prepare(monkeypatch, *arguments[:-3], tmp_path / "other.json", "--name", tmp_path / "e")
    with pytest.raises(SystemExit, match="no edu_fineweb_train"):
        run_prepare(monkeypatch, "shards", "--from", tmp_path / "d2", "--tokenizer", tmp_path / "gpt2.json", "--name", tmp_path / "e")


def test_the_disk_is_asked_before_a_download(server, monkeypatch, tmp_path):
    from collections import namedtuple
    monkeypatch.setattr(fetch.shutil, "disk_usage", lambda _: namedtuple("Usage", "total used free")(10**9, 10**9, 1000))
    with pytest.raises(SystemExit, match="0.0 GB free.*make room"):
        shards(monkeypatch, tmp_path, 1)


# --- parquet


def parquet_files(folder, sizes, seed=0):
    """Files as of sample/10BT, of this many documents each; some documents stand in several."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    folder.mkdir()
    rng = np.random.default_rng(seed)
    texts = [" ".join(rng.choice(WORDS, rng.integers(3, 40))) for _ in range(max(sizes))]
    for i, n in enumerate(sizes):
        mine = [text if j % 3 else f"{text} {i}" for j, text in enumerate(texts[:n])] + ["", " \n", None]
        parquet.write_table(arrow.table({"id": [str(j) for j in range(n + 3)], "text": mine}), folder / f"{i:03d}_00000.parquet", row_group_size=100)
    return folder


def test_parquet_to_tokens(monkeypatch, tmp_path):
    """Validation does not move when files come, shares no text with train, and only such texts are left out. The bytes do not depend on the way there."""
    there, tokenizer = parquet_files(tmp_path / "there", [900, 700, 500]), byte_tokenizer()
    tokenizer.save(tmp_path / "bpe.json")
    common = ["parquet", "--from", there, "--tokenizer", tmp_path / "bpe.json"]
    run_prepare(monkeypatch, *common, "--files", 1, "--name", tmp_path / "d")
    val = (tmp_path / "d/val.bin").read_bytes()
    run_prepare(monkeypatch, *common, "--name", tmp_path / "d", "--workers", 8)
    assert (tmp_path / "d/val.bin").read_bytes() == val
    monkeypatch.setattr(prepare, "BATCH", 500)
    run_prepare(monkeypatch, *common, "--name", tmp_path / "e", "--workers", 1)
    for name in ("val.bin", "train_000000.bin", "train_000001.bin", "train_000002.bin"):
        assert (tmp_path / "d" / name).read_bytes() == (tmp_path / "e" / name).read_bytes()
    held_out = documents_of(tmp_path / "d/val.bin", tokenizer)
    import pyarrow.parquet
    for i in range(3):
        texts = [text for text in pyarrow.parquet.read_table(there / f"{i:03d}_00000.parquet")["text"].to_pylist() if text and not text.isspace()]
        kept = documents_of(tmp_path / f"d/train_{i:06d}.bin", tokenizer)
        assert kept == [text for text in texts if text not in set(held_out)] and not set(kept) & set(held_out)
        assert i == 0 or 20 < len(texts) - len(kept) < 90
        if i == 0:
            assert held_out == [text for text in texts if prepare.fraction(text) < 0.1] and len(held_out) > 50
    train(*SMALL, "--dataset", tmp_path / "d", "--max_iters", 2, "--out_dir", tmp_path / "out")
    with pytest.raises(SystemExit, match="its tokenizer is bytes.0, not bytes.1"):
        byte_tokenizer(1).save(tmp_path / "other.json")
        run_prepare(monkeypatch, *common[:-1], tmp_path / "other.json", "--name", tmp_path / "d")


@pytest.mark.parametrize("damage, message", [("cut", "not a parquet file, or cut off"), ("flip", "damaged after row"), ("other", "no column `text` of strings"), ("text", "not a parquet file")])
def test_a_damaged_parquet_file_is_one_line_and_what_is_complete_is_kept(monkeypatch, tmp_path, damage, message):
    there = parquet_files(tmp_path / "there", [900, 700])
    import pyarrow, pyarrow.parquet
    bad = there / "001_00000.parquet"
    data = bytearray(bad.read_bytes())
    if damage == "cut":
        bad.write_bytes(data[:len(data) // 2])
    elif damage == "flip":
        data[len(data) // 4:len(data) // 2] = bytes(len(data) // 2 - len(data) // 4)
        bad.write_bytes(data)
    elif damage == "other":
        pyarrow.parquet.write_table(pyarrow.table({"text": [1, 2]}), bad)
    else:
        bad.write_text("hello")
    byte_tokenizer().save(tmp_path / "bpe.json")
    with pytest.raises(SystemExit, match=message) as end:
        run_prepare(monkeypatch, "parquet", "--from", there, "--tokenizer", tmp_path / "bpe.json", "--name", tmp_path / "d")
    assert "\n" not in str(end.value) and "001_00000.parquet" in str(end.value)
    assert sorted(path.name for path in (tmp_path / "d").glob("*.bin*")) == ["train_000000.bin", "val.bin"]


def test_a_parquet_file_is_streamed(tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    texts = [os.urandom(1000).hex() for _ in range(4000)]
    parquet.write_table(arrow.table({"text": texts}), tmp_path / "x.parquet", row_group_size=100)
    before, most = arrow.total_allocated_bytes(), 0
    for i, (text, _) in enumerate(fineweb.parquet_texts(tmp_path / "x.parquet")):
        assert text == texts[i]
        most = max(most, arrow.total_allocated_bytes() - before)
    assert i == 3999 and 0 < most < (tmp_path / "x.parquet").stat().st_size / 2


def test_parquet_without_pyarrow(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(SystemExit, match="pip install pyarrow"):
        fineweb.open_parquet(tmp_path / "x.parquet")


# --- nothing half-written


LIMITED = """
import resource, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv.pop(1))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
limit, kind = int(sys.argv.pop(1)), sys.argv.pop(1)
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
if kind == "text":
    from data.text import prepare
else:
    from data.fineweb_edu import prepare
prepare.main()
"""


def run_limited(limit, kind, *arguments, **environment):
    """The last line of stderr of a prepare.py for which a limit on the size of files stands for a full disk."""
    done = subprocess.run([sys.executable, "-c", LIMITED, ROOT, str(limit), kind, *arguments], capture_output=True, text=True, env={**os.environ, **environment})
    assert done.returncode == 1 and "Traceback" not in done.stderr
    return done.stderr.strip().splitlines()[-1]


def test_a_full_disk_is_one_line_and_nothing_half_written_is_kept(server, monkeypatch, tmp_path):
    with open(tmp_path / "a.jsonl", "w") as file:
        for i in range(3000):
            file.write(json.dumps({"text": " ".join(WORDS) + f" {i}"}) + "\n")
    byte_tokenizer().save(tmp_path / "bpe.json")
    end = run_limited(300_000, "text", tmp_path / "a.jsonl", "--name", tmp_path / "x", "--tokenizer", tmp_path / "bpe.json")
    assert end.endswith("File too large; nothing was kept, make room and start again") and not (tmp_path / "x").exists()
    server.files["edu_fineweb_train_000002.bin"] = SHARD_BYTES(shard_ids([200] * 4000))
    end = run_limited(1_500_000, "fineweb", "shards", "--files", "2", "--name", tmp_path / "y", "--tokenizer", tmp_path / "gpt2.json", HF_ENDPOINT=fineweb.HOST)
    assert "train_000002.bin.part: File too large; make room" in end
    assert sorted(path.name for path in (tmp_path / "y").glob("*.bin")) == ["edu_fineweb_train_000001.bin", "edu_fineweb_val_000000.bin"]


def test_a_full_disk_keeps_the_parquet_files_that_are_done(tmp_path):
    there = parquet_files(tmp_path / "there", [300, 4000])
    byte_tokenizer().save(tmp_path / "bpe.json")
    end = run_limited(300_000, "fineweb", "parquet", "--from", there, "--name", tmp_path / "z", "--tokenizer", tmp_path / "bpe.json")
    assert end.endswith("train_000001.bin: File too large; make room and start again, what is complete is kept")
    assert sorted(path.name for path in (tmp_path / "z").glob("*.bin*")) == ["train_000000.bin", "val.bin"]


def test_a_killed_writer_leaves_no_file_and_the_next_one_starts_over(tmp_path):
    tokenizer, path = byte_tokenizer(), tmp_path / "train.bin"
    killed = TokenWriter(path, tokenizer)
    killed.write([np.arange(200)] * 100)
    killed.file.flush()
    with pytest.raises(SystemExit, match="another process is writing it"):  # while it lives
        TokenWriter(path, tokenizer)
    os.close(killed.file.fileno())  # the system closes the files of a process it kills
    assert not path.exists() and (tmp_path / "train.bin.tmp").stat().st_size > 1000
    again = token_file(path, [5, 6])
    assert again.n_tokens == 13 and not (tmp_path / "train.bin.tmp").exists()


KILL = """
import sys, time
sys.path.insert(0, sys.argv.pop(1))
from pathlib import Path
from data import prepare
from data.text import prepare as text_prepare
from data.tokenizer import Tokenizer
encode, prepare.BATCH, text_prepare.DATA = Tokenizer.encode, 1000, Path(sys.argv.pop(1))
Tokenizer.encode = lambda self, text: time.sleep(0.005) or encode(self, text)
text_prepare.main()
"""


def test_a_preparation_that_is_killed_starts_over(tmp_path, monkeypatch):
    """SIGKILL in the middle: no train.bin is there, and the next run writes what an undisturbed one does."""
    with open(tmp_path / "a.jsonl", "w") as file:
        for i in range(3000):
            file.write(json.dumps({"text": " ".join(WORDS) + f" {i}"}) + "\n")
    byte_tokenizer().save(tmp_path / "bpe.json")
    arguments = [tmp_path / "a.jsonl", "--tokenizer", tmp_path / "bpe.json", "--name"]
    process = subprocess.Popen([sys.executable, "-c", KILL, ROOT, tmp_path, *arguments, "x"], stderr=subprocess.DEVNULL)
    part = tmp_path / "x/train.bin.tmp"
    while not part.exists() or part.stat().st_size < 20_000:
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert not (tmp_path / "x/train.bin").exists() and part.exists()
    with pytest.raises(SystemExit, match="no such token file"):
        open_split(tmp_path / "x", "train", None)
    for name in ("x", "y"):
        run_text_prepare(monkeypatch, tmp_path, *arguments, name)
    for name in ("train.bin", "val.bin", "bpe.json"):
        assert (tmp_path / "x" / name).read_bytes() == (tmp_path / "y" / name).read_bytes()
    assert len(list((tmp_path / "x").iterdir())) == 3
