"""
Fused attention over packed documents, causal or not, forward and backward, in three Triton kernels.

    o = attention(q, k, v, cu_seqlens, max_seqlen, causal)    # softmax(q k' / sqrt(D)) v inside each document

Tokens of all documents lie one after another: q (T, H, D), k and v (T, H_kv, D); document i is rows cu_seqlens[i] to cu_seqlens[i + 1]. There is
no padding and no mask: a program knows the bounds of its document. The algorithm, for one block of queries:

    1. Walk over the blocks of keys from the last one that is visible to the first.            scores  s = q k'
    2. Keep the greatest score m of each row so far, and the sum l of exp(s - m).              online softmax (Milakov, Gimelshein 2018)
    3. Where m grows, shrink l and the result by exp(m_old - m_new); add exp(s - m) v.         FlashAttention (Dao et al. 2022)
    4. At the end divide by l. Keep lse = m + log l: exp(s - lse) is the softmax again, so the backward pass stores no scores.
    5. Backward, with p = exp(s - lse): dv = p' do; dp = do v'; ds = p (dp - delta), where delta = rowsum(o do); dq = ds k; dk = ds' q.
       One kernel owns a block of queries (dq), one a block of keys (dk, dv): nothing is added from two sides, so runs are equal to the bit.

What makes it fast, each a line or two below:
    - Only the first block visited (on the diagonal, or the tail) needs a mask; the loop over all others has none.
    - p v is multiplied one step late, after the next q k' has been issued: matrix units work while the exponentials are taken
      (FlashAttention-3's overlap).
    - Exponentials are of base 2 with scale x log2(e) folded into one fused multiply-add.
    - A flat grid over blocks of real rows, the longest work first, from a table made on the device: short documents cost no
      empty programs.
    - Tensor memory accelerator (TMA) loads on Hopper and later; plain pointers elsewhere.

Sources: FlashAttention 1 to 3 (arXiv 2205.14135, 2307.08691, 2407.08608), the Triton tutorial on fused attention, and the reports of their users.
"""
import torch
import triton
import triton.language as tl
from torch.library import custom_op

TABLE_ROWS = 128             # rows of a document that one entry of the table of blocks stands for
COUNTS = ("T", "n_slots")    # differ from batch to batch: no new compilation when one happens to be 1 or a multiple of 16
LOG2E = tl.constexpr(1.4426950408889634)

# ---------------------------------------------------------------------------------------------------------------------------------
# Pieces that the kernels share. A tile is a tuple of one matrix (rows, D), or of two where the head dimension is no power of two
# but the sum of two, D = D0 + D1 (96 = 64 + 32): products with it are then sums of two, and nothing is padded.


@triton.jit
def my_rows(table_ptr, n_slots, ROWS: tl.constexpr, PER_SLOT: tl.constexpr, MIRRORED: tl.constexpr):
    """(first token of this program's document, its length n, the program's first row in it) from the table that `row_blocks` makes.

    n < 0: -n rows of no document, to be zeros. MIRRORED: the document's blocks from the other end."""
    slot = tl.program_id(0) // PER_SLOT
    first = tl.load(table_ptr + slot)
    n = tl.load(table_ptr + n_slots + slot)
    block = tl.load(table_ptr + 2 * n_slots + slot)
    if MIRRORED and n > 0:
        block = (n - 1) // (ROWS * PER_SLOT) - block
    return first, n, (block * PER_SLOT + tl.program_id(0) % PER_SLOT) * ROWS


@triton.jit
def part(source, row, column, stride, end,
         ROWS: tl.constexpr, COLUMNS: tl.constexpr, TMA: tl.constexpr, TAIL: tl.constexpr):
    if TMA:
        return source.load([row, column])
    else:
        r = tl.arange(0, ROWS)
        base = source + row.to(tl.int64) * stride + column  # in 64 bits; offsets from it in 32
        pointers = base + (r[:, None] * stride + tl.arange(0, COLUMNS)[None, :])
        if TAIL:
            return tl.load(pointers, mask=(row + r < end)[:, None], other=0.0)
        else:
            return tl.load(pointers)


@triton.jit
def load(source, row, head, stride, end,
         ROWS: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, TMA: tl.constexpr, TAIL: tl.constexpr):
    """ROWS rows of one head of a (T, heads x D) matrix, from `row` on. TAIL: rows from `end` on are zeros; without it none may lie there.

    Through TMA a tile may hold the next document's first rows instead of zeros; they only meet weights that are exactly 0."""
    column = head * (D0 + D1)
    if D1:
        return (part(source, row, column, stride, end, ROWS, D0, TMA, TAIL),
                part(source, row, column + D0, stride, end, ROWS, D1, TMA, TAIL))
    else:
        return (part(source, row, column, stride, end, ROWS, D0, TMA, TAIL),)


@triton.jit
def store(target, row, head, heads, tile, factor, keep, ROWS: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr):
    """tile x factor (rows,) to rows of a contiguous (T, heads, D) matrix, where `keep` (rows,)."""
    stride = heads * (D0 + D1)
    base = target + row.to(tl.int64) * stride + head * (D0 + D1) + tl.arange(0, ROWS)[:, None] * stride
    tl.store(base + tl.arange(0, D0)[None, :], (tile[0] * factor[:, None]).to(target.dtype.element_ty), mask=keep[:, None])
    if D1:
        tl.store(base + D0 + tl.arange(0, D1)[None, :], (tile[1] * factor[:, None]).to(target.dtype.element_ty),
                 mask=keep[:, None])


@triton.jit
def zeros(ROWS: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr):
    if D1:
        return (tl.zeros([ROWS, D0], tl.float32), tl.zeros([ROWS, D1], tl.float32))
    else:
        return (tl.zeros([ROWS, D0], tl.float32),)


@triton.jit
def outer(a, b, PRECISION: tl.constexpr):
    """a b' of two tiles: (rows of a, rows of b)."""
    s = tl.dot(a[0], b[0].T, input_precision=PRECISION)
    if len(a) == 2:
        s = tl.dot(a[1], b[1].T, s, input_precision=PRECISION)
    return s


@triton.jit
def add(acc, p, b, PRECISION: tl.constexpr):
    """acc + p b, with p (rows of acc, rows of b) rounded to b's dtype."""
    p = p.to(b[0].dtype)
    if len(b) == 2:
        return (tl.dot(p, b[0], acc[0], input_precision=PRECISION),
                tl.dot(p, b[1], acc[1], input_precision=PRECISION))
    else:
        return (tl.dot(p, b[0], acc[0], input_precision=PRECISION),)


@triton.jit
def shrunk(acc, factor):
    if len(acc) == 2:
        return (acc[0] * factor[:, None], acc[1] * factor[:, None])
    else:
        return (acc[0] * factor[:, None],)


@triton.jit
def visible(queries, keys, n, CAUSAL: tl.constexpr):
    """In the one masked block: which keys, of those inside the document, each query sees."""
    if CAUSAL:
        return queries[:, None] >= keys[None, :]
    else:
        return keys[None, :] < n


# ---------------------------------------------------------------------------------------------------------------------------------
# The kernels. q_source and the like are TMA descriptors of (T, heads x D) matrices, or pointers to them.


@triton.jit(do_not_specialize=COUNTS)
def forward(q_source, k_source, v_source, o_ptr, lse_ptr, table_ptr, stride_q, stride_kv, T, n_slots, scale,
            D0: tl.constexpr, D1: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PER_SLOT: tl.constexpr,
            CAUSAL: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr):
    """o, and lse (heads, T) in base 2, of BLOCK_M queries of one head. BLOCK_N >= BLOCK_M, so that one block of keys holds the diagonal."""
    first, n, row0 = my_rows(table_ptr, n_slots, BLOCK_M, PER_SLOT, False)
    head, heads = tl.program_id(1), tl.num_programs(1)
    rows = row0 + tl.arange(0, BLOCK_M)
    keep = rows < tl.abs(n)
    if row0 >= n:  # rows of no document, or none
        store(o_ptr, first + row0, head, heads, zeros(BLOCK_M, D0, D1), rows.to(tl.float32), keep, BLOCK_M, D0, D1)
        return
    end, kv_head = first + n, head // GROUP
    scale *= LOG2E
    q = load(q_source, first + row0, head, stride_q, end, BLOCK_M, D0, D1, TMA, True)

    # the last block of keys that these queries see, the only one that needs a mask
    last = (tl.minimum(row0 + BLOCK_M, n) - 1 if CAUSAL else n - 1) // BLOCK_N * BLOCK_N
    k = load(k_source, first + last, kv_head, stride_kv, end, BLOCK_N, D0, D1, TMA, True)
    s = outer(q, k, PRECISION)  # (BLOCK_M, BLOCK_N)
    s = tl.where(visible(rows, last + tl.arange(0, BLOCK_N), n, CAUSAL), s, -float("inf"))
    m = tl.max(s, 1) * scale
    p = tl.math.exp2(tl.fma(s, scale, -m[:, None]))
    l = tl.sum(p, 1)
    acc = zeros(BLOCK_M, D0, D1)

    # all others: p v of the block before is multiplied while the exponentials of this one are taken
    for j in tl.range(last - BLOCK_N, -1, -BLOCK_N):
        k = load(k_source, first + j, kv_head, stride_kv, end, BLOCK_N, D0, D1, TMA, False)
        v = load(v_source, first + j + BLOCK_N, kv_head, stride_kv, end, BLOCK_N, D0, D1, TMA, True)
        s = outer(q, k, PRECISION)
        acc = add(acc, p, v, PRECISION)
        m_new = tl.maximum(m, tl.max(s, 1) * scale)
        p = tl.math.exp2(tl.fma(s, scale, -m_new[:, None]))
        shrink = tl.math.exp2(m - m_new)
        m, l, acc = m_new, l * shrink + tl.sum(p, 1), shrunk(acc, shrink)

    acc = add(acc, p, load(v_source, first, kv_head, stride_kv, end, BLOCK_N, D0, D1, TMA, True), PRECISION)
    store(o_ptr, first + row0, head, heads, acc, 1.0 / l, keep, BLOCK_M, D0, D1)
    tl.store(lse_ptr + head.to(tl.int64) * T + first + rows, m + tl.math.log2(l), mask=keep)


@triton.jit(do_not_specialize=COUNTS)
def backward_q(q_source, k_source, v_source, o_source, do_source, dq_ptr, lse_ptr, delta_ptr, table_ptr,
               stride_q, stride_kv, stride_do, T, n_slots, scale,
               D0: tl.constexpr, D1: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PER_SLOT: tl.constexpr,
               CAUSAL: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr):
    """dq, and delta (heads, T) = rowsum(o do) which backward_kv needs after this, of BLOCK_M queries of one head. BLOCK_N >= BLOCK_M."""
    first, n, row0 = my_rows(table_ptr, n_slots, BLOCK_M, PER_SLOT, False)
    head, heads = tl.program_id(1), tl.num_programs(1)
    rows = row0 + tl.arange(0, BLOCK_M)
    keep = rows < tl.abs(n)
    if row0 >= n:
        store(dq_ptr, first + row0, head, heads, zeros(BLOCK_M, D0, D1), rows.to(tl.float32), keep, BLOCK_M, D0, D1)
        return
    end, kv_head = first + n, head // GROUP
    do = load(do_source, first + row0, head, stride_do, end, BLOCK_M, D0, D1, TMA, True)
    o = load(o_source, first + row0, head, heads * (D0 + D1), end, BLOCK_M, D0, D1, TMA, True)
    delta = tl.sum(o[0].to(tl.float32) * do[0].to(tl.float32), 1)
    if D1:
        delta += tl.sum(o[1].to(tl.float32) * do[1].to(tl.float32), 1)
    place = head.to(tl.int64) * T + first + rows
    tl.store(delta_ptr + place, delta, mask=keep)
    lse = tl.load(lse_ptr + place, mask=keep, other=float("inf"))  # past the end p = exp2(-inf) = 0
    q = load(q_source, first + row0, head, stride_q, end, BLOCK_M, D0, D1, TMA, True)

    last = (tl.minimum(row0 + BLOCK_M, n) - 1 if CAUSAL else n - 1) // BLOCK_N * BLOCK_N
    k = load(k_source, first + last, kv_head, stride_kv, end, BLOCK_N, D0, D1, TMA, True)
    v = load(v_source, first + last, kv_head, stride_kv, end, BLOCK_N, D0, D1, TMA, True)
    p = tl.math.exp2(tl.fma(outer(q, k, PRECISION), scale * LOG2E, -lse[:, None]))  # (BLOCK_M, BLOCK_N)
    p = tl.where(visible(rows, last + tl.arange(0, BLOCK_N), n, CAUSAL), p, 0.0)
    dp = outer(do, v, PRECISION)
    dq = add(zeros(BLOCK_M, D0, D1), p * (dp - delta[:, None]), k, PRECISION)
    for j in tl.range(0, last, BLOCK_N):
        k = load(k_source, first + j, kv_head, stride_kv, end, BLOCK_N, D0, D1, TMA, False)
        v = load(v_source, first + j, kv_head, stride_kv, end, BLOCK_N, D0, D1, TMA, False)
        s = outer(q, k, PRECISION)
        dp = outer(do, v, PRECISION)
        p = tl.math.exp2(tl.fma(s, scale * LOG2E, -lse[:, None]))
        dq = add(dq, p * (dp - delta[:, None]), k, PRECISION)
    store(dq_ptr, first + row0, head, heads, dq, keep.to(tl.float32) * scale, keep, BLOCK_M, D0, D1)


@triton.jit
def add_queries(dk, dv, k, v, i, head, q_source, do_source, lse_ptr, delta_ptr, stride_q, stride_do, T, scale, first, n, columns,
                D0: tl.constexpr, D1: tl.constexpr, BLOCK_M: tl.constexpr, CAUSAL: tl.constexpr, TMA: tl.constexpr,
                PRECISION: tl.constexpr):
    """dk and dv with what the BLOCK_M queries of `head` from row i of the document on add to them.

    Scores are transposed, (keys, queries), so that p' and ds' are the left operands of their products and stay in registers."""
    rows = i + tl.arange(0, BLOCK_M)
    place = head.to(tl.int64) * T + first + rows
    q = load(q_source, first + i, head, stride_q, first + n, BLOCK_M, D0, D1, TMA, True)
    do = load(do_source, first + i, head, stride_do, first + n, BLOCK_M, D0, D1, TMA, True)
    lse = tl.load(lse_ptr + place, mask=rows < n, other=float("inf"))  # so p = 0 past the end
    delta = tl.load(delta_ptr + place, mask=rows < n, other=0.0)
    s = outer(k, q, PRECISION)  # (BLOCK_N, BLOCK_M)
    dp = outer(v, do, PRECISION)  # asked for before p, so that it is multiplied while the exponentials are taken
    p = tl.math.exp2(tl.fma(s, scale * LOG2E, -lse[None, :]))
    if CAUSAL:
        p = tl.where(rows[None, :] >= columns[:, None], p, 0.0)
    return add(dk, p * (dp - delta[None, :]), q, PRECISION), add(dv, p, do, PRECISION)


@triton.jit(do_not_specialize=COUNTS)
def backward_kv(q_source, k_source, v_source, do_source, dk_ptr, dv_ptr, lse_ptr, delta_ptr, table_ptr,
                stride_q, stride_kv, stride_do, T, n_slots, scale,
                D0: tl.constexpr, D1: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PER_SLOT: tl.constexpr,
                CAUSAL: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr):
    """dk and dv of BLOCK_N keys of one key head, summed over the GROUP query heads that share it."""
    # mirrored if causal: the last queries see the most keys, but the first keys are seen the most
    first, n, column0 = my_rows(table_ptr, n_slots, BLOCK_N, PER_SLOT, CAUSAL)
    kv_head, kv_heads = tl.program_id(1), tl.num_programs(1)
    columns = column0 + tl.arange(0, BLOCK_N)
    keep = columns < tl.abs(n)
    ones = tl.full([BLOCK_N], 1.0, tl.float32)
    if column0 >= n:
        store(dk_ptr, first + column0, kv_head, kv_heads, zeros(BLOCK_N, D0, D1), ones, keep, BLOCK_N, D0, D1)
        store(dv_ptr, first + column0, kv_head, kv_heads, zeros(BLOCK_N, D0, D1), ones, keep, BLOCK_N, D0, D1)
        return
    end = first + n
    k = load(k_source, first + column0, kv_head, stride_kv, end, BLOCK_N, D0, D1, TMA, True)
    v = load(v_source, first + column0, kv_head, stride_kv, end, BLOCK_N, D0, D1, TMA, True)
    dk, dv = zeros(BLOCK_N, D0, D1), zeros(BLOCK_N, D0, D1)
    start = column0 // BLOCK_M * BLOCK_M if CAUSAL else 0  # the first query that sees these keys
    if GROUP == 1:
        for i in tl.range(start, n, BLOCK_M):
            dk, dv = add_queries(dk, dv, k, v, i, kv_head, q_source, do_source, lse_ptr, delta_ptr, stride_q, stride_do, T, scale,
                                 first, n, columns, D0, D1, BLOCK_M, CAUSAL, TMA, PRECISION)
    else:  # one loop over all heads of the group, which takes fewer registers than one in another
        blocks = (n - start + BLOCK_M - 1) // BLOCK_M
        for step in tl.range(0, GROUP * blocks):
            member = step // blocks
            dk, dv = add_queries(dk, dv, k, v, start + (step - member * blocks) * BLOCK_M, kv_head * GROUP + member,
                                 q_source, do_source, lse_ptr, delta_ptr, stride_q, stride_do, T, scale,
                                 first, n, columns, D0, D1, BLOCK_M, CAUSAL, TMA, PRECISION)
    store(dk_ptr, first + column0, kv_head, kv_heads, dk, ones * scale, keep, BLOCK_N, D0, D1)
    store(dv_ptr, first + column0, kv_head, kv_heads, dv, ones, keep, BLOCK_N, D0, D1)


# ---------------------------------------------------------------------------------------------------------------------------------
# where they run

# (BLOCK_M, BLOCK_N, warps, stages) by kernel, head dimension and architecture, chosen by compiling: no tile spills a register, and
# each fits the card's shared memory (bench/attention.py --static shows it). 64 stands for 16 and 32 too, 96 for 48 and 80.
TILES = {
    ("forward", 64):      {"sm_80": (64, 64, 4, 3), "sm_86": (64, 64, 4, 3), "sm_90": (64, 128, 4, 2),  "gfx942": (64, 64, 4, 1)},
    ("forward", 96):      {"sm_80": (64, 64, 4, 2), "sm_86": (64, 64, 4, 2), "sm_90": (64, 128, 4, 2),  "gfx942": (64, 64, 4, 1)},
    ("forward", 128):     {"sm_80": (32, 64, 4, 2), "sm_86": (32, 64, 4, 2), "sm_90": (128, 128, 8, 2), "gfx942": (64, 64, 4, 1)},
    ("forward", 80):      {"sm_80": (64, 64, 4, 2), "sm_86": (64, 64, 4, 2), "sm_90": (64, 64, 4, 2),   "gfx942": (64, 64, 4, 1)},
    ("backward_q", 64):   {"sm_80": (64, 64, 4, 2), "sm_86": (64, 64, 4, 2), "sm_90": (64, 128, 4, 2),  "gfx942": (64, 64, 4, 1)},
    ("backward_q", 96):   {"sm_80": (32, 32, 4, 2), "sm_86": (32, 32, 4, 2), "sm_90": (64, 64, 4, 2),   "gfx942": (64, 64, 4, 1)},
    ("backward_q", 128):  {"sm_80": (32, 32, 4, 2), "sm_86": (32, 32, 4, 2), "sm_90": (64, 64, 4, 2),   "gfx942": (64, 64, 4, 1)},
    ("backward_kv", 64):  {"sm_80": (32, 64, 4, 2), "sm_86": (32, 64, 4, 2), "sm_90": (64, 64, 4, 2),   "gfx942": (64, 64, 4, 1)},
    ("backward_kv", 96):  {"sm_80": (32, 64, 4, 2), "sm_86": (32, 64, 4, 2), "sm_90": (64, 128, 8, 2),  "gfx942": (32, 64, 4, 1)},
    ("backward_kv", 128): {"sm_80": (64, 64, 8, 2), "sm_86": (64, 64, 8, 2), "sm_90": (64, 128, 8, 2),  "gfx942": (32, 64, 4, 1)},
}
if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9):  # which keeps lse and delta of a block in more registers
    TILES["backward_kv", 96] |= {"sm_80": (16, 64, 4, 2), "sm_86": (16, 64, 4, 2), "sm_90": (32, 64, 4, 2)}
    TILES["backward_kv", 128] |= {"sm_90": (32, 128, 8, 2)}
FP32_TILE = (32, 32, 4, 2)  # for every kernel and architecture
HEAD_DIMS = {16: (16, 0), 32: (32, 0), 48: (32, 16), 64: (64, 0), 80: (64, 16), 96: (64, 32), 128: (128, 0)}  # (D0, D1)
KERNELS = {"forward": forward, "backward_q": backward_q, "backward_kv": backward_kv}
INTERPRETED = triton.knobs.runtime.interpret  # TRITON_INTERPRET=1: the kernels run on the CPU, as NumPy, with Hopper's tiles


def architecture(device):
    """A column of TILES, or None."""
    if device.type != "cuda":
        return "sm_90" if INTERPRETED else None
    if torch.version.hip:
        name = torch.cuda.get_device_properties(device).gcnArchName
        return "gfx942" if name.startswith(("gfx942", "gfx950")) else None
    major, minor = torch.cuda.get_device_capability(device)
    return {8: "sm_80" if minor in (0, 7) else "sm_86", 9: "sm_90", 10: "sm_90", 12: "sm_86"}.get(major)


def unsupported(device, dtype, head_dim):
    """Why these kernels cannot serve, in a few words, or None if they can."""
    if architecture(device) is None:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"device {device.type}"
        return f"no tiles for {name}"
    if head_dim not in HEAD_DIMS:
        return f"head dimension {head_dim} is not one of {', '.join(map(str, HEAD_DIMS))}"
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"{dtype} is not bfloat16, float16 or float32"
    return None


def row_blocks(cu_seqlens, T, causal):
    """The table of work: int32 (3, slots), for each block of TABLE_ROWS rows of a document its first token, its length and the number
    of the block; the longest work first. Made on the device with static shapes: slots for every way that T tokens can fall into
    these documents, the spare ones at the end. The rows past the last document are one more document, with its length negated.

    Document i can have its slots from cu_seqlens[i] // TABLE_ROWS + i on, since those before it need at most one more each."""
    device, documents = cu_seqlens.device, cu_seqlens.numel()
    starts = cu_seqlens.long()
    lengths = torch.diff(starts, append=starts.new_full((1,), T))
    base = starts // TABLE_ROWS + torch.arange(documents, device=device)
    slot = torch.arange(T // TABLE_ROWS + documents, device=device)
    document = torch.searchsorted(base, slot, right=True) - 1
    block, length = slot - base[document], lengths[document]
    real = block * TABLE_ROWS < length
    work = torch.where(real, block + 1 if causal else length, 0)
    length = torch.where(real, torch.where(document == documents - 1, -length, length), 0)
    longest_first = torch.argsort(work, descending=True)
    return torch.stack((starts[document], length, block))[:, longest_first].int()


def tile_of(name, D, arch, dtype):
    """(BLOCK_M, BLOCK_N, warps, stages)."""
    if dtype == torch.float32:
        return FP32_TILE
    column = D if (name, D) in TILES else 64 if D < 48 else 96
    return TILES[name, column][arch]


def by_descriptor(D, arch, dtype):
    """Whether tiles are loaded by TMA: from Hopper on, unless a tile has two parts."""
    return arch == "sm_90" and not HEAD_DIMS[D][1] and dtype != torch.float32


def launch(name, heads, group, arguments, tensors, table, causal, scale):
    """One kernel over all blocks and heads. arguments: q, k, v, ... (T, heads, D), which it reads by descriptors or pointers;
    tensors: what goes by pointer in any case."""
    q, k, v = arguments[:3]
    T, _, D = q.shape
    D0, D1 = HEAD_DIMS[D]
    arch = architecture(q.device)
    block_m, block_n, warps, stages = tile_of(name, D, arch, q.dtype)
    tma = by_descriptor(D, arch, q.dtype)
    by_keys = name == "backward_kv"
    sources = []
    for x, rows in zip(arguments, (block_m, block_n, block_n, block_m, block_m)):
        if tma:
            from triton.tools.tensor_descriptor import TensorDescriptor
            x = TensorDescriptor(x, [T, x.shape[1] * D], [x.stride(0), 1], [rows, D])
        sources.append(x)
    per_slot = TABLE_ROWS // (block_n if by_keys else block_m)
    strides = [q.stride(0), k.stride(0)] + ([arguments[-1].stride(0)] if len(arguments) > 3 else [])
    n_slots = table.shape[1]
    precision = "tf32" if q.dtype != torch.float32 or torch.get_float32_matmul_precision() != "highest" else "ieee"
    KERNELS[name][(n_slots * per_slot, heads)](
        *sources, *tensors, table, *strides, T, n_slots, scale, D0=D0, D1=D1, GROUP=group, BLOCK_M=block_m, BLOCK_N=block_n,
        PER_SLOT=per_slot, CAUSAL=causal, TMA=tma, PRECISION=precision, num_warps=warps, num_stages=stages, enable_fp_fusion=True)


def laid_out(*tensors):
    """The same values as the kernels read them: the heads of a token side by side, rows aligned to 16 bytes for TMA, one row stride."""
    def good(x):
        row, head, one = x.stride()
        return (one == 1 and head == x.shape[2] and row >= x.shape[1] * head and row * x.element_size() % 16 == 0
                and x.data_ptr() % 16 == 0)
    if all(map(good, tensors)) and len({x.stride(0) for x in tensors}) == 1:
        return tensors
    return tuple(x.contiguous() if x.data_ptr() % 16 == 0 else x.clone(memory_format=torch.contiguous_format) for x in tensors)


@custom_op("encoder::attention_forward", mutates_args=())
def attention_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor,
                      causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    (q,), (k, v) = laid_out(q), laid_out(k, v)
    T, H, D = q.shape
    o = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = torch.empty(H, T, dtype=torch.float32, device=q.device)
    if T:
        launch("forward", H, H // k.shape[1], (q, k, v), (o, lse), table, causal, D ** -0.5)
    return o, lse


@custom_op("encoder::attention_backward", mutates_args=())
def attention_backward(do: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, lse: torch.Tensor,
                       table: torch.Tensor, causal: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    (do,), (q,), (k, v) = laid_out(do), laid_out(q), laid_out(k, v)
    T, H, D = q.shape
    group = H // k.shape[1]
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    delta = torch.empty_like(lse)
    if T:
        launch("backward_q", H, group, (q, k, v, o, do), (dq, lse, delta), table, causal, D ** -0.5)
        launch("backward_kv", k.shape[1], group, (q, k, v, do), (dk, dv, lse, delta), table, causal, D ** -0.5)
    return dq, dk, dv


@attention_forward.register_fake
def _(q, k, v, table, causal):
    return torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)


@attention_backward.register_fake
def _(do, q, k, v, o, lse, table, causal):
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))


def setup_context(ctx, inputs, output):
    q, k, v, table, ctx.causal = inputs
    ctx.save_for_backward(q, k, v, *output, table)
    ctx.mark_non_differentiable(output[1])


def backward(ctx, do, _):
    q, k, v, o, lse, table = ctx.saved_tensors
    return *attention_backward(do, q, k, v, o, lse, table, ctx.causal), None, None


attention_forward.register_autograd(backward, setup_context=setup_context)


def attention(q, k, v, cu_seqlens, max_seqlen, causal, table=None):
    """softmax(q k' / sqrt(D)) v inside each document -> (T, H, D), with gradients.

    q (T, H, D), k and v (T, H_kv, D), one dtype (under autocast its dtype); cu_seqlens (documents + 1,) int32, ascending from 0, on
    the same device. Rows past cu_seqlens[-1] belong to no document and come out as zeros, in the gradients too; what they hold must be
    finite. max_seqlen, the greatest length, is not needed: the grid is laid over `table`, which `row_blocks(cu_seqlens, T, causal)`
    makes, here or once for all layers."""
    if torch.is_autocast_enabled(q.device.type):
        q, k, v = (x.to(torch.get_autocast_dtype(q.device.type)) for x in (q, k, v))
    if q.dim() != 3 or k.shape != v.shape or k.shape[::2] != q.shape[::2] or q.shape[1] % max(1, k.shape[1]):
        raise ValueError(f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}: "
                         f"give q (T, H, D), k and v (T, H_kv, D), with H a multiple of H_kv")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q {q.dtype}, k {k.dtype}, v {v.dtype}: give one dtype")
    if cu_seqlens.dtype != torch.int32 or cu_seqlens.dim() != 1:
        raise ValueError(f"cu_seqlens {cu_seqlens.dtype} {tuple(cu_seqlens.shape)}: give one dimension of int32")
    if reason := unsupported(q.device, q.dtype, q.shape[2]):
        raise ValueError(f"attention: {reason}")
    return attention_forward(q, k, v, row_blocks(cu_seqlens, q.shape[0], causal) if table is None else table, causal)[0]
