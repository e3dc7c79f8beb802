"""
Speed of the attention kernel, kernels/attention.py.

    python bench/attention.py                           # on a GPU: TFLOP/s against PyTorch's back ends, FlexAttention, flash-attn
    python bench/attention.py --quick                   # the same in about a minute
    python bench/attention.py --static                  # without a GPU: what the compiler makes of the kernels
    python bench/attention.py --static --target sm_80 gfx942

Measured: contenders take turns on equal tensors and the median of the turns is kept. Work is counted by the scores that the mask
leaves: 4 x pairs x heads x head_dim for the forward pass, 2.5 times that for the backward pass. Beside each figure stands its
relative error against float64.

Static: kernels are compiled for a card that is not there and their machine code is read. That shows spilled registers, lost overlap
and superfluous instructions; it proves neither speed nor absence of races. The prediction is a model, stated at `predict`.
"""
import argparse, itertools, json, os, re, subprocess, sys, tempfile
from multiprocessing import Pool
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels import attention as ours

# ---------------------------------------------------------------------------------------------------------------------------------
# static

TARGETS = {  # column of TILES, shared memory of a block and of a multiprocessor in bytes, warps and registers of a multiprocessor
    "sm_80": ("sm_80", 166912, 167936, 64, 65536), "sm_86": ("sm_86", 101376, 102400, 48, 65536),
    "sm_89": ("sm_86", 101376, 102400, 48, 65536), "sm_90": ("sm_90", 232448, 233472, 64, 65536),
    "sm_100": ("sm_90", 232448, 233472, 64, 65536), "sm_120": ("sm_86", 101376, 102400, 48, 65536),
    "gfx942": ("gfx942", 65536, 65536, 32, 131072),
}
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@triton.jit
def two_loops(q_source, k_source, v_source, o_ptr, lse_ptr, T, scale,
              D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr):
    """For comparison, the form of Triton's tutorial: blocks below the diagonal in one loop, those on it in a second one with a
    mask, and the softmax between its two products. One document, one head a program, forward only."""
    row0, column = tl.program_id(0) * BLOCK_M, tl.program_id(1) * D
    rows = row0 + tl.arange(0, BLOCK_M)
    q = q_source.load([row0, column])
    m = tl.full([BLOCK_M], -float("inf"), tl.float32)
    l = tl.full([BLOCK_M], 1.0, tl.float32)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    scale *= 1.44269504
    for masked in tl.static_range(2 if CAUSAL else 1):
        for j in tl.range(row0 if masked else 0, row0 + BLOCK_M if masked else row0 if CAUSAL else T, BLOCK_N):
            k, v = k_source.load([j, column]), v_source.load([j, column])
            s = tl.dot(q, k.T)
            if masked:
                s = s * scale + tl.where(rows[:, None] >= (j + tl.arange(0, BLOCK_N))[None, :], 0, -1.0e6)
                m_new = tl.maximum(m, tl.max(s, 1))
                s -= m_new[:, None]
            else:
                m_new = tl.maximum(m, tl.max(s, 1) * scale)
                s = s * scale - m_new[:, None]
            p = tl.math.exp2(s)
            shrink = tl.math.exp2(m - m_new)
            m, l = m_new, l * shrink + tl.sum(p, 1)
            acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None])
    tl.store(lse_ptr + tl.program_id(1) * T + rows, m + tl.math.log2(l))
    tl.store(o_ptr + rows[:, None] * D + tl.arange(0, D)[None, :], (acc / l[:, None]).to(o_ptr.dtype.element_ty))


def compiled(name, D, target, causal=False, group=1, dtype="bf16", tile=None):
    """Facts of one kernel, as the launcher in kernels/attention.py would build it for `target`, without a GPU.

    name: a key of KERNELS, or "two_loops"; tile: (BLOCK_M, BLOCK_N, warps, stages), by default the one that ships."""
    column = TARGETS[target][0]
    tile = tile or ours.tile_of(name, D, column, TYPES[dtype])
    block_m, block_n, warps, stages = tile
    if name == "two_loops":
        kernel, tma, (D0, D1) = two_loops, True, (D, 0)
        constants = dict(D=D, BLOCK_M=block_m, BLOCK_N=block_n, CAUSAL=causal)
    else:
        kernel, tma, (D0, D1) = ours.KERNELS[name], ours.by_descriptor(D, column, TYPES[dtype]), ours.HEAD_DIMS[D]
        constants = dict(D0=D0, D1=D1, GROUP=group, BLOCK_M=block_m, BLOCK_N=block_n, CAUSAL=causal, TMA=tma,
                         PER_SLOT=ours.TABLE_ROWS // (block_n if name == "backward_kv" else block_m),
                         PRECISION="ieee" if dtype == "fp32" else "tf32")
    signature, aligned = {}, set()
    for argument in kernel.arg_names:
        kind = "constexpr" if argument in constants else "i32"
        if argument.endswith("_source"):
            rows = block_n if argument[0] in "kv" else block_m
            kind = f"tensordesc<{dtype}[{rows},{D0}]>" if tma else "*" + dtype
        elif argument.endswith("_ptr"):
            kind = {"lse_ptr": "*fp32", "delta_ptr": "*fp32", "table_ptr": "*i32"}.get(argument, "*" + dtype)
        elif argument == "scale":
            kind = "fp32"
        if kind[0] == "*" or argument.startswith("stride"):
            aligned.add(argument)
        signature[argument] = kind
    place = kernel.arg_names.index
    source = ASTSource(kernel, signature, {(place(a),): value for a, value in constants.items()},
                       {(place(a),): [["tt.divisibility", 16]] for a in aligned})
    card = GPUTarget("hip", target, 64) if target.startswith("gfx") else GPUTarget("cuda", int(target[3:]), 32)
    binary = triton.compile(source, target=card, options=dict(num_warps=warps, num_stages=stages, enable_fp_fusion=True))
    facts = dict(kernel=name, head_dim=D, target=target, causal=causal, group=group, dtype=dtype, tile=tile,
                 shared=binary.metadata.shared)
    return facts | (read_amd(binary.asm["amdgcn"]) if target.startswith("gfx") else read_nvidia(binary.asm["cubin"], facts))


def read_amd(text):
    count = lambda name: max(map(int, re.findall(rf"\.{name}:\s*(\d+)", text)))
    return dict(registers=count("vgpr_count"), spills=count("vgpr_spill_count") + count("sgpr_spill_count"),
                matrix=len(re.findall("v_mfma", text)), ptx_tf32=False)


def read_nvidia(cubin, facts):
    """The resource usage of a cubin and the instructions of its innermost loop, by the disassembler that comes with Triton."""
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        run = lambda *command: subprocess.run([tools / command[0], *command[1:], file.name], capture_output=True, text=True,
                                              check=True).stdout
        usage, listing = run("cuobjdump", "-res-usage"), run("nvdisasm", "-c")
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())
    instructions, loops = read_listing(listing)
    loop = max(loops, key=len, default=[])
    block_m, block_n, warps, _ = facts["tile"]
    _, _, shared_all, warps_all, registers_all = TARGETS[facts["target"]]
    a_block = -(-registers // 8) * 8 * 32 * warps
    return dict(registers=registers, spills=stack + sum(op.startswith(("LDL", "STL")) for op in instructions),
                blocks=min(shared_all // (facts["shared"] + 1024), registers_all // a_block, warps_all // warps),
                atomics=sum(op.startswith(("RED.", "ATOM", "UTMAREDG")) for op in instructions),
                loop=len(loop), per_score=len(loop) * warps * 32 / (block_m * block_n), matrix=sum(map(is_matrix, loop)),
                exponentials=sum("MUFU.EX2" in op for op in loop), multiply_adds=sum(op.startswith("FFMA") for op in loop),
                barriers=sum(op.startswith("WARPGROUP") for op in loop), overlap=overlap(loop))


def read_listing(listing):
    """SASS -> all instructions, without predicates, and those of each innermost loop."""
    instructions, labels, loops = [], {}, []
    for line in listing.splitlines():
        if label := re.match(r"\s*(\.L_\w+):", line):
            labels[label[1]] = len(instructions)
        elif code := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ +)?(.*?);", line):
            instructions.append(code[1].strip())
            target = re.search(r"BRA.*`\((\.L_\w+)\)", code[1])
            if target and target[1] in labels:  # backwards
                loops.append((labels[target[1]], len(instructions)))
    inside = lambda a, b: a != b and b[0] <= a[0] and a[1] <= b[1]
    innermost = [a for a in set(loops) if a[1] - a[0] > 1 and not any(inside(b, a) for b in loops)]
    return instructions, [instructions[a:b] for a, b in innermost]


def is_matrix(op):
    return op.split()[0].split(".")[0] in ("HGMMA", "HMMA", "UTCHMMA", "QGMMA")


def overlap(loop):
    """Share of a loop's exponentials that begin while a matrix product is under way: an HGMMA before, no full wait since. None
    where products are not asynchronous instructions of the same warps (all but Hopper)."""
    if not any(op.startswith("HGMMA") for op in loop):
        return None
    under_way, during, all_of_them = False, 0, 0
    for turn in range(2):  # the first turn finds out how a turn begins
        for op in loop:
            if op.startswith("HGMMA"):
                under_way = True
            elif op.startswith("WARPGROUP.DEPBAR") and op.endswith(" 0x0"):
                under_way = False
            elif "MUFU.EX2" in op and turn:
                during, all_of_them = during + under_way, all_of_them + 1
    return during / max(1, all_of_them)


MATMUL_TFLOPS = 790  # what a large bf16 matrix product reaches on an H100 SXM
DERATE = 0.8         # what is published of kernels like these, over what this model says of them: 0.75 to 0.83


def predict(facts):
    """Share of the matrix units' time that one loop turn keeps them busy on an H100 or H200: per multiprocessor and clock 4,096
    operations of bf16 products, 128 bytes of shared memory, 16 exponentials, 4 instructions.

    A turn takes as long as its products, and its softmax, max(1.15 x issue, exponentials) + 100 clocks, as far as no product hides it;
    several blocks on a multiprocessor fill each other's gaps, up to the limit of any one unit."""
    if facts["target"] != "sm_90" or facts["dtype"] == "fp32":
        return None
    block_m, block_n, warps, _ = facts["tile"]
    D, products = facts["head_dim"], {"backward_q": 3, "backward_kv": 4}.get(facts["kernel"], 2)
    walks = 2 * D * 2 * (block_m if facts["kernel"] == "backward_kv" else block_n)  # bytes of the two tiles loaded each turn
    stays = 2 * D * (block_n if facts["kernel"] == "backward_kv" else block_m)
    matrix = products * 2 * block_m * block_n * D / 4096
    shared = (products / 2 * warps / 4 * walks + stays + walks) / 128
    exponentials, issue = facts["exponentials"] * warps * 32 / 16, facts["loop"] * warps / 4
    softmax = max(1.15 * issue, exponentials) + 100
    hidden = facts["overlap"] * min(softmax, matrix / products)
    return matrix / max(matrix, shared, exponentials, issue, (matrix + softmax - hidden) / facts["blocks"])


def job(arguments):
    torch.set_num_threads(1)
    return compiled(*arguments)


def static(targets):
    print(f"triton {triton.__version__}, no GPU used. per score: thread instructions of the innermost loop for each score; overlap: share of "
          f"the exponentials\nthat run beside a product; busy: predicted share of time that the matrix units work (H100, H200)")
    rows = []
    for target in targets:
        jobs = [(name, D, target, causal) for D in (64, 96, 128) for name in ours.KERNELS for causal in (False, True)]
        if target == "sm_90":
            jobs += [("two_loops", D, target, causal, 1, "bf16", (128, 64, 8, 3 if D == 64 else 2))
                     for D in (64, 128) for causal in (False, True)]
        print(f"\n{target:12} D  causal  block, warps, stages   registers spills shared/KB blocks/SM  loop  per score  matrix  overlap  busy")
        with Pool() as pool:
            for f in pool.imap(job, jobs):
                rows.append(f)
                f["busy"] = predict(f) if "loop" in f else None
                shown = lambda key, form: format(f[key], form) if f.get(key) is not None else "-"
                print(f"{f['kernel']:11} {f['head_dim']:3}  {str(f['causal']):6}  {str(f['tile']):20} {f['registers']:9} {f['spills']:6} "
                      f"{f['shared'] / 1024:9.0f} {shown('blocks', '9'):>9} {shown('loop', '6'):>6} {shown('per_score', '9.2f'):>9} "
                      f"{f['matrix']:8} {shown('overlap', '7.0%'):>8} {shown('busy', '6.0%'):>6}", flush=True)
    shipped = [f for f in rows if f["kernel"] != "two_loops"]
    clean = sum(f["spills"] == 0 and f["shared"] <= TARGETS[f["target"]][1] for f in shipped)
    summary = f"{clean} of {len(shipped)} kernels spill nothing and fit"
    hopper = {(f["kernel"], f["head_dim"]): f for f in rows if f["target"] == "sm_90" and not f["causal"]}
    if hopper:
        for D in (64, 128):
            f, t = hopper["forward", D], hopper["two_loops", D]
            q, kv = (hopper[name, D]["busy"] for name in ("backward_q", "backward_kv"))
            back = 5 / (3 / q + 4 / kv)  # seven products are done, five are counted
            summary += (f"; head dim {D}: {f['per_score']:.2f} instructions a score (two loops: {t['per_score']:.2f}), predicted "
                        f"{f['busy'] * MATMUL_TFLOPS * DERATE:.0f} (two loops: {t['busy'] * MATMUL_TFLOPS * DERATE:.0f}) TFLOP/s forward, "
                        f"{back * MATMUL_TFLOPS * DERATE:.0f} backward")
    print("\n" + summary)
    return rows


# ---------------------------------------------------------------------------------------------------------------------------------
# measured


def contenders(D):
    """{name: make(q, k, v, cu_seqlens, lengths, causal) -> function of no arguments that returns o (T, H, D)}; a peer that cannot do
    a case raises, and the table says "-"."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    flex = torch.compile(flex_attention, dynamic=False)

    def ours_(q, k, v, cu, lengths, causal):
        table = ours.row_blocks(cu, len(q), causal)
        return lambda: ours.attention(q, k, v, cu, max(lengths), causal, table)

    def sdpa(backend):
        def make(q, k, v, cu, lengths, causal):
            if len(set(lengths)) > 1:
                raise ValueError("dense only")
            def run():
                with sdpa_kernel([backend]):
                    rows = [x.view(len(lengths), lengths[0], -1, D).transpose(1, 2) for x in (q, k, v)]
                    return torch.nn.functional.scaled_dot_product_attention(*rows, is_causal=causal).transpose(1, 2).flatten(0, 1)
            return run
        return make

    def padded(q, k, v, cu, lengths, causal):
        if len(set(lengths)) == 1:
            raise ValueError("packed only")
        n, longest = len(lengths), max(lengths)
        document = torch.repeat_interleave(torch.arange(n, device=q.device), torch.tensor(lengths, device=q.device))
        place = document * longest + torch.arange(len(q), device=q.device) - cu[:-1].long()[document]
        see = torch.arange(longest, device=q.device) < torch.tensor(lengths, device=q.device)[:, None]
        mask = see[:, None, None, :].expand(n, 1, longest, longest)
        mask = mask.tril() if causal else mask
        def run():
            rows = [x.new_zeros(n * longest, x.shape[1], D).index_put((place,), x).view(n, longest, -1, D).transpose(1, 2) for x in (q, k, v)]
            return torch.nn.functional.scaled_dot_product_attention(*rows, attn_mask=mask).transpose(1, 2).flatten(0, 1)[place]
        return run

    def flex_(q, k, v, cu, lengths, causal):
        T = len(q)
        document = torch.repeat_interleave(torch.arange(len(lengths), device=q.device), torch.tensor(lengths, device=q.device))
        rule = lambda b, h, i, j: (document[i] == document[j]) & (i >= j) if causal else document[i] == document[j]
        mask = create_block_mask(rule, None, None, T, T, device=q.device, _compile=True)
        return lambda: flex(*(x.transpose(0, 1)[None] for x in (q, k, v)), block_mask=mask, enable_gqa=q.shape[1] != k.shape[1])[0].transpose(0, 1)

    def varlen(q, k, v, cu, lengths, causal):
        from flash_attn import flash_attn_varlen_func
        return lambda: flash_attn_varlen_func(q, k, v, cu, cu, max(lengths), max(lengths), causal=causal)

    return {"ours": ours_, "cudnn": sdpa(SDPBackend.CUDNN_ATTENTION), "flash": sdpa(SDPBackend.FLASH_ATTENTION),
            "efficient": sdpa(SDPBackend.EFFICIENT_ATTENTION), "math": sdpa(SDPBackend.MATH), "padded": padded, "flex": flex_, "flash-attn": varlen}


def reference(q, k, v, do, lengths, causal):
    """o and the gradients in float64, document by document, of the heads given; q, k, v (T, heads, D) with equal heads."""
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    outs = []
    for a, b, c in zip(q.split(lengths), k.split(lengths), v.split(lengths)):
        s = torch.einsum("ihd,jhd->hij", a, b) * q.shape[-1] ** -0.5
        if causal:
            s = s.masked_fill(torch.ones_like(s[0], dtype=torch.bool).triu(1), -float("inf"))
        outs.append(torch.einsum("hij,jhd->ihd", s.softmax(-1), c))
    o = torch.cat(outs)
    return o.detach(), *torch.autograd.grad(o, (q, k, v), do.double())


def error(found, wanted):
    """Greatest relative error in the Frobenius norm."""
    return max(float((a.double() - b).norm() / b.norm().clamp(min=1e-30)) for a, b in zip(found, wanted))


def seconds(function, at_least=0.004):
    """Median time of one call, over calls that take at_least seconds together."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    function()
    end.record()
    torch.cuda.synchronize()
    calls = max(1, min(50, round(at_least * 1e3 / max(1e-3, start.elapsed_time(end)))))
    start.record()
    for _ in range(calls):
        function()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3 / calls


def corpus_lengths(tokens, generator):
    """Lengths as documents of web text have them: log-normal with a median of 400 tokens, cut at 2,048."""
    lengths = []
    while sum(lengths) < tokens:
        lengths.append(int(min(2048, max(12, torch.empty(1).log_normal_(6.0, 1.0, generator=generator)))))
    lengths[-1] -= sum(lengths) - tokens
    return [n for n in lengths if n > 0]


def measured(quick, path, seconds_each=0.25):
    device = torch.device("cuda")
    card, tokens, rounds = torch.cuda.get_device_name(), 16384, 5 if quick else 11
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device=device) for _ in range(2))
    seconds(lambda: a @ b)
    peak = 2 * 8192**3 / min(seconds(lambda: a @ b, 0.05) for _ in range(5))
    print(f"{card}, torch {torch.__version__}, triton {triton.__version__}; a bf16 matrix product of 8,192 reaches {peak / 1e12:.0f} TFLOP/s")
    generator = torch.Generator().manual_seed(0)
    cases = [(f"{tokens // T} x {T}", [T] * (tokens // T)) for T in ((2048, 8192) if quick else (512, 1024, 2048, 4096, 8192, 16384))]
    uniform = torch.randint(12, 2049, (1000,), generator=generator).tolist()
    n = next(i for i in range(1000) if sum(uniform[:i + 1]) > tokens)
    cases += [("12 to 2048", uniform[:n] + [tokens - sum(uniform[:n])]), ("as web text", corpus_lengths(tokens, generator)),
              ("1024 x 16", [16] * (tokens // 16))]
    results = []
    for D, causal in itertools.product((64, 128) if quick else (64, 96, 128), (False, True)):
        everyone = contenders(D)
        print(f"\nhead dim {D}, {2048 // D} heads, {'causal' if causal else 'bidirectional'}; TFLOP/s forward, backward (error)\n{'documents':12}"
              + "".join(f"{name:>24}" for name in everyone))
        for label, lengths in cases:
            heads, cu = 2048 // D, torch.tensor([0, *lengths]).cumsum(0).int().to(device)
            q, k, v = (torch.randn(tokens, heads, D, dtype=torch.bfloat16, device=device, requires_grad=True) for _ in range(3))
            do = torch.randn_like(q)
            some = [0, heads - 1]
            wanted = reference(q[:, some], k[:, some], v[:, some], do[:, some], lengths, causal)
            work = sum(n * (n + 1) // 2 if causal else n * n for n in lengths) * heads * D * 4
            running, times = {}, {}
            for name, make in everyone.items():
                if quick and name == "math":
                    continue
                try:
                    forward = make(q, k, v, cu, lengths, causal)
                    o = forward()
                    gradients = torch.autograd.grad(o, (q, k, v), do, retain_graph=True)
                    wrong = error([x[:, some] for x in (o, *gradients)], wanted)
                    running[name] = forward, lambda o=o: torch.autograd.grad(o, (q, k, v), do, retain_graph=True), wrong
                    times[name] = [], []
                except (RuntimeError, ValueError, ImportError, AssertionError, NotImplementedError) as problem:
                    results.append(dict(head_dim=D, causal=causal, documents=label, name=name, failed=f"{type(problem).__name__}: {problem}"[:200]))
            for _ in range(rounds):
                for name, (forward, backward, _) in running.items():
                    with torch.no_grad():
                        times[name][0].append(seconds(forward))
                    times[name][1].append(seconds(backward))
            cells = []
            for name in everyone:
                if name not in running:
                    cells.append(f"{'-':>24}")
                    continue
                f, b = (sorted(t)[rounds // 2] for t in times[name])
                results.append(dict(head_dim=D, causal=causal, documents=label, name=name, forward=work / f / 1e12, backward=2.5 * work / b / 1e12,
                                    error=running[name][2], share_of_peak=work / f / peak))
                cells.append(f"{work / f / 1e12:9.0f} {2.5 * work / b / 1e12:5.0f} ({running[name][2]:.0e})")
            print(f"{label:12}" + "".join(cells), flush=True)
    if path:
        Path(path).write_text(json.dumps(dict(card=card, torch=torch.__version__, triton=triton.__version__, matmul=peak / 1e12, rows=results), indent=1))
    plot(results, card)


def plot(results, card):
    """attention.png beside the current folder's files, if matplotlib is there."""
    try:
        import matplotlib
    except ImportError:
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    kinds = sorted({(r["head_dim"], r["causal"]) for r in results})
    figure, axes = plt.subplots(2, len(kinds), figsize=(4 * len(kinds), 7), sharex=True, squeeze=False)
    for column, (D, causal) in enumerate(kinds):
        for row, way in enumerate(("forward", "backward")):
            for name in dict.fromkeys(r["name"] for r in results):
                points = [(r["documents"], r[way]) for r in results if (r["head_dim"], r["causal"], r["name"]) == (D, causal, name) and way in r]
                if points:
                    axes[row][column].plot(*zip(*points), marker="o", label=name)
            axes[row][column].set(title=f"{way}, head dim {D}{', causal' if causal else ''}", ylabel="TFLOP/s")
            axes[row][column].tick_params(axis="x", rotation=60)
    axes[0][0].legend()
    figure.suptitle(card)
    figure.savefig("attention.png", dpi=120, bbox_inches="tight")
    print("plot: attention.png")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--static", action="store_true", help="compile only; needs no GPU")
    parser.add_argument("--target", nargs="+", default=["sm_90"], choices=TARGETS, help="cards to compile for, with --static")
    parser.add_argument("--quick", action="store_true", help="fewer cases, about a minute")
    parser.add_argument("--json", metavar="PATH", help="also write the figures there")
    args = parser.parse_args()
    if args.static:
        rows = static(args.target)
        if args.json:
            Path(args.json).write_text(json.dumps(rows, indent=1))
    elif not torch.cuda.is_available():
        raise SystemExit("error: no GPU here; --static shows what the compiler makes of the kernels")
    else:
        measured(args.quick, args.json)


if __name__ == "__main__":
    main()
