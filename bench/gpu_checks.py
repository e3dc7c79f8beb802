"""
The parts of bench/gpu.sh, each of which can be run alone:

    python bench/gpu_checks.py correct                         kernels/attention.py against float64: head dimensions, packed, causal or not
    python bench/gpu_checks.py step --objective mlm --attention triton --compile true     a pretraining step of the 210M model: tokens/s, MFU, memory
    python bench/gpu_checks.py report FOLDER                   FOLDER/gpu.json and one table from what the parts left there
"""
import argparse, functools, json, sys, time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import numpy as np
import torch

from bench.attention import TOLERANCE, Case, errors, exact

LENGTHS = {  # of the documents, and rows past the last one
    "tails": ([1, 7, 16, 63, 64, 65, 127, 128, 129, 300], 0), "empty": ([0, 5, 0, 0, 33, 0], 20), "one": ([1], 0), "ones": ([1] * 70_000, 0),
    "long": ([4096], 0), "many": (np.random.default_rng(0).integers(10, 2049, 500).tolist(), 100)}


def write(path, record):
    print(json.dumps(record), flush=True)
    if path:
        Path(path).write_text(json.dumps(record, indent=1))


# ---------------------------------------------------------------------------------------------------------------------------------

def attention_case(name, D, dtype, heads, kv_heads, causal, device):
    """Problems of one case, a list of words: empty if all is right."""
    from kernels.attention import attention
    lengths, slack = LENGTHS[name]
    case = Case(name, lengths, heads, kv_heads, D, causal)
    T, n = sum(lengths) + slack, sum(lengths)
    torch.manual_seed(0)
    q, k, v = (torch.randn(T, h, D, device=device, dtype=dtype, requires_grad=True) for h in (heads, kv_heads, kv_heads))
    do = torch.randn(T, heads, D, device=device, dtype=dtype)
    cu = torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32, device=device)

    def run(do):
        o = attention(q, k, v, cu, max(lengths), causal)
        return (o, *torch.autograd.grad(o, (q, k, v), do))

    poison = torch.full((T * heads * D * 8,), torch.nan, device=device, dtype=dtype)  # the allocator hands its memory to the outputs
    del poison
    first, again = run(do), run(do)
    documents = sorted({0, len(lengths) - 1, int(np.argmax(lengths)), int(np.argmin(lengths)), *range(min(len(lengths), 12))})
    off = errors(first, exact(q, k, v, do, case, [(document, head) for document in documents for head in range(kv_heads)]))
    limit = TOLERANCE[dtype]
    problems = [f"{what} off by {x:.1e}" for what, x in zip(("o", "dq", "dk", "dv"), off) if not x < limit]
    problems += ["two runs differ"] * (not all(map(torch.equal, first, again)))
    problems += ["rows of no document are not 0"] * any(bool(x[n:].any()) for x in first)
    problems += ["not finite"] * (not all(bool(x.isfinite().all()) for x in first))
    strided = do.transpose(0, 1).contiguous().transpose(0, 1)
    problems += ["another gradient from a strided do"] * (not all(map(torch.equal, first, run(strided))))
    return problems, max(off)


def correct(args):
    device, gpu, dtype = torch.device(args.device), args.device == "cuda", getattr(torch, args.dtype)
    from kernels.attention import HEAD_DIMS
    record = {"device": torch.cuda.get_device_name() if gpu else "cpu", "torch": torch.__version__, "runs": 0, "failures": {}, "worst": 0.0}
    try:
        import triton
        record["triton"] = triton.__version__
        checks = {}
        for D in (64, 128, 96, *(d for d in HEAD_DIMS if d not in (64, 96, 128))) if gpu else (16,):
            for name in LENGTHS if gpu and D in (64, 96, 128) else ("tails", "empty") if gpu else ("empty",):
                for kv_heads in (1, 4) if dtype == torch.bfloat16 and D in (64, 128) else (1,):
                    for causal in (False, True):
                        checks[f"{name}, head dimension {D}, 4 heads on {kv_heads}{', causal' if causal else ''}"] = functools.partial(
                            attention_case, name, D, dtype, 4, kv_heads, causal, device)
        if dtype == torch.float32:
            checks |= {"model": lambda: (model_agrees(device), 0), "torch.compile": lambda: (compile_agrees(device), 0), "offsets beyond 2^31": lambda: far_apart(device)}
        record["planned"] = len(checks)
        for label, check in checks.items():
            try:
                problems, worst = check()
                record["worst"] = max(worst, record["worst"])
            except Exception as problem:
                problems = [f"{type(problem).__name__}: {(str(problem).strip() or '-').splitlines()[0][:200]}"]
            record["runs"] += 1
            if problems:
                record["failures"][label] = problems
                print(f"{label}: {'; '.join(problems)}", flush=True)
            if args.json:
                Path(args.json).write_text(json.dumps(record, indent=1))
    finally:
        write(args.json, record)
    sys.exit(bool(record["failures"]))


def model_agrees(device):
    """The network's loss and gradients by our kernel and by PyTorch's attention, both objectives, fp32."""
    from model import Config, Transformer
    torch.manual_seed(0)
    T = 256 if device.type == "cuda" else 32
    network = Transformer(Config(vocab_size=512, block_size=T, n_layer=2, n_head=4, n_kv_head=2, n_embd=64, intermediate_size=512)).to(device)
    ids = torch.randint(512, (2, T), device=device)
    cu = torch.tensor([0, T // 3, T // 3 + 1, T, 2 * T], dtype=torch.int32, device=device)
    for causal in (False, True):
        found = []
        for network.kernel in (False, True):
            network.zero_grad()
            loss = network(ids, cu, T, causal, None, ids.flatten())
            loss.backward()
            found.append([loss.detach()] + [p.grad.clone() for p in network.parameters()])
        for a, b in zip(*found):
            if not float((a - b).norm() / a.norm().clamp(min=1e-20)) < 1e-4:
                return [f"{'clm' if causal else 'mlm'}: the paths differ by {float((a - b).norm() / a.norm()):.1e}"]


def compile_agrees(device):
    """fullgraph, three batches of other documents, at most two compilations, equal gradients."""
    from kernels.attention import attention
    if device.type == "cpu":
        return None
    from torch._dynamo.utils import counters
    counters.clear()
    torch._dynamo.reset()
    f = torch.compile(attention, fullgraph=True)
    for lengths in ([64, 200], [1, 2, 300, 17], [500, 500, 24]):
        q, k, v = (torch.randn(sum(lengths), 4, 64, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
        cu = torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32, device=device)
        results = [torch.autograd.grad(g(q, k, v, cu, 512, True).sum(), (q, k, v)) for g in (f, attention)]
        if not all(map(torch.equal, *results)):
            return ["compiled gradients are not those of eager mode"]
    if counters["stats"]["unique_graphs"] > 2:
        return [f"{counters['stats']['unique_graphs']} compilations for three batches"]


def far_apart(device):
    """Rows of q, k and v that lie 60 million elements apart, in one buffer: an offset in 32 bits would wrap."""
    if device.type == "cpu" or torch.cuda.mem_get_info()[0] < 12e9:
        return ["left out: needs a GPU with 12 GB free"] if device.type == "cuda" else [], 0
    from kernels.attention import attention
    T, D, stride = 40, 64, 60_000_000
    buffer = torch.empty(T * stride, dtype=torch.bfloat16, device=device)
    q, k, v = (buffer.as_strided((T, 1, D), (stride, D, 1), i * D) for i in range(3))
    for x in (q, k, v):
        x.copy_(torch.randn(T, 1, D, device=device))
        x.requires_grad_()
    do = torch.randn(T, 1, D, device=device, dtype=torch.bfloat16)
    cu = torch.tensor([0, T], dtype=torch.int32, device=device)
    o = attention(q, k, v, cu, T, True)
    results = (o, *torch.autograd.grad(o, (q, k, v), do))
    off = errors(results, exact(q, k, v, do, Case("far", [T], 1, 1, D, True), [(0, 0)]))
    return [f"off by {max(off):.1e}"] if not max(off) < TOLERANCE[torch.bfloat16] else [], max(off)


# ---------------------------------------------------------------------------------------------------------------------------------

def step(args):
    """Optimizer steps of the 210M model with the study's vocabulary on 8 rows of 2,048 tokens, packed with documents of 10 to 2,048."""
    from bench.pretrain import corpus
    from data.batches import make_batch
    from model import SIZES, Config, Transformer, flops_per_token
    from train import peak_flops
    device, gpu, compiled = torch.device(args.device), args.device == "cuda", args.compile == "true"
    size, rows, row, steps, vocabulary = ("210m", 8, 2048, 10, 128_256) if gpu else ("mini", 1, 32, 1, 512)
    if gpu:
        torch.set_float32_matmul_precision("high")
    torch.manual_seed(0)
    with device:
        network = Transformer(Config(vocab_size=vocabulary, **SIZES[size]))
    network.kernel = args.attention == "triton"
    optimizer = torch.optim.AdamW(network.parameters(), 5e-4, (0.9, 0.95), 1e-5, 0.1, fused=True)
    tokens = corpus(vocabulary, rows * row * 8, longest=row)
    batches = [make_batch(tokens, np.arange(rows) + i * rows, row, args.objective, 0.4).to(device) for i in range(4)]
    forward = torch.compile(network) if compiled else network

    def take(batch):
        with torch.autocast(device.type, torch.bfloat16, enabled=gpu):
            loss = forward(batch.ids, batch.cu_seqlens, batch.max_seqlen, args.objective == "clm", batch.places, batch.targets) / batch.n_targets
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    begun = time.perf_counter()
    losses = [float(take(batch)) for batch in (batches[i % 4] for i in range(6 if gpu else 1))]
    warm = time.perf_counter() - begun
    seconds = []
    for i in range(steps):
        begun = time.perf_counter()
        loss = take(batches[i % 4])
        if gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
    quartiles = np.quantile(seconds, (0.25, 0.5, 0.75))
    total = lambda name: sum(getattr(b, name) for b in batches)
    work = flops_per_token(network.config, total("n_pairs") / total("n_tokens") / (1 + (args.objective == "clm")), total("n_targets") / total("n_tokens"))
    rate, peak = rows * row / quartiles[1], peak_flops(device, torch.bfloat16)
    write(args.json, dict(objective=args.objective, attention=args.attention, compile=compiled, ms=[1e3 * x for x in quartiles], tokens_per_s=rate,
                          mfu=work * rate / peak if peak else None, memory_gb=torch.cuda.max_memory_allocated() / 1e9 if gpu else None, warm_up_s=warm,
                          first_loss=losses[0], last_loss=float(loss)))


# ---------------------------------------------------------------------------------------------------------------------------------

def report(folder):
    """FOLDER/gpu.json and the table. A part without a result is in both, with the end of its log."""
    folder = Path(folder)
    parts = {}
    for status in sorted(folder.glob("*.status"), key=lambda path: path.stat().st_mtime):
        code, seconds = (int(word) if word.isdigit() else word for word in status.read_text().split())
        part = parts[status.stem] = dict(status=code, seconds=seconds)
        result, log = folder / f"{status.stem}.json", folder / f"{status.stem}.log"
        if result.exists():
            part["result"] = json.loads(result.read_text())
        if code and log.exists():
            part["log"] = log.read_text(errors="replace").splitlines()[-15:]
    metrics = folder / "mlm" / "metrics.jsonl"
    if metrics.exists() and "train" in parts:
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
        parts["train"]["result"] = dict(last=next((x for x in reversed(lines) if "loss" in x), None), evaluations=[x for x in lines if "val_loss_mlm" in x])
    (folder / "gpu.json").write_text(json.dumps(parts, indent=1))

    print(f"\n{'part':28}{'result':13}{'seconds':>7}  ")
    for name, part in parts.items():
        state = {0: "done", 124: "out of time", 137: "out of time", "skipped": "no time left"}.get(part["status"], "FAILED")
        print(f"{name:28}{state:13}{part['seconds']:7}  {sentence(name, part.get('result')) or (part.get('log') or [''])[-1][:150]}")
    print(f"all figures: {folder / 'gpu.json'}")


def sentence(name, r):
    """What a part found, in a line."""
    if not r:
        return ""
    if name.startswith("correct"):
        return (f"{r['device']}: {r['runs'] - len(r['failures'])} of {r['planned']} right, greatest relative error {r['worst']:.1e}"
                + "".join(f"; {label}: {problems[0]}" for label, problems in list(r["failures"].items())[:3]))
    if name == "attention":
        figures = []
        for c in r["cases"]:
            if mine := c["results"].get("ours", {}).get("fwd"):
                back = c["results"]["ours"].get("bwd", [0, 0, 0])
                figures.append(f"{c['head_dim']}{'c' if c['causal'] else ''} {c['name']}: {mine[1]:.3g}/{back[1]:.3g}")
        return f"TFLOP/s forward/backward (a matrix product {r['matmul_tflops']:.3g}): " + "; ".join(figures)
    if name.startswith("step"):
        return (f"{r['ms'][1]:.1f} ms ({r['ms'][0]:.1f} - {r['ms'][2]:.1f}), {r['tokens_per_s']:,.0f} tokens/s, " + (f"MFU {r['mfu']:.1%}, " if r["mfu"] else "")
                + (f"{r['memory_gb']:.1f} GB, " if r["memory_gb"] else "") + f"loss {r['first_loss']:.3f} -> {r['last_loss']:.3f}")
    last, evaluations = r["last"], r["evaluations"]
    return ((f"iteration {last['iter']:,}, {last['tokens_per_s']:,} tokens/s, " + (f"MFU {last['mfu']:.1%}, " if last["mfu"] else "") if last else "")
            + (f"val_loss_mlm {evaluations[-1]['val_loss_mlm']:.3f} at {evaluations[-1]['iter']:,}" if evaluations else "no evaluation yet"))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("part", choices=("correct", "step", "report"))
    parser.add_argument("folder", nargs="?", help="of report")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16", help="of correct")
    parser.add_argument("--objective", choices=("mlm", "clm"), default="mlm")
    parser.add_argument("--attention", choices=("triton", "sdpa"), default="triton")
    parser.add_argument("--compile", choices=("true", "false"), default="true")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    if args.part == "report":
        return report(args.folder or parser.error("report needs the folder"))
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no GPU here; --device cpu tries the script itself on tiny shapes")
    {"correct": correct, "step": step}[args.part](args)


if __name__ == "__main__":
    main()
