"""
Speed of kernels/attention.py, forward and backward, against what PyTorch and flash-attn offer:

    python bench/attention.py                                  on a GPU: head dimensions, lengths, causal or not, packed documents
    python bench/attention.py --quick --json speed.json        in about a minute
    python bench/attention.py --static --target sm_90 sm_100   without a GPU: what the compiler makes of the kernels (bench/static.py)

Every contender gets the same tensors (tokens, heads, head_dim) and is first compared with float64; one that is wrong is not timed. Then all take turns,
round after round, and what is shown is the median over rounds of the GPU's time. TFLOP/s count the products of real (query, key) pairs only: 4 x head_dim a
pair and head forward, 10 x head_dim backward, so masked and padded pairs earn nothing. Launches are queued behind a pause, so that a slow CPU does not count.
"""
import argparse, functools, importlib.util, json, sys, time
from collections import namedtuple
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}  # of the relative error, ||x - exact|| / ||exact||
Case = namedtuple("Case", "name lengths heads kv_heads D causal")


def dense(T, tokens, D, causal):
    """Width 2,048 or just below, as in the papers."""
    return Case(f"{T:,}", [T] * max(1, tokens // T), max(1, 2048 // D), max(1, 2048 // D), D, causal)


def packed(name, tokens, D, causal, heads=12):
    """Documents of 10 to 2,048 tokens, in random order. "uniform": their lengths are; "short": the logarithms of their lengths are, half below 143."""
    rng, lengths = np.random.default_rng(0), []
    while sum(lengths) < tokens:
        length = rng.uniform(10, 2048) if name == "uniform" else np.exp(rng.uniform(np.log(10), np.log(2048)))
        lengths.append(min(int(length), tokens - sum(lengths)))
    return Case(f"{name}, {len(lengths):,} documents", lengths, heads, heads, D, causal)


def pairs(case):
    """(query, key) pairs of one head."""
    return sum(n * (n + 1) // 2 if case.causal else n * n for n in case.lengths)


# ---------------------------------------------------------------------------------------------------------------------------------
# contenders: each makes, for a case, a function (q, k, v) -> o of packed tensors (tokens, heads, D), or says by an Unfit why not

class Unfit(Exception):
    pass


def bounds(case, device):
    return torch.tensor([0, *np.cumsum(case.lengths)], dtype=torch.int32, device=device)


def ours(case, device, dtype):
    from kernels.attention import attention, row_blocks, unsupported
    if reason := unsupported(device, dtype, case.D):
        raise Unfit(reason)
    cu = bounds(case, device)
    table = row_blocks(cu, sum(case.lengths), case.causal)  # once for all layers of a model, so not part of the time
    return lambda q, k, v: attention(q, k, v, cu, max(case.lengths), case.causal, table)


def tutorial(case, device, dtype):
    """The form of the Triton tutorial, forward only."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] not in (9, 10) or case.D not in (64, 128) or dtype == torch.float32:
        raise Unfit("written for Hopper and Blackwell, 16 bits, head dimensions 64 and 128")
    if len(set(case.lengths)) > 1 or case.lengths[0] % 128:
        raise Unfit("equal lengths only")
    import bench.static
    return lambda q, k, v: bench.static.tutorial(q, k, v, case.lengths[0], case.causal)


def sdpa(backend, case, device, dtype):
    """Documents as rows of a batch; of unequal length, padded to the longest. Packing and unpacking is not part of the work of a batch that lives padded, but
    here it is, since the others need none."""
    n, T = len(case.lengths), max(case.lengths)
    equal = min(case.lengths) == T
    rows_bytes = n * T * case.heads * case.D * dtype.itemsize
    if backend == SDPBackend.MATH and n * case.heads * T * T * 4 > 4e9:
        raise Unfit("scores beyond 4 GB")
    if not equal and rows_bytes > 8e9:
        raise Unfit(f"{rows_bytes / 1e9:.0f} GB a tensor when padded")
    real = torch.arange(T, device=device)[None] < torch.tensor(case.lengths, device=device)[:, None]  # (n, T)
    place = real.flatten().nonzero()[:, 0]  # of each token in the padded batch
    mask = None if equal or case.causal else real[:, None, None]  # with causal attention no token sees the padding after it

    def padded(x):
        return x.new_zeros(n * T, *x.shape[1:]).index_copy(0, place, x)

    def run(q, k, v):
        q, k, v = ((x if equal else padded(x)).view(n, T, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel(backend):
            o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=case.causal).transpose(1, 2).reshape(n * T, case.heads, case.D)
        return o if equal else o[place]
    return run


def flex(case, device, dtype):
    """One row that holds all documents, with a block mask."""
    if device.type != "cuda":
        raise Unfit("compiled for GPUs only here")
    torch._dynamo.reset()  # else it gives up after eight shapes
    compiled, T = torch.compile(flex_attention, dynamic=False), sum(case.lengths)
    if len(set(case.lengths)) == 1:
        n, T = len(case.lengths), case.lengths[0]
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, T, T, device=device) if case.causal else None
    else:
        n = 1
        document = torch.repeat_interleave(torch.arange(len(case.lengths), device=device), torch.tensor(case.lengths, device=device))
        see = (lambda b, h, i, j: (document[i] == document[j]) & (i >= j)) if case.causal else lambda b, h, i, j: document[i] == document[j]
        mask = create_block_mask(see, None, None, T, T, device=device, _compile=True)

    def run(q, k, v):
        q, k, v = (x.view(n, T, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
        return compiled(q, k, v, block_mask=mask).transpose(1, 2).reshape(n * T, case.heads, case.D)
    return run


def varlen(case, device, dtype):
    """FlashAttention-2 for packed documents, as PyTorch ships it."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        raise Unfit("not in this PyTorch") from None
    if device.type != "cuda" or dtype == torch.float32:
        raise Unfit("GPUs and 16 bits only")
    cu, longest = bounds(case, device), max(case.lengths)
    return lambda q, k, v: varlen_attn(q, k, v, cu, cu, longest, longest, window_size=(-1, 0) if case.causal else (-1, -1))


def flash_attn(module, case, device, dtype):
    """The packages flash-attn (2) and flash_attn_interface (3), where installed."""
    if importlib.util.find_spec(module) is None:
        raise Unfit("not installed")
    if dtype == torch.float32:
        raise Unfit("16 bits only")
    function = importlib.import_module(module).flash_attn_varlen_func
    cu, longest = bounds(case, device), max(case.lengths)

    def run(q, k, v):
        o = function(q, k, v, cu, cu, longest, longest, causal=case.causal)
        return o[0] if isinstance(o, tuple) else o
    return run


CONTENDERS = {
    "ours": ours, "cudnn": functools.partial(sdpa, SDPBackend.CUDNN_ATTENTION), "flash": functools.partial(sdpa, SDPBackend.FLASH_ATTENTION),
    "efficient": functools.partial(sdpa, SDPBackend.EFFICIENT_ATTENTION), "math": functools.partial(sdpa, SDPBackend.MATH), "flex": flex, "varlen": varlen,
    "flash2": functools.partial(flash_attn, "flash_attn"), "flash3": functools.partial(flash_attn, "flash_attn_interface"), "tutorial": tutorial}


# ---------------------------------------------------------------------------------------------------------------------------------
# what is right

def exact(q, k, v, do, case, samples):
    """[(document's rows, head, o, dq, dk, dv)] by the formula in float64, for documents and key heads in `samples`; a key head's query heads together."""
    group, found = case.heads // case.kv_heads, []
    starts = [0, *np.cumsum(case.lengths)]
    for document, kv_head in samples:
        rows, heads = slice(int(starts[document]), int(starts[document + 1])), slice(kv_head * group, (kv_head + 1) * group)
        Q, K, V = (x.detach()[rows, h].double().transpose(0, 1).requires_grad_() for x, h in ((q, heads), (k, slice(kv_head, kv_head + 1)), (v, slice(kv_head, kv_head + 1))))
        s = Q @ K.transpose(1, 2) * case.D ** -0.5
        if case.causal:
            s = s.masked_fill(torch.ones(s.shape[1:], dtype=torch.bool, device=s.device).triu(1), -torch.inf)
        o = s.softmax(-1) @ V
        found.append((rows, heads, kv_head, o.detach(), *torch.autograd.grad(o, (Q, K, V), do[rows, heads].double().transpose(0, 1))))
    return found


def samples_of(case):
    """First, last, longest, shortest document; the first and the last head."""
    documents = {0, len(case.lengths) - 1, int(np.argmax(case.lengths)), int(np.argmin(case.lengths))}
    return [(document, head) for document in sorted(documents) for head in sorted({0, case.kv_heads - 1})]


def errors(results, truth):
    """Relative errors of (o, dq, dk, dv), or of o alone, against `exact`."""
    found = []
    for i, x in enumerate(results):
        off = size = 0.0
        for rows, heads, kv_head, *true in truth:
            part = x.detach()[rows, heads if i < 2 else slice(kv_head, kv_head + 1)].double().transpose(0, 1)
            off, size = off + float((part - true[i]).square().sum()), size + float(true[i].square().sum())
        found.append((off / max(size, 1e-300)) ** 0.5)
    return found


# ---------------------------------------------------------------------------------------------------------------------------------
# time

def timed(work, device, times):
    """Seconds of one call, by the device's clock."""
    if device.type == "cpu":
        begun = time.perf_counter()
        for _ in range(times):
            work()
        return (time.perf_counter() - begun) / times
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(1_000_000 + 600_000 * times)  # cycles: meanwhile the CPU queues all launches
    begin.record()
    for _ in range(times):
        work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / times


def matmul_peak(device, dtype):
    """TFLOP/s of a large matrix product on this machine: what attention could reach if it were nothing else."""
    n = 8192 if device.type == "cuda" else 256
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    for _ in range(3):
        a @ b
    return 2 * n ** 3 / np.median([timed(lambda: a @ b, device, 3) for _ in range(7)]) / 1e12


def race(case, contenders, device, dtype, rounds):
    """{contender: dict with fwd and bwd as (lower quartile, median, upper quartile) in TFLOP/s and errors, or with `out`, why it does not run}."""
    torch.manual_seed(0)
    T = sum(case.lengths)
    q, k, v = (torch.randn(T, heads, case.D, device=device, dtype=dtype, requires_grad=True) for heads in (case.heads, case.kv_heads, case.kv_heads))
    do = torch.randn(T, case.heads, case.D, device=device, dtype=dtype)
    truth = exact(q, k, v, do, case, samples_of(case))
    results, works = {}, {}
    for name in contenders:
        try:
            run = CONTENDERS[name](case, device, dtype)
            o = run(q, k, v)
            gradients = torch.autograd.grad(o, (q, k, v), do, retain_graph=True) if o.requires_grad else ()
            off = errors((o, *gradients), truth)
            results[name] = {"errors": off}
            if not max(off) < TOLERANCE[dtype]:  # NaN too
                results[name]["out"] = "wrong: relative errors " + ", ".join(f"{x:.1e}" for x in off)
                continue
            works[name, "fwd"] = lambda run=run: run(q.detach(), k.detach(), v.detach())
            if o.requires_grad:
                works[name, "bwd"] = lambda o=o: torch.autograd.grad(o, (q, k, v), do, retain_graph=True)
        except Unfit as reason:
            results[name] = {"out": str(reason)}
        except Exception as problem:
            if "CUDA error" in str(problem):  # nothing can be trusted on this device from here on
                raise
            results[name] = {"out": f"{type(problem).__name__}: {(str(problem).strip() or '-').splitlines()[0][:160]}"}
        o = gradients = None
    seconds, times = {key: [] for key in works}, {}
    for key, work in works.items():
        work()
        times[key] = max(1, min(20, int(3e-3 / max(timed(work, device, 1), 1e-6)))) if device.type == "cuda" else 1
    for _ in range(rounds):
        for key, work in works.items():
            seconds[key].append(timed(work, device, times[key]))
    flops = {"fwd": 4 * case.D * case.heads * pairs(case), "bwd": 10 * case.D * case.heads * pairs(case)}
    for (name, direction), took in seconds.items():
        results[name][direction] = [float(x) for x in flops[direction] / np.quantile(took, (0.75, 0.5, 0.25)) / 1e12]
        results[name][direction + "_ms"] = float(np.median(took)) * 1e3
    return results


# ---------------------------------------------------------------------------------------------------------------------------------
# what a person sees

def show(group, rows, contenders, peak):
    """A table of each direction for cases that differ in length only: median TFLOP/s +- half of the distance between the quartiles."""
    there = [name for name in contenders if any("fwd" in results.get(name, {}) for _, results in rows)]
    for direction in ("fwd", "bwd"):
        print(f"\n{group}, {'forward' if direction == 'fwd' else 'backward'}, TFLOP/s")
        print(f"{'length':>24}" + "".join(f"{name:>14}" for name in there) + f"{'of peak':>9}{'ours / best other':>19}")
        for case, results in rows:
            figure = lambda name: results.get(name, {}).get(direction)
            cells = [f"{x[1]:.4g} ±{(x[2] - x[0]) / 2:.1g}" if (x := figure(name)) else "-" for name in there]
            other = max((figure(name)[1] for name in there if name != "ours" and figure(name)), default=None)
            mine = figure("ours")
            print(f"{case.name:>24}" + "".join(f"{cell:>14}" for cell in cells) + (f"{mine[1] / peak:9.0%}" if mine else f"{'-':>9}")
                  + (f"{mine[1] / other:18.2f}x" if mine and other else f"{'-':>19}"), flush=True)
    for name in contenders:
        outs = [f"{case.name}: {results[name]['out']}" for case, results in rows if "out" in results.get(name, {})]
        if len({out.split(": ", 1)[1] for out in outs}) == 1 and len(outs) == len(rows):
            outs = [outs[0].split(": ", 1)[1]]
        for out in outs:
            print(f"  {name} left out, {out}")


def plot(path, records, contenders):
    """TFLOP/s over length, a panel for each head dimension, mask and direction, if matplotlib is there."""
    if importlib.util.find_spec("matplotlib") is None:
        return
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    groups = list(dict.fromkeys((r["head_dim"], r["causal"]) for r in records if r["equal"]))
    if not groups:
        return
    figure, axes = plt.subplots(2, len(groups), figsize=(4 * len(groups), 7), squeeze=False, sharey="row")
    for column, (D, causal) in enumerate(groups):
        for axis, direction in zip(axes[:, column], ("fwd", "bwd")):
            for name in contenders:
                points = [(r["length"], r["results"][name][direction][1]) for r in records
                          if r["equal"] and (r["head_dim"], r["causal"]) == (D, causal) and direction in r["results"].get(name, {})]
                if points:
                    axis.plot(*zip(*points), marker="o", label=name, linewidth=2.5 if name == "ours" else 1)
            axis.set(xscale="log", title=f"head dimension {D}{', causal' if causal else ''}, {direction}", xlabel="length", ylabel="TFLOP/s")
    axes[0, 0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    print(f"plot: {path}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--quick", action="store_true", help="fewer shapes and rounds")
    parser.add_argument("--head_dim", type=int, nargs="+")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, metavar="NAME", help=", ".join(CONTENDERS))
    parser.add_argument("--json", metavar="FILE", help="all figures, written as they come; the plot goes beside it")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: tiny shapes, to try the script itself (TRITON_INTERPRET=1)")
    parser.add_argument("--static", action="store_true", help="compile for GPUs that need not be there, and read the machine code")
    parser.add_argument("--target", nargs="+", metavar="SM", help="with --static: sm_80, sm_86, sm_89, sm_90, sm_100, sm_120, gfx942 (default: all)")
    parser.add_argument("--group", type=int, default=1, help="with --static: query heads of a key head")
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype)
    if importlib.util.find_spec("triton") is None:
        raise SystemExit("the package triton is not installed; it comes with PyTorch for GPUs on Linux, or by pip install triton")
    if args.static:
        import bench.static as static
        if unknown := set(args.target or ()) - static.TARGETS.keys():
            raise SystemExit(f"--target {sorted(unknown)[0]}: give one or more of {', '.join(static.TARGETS)}")
        from kernels.attention import HEAD_DIMS
        if unknown := set(args.head_dim or ()) - HEAD_DIMS.keys():
            raise SystemExit(f"--head_dim {sorted(unknown)[0]}: give one or more of {', '.join(map(str, HEAD_DIMS))}")
        sys.exit(not static.main(args.target or list(static.TARGETS), args.head_dim or [64, 96, 128], dtype, args.group, args.json))
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no GPU here to time on; python bench/attention.py --static shows what the compiler makes of the kernels, and needs none")

    device, gpu = torch.device(args.device), args.device == "cuda"
    if gpu:
        torch.set_float32_matmul_precision("highest")
    contenders = args.contenders or [name for name in CONTENDERS if not (args.quick and name in ("math", "efficient"))]
    head_dims = args.head_dim or ([64, 128] if args.quick else [64, 96, 128])
    if not gpu:
        groups = [(D, causal, [dense(64, 64, D, causal)._replace(heads=1, kv_heads=1), packed("short", 200, D, causal, 1)]) for D in head_dims for causal in (False, True)]
    else:
        lengths = (1024, 8192) if args.quick else (512, 1024, 2048, 4096, 8192, 16384)
        groups = [(D, causal, [dense(T, 16384, D, causal) for T in lengths]) for D in head_dims for causal in (False, True)]
        sizes = {"short": 2**18} if args.quick else {"uniform": 2**18, "short": 2**20}
        groups += [(64, causal, [packed(name, tokens, 64, causal) for name, tokens in sizes.items()]) for causal in (False, True)]
    import triton
    machine = torch.cuda.get_device_name(device) if gpu else "CPU, which times nothing of interest"
    peak = matmul_peak(device, dtype)
    print(f"{machine}; torch {torch.__version__}, Triton {triton.__version__}; {args.dtype}; a large matrix product: {peak:.3g} TFLOP/s")
    report = dict(device=machine, torch=torch.__version__, triton=triton.__version__, dtype=args.dtype, matmul_tflops=peak, cases=[])
    for D, causal, cases in groups:
        rows = []
        for case in cases:
            try:
                results = race(case, contenders, device, dtype, (5 if args.quick else 15) if gpu else 1)
            except torch.cuda.OutOfMemoryError:
                results = {name: {"out": "out of memory"} for name in contenders}
            rows.append((case, results))
            report["cases"].append(dict(name=case.name, head_dim=D, causal=causal, heads=case.heads, tokens=sum(case.lengths), documents=len(case.lengths),
                                        length=max(case.lengths), equal=len(set(case.lengths)) == 1, results=results))
            if args.json:
                Path(args.json).write_text(json.dumps(report, indent=1))
            if gpu:
                torch.cuda.empty_cache()
        equal = len(set(cases[0].lengths)) == 1
        show(f"head dimension {D}{', causal' if causal else ''}" + (f", {sum(cases[0].lengths):,} tokens" if equal else ", packed documents"), rows, contenders, peak)
    if args.json:
        plot(Path(args.json).with_suffix(".png"), report["cases"], contenders)


if __name__ == "__main__":
    main()
