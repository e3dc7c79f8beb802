"""What must stay true of the model and of pretraining. `python -m pytest` runs this file and the test files of the folders."""
import json, math, os, re, shutil, signal, subprocess, sys, time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import model as model_file
import train
from data.batches import make_batch
from data.test_data import byte_tokenizer
from data.tokenizer import Tokenizer
from data.tokens import TokenFile, TokenWriter
from model import IGNORE, SIZES, Config, HeadLoss, Transformer, count_parameters, flops_per_token, load_checkpoint, save_checkpoint, score, training_bytes

ROOT = Path(__file__).resolve().parent
torch.set_num_threads(1)  # the models here are too small for more
LENGTHS = [1, 7, 48, 63, 64, 65, 129]


@pytest.fixture(params=["explicit", "fused"])
def both_forms(request, monkeypatch):
    """Attention on a CPU in each of its two forms, whatever the length of a row."""
    monkeypatch.setattr(model_file, "explicit_form", lambda *_: request.param == "explicit")


def tiny(**changes):
    torch.manual_seed(0)
    config = Config(**{**dict(vocab_size=100, block_size=512, n_layer=2, n_head=4, n_kv_head=2, n_embd=32, intermediate_size=48), **changes})
    network = Transformer(config)
    for p in network.parameters():  # larger than N(0, 0.02), so that every token matters visibly
        torch.nn.init.normal_(p, std=0.2) if p.dim() > 1 else torch.nn.init.normal_(p, 1, 0.2)
    return network


def bounds(*lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int()


# --- the network


def test_parameter_counts_are_the_papers():
    """arXiv 2507.00994 and EuroBERT: blocks, with the embedding, with the head, in millions."""
    for size, wanted in {"210m": (113, 212, 310), "610m": (460, 608, 756), "1b": (759, 981, 1202)}.items():
        config = Config(**SIZES[size])
        with torch.device("meta"):
            network = Transformer(config)
        assert config.vocab_size == 128256 and config.block_size == 2048
        blocks, embedding, head = count_parameters(config)
        assert blocks + embedding + head == sum(p.numel() for p in network.parameters())
        assert tuple(round(n / 1e6) for n in (blocks, blocks + embedding, blocks + embedding + head)) == wanted
    assert Config(**SIZES["1b"]).head_dim == 96
    assert count_parameters(Config(**SIZES["mini"]))[2] == 0


def test_untrained_weights_and_loss():
    torch.manual_seed(0)
    network = Transformer(Config(vocab_size=4096, **SIZES["mini"]))
    for name, p in network.named_parameters():
        assert abs(p.std() - 0.02) < 0.001 if p.dim() > 1 else (p == 1).all(), name
    ids = torch.randint(0, 4096, (4, 128))
    loss = network(ids, targets=torch.randint(0, 4096, (512,))) / 512
    assert abs(loss - math.log(4096)) < 0.1


@pytest.mark.parametrize("T", LENGTHS)
@pytest.mark.parametrize("packed", [False, True])
def test_causality_and_bidirectionality(T, packed, both_forms):
    network, ids = tiny(), torch.randint(0, 100, (2, T))
    documents = dict(cu_seqlens=bounds(T, T), max_seqlen=T) if packed else {}
    for causal in (True, False):
        before = network(ids, **documents, causal=causal)
        for j in {T - 1, T // 2, 1} & set(range(1, T)):
            changed = ids.clone()
            changed[0, j] = (changed[0, j] + 1) % 100
            after = network(changed, **documents, causal=causal)
            assert torch.equal(after[1], before[1])
            differs = (after[0] != before[0]).any(-1)
            assert differs[j:].all()
            assert not differs[:j].any() if causal else differs[:j].all()


def test_one_set_of_weights_serves_both_masks():
    """Position 0 depends on the last token as soon as the mask is bidirectional, and never again when it is causal: no state is kept."""
    network, ids = tiny(), torch.randint(0, 100, (1, 20))
    causal, both = network(ids, causal=True), network(ids)
    assert not torch.equal(causal[0, 0], both[0, 0])
    assert torch.equal(causal, network(ids, causal=True)) and torch.equal(both, network(ids))
    assert torch.allclose(network(ids[:, :1], causal=True), network(ids[:, :1]), atol=1e-6)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(5, 1, 1, 1, 20, 2, 34), (64,), (63, 1), (1,) * 64, (200, 1, 99)])
def test_packed_documents_are_as_if_alone(lengths, causal, both_forms):
    """Outputs and gradients; one-token documents in a row among them."""
    network, T = tiny(), sum(lengths)
    ids, weight = torch.randint(0, 100, (2, T)), torch.randn(2 * T, 32)
    together = network(ids, bounds(*lengths, *lengths), T, causal).flatten(0, 1)
    (together * weight).sum().backward()
    gradients = [p.grad.clone() for p in network.parameters() if p.grad is not None]
    network.zero_grad()
    alone = torch.cat([network(part[None], causal=causal)[0] for row in ids for part in row.split(lengths)])
    (alone * weight).sum().backward()
    assert torch.allclose(together, alone, atol=1e-5)
    for one, other in zip(gradients, [p.grad for p in network.parameters() if p.grad is not None]):
        assert torch.allclose(one, other, atol=1e-4 * other.abs().max().item())


def test_documents_are_isolated_to_the_bit(both_forms, T=64):
    network, ids = tiny(), torch.randint(0, 100, (1, T))
    documents = dict(cu_seqlens=bounds(20, 1, T - 21), max_seqlen=T)
    before = network(ids, **documents)
    changed = ids.clone()
    changed[0, 20] += 1
    changed[0, 21:] = 3
    assert torch.equal(network(changed % 100, **documents)[0, :20], before[0, :20])


def test_cu_seqlens_may_repeat_its_end():
    """Documents of no length, which keep the shape static, change nothing."""
    network, ids = tiny(), torch.randint(0, 100, (2, 16))
    plain = network(ids, bounds(10, 6, 16), 16)
    assert torch.equal(plain, network(ids, bounds(10, 6, 16, 0, 0, 0), 16))
    assert torch.equal(plain, network(ids, bounds(10, 0, 6, 16, 0), 16))


def norm64(x, weight):
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_the_network_equals_its_definition(autocast, causal, both_forms, T=48):
    """A whole block against float64, softmax(QK'/sqrt(D))V for grouped heads and rotary positions by complex numbers: to rounding in fp32, and in
    bf16 to what bf16 operands cost."""
    network = tiny(n_head=8, n_kv_head=2, n_embd=64, n_layer=1)
    ids, targets = torch.randint(0, 100, (1, T)), torch.randint(0, 100, (T,))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = network(ids, causal=causal)[0]
        loss = network(ids, causal=causal, targets=targets)
    network.requires_grad_(False)
    block, w64 = network.blocks[0], lambda layer: layer.weight.double().t()
    stream = network.embed.weight.double()[ids[0]]
    x = norm64(stream, block.norm1.weight)
    q, k, v = (x @ w64(block.attention.qkv)).view(T, -1, 8).split((8, 2, 2), 1)
    angle = torch.outer(torch.arange(T).double(), 10000 ** (-torch.arange(0, 8, 2).double() / 8))
    turn = torch.polar(torch.ones(T, 4).double(), angle)[:, None]
    q, k = (torch.view_as_real(torch.complex(z[..., :4], z[..., 4:]) * turn).movedim(-1, -2).flatten(-2) for z in (q, k))
    k, v = (z.repeat_interleave(4, 1) for z in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(8)
    if causal:
        scores.masked_fill_(torch.ones(T, T).triu(1).bool(), -math.inf)
    stream = stream + torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).reshape(T, 64) @ w64(block.attention.out)
    gate, up = (norm64(stream, block.norm2.weight) @ w64(block.mlp.gate_up)).chunk(2, -1)
    stream = stream + (F.silu(gate) * up) @ w64(block.mlp.down)
    wanted = norm64(stream, network.norm.weight)
    error = (found.double() - wanted).norm() / wanted.norm()
    assert error < (0.02 if autocast else 1e-6)
    assert found.dtype == loss.dtype == torch.float32  # the residual stream stays fp32
    assert loss.double() == pytest.approx(F.cross_entropy(wanted @ w64(network.head), targets, reduction="sum").item(), rel=0.003 if autocast else 1e-6)


def test_norms_rotations_and_the_loss_are_fp32_inside():
    """Of bf16 operands they give what fp32 gives, rounded once."""
    torch.manual_seed(0)
    x, norm = (3 + torch.randn(5, 64)).bfloat16(), tiny(n_embd=64).norm
    wanted = x.float() / (x.float().square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight
    assert torch.equal(norm(x), wanted.bfloat16())
    x, angle = torch.randn(1, 9, 2, 16).bfloat16(), torch.randn(1, 9, 1, 8)
    a, b = x.float().chunk(2, -1)
    wanted = torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)
    assert torch.equal(model_file.rotate(x, angle.cos(), angle.sin()), wanted.bfloat16())
    hidden, weight, targets = torch.randn(40, 32).bfloat16(), torch.randn(500, 32).bfloat16(), torch.randint(0, 500, (40,))
    wanted = F.cross_entropy((hidden @ weight.t()).double(), targets, reduction="sum")
    for loss in (HeadLoss.apply(hidden, weight, targets), score(hidden, weight, targets)[0]):
        assert loss.double() == pytest.approx(wanted.item(), rel=1e-6)


def test_rows_longer_than_the_model_are_refused():
    with pytest.raises(ValueError, match="rows of 600 tokens"):
        tiny()(torch.zeros(1, 600, dtype=torch.long))
    for wrong in (dict(n_head=5), dict(n_kv_head=3), dict(n_embd=36, n_head=12, n_kv_head=12)):
        with pytest.raises(ValueError, match="does not divide|odd"):
            tiny(**wrong)


def test_dropout_only_in_training():
    network, ids = tiny(dropout=0.3), torch.randint(0, 100, (1, 9))
    assert not torch.equal(network(ids), network(ids))
    network.eval()
    assert torch.equal(network(ids), network(ids))


def test_compiled_model_equals_eager():
    if not train.shutil.which("c++"):
        pytest.skip("torch.compile on a CPU needs a C++ compiler")
    network, ids = tiny(n_layer=1), torch.randint(0, 100, (2, 16))
    compiled = torch.compile(network, fullgraph=True)
    places, targets = torch.arange(0, 32, 3), torch.randint(0, 100, (11,))
    for causal in (False, True):
        losses = []
        for f in (network, compiled):
            network.zero_grad()
            loss = f(ids, bounds(10, 6, 16, 0), 16, causal, places, targets)
            loss.backward()
            losses.append((loss.detach(), network.embed.weight.grad.clone()))
        assert torch.allclose(losses[0][0], losses[1][0]) and torch.allclose(losses[0][1], losses[1][1], atol=1e-4)


# --- the loss


@pytest.mark.parametrize("at_once", [10**9, 1000, 1])
def test_head_loss_equals_cross_entropy(monkeypatch, at_once):
    monkeypatch.setattr(model_file, "LOGITS_AT_ONCE", at_once)
    torch.manual_seed(0)
    hidden, weight = torch.randn(37, 16, requires_grad=True), torch.randn(90, 16, requires_grad=True)
    targets = torch.randint(0, 90, (37,))
    targets[[0, 5, 36]] = IGNORE
    results = []
    for f in (HeadLoss.apply, lambda h, w, t: F.cross_entropy(h.double() @ w.double().t(), t, ignore_index=IGNORE, reduction="sum")):
        hidden.grad = weight.grad = None
        loss = f(hidden, weight, targets)
        (loss / 34).backward()
        results.append((loss.detach(), hidden.grad, weight.grad))
    for mine, other in zip(*results):
        assert torch.allclose(mine.double(), other.double(), rtol=1e-5, atol=1e-6)
    value, right = score(hidden, weight, targets)
    assert torch.allclose(value, loss.detach().float()) and right == ((hidden @ weight.t()).argmax(-1) == targets).sum()
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient, = torch.autograd.grad(HeadLoss.apply(hidden, weight, targets) ** 2, hidden, create_graph=True)
        gradient.sum().backward()


def test_no_target_is_harmless():
    network = tiny()
    network(torch.zeros(1, 8, dtype=torch.long), targets=torch.full((8,), IGNORE)).backward()
    assert all((p.grad == 0).all() for p in network.parameters())
    network(torch.zeros(1, 8, dtype=torch.long), places=torch.zeros(0, dtype=torch.long), targets=torch.zeros(0, dtype=torch.long)).backward()


def test_logits_exist_at_targets_only_and_a_block_at_a_time():
    """The largest tensor of a training step stays below one matrix of logits for all targets."""
    network, ids = tiny(vocab_size=50_000), torch.randint(0, 100, (4, 128))
    places = torch.arange(0, 512, 2)

    class Largest(torch.overrides.TorchFunctionMode):
        seen = 0

        def __torch_function__(self, function, types, arguments=(), named=None):
            result = function(*arguments, **(named or {}))
            if isinstance(result, torch.Tensor) and result.dim() == 2 and 50_000 in result.shape and 32 not in result.shape:
                Largest.seen = max(Largest.seen, result.numel())
            return result

    old = model_file.LOGITS_AT_ONCE
    model_file.LOGITS_AT_ONCE = 50_000 * 64
    try:
        with Largest():
            network(ids, places=places, targets=ids.view(-1)[places]).backward()
    finally:
        model_file.LOGITS_AT_ONCE = old
    assert 0 < Largest.seen <= 50_000 * 64


def test_size_work_and_memory_are_stated():
    config = Config(vocab_size=4096, block_size=128, **SIZES["mini"])
    network = Transformer(config)
    ids = torch.randint(0, 4096, (8, 128))
    from torch.utils.flop_counter import FlopCounterMode
    with FlopCounterMode(display=False) as counter:
        network(ids, bounds(*[128] * 8), 128, places=torch.arange(0, 1024, 4), targets=torch.zeros(256, dtype=torch.long)).backward()
    assert abs(counter.get_total_flops() / 1024 / flops_per_token(config, 128, 0.25) - 1) < 0.01
    kept = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.setdefault(x.untyped_storage().data_ptr(), x.untyped_storage().nbytes()) and x, lambda x: x):
        with torch.autocast("cpu", torch.bfloat16):
            loss = network(ids, bounds(*[128] * 8), 128, places=torch.arange(0, 1024, 4), targets=torch.zeros(256, dtype=torch.long))
    own = {p.data_ptr() for p in network.parameters()}
    measured = sum(size for place, size in kept.items() if place not in own)
    assert 0.7 < (training_bytes(config, 1024, 128, 0.25) - 16 * sum(count_parameters(config))) / measured < 1.4


@pytest.mark.parametrize("objective, wanted", [("clm", 1), ("mlm", 0)])
def test_the_objective_learns_what_it_says(objective, wanted):
    """On a counting sequence CLM learns the next number (not the one after it, and not a copy), MLM the hidden number itself."""
    network = tiny(vocab_size=64, n_layer=2, block_size=32)
    optimizer = torch.optim.AdamW(network.parameters(), 3e-3)
    torch.manual_seed(1)

    def batch():
        ids = (torch.randint(0, 60, (32, 1)) + torch.arange(33)) % 60
        if objective == "clm":
            return ids[:, :-1], None, ids[:, 1:].reshape(-1)
        places = torch.randperm(32 * 32)[:200]
        hidden = ids[:, :-1].reshape(-1).clone()
        targets = hidden[places].clone()
        hidden[places] = 62
        return hidden.view(32, 32), places, targets

    for _ in range(150):
        ids, places, targets = batch()
        optimizer.zero_grad()
        (network(ids, causal=objective == "clm", places=places, targets=targets) / len(targets)).backward()
        optimizer.step()
    ids = (7 + torch.arange(32))[None] % 60
    if objective == "mlm":
        ids[0, 20] = 62
    guess = (network(ids, causal=objective == "clm")[0, 20] @ network.head_weight.t()).argmax()
    assert guess == 7 + 20 + wanted


# --- schedule and settings


@pytest.mark.parametrize("warmup", [0, 1, 5])
@pytest.mark.parametrize("decay", [0, 1, 5])
def test_wsd_schedule(warmup, decay):
    s = train.Settings(max_iters=12, warmup_iters=warmup, decay_iters=decay, learning_rate=1.0)
    rates = [train.learning_rate_at(i, s) for i in range(12)]
    wanted = [min((i + 1) / warmup if warmup else 1, (12 - i) / decay if decay else 1, 1) for i in range(12)]
    assert rates == pytest.approx(wanted) and all(0 < rate <= 1 for rate in rates)
    literal = {(0, 0): [1] * 12, (5, 0): [0.2, 0.4, 0.6, 0.8] + [1] * 8, (0, 5): [1] * 8 + [0.8, 0.6, 0.4, 0.2],
               (5, 5): [0.2, 0.4, 0.6, 0.8, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2]}
    assert rates == pytest.approx(literal.get((warmup, decay), rates))


def test_phases():
    assert train.phases_of("mlm", 10) == [("mlm", 0, 10)]
    assert train.phases_of("clm:0.25,mlm:0.75", 40) == [("clm", 0, 10), ("mlm", 10, 40)]
    assert train.phases_of("clm:0.3,mlm:0.4,clm:0.3", 10) == [("clm", 0, 3), ("mlm", 3, 7), ("clm", 7, 10)]
    assert [train.objective_at(i, train.phases_of("clm:0.5,mlm:0.5", 4)) for i in range(4)] == ["clm", "clm", "mlm", "mlm"]


def test_auto_switches_where_mlm_learns_faster():
    """20 probes, each the last fifth of its part; MLM alone after the first one at which MLM's loss fell by more than CLM's, at the latest with the decay."""
    assert train.phases_of("auto", 200)[:4] == [("clm", 0, 8), ("mlm", 8, 10), ("clm", 10, 18), ("mlm", 18, 20)]
    names = [train.objective_at(i, train.phases_of("auto", 200, 40)) for i in range(200)]
    assert names == (["clm"] * 8 + ["mlm"] * 2) * 4 + ["mlm"] * 160
    s = train.Settings(max_iters=200, decay_iters=50)
    falls = [(10, 5.0, 6.0), (20, 4.0, 5.5), (30, 3.9, 5.3), (40, 3.8, 5.2)]  # CLM's by 1.0, 0.1; MLM's by 0.5, 0.2
    assert [train.switch_of(falls[:n], s) for n in range(5)] == [None, None, None, 30, 30]
    never = [(at, 10 - 0.2 * at, 10 - 0.1 * at) for at in range(10, 151, 10)]
    assert train.switch_of(never[:-1], s) is None and train.switch_of(never, s) == 150  # the next probe would be in the decay
    with pytest.raises(SystemExit, match="100 or more"):
        train.phases_of("auto", 99)


def test_command_line_spellings():
    assert train.parse(train.Settings, ["--learning_rate", "1e-4", "--max_iters=1e3", "--compile", "No", "--tie_embeddings=TRUE", "--init_optimizer", "--batch_size", "8"]) == {
        "learning_rate": 1e-4, "max_iters": 1000, "compile": False, "tie_embeddings": True, "init_optimizer": True, "batch_size": 8}


@pytest.mark.parametrize("flags, message", [
    ("--mask_ration 0.4", "did you mean --mask_ratio"), ("--epochs 3", "no such setting; --help"), ("--lerning_rate=1", "did you mean --learning_rate"), ("--max_iters ten", "give a whole number"),
    ("--max_iters 1.5", "give a whole number"), ("--compile maybe", "give true or false"), ("--mask_ratio 0", "mask_ratio 0"), ("--mask_ratio 1.5", "mask_ratio 1.5"),
    ("--mask_ratio nan", "mask_ratio nan"), ("--mask_split 1,1,1", "add up to 1"), ("--objective mlm:0.5", "add up to 0.5"), ("--objective bert", "--objective bert"),
    ("--objective clm:0.01,mlm:0.99 --max_iters 10", "gets no step"), ("--block_size 4096", "at most 2,048"), ("--warmup_iters 8 --decay_iters 8 --max_iters 10", "more than --max_iters"),
    ("--tokens_per_iter 1000 --batch_size 3 --block_size 128", "the nearest are 768 and 1152"), ("--size huge", "give micro, mini, 210m"), ("--learning_rate -1", "learning_rate -1"),
    ("--learning_rate inf", "learning_rate inf"), ("--device tpu", "--device tpu"), ("--dtype fp8", "--dtype fp8"), ("--packing none", "--packing none"), ("--attention triton", "--attention triton"),
    ("--dataset nowhere", "no such token file"), ("--init_from nowhere.pt", "no such checkpoint"), ("--init_from resume --out_dir nowhere", "no such checkpoint"), ("--max_iters 0", "at least 1"),
    ("--max_iters", "--max_iters"), ("mlm", "no such setting"), ("--dropout 1", "dropout 1"), ("--mask_ratio 0.005 --block_size 64", "chooses no token"), ("--seed 1e30", "seed"), ("--init_optimizer yes", "goes with --init_from PATH"), ("--batch_size 0 --tokens_per_iter 128", "batch_size 0")])
def test_bad_settings_are_one_line(flags, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        train.main((flags if "--device" in flags else flags + " --device=cpu" * (flags != "--max_iters")).split())
    assert message in str(end.value) and "\n" not in str(end.value)
    assert not list(tmp_path.iterdir())  # before any work


# --- runs

TEXT = "the quick brown fox jumps over the lazy dog and runs away from here".split()


def write_corpus(folder, texts):
    folder.mkdir()
    for split, documents in texts.items():
        out = TokenWriter(folder / f"{split}.bin", byte_tokenizer())
        out.write([byte_tokenizer().encode(text) for text in documents])
        out.close()
    byte_tokenizer().save(folder / "bpe.json")
    return folder


@pytest.fixture(scope="session")
def dataset(tmp_path_factory):
    """A small corpus in bytes, of long and of one-token documents."""
    rng = np.random.default_rng(0)
    documents = lambda n: [" ".join(rng.choice(TEXT, rng.integers(2, 40))) if i % 3 else "a" for i in range(n)]
    return write_corpus(tmp_path_factory.mktemp("data") / "set", {"train": documents(600), "val": documents(40)})


def flags_for(dataset, out_dir, **changes):
    settings = dict(dataset=dataset, out_dir=out_dir, device="cpu", block_size=64, tokens_per_iter=512, max_iters=8, eval_interval=4, eval_tokens=2048, log_interval=1, dtype="float32") | changes
    return [f"--{name}={value}" for name, value in settings.items() if value is not None]


def run(dataset, out_dir, processes=1, check=True, **changes):
    """train.py on its own, or under torchrun; returns the finished process."""
    launcher = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={processes}", "--standalone"] if processes > 1 else [sys.executable]
    done = subprocess.run(launcher + [str(ROOT / "train.py"), *flags_for(dataset, out_dir, **changes)], capture_output=True, text=True, env=environment())
    assert done.returncode == 0 or not check, done.stdout + done.stderr
    return done


def environment():
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def here(dataset, out_dir, **changes):
    """The same in this process, which is quicker."""
    old = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        train.main(flags_for(dataset, out_dir, **changes))
    finally:
        for number, handler in zip((signal.SIGINT, signal.SIGTERM), old):
            signal.signal(number, handler)


def metrics(out_dir, key="loss"):
    return {line["iter"]: line[key] for line in map(json.loads, (Path(out_dir) / "metrics.jsonl").read_text().splitlines()) if key in line}


def weights(path):
    return load_checkpoint(path)["model"]


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("objective", ["mlm", "clm"])
def test_loss_is_the_mean_over_all_targets(tmp_path, objective):
    """1 x 8 rows, 4 x 2, and 2 processes x 2 x 2: equal losses, gradient norms and weights, though one row holds 1 target and others 9."""
    dataset = write_corpus(tmp_path / "set", {"train": ["the quick brown fox jumps over the lazy dog, and runs far away."] * 7 + ["brown f"], "val": ["a lazy dog"] * 20})
    common = dict(objective=objective, max_iters=3, eval_interval=3, mask_ratio=0.15, warmup_iters=0, decay_iters=0, learning_rate=1e-3)
    here(dataset, tmp_path / "1x8", batch_size=8, **common)
    here(dataset, tmp_path / "4x2", batch_size=2, **common)
    run(dataset, tmp_path / "2x2x2", processes=2, batch_size=2, **common)
    counts = [make_batch(TokenFile(dataset / "train.bin"), [row], 64, objective, 0.15, seed=1337).n_targets for row in range(24)]
    assert len(counts) == 24 and min(counts) * 6 <= max(counts) and min(counts) <= 7
    for other in ("4x2", "2x2x2"):
        for key in ("loss", "grad_norm", "tokens", "lr"):
            assert metrics(tmp_path / "1x8", key) == pytest.approx(metrics(tmp_path / other, key), rel=1e-4)
        one, two = weights(tmp_path / "1x8/last.pt"), weights(tmp_path / other / "last.pt")
        assert max((one[name] - two[name]).abs().max() for name in one) < 2e-4
        for key in ("val_loss_" + objective,):
            assert metrics(tmp_path / "1x8", key) == pytest.approx(metrics(tmp_path / other, key), rel=1e-4)


def test_validation_counts_each_target_once(dataset, tmp_path):
    """Whatever the batch size; more evaluations change nothing of the training."""
    here(dataset, tmp_path / "a", eval_tokens=0, batch_size=8, eval_interval=8)
    here(dataset, tmp_path / "b", eval_tokens=0, batch_size=8, eval_interval=1)
    assert metrics(tmp_path / "a") == metrics(tmp_path / "b") and same(weights(tmp_path / "a/last.pt"), weights(tmp_path / "b/last.pt"))
    assert metrics(tmp_path / "a", "val_loss_mlm")[8] == metrics(tmp_path / "b", "val_loss_mlm")[8]
    state, tokens = load_checkpoint(tmp_path / "a/last.pt"), TokenFile(dataset / "val.bin")
    network = model_file.from_checkpoint(state).requires_grad_(False)
    total = count = right = 0
    for row in range(-(-tokens.n_tokens // 64)):
        batch = make_batch(tokens, [row], 64, "mlm", 0.4)
        total += float(network(batch.ids, batch.cu_seqlens, 64, False, batch.places, batch.targets))
        hidden = network(batch.ids, batch.cu_seqlens, 64).flatten(0, 1)[batch.places[:batch.n_targets]]
        right += int(((hidden @ network.head_weight.t()).argmax(-1) == batch.targets[:batch.n_targets]).sum())
        count += batch.n_targets
    assert metrics(tmp_path / "a", "val_loss_mlm")[8] == pytest.approx(total / count, rel=1e-5)
    assert metrics(tmp_path / "a", "val_accuracy_mlm")[8] == pytest.approx(right / count, abs=2 / count) and right


@pytest.mark.parametrize("processes", [1, 2])
def test_resume_is_exact(dataset, tmp_path, processes):
    """From warm-up, plateau, decay, and on both sides of the change of objective; with dropout: equal to the bit, log included."""
    common = dict(processes=processes, objective="clm:0.5,mlm:0.5", max_iters=12, warmup_iters=3, decay_iters=3, eval_interval=2, save_interval=1, dropout=0.1)
    run(dataset, tmp_path / "whole", **common)
    for at in (1, 5, 6, 7, 10) if processes == 1 else (2, 6, 11):
        part = tmp_path / f"from{at}"
        part.mkdir()
        shutil.copy(tmp_path / f"whole/step_{at}.pt", part / "last.pt")
        shutil.copy(tmp_path / "whole/metrics.jsonl", part)
        done = run(dataset, part, **common, init_from="resume")
        assert "are dropped, since that part runs again" in done.stdout
        assert same(weights(part / "last.pt"), weights(tmp_path / "whole/last.pt"))
        assert same(weights(part / "best.pt"), weights(tmp_path / "whole/best.pt"))
        for key in ("loss", "lr", "grad_norm", "tokens", "val_loss_mlm", "val_loss_clm"):
            assert metrics(part, key) == metrics(tmp_path / "whole", key)


def test_auto_resumes_exactly_and_does_not_see_other_evaluations(dataset, tmp_path, monkeypatch):
    """From before the switch, from the checkpoint at it (written before the probe is judged) and from after it."""
    monkeypatch.setattr(train, "PROBES", 4)
    common = dict(objective="auto", max_iters=24, warmup_iters=2, decay_iters=6, save_interval=1, tokens_per_iter=128)
    here(dataset, tmp_path / "whole", eval_interval=24, **common)
    (at, _), = metrics(tmp_path / "whole", "switch").items()
    assert at in (6, 12, 18) and metrics(tmp_path / "whole", "val_loss_clm").keys() == {0, 24} | set(range(6, at + 1, 6))
    here(dataset, tmp_path / "often", eval_interval=5, **common)
    assert metrics(tmp_path / "often") == metrics(tmp_path / "whole")
    for begin in (at - 2, at, at + 2):
        part = tmp_path / f"from{begin}"
        part.mkdir()
        shutil.copy(tmp_path / f"whole/step_{begin}.pt", part / "last.pt")
        shutil.copy(tmp_path / "whole/metrics.jsonl", part)
        here(dataset, part, eval_interval=24, **common, init_from="resume")
        assert same(weights(part / "last.pt"), weights(tmp_path / "whole/last.pt"))
        for key in ("loss", "val_loss_mlm", "switch"):
            assert metrics(part, key) == metrics(tmp_path / "whole", key)


def test_resume_under_another_number_of_processes(dataset, tmp_path):
    """Same iteration, rates, data and batch: the losses go on as they would have."""
    common = dict(objective="clm:0.5,mlm:0.5", max_iters=8, warmup_iters=2, decay_iters=2, eval_interval=4, save_interval=3)
    here(dataset, tmp_path / "one", **common)
    (tmp_path / "two").mkdir()
    shutil.copy(tmp_path / "one/step_3.pt", tmp_path / "two/last.pt")
    run(dataset, tmp_path / "two", processes=2, init_from="resume", **common)
    assert list(metrics(tmp_path / "two")) == [4, 5, 6, 7, 8]
    for key in ("loss", "lr", "grad_norm", "tokens"):
        whole = metrics(tmp_path / "one", key)
        assert metrics(tmp_path / "two", key) == pytest.approx({i: whole[i] for i in (4, 5, 6, 7, 8)}, rel=1e-4)


@pytest.mark.parametrize("objective", ["mlm", "clm"])
def test_steps_are_adamw_with_clipping_and_weight_decay(dataset, tmp_path, objective):
    """Three steps of the real loop, under the mask of its objective, against the formulas (Loshchilov and Hutter, arXiv 1711.05101)."""
    here(dataset, tmp_path / "x", objective=objective, max_iters=3, save_interval=1, warmup_iters=2, decay_iters=0, learning_rate=0.01, grad_clip=0.5)
    tokens = TokenFile(dataset / "train.bin")
    network = model_file.from_checkpoint(load_checkpoint(tmp_path / "x/step_0.pt"))
    moments = {name: [torch.zeros_like(p), torch.zeros_like(p)] for name, p in network.named_parameters()}
    for step in (1, 2, 3):
        batch = make_batch(tokens, np.arange(8) + 8 * (step - 1), 64, objective, 0.4, seed=1337)
        network.zero_grad()
        (network(batch.ids, batch.cu_seqlens, 64, objective == "clm", batch.places, batch.targets) / batch.n_targets).backward()
        norm = torch.stack([p.grad.norm() for p in network.parameters()]).norm()
        assert metrics(tmp_path / "x", "grad_norm")[step] == pytest.approx(norm.item(), rel=1e-4) and norm > 0.5
        rate = 0.01 * min(1, step / 2)
        for name, p in network.named_parameters():
            gradient, (m, v) = p.grad * (0.5 / norm), moments[name]
            m.mul_(0.9).add_(0.1 * gradient)
            v.mul_(0.95).add_(0.05 * gradient ** 2)
            p.data.mul_(1 - rate * 0.1)
            p.data.sub_(rate * (m / (1 - 0.9**step)) / ((v / (1 - 0.95**step)).sqrt() + 1e-5))
        after = weights(tmp_path / f"x/step_{step}.pt")
        for name, p in network.named_parameters():
            assert torch.allclose(p, after[name], atol=2e-5), name


def test_the_loop_uses_what_the_settings_say(dataset, tmp_path, monkeypatch):
    seen = []
    real = train.make_batch
    monkeypatch.setattr(train, "make_batch", lambda *a, **k: seen.append((a, k)) or real(*a, **k))
    here(dataset, tmp_path / "x", max_iters=1, packing="random", mask_split="0.8,0.1,0.1", mask_ratio=0.3, tie_embeddings=False, eval_interval=1)
    for (_, rows, block_size, objective, ratio, split, packing, *seed), named in seen:
        assert (block_size, objective, ratio, split, packing) == (64, "mlm", 0.3, (0.8, 0.1, 0.1), "random")
        assert (seed or [named["seed"]])[0] in (0, 1337)
    assert sum(len(a[1]) for a, k in seen if a[7:] == (1337,)) == 8
    assert "head.weight" in weights(tmp_path / "x/last.pt")


def test_processes_drop_different_units(dataset, tmp_path):
    """Two processes on equal rows: with one seed for both, dropout would give both the same loss."""
    one = write_corpus(tmp_path / "set", {"train": ["the quick brown fox jumps over the lazy dog, and runs far away."], "val": ["a lazy dog"] * 20})
    code = (f"import sys; sys.path.insert(0, {str(ROOT)!r}); import train, torch\nreal = torch.autograd.Function.apply\nimport model\n"
            "score = model.HeadLoss.forward\n"
            "model.HeadLoss.forward = staticmethod(lambda *a: (lambda l: (print('LOSS', l.item(), flush=True), l)[1])(score(*a)))\n"
            f"train.main({flags_for(one, tmp_path / 'x', max_iters=1, tokens_per_iter=128, dropout=0.5)!r})")
    (tmp_path / "go.py").write_text(code)
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone", str(tmp_path / "go.py")],
                          capture_output=True, text=True, env=environment())
    losses = re.findall(r"LOSS ([\d.]+)", done.stdout)
    assert len(losses) == 2 and losses[0] != losses[1], done.stdout + done.stderr


def test_sigkill_and_resume_under_torchrun(dataset, tmp_path):
    common = dict(objective="clm:0.5,mlm:0.5", max_iters=40, eval_interval=4)
    run(dataset, tmp_path / "whole", processes=2, **common)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone", str(ROOT / "train.py")]
    victim = subprocess.Popen(launcher + flags_for(dataset, tmp_path / "killed", **common), env=environment(), start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    log = tmp_path / "killed/metrics.jsonl"
    deadline = time.time() + 120
    while time.time() < deadline and not (log.exists() and '"iter": 25,' in log.read_text()):
        time.sleep(0.01)
    os.killpg(victim.pid, signal.SIGKILL)
    victim.wait()
    kill_workers(tmp_path / "killed")
    at = load_checkpoint(tmp_path / "killed/last.pt")["iter"]
    assert 20 <= at < 40
    run(dataset, tmp_path / "killed", processes=2, init_from="resume", **common)
    assert same(weights(tmp_path / "killed/last.pt"), weights(tmp_path / "whole/last.pt"))
    assert metrics(tmp_path / "killed") == metrics(tmp_path / "whole")


def kill_workers(out_dir):
    """torchrun starts its workers in sessions of their own."""
    subprocess.run(["pkill", "-9", "-f", str(out_dir)], check=False)
    time.sleep(0.5)


@pytest.mark.parametrize("number, processes", [(signal.SIGTERM, 1), (signal.SIGINT, 1), (signal.SIGTERM, 2)])
def test_a_signal_saves_and_ends(dataset, tmp_path, number, processes):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone"] if processes > 1 else [sys.executable]
    process = subprocess.Popen(launcher + [str(ROOT / "train.py"), *flags_for(dataset, tmp_path / "x", max_iters=100_000, eval_interval=50_000)],
                               env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    log = tmp_path / "x/metrics.jsonl"
    deadline = time.time() + 120
    while time.time() < deadline and not (log.exists() and '"iter": 3,' in log.read_text()):
        time.sleep(0.05)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == (128 + number if processes == 1 else 1)  # torchrun has one of its own
    state = load_checkpoint(tmp_path / "x/last.pt")
    assert f"stopped at iteration {state['iter']:,}" in output and state["iter"] >= 3
    assert list(metrics(tmp_path / "x"))[-1] == state["iter"]  # the step was finished


def test_what_is_there_is_kept(dataset, tmp_path, monkeypatch, capsys):
    here(dataset, tmp_path / "x", max_iters=2)
    with pytest.raises(SystemExit, match="holds a run already"):
        here(dataset, tmp_path / "x", max_iters=2)
    before = (tmp_path / "x/last.pt").read_bytes()
    here(dataset, tmp_path / "x", max_iters=2, init_from="resume")
    assert "no step to take" in capsys.readouterr().out and (tmp_path / "x/last.pt").read_bytes() == before
    for changed in (dict(learning_rate=1), dict(seed=3), dict(objective="clm"), dict(tokens_per_iter=1024), dict(block_size=32), dict(eval_tokens=64)):
        with pytest.raises(SystemExit, match="to change it, start a new run"):
            here(dataset, tmp_path / "x", **{"max_iters": 2, "init_from": "resume"} | changed)
    here(dataset, tmp_path / "x", max_iters=4, decay_iters=2, init_from="resume")  # longer, and with a decay
    assert load_checkpoint(tmp_path / "x/last.pt")["iter"] == 4
    monkeypatch.chdir(tmp_path)
    for folder in ("out/mlm", "out/mlm-2"):  # without --out_dir each run gets a folder of its own
        here(dataset, None, max_iters=1)
        assert Path(folder, "last.pt").exists()
    here(dataset, None, max_iters=2, init_from="resume")
    assert [load_checkpoint(f"out/{name}/last.pt")["iter"] for name in ("mlm", "mlm-2")] == [1, 2]


def test_two_runs_that_start_together_get_folders_of_their_own(dataset, tmp_path, monkeypatch, capsys):
    """A run that has saved nothing yet holds its folder by the lock on its log."""
    monkeypatch.chdir(tmp_path)
    Path("out/mlm").mkdir(parents=True)
    with open("out/mlm/metrics.jsonl", "a") as log:
        assert train.lock(log)
        here(dataset, None, max_iters=1)
        assert [path.parent.name for path in Path("out").glob("*/last.pt")] == ["mlm-2"]
        with pytest.raises(SystemExit, match="holds a run already"):
            here(dataset, "out/mlm", max_iters=1)
    here(dataset, "out/mlm", max_iters=1)  # the one that held it ended without a checkpoint


def test_a_new_run_from_a_plateau_checkpoint(dataset, tmp_path, capsys):
    """--init_from PATH: own clock, data goes on where it stood; --init_optimizer takes the moments along, and then two runs equal one."""
    flat = dict(warmup_iters=0, decay_iters=0, learning_rate=1e-3)
    here(dataset, tmp_path / "both", objective="clm:0.5,mlm:0.5", max_iters=8, **flat)
    here(dataset, tmp_path / "first", objective="clm", max_iters=4, **flat)
    here(dataset, tmp_path / "second", objective="mlm", max_iters=4, init_from=tmp_path / "first/last.pt", init_optimizer=True, **flat)
    assert same(weights(tmp_path / "second/last.pt"), weights(tmp_path / "both/last.pt"))
    assert "from row 32 on" in capsys.readouterr().out
    here(dataset, tmp_path / "fresh", objective="mlm", max_iters=4, init_from=tmp_path / "first/last.pt", **flat)
    assert not same(weights(tmp_path / "fresh/last.pt"), weights(tmp_path / "both/last.pt"))
    here(dataset, tmp_path / "decay", objective="clm", max_iters=3, init_from=tmp_path / "first/last.pt", init_optimizer=True, warmup_iters=0, decay_iters=3, learning_rate=1e-3)
    assert list(metrics(tmp_path / "decay", "lr").values()) == pytest.approx([1e-3, 2e-3 / 3, 1e-3 / 3])
    one_more = dict(objective="mlm", max_iters=4, init_from=tmp_path / "first/last.pt", init_optimizer=True, save_interval=2, **flat)
    here(dataset, tmp_path / "again", **one_more)
    shutil.copy(tmp_path / "again/step_2.pt", tmp_path / "again/last.pt")
    here(dataset, tmp_path / "again", objective="mlm", max_iters=4, init_from="resume", **flat)  # such a run resumes like any other
    assert same(weights(tmp_path / "again/last.pt"), weights(tmp_path / "both/last.pt"))
    with pytest.raises(SystemExit, match="leave these out"):
        here(dataset, tmp_path / "y", size="210m", init_from=tmp_path / "first/last.pt")


def test_checkpoints_are_plain(dataset, tmp_path):
    """They load with weights_only=True in a process that cannot import this repository, and carry the tokenizer."""
    here(dataset, tmp_path / "x", max_iters=2, save_interval=1)
    assert sorted(path.name for path in (tmp_path / "x").glob("*.pt")) == ["best.pt", "last.pt", "step_0.pt", "step_1.pt", "step_2.pt"]
    code = ("import sys, torch\nfor path in sys.argv[1:]:\n c = torch.load(path, weights_only=True)\n"
            " assert not any('module' in n or '_orig_mod' in n for n in c['model']) and all(t.device.type == 'cpu' for t in c['model'].values())\n print(c['iter'])")
    done = subprocess.run([sys.executable, "-I", "-c", code, *map(str, (tmp_path / "x").glob("*.pt"))], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    state = load_checkpoint(tmp_path / "x/last.pt")
    assert Tokenizer.from_dict(state["tokenizer"]).hash == byte_tokenizer().hash
    assert Config(**state["config"]).n_layer == 4 and state["settings"]["mask_ratio"] == 0.4


def test_a_failed_save_keeps_the_old_file(tmp_path):
    """A file that may not grow stands for a full disk: PyTorch sees the same error from the same call."""
    path = tmp_path / "last.pt"
    state = {"model": {"w": torch.zeros(100_000)}, "config": {}, "tokenizer": {}, "settings": {}, "iter": 1}
    save_checkpoint(path, state)
    code = (f"import sys, resource, signal; sys.path.insert(0, {str(ROOT)!r}); import model, torch; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
            f"model.save_checkpoint({str(path)!r}, {{'model': {{'w': torch.zeros(100_000)}}}})")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert re.search(r"last.pt: not written \(.*File too large.*\); what was there before is intact", done.stderr) and done.returncode == 1
    assert load_checkpoint(path)["iter"] == 1 and list(tmp_path.iterdir()) == [path]
    for content, message in ((path.read_bytes()[:100], "not a checkpoint"), (b"", "not a checkpoint"), (b"hello", "not a checkpoint")):
        path.write_bytes(content)
        with pytest.raises(SystemExit, match=message):
            load_checkpoint(path)
    save_checkpoint(path, {"model": {}, "config": {}})
    with pytest.raises(SystemExit, match="a checkpoint without tokenizer, settings"):
        load_checkpoint(path)


def test_divergence_stops_with_the_iteration(dataset, tmp_path, monkeypatch):
    real = model_file.HeadLoss.apply
    calls = iter(range(100))
    monkeypatch.setattr(model_file.HeadLoss, "apply", lambda *a: real(*a) * (math.nan if next(calls) == 5 else 1))
    with pytest.raises(SystemExit, match="iteration 6 is not finite"):
        here(dataset, tmp_path / "x", max_iters=20, eval_interval=2, log_interval=20)
    for path in (tmp_path / "x").glob("*.pt"):
        assert all(p.isfinite().all() for p in weights(path).values())
    assert load_checkpoint(tmp_path / "x/last.pt")["iter"] == 4


def test_best_is_the_minimum_of_the_log(dataset, tmp_path, monkeypatch):
    losses = iter([9, 3, math.nan, 2, 5, 2.5])
    real = train.evaluate
    monkeypatch.setattr(train, "evaluate", lambda *a: real(*a) | {"val_loss_mlm": next(losses)})
    here(dataset, tmp_path / "x", max_iters=4, eval_interval=1)
    assert load_checkpoint(tmp_path / "x/best.pt")["iter"] == 3
    losses = iter([5, 2.5, 1.5])
    here(dataset, tmp_path / "x", max_iters=5, eval_interval=1, init_from="resume")
    assert load_checkpoint(tmp_path / "x/best.pt")["iter"] == 3  # 2.5 at iteration 5 is no new minimum


def test_an_evaluation_at_the_end_counts_after_a_resume(dataset, tmp_path, monkeypatch, capsys):
    """Also where it does not fall on the grid of evaluations; and one that was killed is made up for."""
    losses = iter([9, 5, 4, 1, 3, 3.5, 2.5])
    real = train.evaluate
    monkeypatch.setattr(train, "evaluate", lambda *a: real(*a) | {"val_loss_mlm": next(losses)})
    here(dataset, tmp_path / "x", max_iters=5, eval_interval=2)
    here(dataset, tmp_path / "x", max_iters=8, eval_interval=2, init_from="resume")
    assert load_checkpoint(tmp_path / "x/best.pt")["iter"] == 5 and metrics(tmp_path / "x", "val_loss_mlm")[5] == 1
    lines = (tmp_path / "x/metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "x/metrics.jsonl").write_text("".join(lines[:-1]) + '{"iter": 8, "val_l')  # killed while it wrote its last evaluation
    here(dataset, tmp_path / "x", max_iters=8, eval_interval=2, init_from="resume")
    assert metrics(tmp_path / "x", "val_loss_mlm")[8] == 2.5  # every line of the log can be read
    assert not list((tmp_path / "x").glob("*.tmp"))


def test_wrong_data_is_refused(dataset, tmp_path):
    here(dataset, tmp_path / "x", max_iters=2)
    other = tmp_path / "other"
    shutil.copytree(dataset, other)
    byte_tokenizer(1).save(other / "bpe.json")
    with pytest.raises(SystemExit, match="not of one tokenizer"):
        here(other, tmp_path / "y", max_iters=2)
    for split in ("train", "val"):
        out = TokenWriter(other / f"{split}.bin", byte_tokenizer(1))
        out.write([np.arange(200, dtype=np.uint32)])
        out.close()
    with pytest.raises(SystemExit, match="is not that of the checkpoint"):
        here(other, tmp_path / "y", max_iters=2, init_from=tmp_path / "x/last.pt")
    with pytest.raises(SystemExit, match="fewer than one row of --block_size 512"):
        here(other, tmp_path / "y", block_size=512)


def test_bad_settings_under_torchrun_end_on_all_ranks(dataset, tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "x/step_7.pt").write_bytes(b"someone's")
    for folder, changes, message in (("y", dict(mask_ratio=1.5), "error: --mask_ratio 1.5"), ("x", {}, "holds a run already")):
        done = run(dataset, tmp_path / folder, processes=2, check=False, **changes)
        assert done.returncode != 0 and done.stderr.count(message) == 1 and "[rank1]" not in done.stderr


def test_the_model_learns_english(tmp_path):
    """CLM and then MLM on documentation: well below the entropy of single tokens within two minutes."""
    folder = ROOT / "data/docstrings"
    if not (folder / "train.bin").exists():
        subprocess.run([sys.executable, folder / "prepare.py"], check=True)
    val = TokenFile(folder / "val.bin")
    counts = np.bincount(TokenFile(folder / "train.bin").ids, minlength=val.vocab_size)[:val.n_ordinary] + 1.0
    seen = np.bincount(val.ids, minlength=val.vocab_size)[:val.n_ordinary]
    unigram = -(seen * np.log(counts / counts.sum())).sum() / seen.sum()
    done = run(folder, tmp_path / "x", objective="clm:0.6,mlm:0.4", block_size=64, tokens_per_iter=2048, max_iters=360, eval_interval=360, eval_tokens=20_000, dtype="auto", log_interval=20)
    assert "guesses" in done.stdout and "MFU" in done.stderr
    found = metrics(tmp_path / "x", "val_loss_mlm")
    assert found[0] == pytest.approx(math.log(4096), abs=0.15)
    assert found[360] < unigram - 0.7
