"""
Speed of pretraining steps against other people's code, whole optimizer steps on equal batches:

    python bench/pretrain.py                        # the loader; MLM against logits at all positions, and against EuroBertForMaskedLM (pip install transformers)
    python bench/pretrain.py --nanogpt model.py     # and CLM against the model.py of a nanoGPT checkout

The two sides take turns in one process, so that a machine whose speed drifts does so for both; what is quoted is the median of the ratios of
pairs, with their quartiles. Peak memory is that of a process of its own for each side.
"""
import argparse, importlib.util, resource, subprocess, sys, tempfile, time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import numpy as np
import torch
import torch.nn.functional as F

from data.batches import make_batch
from data.tokens import TokenFile, TokenWriter
from model import Config, Transformer

SHAPE = dict(n_layer=4, n_head=4, n_kv_head=4, n_embd=256, intermediate_size=768, tie_embeddings=False)


def corpus(vocab_size, n_tokens, longest=400):
    """A token file of random documents of 10 to `longest` tokens."""
    class tokenizer:
        name, hash, first, pad, mask = "random", "", 0, vocab_size - 2, vocab_size - 1
        eos = n_ordinary = vocab_size - 3
    tokenizer.vocab_size = vocab_size
    rng = np.random.default_rng(0)
    folder = tempfile.TemporaryDirectory()
    out = TokenWriter(Path(folder.name) / "random.bin", tokenizer)
    while out.n_tokens < n_tokens:
        out.write([rng.integers(0, tokenizer.n_ordinary, n).astype(np.uint32) for n in rng.integers(10, longest, 1000)])
    out.close()
    tokens = TokenFile(out.path)
    tokens.folder = folder  # which goes with it
    return tokens


def whole_step(network, loss_of, args):
    optimizer = torch.optim.AdamW(network.parameters(), 5e-4, (0.9, 0.95), 1e-5, 0.1, fused=True)

    def step():
        with torch.autocast("cpu", torch.bfloat16, enabled=args.dtype == "bfloat16"):
            loss = loss_of()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def ours(objective, vocab_size, args, **shape):
    torch.manual_seed(0)
    network = Transformer(Config(vocab_size=vocab_size, **SHAPE | shape))
    batch = make_batch(args.tokens, np.arange(args.rows), args.block_size, objective, 0.4)
    loss_of = lambda: network(batch.ids, batch.cu_seqlens, batch.max_seqlen, objective == "clm", batch.places, batch.targets) / batch.n_targets
    return whole_step(network, loss_of, args)


def full_logits(vocab_size, args):
    """Our own network, but with plain code in place of its loss: logits at all positions, and cross_entropy that ignores those without a target."""
    torch.manual_seed(0)
    network = Transformer(Config(vocab_size=vocab_size, **SHAPE))
    ids, labels = ids_and_labels(args)
    return whole_step(network, lambda: F.cross_entropy(network.head(network(ids)).float().flatten(0, 1), labels.flatten()), args)


def ids_and_labels(args):
    batch = make_batch(args.tokens, np.arange(args.rows), args.block_size, "mlm", 0.4)
    labels = torch.full((args.rows * args.block_size,), -100)
    labels[batch.places[:batch.n_targets]] = batch.targets[:batch.n_targets]
    return batch.ids, labels.view(args.rows, -1)


def eurobert(vocab_size, args):
    from transformers import EuroBertConfig, EuroBertForMaskedLM
    torch.manual_seed(0)
    network = EuroBertForMaskedLM(EuroBertConfig(
        vocab_size=vocab_size, hidden_size=SHAPE["n_embd"], intermediate_size=SHAPE["intermediate_size"], num_hidden_layers=SHAPE["n_layer"],
        num_attention_heads=SHAPE["n_head"], num_key_value_heads=SHAPE["n_kv_head"], max_position_embeddings=2048, rope_theta=10000.0, pad_token_id=0,
        bos_token_id=0, eos_token_id=0, mask_token_id=0, tie_word_embeddings=False))
    ids, labels = ids_and_labels(args)
    return whole_step(network, lambda: network(input_ids=ids, labels=labels).loss, args)


def nanogpt(vocab_size, args):
    spec = importlib.util.spec_from_file_location("nanogpt", args.nanogpt)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.manual_seed(0)
    network = module.GPT(module.GPTConfig(block_size=args.block_size, vocab_size=vocab_size, n_layer=SHAPE["n_layer"], n_head=SHAPE["n_head"], n_embd=SHAPE["n_embd"],
                                          dropout=0.0, bias=False))
    batch = make_batch(args.tokens, np.arange(args.rows), args.block_size, "clm")
    targets = batch.targets.view(args.rows, -1).clone()
    targets[targets < 0] = -1  # nanoGPT's ignore_index
    return whole_step(network, lambda: network(batch.ids, targets)[1], args)


def race(name, mine, other, args):
    """Turns of the two steps, in both orders; the ratio is of tokens a second."""
    pairs, times = [], ([], [])
    for step in (mine, other, mine, other):
        step()  # warm-up
    for i in range(args.pairs):
        for side in ((0, 1), (1, 0))[i % 2]:
            begun = time.perf_counter()
            (mine, other)[side]()
            times[side].append(time.perf_counter() - begun)
        pairs.append(times[1][-1] / times[0][-1])
    low, middle, high = np.quantile(pairs, (0.25, 0.5, 0.75))
    speed = [args.rows * args.block_size / np.median(t) for t in times]
    print(f"{name:44} {speed[0]:9,.0f} {speed[1]:9,.0f}   {middle:5.2f}x  ({low:.2f} - {high:.2f})", flush=True)


def peak_memory():
    """Greatest resident size of this process so far, in bytes. Linux's ru_maxrss would count the parent's at the fork as well."""
    status = Path("/proc/self/status")
    if status.exists():
        return int(status.read_text().split("VmHWM:")[1].split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nanogpt", help="path of nanoGPT's model.py")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--block_size", type=int, default=128)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--dtype", default="bfloat16" if torch.cpu._is_avx512_bf16_supported() else "float32", choices=("bfloat16", "float32"))
    parser.add_argument("--peak", nargs=2, metavar=("SIDE", "VOCABULARY"), help=argparse.SUPPRESS)  # one step in this process, then its peak memory
    args = parser.parse_args()
    if args.peak:
        side, vocabulary = args.peak[0], int(args.peak[1])
        args.tokens = corpus(vocabulary, 100_000)
        {"ours": lambda: ours("mlm", vocabulary, args), "full logits": lambda: full_logits(vocabulary, args), "EuroBertForMaskedLM": lambda: eurobert(vocabulary, args)}[side]()()
        print(peak_memory() / 1e9)
        return

    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {args.dtype}; {args.rows} rows of {args.block_size} tokens; {SHAPE}")
    tokens = corpus(8192, 20_000_000)
    for objective in ("mlm", "clm"):
        rates = []
        for turn in range(40):
            begun = time.perf_counter()
            for i in range(10):
                make_batch(tokens, np.arange(64) + 64 * (10 * turn + i), 512, objective)
            rates.append(10 * 64 * 512 / (time.perf_counter() - begun))
        print(f"loader alone, {objective}, batches of 64 x 512: {np.median(rates) / 1e6:.0f} million tokens/s (median of 40 turns)")

    print(f"\n{'tokens a second':44} {'ours':>9} {'other':>9}   ratio   (quartiles of {args.pairs} pairs)")
    transformers = importlib.util.find_spec("transformers") is not None
    for vocabulary in (8192, 50304):
        args.tokens = corpus(vocabulary, 100_000)
        mlm = lambda: ours("mlm", vocabulary, args)
        race(f"MLM 0.4, {vocabulary:,} ids, full logits", mlm(), full_logits(vocabulary, args), args)
        if transformers:
            race(f"MLM 0.4, {vocabulary:,} ids, EuroBertForMaskedLM", mlm(), eurobert(vocabulary, args), args)
        if args.nanogpt:
            race(f"CLM, {vocabulary:,} ids, nanoGPT", ours("clm", vocabulary, args, intermediate_size=680), nanogpt(vocabulary, args), args)
    print("\npeak memory of a process that takes one MLM step, vocabulary 128,256")
    for side in ("ours", "full logits") + ("EuroBertForMaskedLM",) * transformers:
        done = subprocess.run([sys.executable, __file__, "--peak", side, "128256", "--rows", str(args.rows), "--block_size", str(args.block_size), "--dtype", args.dtype],
                              capture_output=True, text=True, check=True)
        print(f"{side:44} {float(done.stdout.split()[-1]):9.2f} GB", flush=True)
    if not transformers:
        print("EuroBertForMaskedLM: left out, transformers is not installed")


if __name__ == "__main__":
    main()
