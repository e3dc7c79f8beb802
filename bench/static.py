"""
What the compiler makes of the attention kernels, for GPUs that need not be there: `python bench/attention.py --static`.

Each kernel is compiled as kernels/attention.py would launch it; registers, spills and instructions are read from the machine code. Of
the loop over blocks, which is where the time goes:

    a score   instructions of all threads / (BLOCK_M x BLOCK_N): what one query-key pair costs
    overlap   share of the exponentials that are issued while a matrix product is in flight (Hopper): after an HGMMA, before a wait for all
    mma, smem, mufu, issue: clock cycles that these units of an H100 or H200 SM need for one iteration of one thread block
              mma    FLOPs of the HGMMA / 4096
              smem   bytes / 128: for each product a warpgroup reads a tile that the loop loads; tiles that stay are read once; what is
                     loaded is written
              mufu   threads x exponentials / 16
              issue  warps x instructions that are no HGMMA / 4
    TFLOP/s   predicted, 790 (a large bf16 matrix product on an H100) x mma / cycles, of the products that the kernel makes, with
              softmax = max(1.15 issue, mufu) + 60
              alone   = mma + softmax + 40
              latency = alone - overlap x min(softmax, one product)
              best    = max(latency / blocks on an SM, mma, smem, mufu, issue)
              cycles  = (best + alone) / 2: about half of what could be hidden is, in the kernels whose speeds are published

A prediction, not a measurement. Published for an H100: the tutorial 403 at head dimension 64 and 395 to 477 at 128, FlashAttention-3
497 and 648.
"""
import contextlib, io, json, os, re, subprocess, tempfile
from collections import Counter
from dataclasses import asdict, dataclass
from unittest import mock

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import kernels.attention as ours

KB = 1024
TARGETS = {  # shared memory of an SM and the greatest of a block, in bytes; warps of an SM
    "sm_80": (164 * KB, 163 * KB, 64), "sm_86": (100 * KB, 99 * KB, 48), "sm_89": (100 * KB, 99 * KB, 48), "sm_90": (228 * KB, 227 * KB, 64),
    "sm_100": (228 * KB, 227 * KB, 64), "sm_120": (100 * KB, 99 * KB, 48), "gfx942": (64 * KB, 64 * KB, 32)}
DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int32: "i32"}
HOPPER = 790  # TFLOP/s
MATRIX = ("HGMMA", "HMMA", "UTCHMMA", "v_mfma", "v_smfma")


# ---------------------------------------------------------------------------------------------------------------------------------
# for comparison: the form of the Triton tutorial on fused attention, in our words

@triton.jit
def tutorial_loop(q, k_source, v_source, acc, l, m, first, column, rows, low, high, scale, BLOCK_N: tl.constexpr, MASKED: tl.constexpr):
    for j in tl.range(low, high, BLOCK_N):
        k = k_source.load([first + j, column])
        s = tl.dot(q, k.T)
        if MASKED:
            s = s * scale + tl.where(rows[:, None] >= j + tl.arange(0, BLOCK_N)[None, :], 0.0, -1e6)
            m_new = tl.maximum(m, tl.max(s, 1))
            s = s - m_new[:, None]
        else:
            m_new = tl.maximum(m, tl.max(s, 1) * scale)
            s = s * scale - m_new[:, None]
        p = tl.math.exp2(s)
        shrink = tl.math.exp2(m - m_new)
        acc = acc * shrink[:, None]
        v = v_source.load([first + j, column])
        acc = tl.dot(p.to(v.dtype), v, acc)
        l = l * shrink + tl.sum(p, 1)
        m = m_new
    return acc, l, m


@triton.jit
def tutorial_forward(q_source, k_source, v_source, o_ptr, lse_ptr, T, scale, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr):
    """Documents of equal length T, a multiple of both blocks. Grid (T / BLOCK_M, heads, documents)."""
    row0, head, heads, first = tl.program_id(0) * BLOCK_M, tl.program_id(1), tl.num_programs(1), tl.program_id(2) * T
    column = head * D
    rows = row0 + tl.arange(0, BLOCK_M)
    q = q_source.load([first + row0, column])
    m = tl.full([BLOCK_M], -float("inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    scale *= 1.4426950408889634
    if CAUSAL:  # blocks that all rows see, then those on the diagonal
        acc, l, m = tutorial_loop(q, k_source, v_source, acc, l, m, first, column, rows, 0, row0, scale, BLOCK_N, False)
        acc, l, m = tutorial_loop(q, k_source, v_source, acc, l, m, first, column, rows, row0, row0 + BLOCK_M, scale, BLOCK_N, True)
    else:
        acc, l, m = tutorial_loop(q, k_source, v_source, acc, l, m, first, column, rows, 0, T, scale, BLOCK_N, False)
    place = (first + rows[:, None]).to(tl.int64) * heads * D + column + tl.arange(0, D)[None, :]
    tl.store(o_ptr + place, (acc / l[:, None]).to(o_ptr.dtype.element_ty))
    tl.store(lse_ptr + head * T * tl.num_programs(2) + first + rows, m + tl.math.log2(l))


def tutorial(q, k, v, T, causal):
    """q, k, v (documents x T, heads, D) on Hopper or later -> o. Forward only."""
    from triton.tools.tensor_descriptor import TensorDescriptor
    tokens, heads, D = q.shape
    block_m, block_n, warps, stages = 128, 64, 8, 3
    o, lse = torch.empty_like(q), torch.empty(heads, tokens, dtype=torch.float32, device=q.device)
    sources = [TensorDescriptor(x.view(tokens, -1), [tokens, heads * D], [heads * D, 1], [rows, D]) for x, rows in ((q, block_m), (k, block_n), (v, block_n))]
    tutorial_forward[(T // block_m, heads, tokens // T)](*sources, o, lse, T, D ** -0.5, D=D, BLOCK_M=block_m, BLOCK_N=block_n, CAUSAL=causal,
                                                         num_warps=warps, num_stages=stages)
    return o


# ---------------------------------------------------------------------------------------------------------------------------------
# compiling

class Recorder:
    """Stands in for a kernel: keeps the arguments of its launch instead of launching it."""

    def __init__(self, kernel, launches):
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid):
        return lambda *args, **constants: self.launches.append((self.kernel, args, constants))


def column_of(target):
    """The column of ours.TILES that serves this target."""
    if target.startswith("gfx"):
        return target
    with mock.patch.object(torch.cuda, "get_device_capability", lambda device=None: divmod(int(target[3:]), 10)), mock.patch.object(torch.version, "hip", None):
        return ours.architecture(torch.device("cuda"))


def our_launches(target, D, causal, dtype, group):
    """[(kernel, arguments, constants)] of a forward and a backward pass, as they would be on this target."""
    launches, column = [], column_of(target)
    recorders = {name: Recorder(kernel, launches) for name, kernel in ours.KERNELS.items()}
    with mock.patch.object(ours, "KERNELS", recorders), mock.patch.object(ours, "architecture", lambda device: column):
        q, k, v = (torch.zeros(256, heads, D, dtype=dtype, requires_grad=True) for heads in (2 * group, 2, 2))
        ours.attention(q, k, v, torch.tensor([0, 256], dtype=torch.int32), 256, causal).sum().backward()
    return launches


def tutorial_launch(D, causal, dtype):
    launches = []
    with mock.patch.dict(globals(), tutorial_forward=Recorder(tutorial_forward, launches)):
        tutorial(*(torch.zeros(256, 2, D, dtype=dtype) for _ in range(3)), 256, causal)
    return launches[0]


def compiled(kernel, args, constants, target):
    """What triton.compile makes of a launch, with the knowledge of alignment that the launcher would have."""
    constants = dict(constants)
    options = {name: constants.pop(name) for name in list(constants) if name not in kernel.arg_names}
    signature, attributes = {name: "constexpr" for name in constants}, {}
    for i, (name, value) in enumerate(zip(kernel.arg_names, args)):
        if hasattr(value, "block_shape"):
            signature[name] = f"tensordesc<{DTYPES[value.base.dtype]}{list(value.block_shape)}>"
        elif isinstance(value, torch.Tensor):
            signature[name] = "*" + DTYPES[value.dtype]
            attributes[i,] = [["tt.divisibility", 16]]
        elif isinstance(value, int):
            signature[name] = "i32"
            if value % 16 == 0 and not kernel.params[i].do_not_specialize:
                attributes[i,] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32"
    source = ASTSource(kernel, {name: signature[name] for name in kernel.arg_names}, {(kernel.arg_names.index(name),): value for name, value in constants.items()}, attributes)
    gpu = GPUTarget("hip", target, 64) if target.startswith("gfx") else GPUTarget("cuda", int(target[3:]), 32)
    return triton.compile(source, target=gpu, options=options)


# ---------------------------------------------------------------------------------------------------------------------------------
# reading machine code

def instructions(listing):
    """Assembly of NVIDIA (nvdisasm) or AMD -> [(name, its operands)], where ("label", L) stands for a label."""
    found = []
    for line in listing.splitlines():
        if label := re.match(r"\s*(\.L\w+):", line):
            found.append(("label", label[1]))
        elif code := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?)\s*;", line) or re.match(r"\s+([vsdgb][a-z0-9]*_\w+)\s*(.*)", line):
            found.append((code[1], code[2]))
    return found


def inner_loops(code):
    """Loops of the code that hold no other loop, each a list of instructions."""
    place = {operand: i for i, (name, operand) in enumerate(code) if name == "label"}
    spans = set()
    for i, (name, operand) in enumerate(code):
        goal = re.search(r"(\.L\w+)", operand) if name.startswith(("BRA", "s_cbranch", "s_branch")) else None
        if goal and place.get(goal[1], i) < i:
            spans.add((place[goal[1]], i))
    inner = [(a, b) for a, b in spans if not any((a, b) != (c, d) and a <= c and d <= b for c, d in spans)]
    return [[x for x in code[a:b + 1] if x[0] != "label"] for a, b in sorted(inner)]


def matrix_flops(name):
    """FLOPs of one warp by an instruction's name, HGMMA.64x128x16... (of four warps) or HMMA.16816...; 0 where it does not say."""
    if shape := re.match(r"HGMMA\.(\d+)x(\d+)x(\d+)", name):
        return 2 * int(shape[1]) * int(shape[2]) * int(shape[3]) / 4
    if shape := re.match(r"HMMA\.16(8)(\d+)", name):
        return 2 * 16 * 8 * int(shape[2])
    return 0


def hidden_exponentials(loop):
    """Share of the loop's exponentials that are issued while an HGMMA is in flight."""
    in_flight, hidden, seen = False, 0, 0
    for name, operand in loop:
        if name.startswith("HGMMA"):
            in_flight = True
        elif name.startswith("WARPGROUP.DEPBAR") and operand.endswith("0x0"):  # until none is left
            in_flight = False
        elif name.startswith("MUFU.EX2"):
            seen, hidden = seen + 1, hidden + in_flight
    return hidden / max(seen, 1)


@dataclass
class Facts:
    """What machine code says: registers of a thread, instructions that spill, and of the loop over blocks ..."""
    registers: int
    spills: int
    loop: int              # instructions
    matrix: int            # of these, matrix products
    exponentials: int
    matrix_flops: float    # of one warp
    overlap: float


def main_loop(code):
    """The innermost loop with matrix products; where a masked loop stands beside, the one without."""
    loops = [loop for loop in inner_loops(code) if any(name.startswith(MATRIX) for name, _ in loop)]
    return min(loops, key=len, default=[])


def read(listing, usage=""):
    """Facts of a listing. usage: `cuobjdump -res-usage`; on AMD the listing itself says these."""
    code = instructions(listing)
    loop = main_loop(code)
    count = lambda *names: sum(name.startswith(names) for name, _ in loop)
    if usage:
        registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())
        spills = sum(name.startswith(("LDL", "STL")) for name, _ in code) or stack
    else:
        number = lambda key: int(re.search(rf"{key}:\s+(\d+)", listing)[1])
        registers, spills = number(r"\.vgpr_count"), number(r"\.vgpr_spill_count")
    return Facts(registers, spills, len(loop), count(*MATRIX), count("MUFU.EX2", "v_exp"), sum(matrix_flops(name) for name, _ in loop), hidden_exponentials(loop))


def disassembled(kernel):
    """(listing, resource usage) of a compiled kernel."""
    if "amdgcn" in kernel.asm:
        return kernel.asm["amdgcn"], ""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "kernel.cubin")
        with open(path, "wb") as file:
            file.write(kernel.asm["cubin"])
        tool = lambda *words: subprocess.run([*words, path], capture_output=True, text=True, check=True).stdout
        return tool(triton.knobs.nvidia.nvdisasm.path, "-c"), tool(triton.knobs.nvidia.cuobjdump.path, "-res-usage")


# ---------------------------------------------------------------------------------------------------------------------------------
# the model

def blocks_on_sm(target, registers, shared, warps):
    memory, _, most_warps = TARGETS[target]
    if target.startswith("gfx"):
        return min(4 * min(8, 512 // max(registers, 1)) // warps, memory // max(shared, 1))
    by_registers = 65536 // (-(-registers // 8) * 8 * 32) // 4 * 4 // warps
    return min(by_registers, memory // (shared + KB), most_warps // warps)


def prediction(name, facts, D, block_m, block_n, warps, blocks, bytes_per_value=2):
    """The model of the docstring -> cycles of each unit, and of an iteration in all."""
    kept, loaded = {"forward": (block_m, 2 * block_n), "backward_q": (2 * block_m, 2 * block_n), "backward_kv": (2 * block_n, 2 * block_m)}[name]
    row, products = D * bytes_per_value, {"forward": 2, "backward_q": 3, "backward_kv": 4}[name]
    reads = {"forward": 2, "backward_q": 3, "backward_kv": 4}[name] * loaded // 2  # of rows by a warpgroup, one tile a product
    mma = facts.matrix_flops * warps / 4096
    smem = (warps // 4 * reads + kept + loaded) * row / 128
    mufu = facts.exponentials * warps * 32 / 16
    issue = (facts.loop - facts.matrix) * warps / 4
    softmax = max(1.15 * issue, mufu) + 60
    alone = mma + softmax + 40
    latency = alone - facts.overlap * min(softmax, mma / products)
    best = max(latency / max(blocks, 1), mma, smem, mufu, issue)
    return dict(mma=mma, smem=smem, mufu=mufu, issue=issue, cycles=(best + alone) / 2)


def examine(form, target, launch, D, causal, dtype):
    """One row of the table, as a dict."""
    kernel, args, constants = launch
    name = kernel.fn.__name__.replace("tutorial_", "")
    block_m, block_n, warps = (constants[key] for key in ("BLOCK_M", "BLOCK_N", "num_warps"))
    row = dict(form=form, target=target, kernel=name, head_dim=D, causal=causal, tile=(block_m, block_n, warps, constants["num_stages"]))
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # the compiler prints all its input where it fails
            binary = compiled(kernel, args, constants, target)
    except Exception as problem:
        return row | dict(error=f"{type(problem).__name__}: {(str(problem).strip() or '-').splitlines()[0][:100]}")
    facts, shared = read(*disassembled(binary)), binary.metadata.shared
    blocks = blocks_on_sm(target, facts.registers, shared, warps)
    threads = 64 if target.startswith("gfx") else 32
    row |= asdict(facts) | dict(shared=shared, fits=shared <= TARGETS[target][1] and blocks > 0, blocks=blocks, a_score=facts.loop * warps * threads / (block_m * block_n))
    if target == "sm_90" and dtype != torch.float32 and facts.matrix_flops:
        row |= prediction(name, facts, D, block_m, block_n, warps, blocks)
        row["tflops"] = HOPPER * row["mma"] / row["cycles"]
    return row


def line(row):
    m, n, warps, stages = row["tile"]
    start = f"{row['form']:9}{row['target']:7}{row['kernel']:12}{row['head_dim']:4} {'causal' if row['causal'] else '':7}{f'{m}x{n}':>7} {warps}w {stages}s "
    if "error" in row:
        return start + row["error"]
    text = start + f"{row['registers']:5}{row['spills']:7}{row['shared']:8,}{'' if row['fits'] else '!':1}{row['blocks']:6} {row['loop']:6}{row['a_score']:8.2f}{row['matrix']:7}"
    text += f"{row['overlap']:9.0%}" if row["target"] == "sm_90" else f"{'-':>9}"
    return text + (f"{row['mma']:7.0f}{row['smem']:6.0f}{row['mufu']:6.0f}{row['issue']:6.0f}{row['tflops']:8.0f}" if "tflops" in row else "")


def summary(rows):
    """One line about all rows."""
    own = [row for row in rows if row["form"] == "ours"]
    good = [row for row in own if "error" not in row]
    parts = [f"0 spills in {sum(row['spills'] == 0 for row in good)} of {len(own)} kernels", f"shared memory fits in {sum(row['fits'] for row in good)} of {len(own)}"]
    hopper = [row for row in rows if row["target"] == "sm_90" and "error" not in row and row["kernel"] == "forward"]
    for form in ("ours", "tutorial"):
        score = {}
        for row in hopper:
            if row["form"] == form:
                score[row["head_dim"]] = max(row["a_score"], score.get(row["head_dim"], 0))
        if score:
            parts.append(f"{form} forward on sm_90: " + ", ".join(f"{value:.2f} at {D}" for D, value in score.items()) + " thread instructions a score at most")
    if mine := [row for row in hopper if row["form"] == "ours"]:
        parts.append(f"softmax and products overlap in {sum(row['overlap'] >= 0.5 for row in mine)} of {len(mine)} forward kernels there")
    return "; ".join(parts)


def main(targets, head_dims, dtype, group, path=None):
    """Prints the table and the line that sums it up; returns whether nothing spills and all fits."""
    if ours.INTERPRETED:
        raise SystemExit("--static: unset TRITON_INTERPRET, under which nothing is compiled")
    print(f"Triton {triton.__version__}, {DTYPES[dtype]}, {group} query heads a key head; compiled, not run. "
          f"sm_90: cycles of an iteration on an SM, and TFLOP/s predicted from them\n")
    print(f"{'form':9}{'target':7}{'kernel':12}{'dim':>4} {'':7}{'tile':>7} {'':5} {'regs':>5}{'spills':>7}{'shared':>8} {'blocks':>6} {'loop':>6}{'a score':>8}{'matrix':>7}{'overlap':>9}"
          f"{'mma':>7}{'smem':>6}{'mufu':>6}{'issue':>6}{'TFLOP/s':>8}")
    rows = []
    for target in targets:
        for D in head_dims:
            for causal in (False, True):
                launches = [("ours", launch) for launch in our_launches(target, D, causal, dtype, group)]
                if target in ("sm_90", "sm_100") and D in (64, 128) and dtype != torch.float32:
                    launches.append(("tutorial", tutorial_launch(D, causal, dtype)))
                for form, launch in launches:
                    rows.append(examine(form, target, launch, D, causal, dtype))
                    print(line(rows[-1]), flush=True)
                both = [row for row in rows[-len(launches):] if row["kernel"] != "forward"]
                if all("tflops" in row for row in both):  # of the seven products five are credited
                    time = sum(row["cycles"] / (row["tile"][0] * row["tile"][1]) for row in both)
                    print(f"{'':16}backward, both kernels, 5 products credited of 7: {HOPPER * 10 * D / 4096 / time:.0f} TFLOP/s")
    print("\n" + summary(rows))
    if path:
        with open(path, "w") as file:
            json.dump(rows, file, indent=1)
    return all("error" not in row and row["spills"] == 0 and row["fits"] for row in rows if row["form"] == "ours")
