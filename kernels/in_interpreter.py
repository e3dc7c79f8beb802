"""What the attention kernels compute, in Triton's interpreter: test_attention.py runs this file with TRITON_INTERPRET=1 and OPENBLAS_NUM_THREADS=1.

The tiles are those of Hopper, as shipped. Each fact was once somebody's bug; the reports are named where the test alone would not explain itself."""
import os, subprocess, sys, types
from pathlib import Path

import numpy as np
import pytest
import torch
import torch._dynamo.testing
import triton.language as tl
from torch.library import opcheck
from triton.runtime import interpreter

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from kernels import attention as kernels
from kernels.attention import HEAD_DIMS, TABLE_ROWS, TILES, attention, attention_backward, attention_forward, row_blocks
from model import Config, Transformer

assert os.environ.get("TRITON_INTERPRET") == "1", "run test_attention.py, or set TRITON_INTERPRET=1 and OPENBLAS_NUM_THREADS=1"
torch.set_num_threads(1)
LIMIT = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 2e-2}  # relative error, Frobenius; the interpreter truncates when it rounds to bf16


@pytest.fixture(autouse=True, scope="session")
def bf16_products():
    """The interpreter keeps bf16 as uint16 and multiplies those in tl.dot (triton#11584); here they are made fp32 first."""
    dot = interpreter.InterpreterBuilder.create_dot

    def widened(x):
        return interpreter.TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32) if x.dtype.scalar == tl.bfloat16 else x
    interpreter.InterpreterBuilder.create_dot = lambda self, a, b, *rest: dot(self, widened(a), widened(b), *rest)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """What the kernels allocate and do not write is NaN."""
    outside = torch.empty, torch.empty_like
    pytorch = types.SimpleNamespace(**vars(torch))
    pytorch.empty = lambda *size, **options: outside[0](*size, **options).fill_(torch.nan)
    pytorch.empty_like = lambda x, **options: outside[1](x, **options).fill_(torch.nan)
    monkeypatch.setattr(kernels, "torch", pytorch)


def inputs(T, D=64, heads=4, kv_heads=2, dtype=torch.float16):
    """q, k, v, and do, the gradient of the result."""
    torch.manual_seed(0)
    return tuple(torch.randn(T, h, D).to(dtype).requires_grad_(i < 3) for i, h in enumerate((heads, kv_heads, kv_heads, heads)))


def bounds(*lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int()


def both_passes(q, k, v, do, cu, causal):
    """o, dq, dk, dv."""
    o = attention(q, k, v, cu, max(torch.diff(cu).tolist(), default=0), causal)
    return o.detach(), *torch.autograd.grad(o, (q, k, v), do)


def formula(q, k, v, do, cu, causal):
    """The same by the formula, in float64; rows of no document are zeros."""
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    K, V = (x.repeat_interleave(group, 1) for x in (k, v))
    parts = [q[:0]]
    for a, b in zip(cu[:-1].tolist(), cu[1:].tolist()):
        s = torch.einsum("ihd,jhd->hij", q[a:b], K[a:b]) * q.shape[2] ** -0.5
        if causal:
            s = s.masked_fill(torch.ones(b - a, b - a, dtype=torch.bool).triu(1), -torch.inf)
        parts.append(torch.einsum("hij,jhd->ihd", s.softmax(-1), V[a:b]))
    o = torch.cat(parts)
    o = torch.nn.functional.pad(o, (0, 0, 0, 0, 0, len(q) - len(o)))
    return o.detach(), *torch.autograd.grad(o, (q, k, v), do.double())


def assert_right(q, k, v, do, cu, causal):
    for name, x, y in zip(("o", "dq", "dk", "dv"), both_passes(q, k, v, do, cu, causal), formula(q, k, v, do, cu, causal)):
        assert x.shape == y.shape and x.isfinite().all(), name
        error, size = float((x.double() - y).norm()), float(y.norm()) or float(do.norm())  # dq and dk of a document of one token are 0
        assert error <= LIMIT[q.dtype] * size, (name, error / size)


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


causal_or_not = pytest.mark.parametrize("causal", [False, True])


# --- right numbers


@causal_or_not
@pytest.mark.parametrize("length", [1, 7, 16, 31, 32, 33, 63, 64, 65, 127, 128, 129, 300])
def test_any_length_is_right(length, causal):
    """Lengths around every tile's and the table's bounds; both flags (triton#4541: a backward that ignored the flag), grouped heads (FlagGems#898)."""
    assert_right(*inputs(length, 32, 2, 1, torch.float32), bounds(length), causal)


@causal_or_not
@pytest.mark.parametrize("lengths", [[0, 5, 0, 0, 33, 0], [0], [0, 1, 0, 1], [5, 128], [5, 129], [100, 1, 200, 0, 77], [37, 1, 0, 64, 19]], ids=str)
def test_any_mix_of_documents_is_right(lengths, causal):
    """Empty documents, documents of one token, and the longest a multiple of a block or one more."""
    assert_right(*inputs(sum(lengths), 32, 2, 1, torch.float32), bounds(*lengths), causal)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", [(2, 2), (4, 1)], ids=["group1", "group4"])
@pytest.mark.parametrize("D", HEAD_DIMS)
def test_every_tile_is_right_in_half_precision(D, heads, dtype):
    """Hopper's tiles, loaded through descriptors where D is a power of two (80 and 96 in two parts, nothing padded). Causal with fp16, not with bf16."""
    assert_right(*inputs(210, D, *heads, dtype), bounds(3, 130, 0, 77), causal=dtype == torch.float16)


@pytest.mark.parametrize("column", ["sm_80", "gfx942"])
@pytest.mark.parametrize("D", [64, 96, 128])
def test_tiles_of_other_machines_are_right(D, column, monkeypatch):
    monkeypatch.setattr(kernels, "architecture", lambda device: column)
    assert_right(*inputs(210, D, 4, 2, torch.float16), bounds(3, 130, 0, 77), causal=True)


@causal_or_not
@pytest.mark.parametrize("D", [48, 128])
def test_fp32_is_fp32(D, causal):
    assert_right(*inputs(150, D, 2, 2, torch.float32), bounds(20, 130), causal)


@pytest.mark.parametrize("precision, tf32", [("highest", False), ("high", True)])
def test_tf32_only_where_pytorch_allows_it(precision, tf32, monkeypatch):
    """tl.dot of fp32 is tf32 unless told otherwise (triton#1671, #5895)."""
    seen = []
    monkeypatch.setattr(kernels.torch, "get_float32_matmul_precision", lambda: precision)

    class Recorder:
        def __getitem__(self, grid):
            return lambda *_, **options: seen.append(options["PRECISION"])
    monkeypatch.setattr(kernels, "KERNELS", dict.fromkeys(kernels.KERNELS, Recorder()))
    both_passes(*inputs(8, dtype=torch.float32), bounds(8), True)
    assert seen == 3 * ["tf32" if tf32 else "ieee"]


def test_long_documents_that_are_no_multiple_of_a_block():
    assert_right(*inputs(1025, 64, 1, 1, torch.float16), bounds(1025), True)


def test_max_seqlen_may_exceed_every_document():
    for length in (64, 200):
        q, k, v, do = inputs(length)
        assert torch.equal(attention(q, k, v, bounds(length), 256, True), attention(q, k, v, bounds(length), length, True))


def test_great_scores_stay_finite():
    """Logits up to about 1e4."""
    q, k, v, do = inputs(100, 64, 2, 2, torch.float32)
    q, k = ((x.detach() * 50).requires_grad_() for x in (q, k))
    found, wanted = both_passes(q, k, v, do, bounds(100), True), formula(q, k, v, do, bounds(100), True)
    assert all(x.isfinite().all() for x in found) and (found[0] - wanted[0]).norm() <= 1e-3 * wanted[0].norm()
    plain = torch.nn.functional.scaled_dot_product_attention
    qs, ks, vs = (x.detach().transpose(0, 1)[None].requires_grad_() for x in (q, k, v))
    dq, = torch.autograd.grad(plain(qs, ks, vs, is_causal=True), qs, do.transpose(0, 1)[None])
    theirs = (dq[0].transpose(0, 1) - wanted[1]).norm()
    assert (found[1] - wanted[1]).norm() <= 2 * theirs + 1e-6 * wanted[1].norm()


# --- who sees whom


def test_rows_of_no_document_are_zeros():
    """In the result and in all gradients, whatever they hold and wherever the documents end; the others are as without them, to the bit."""
    q, k, v, do = inputs(300)
    for causal in (False, True):
        padded = both_passes(q, k, v, do, bounds(100, 33), causal)
        alone = both_passes(*(x[:133].detach().requires_grad_() for x in (q, k, v)), do[:133], bounds(100, 33), causal)
        assert all(not x[133:].any() for x in padded) and equal([x[:133] for x in padded], alone)


def test_nothing_but_empty_documents():
    q, k, v, do = inputs(20)
    assert not any(x.any() for x in both_passes(q, k, v, do, bounds(0, 0), True))
    q, k, v, do = inputs(0)
    assert all(x.numel() == 0 for x in both_passes(q, k, v, do, bounds(0), True))


def test_one_token_attends_to_itself():
    q, k, v, do = inputs(2)
    assert torch.allclose(attention(q, k, v, bounds(0, 1, 0, 1), 1, False), v.repeat_interleave(2, 1), rtol=1e-3)


def test_causal_rows_do_not_depend_on_later_ones():
    q, k, v, do = inputs(200)
    before = attention(q, k, v, bounds(200), 200, True)
    k2, v2 = k.detach().clone(), v.detach().clone()
    k2[130:], v2[130:] = 7, -9
    after = attention(q, k2, v2, bounds(200), 200, True)
    assert torch.equal(before[:130], after[:130]) and not torch.equal(before[130:], after[130:])


@causal_or_not
def test_documents_do_not_see_each_other(causal):
    """Each document of a packed batch comes out as if it were alone, to the bit, gradients too."""
    q, k, v, do = inputs(200)
    packed = both_passes(q, k, v, do, bounds(70, 30, 100), causal)
    for a, b in ((0, 70), (70, 100), (100, 200)):
        alone = both_passes(*(x[a:b].detach().requires_grad_() for x in (q, k, v)), do[a:b], bounds(b - a), causal)
        assert equal([x[a:b] for x in packed], alone)


def test_nan_stays_in_its_document_where_loads_are_by_pointer():
    q, k, v, do = (x.detach() for x in inputs(100, 32, 2, 1, torch.float32))
    clean = both_passes(*(x.clone().requires_grad_() for x in (q, k, v)), do, bounds(60, 40), True)
    for x in (q, k, v):
        x[60:] = torch.nan
    dirty = both_passes(*(x.requires_grad_() for x in (q, k, v)), do, bounds(60, 40), True)
    assert equal([x[:60] for x in clean], [x[:60] for x in dirty])


def test_runs_are_equal_to_the_bit():
    x = inputs(200)
    assert equal(both_passes(*x, bounds(77, 123), True), both_passes(*x, bounds(77, 123), True))


# --- the table of work


@causal_or_not
def test_table_holds_every_block_once(causal):
    """Every 128 rows of every document and of the rows past the last, the longest work first, in static shapes."""
    torch.manual_seed(0)
    for trial in range(50):
        lengths = torch.randint(0, (3, 300)[trial % 2], (trial,)).tolist()
        rest = trial * 13 % 300
        cu, T = bounds(*lengths), sum(lengths) + rest
        table = row_blocks(cu, T, causal)
        assert table.dtype == torch.int32 and table.shape == (3, T // TABLE_ROWS + len(cu))
        first, n, block = table.tolist()
        found = sorted((f, l, b) for f, l, b in zip(first, n, block) if l)
        starts = cu.tolist()
        wanted = [(a, l, b) for a, l in zip(starts, lengths) for b in range(-(-l // TABLE_ROWS))]
        wanted += [(starts[-1], -rest, b) for b in range(-(-rest // TABLE_ROWS))]
        assert found == sorted(wanted)
        work = [0 if l == 0 else b + 1 if causal else abs(l) for l, b in zip(n, block)]
        assert work == sorted(work, reverse=True)


def test_seventy_thousand_documents_fit_the_grid():
    """Axes 1 and 2 of a grid end at 65,535 (triton#3299, flashinfer#3125): the blocks are on axis 0, the heads on axis 1."""
    T = 70_000
    cu, grids = torch.arange(T + 1, dtype=torch.int32), []
    table = row_blocks(cu, T, False)
    assert (table[1] == 1).sum() == T and table.shape[1] < 1.02 * T

    class Recorder:
        def __getitem__(self, grid):
            grids.append(grid)
            return lambda *_, **__: None
    q = torch.zeros(T, 4, 16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "KERNELS", dict.fromkeys(kernels.KERNELS, Recorder()))
        kernels.launch("forward", 4, 1, (q, q, q), (q, q), table, False, 1.0)
    (x, y), = grids
    assert T <= x < 2**31 and y == 4


def test_bounds_are_read_on_the_device_and_no_further():
    """cu_seqlens at the end of a larger buffer: what follows it is not read. The table follows its values, not its object."""
    q, k, v, do = inputs(90)
    buffer = torch.tensor([0, 40, 90, 10**9, -10**9], dtype=torch.int32)
    assert torch.equal(attention(q, k, v, buffer[:3], 90, True), attention(q, k, v, bounds(40, 50), 50, True))
    buffer[1] = 20
    assert torch.equal(attention(q, k, v, buffer[:3], 90, True), attention(q, k, v, bounds(20, 70), 70, True))


# --- how tensors lie


def test_slices_of_one_buffer():
    buffer = torch.randn(120, 3, 2, 64).half().requires_grad_()
    q, k, v = buffer.unbind(1)
    do = torch.randn(120, 2, 64).half()
    o = attention(q, k, v, bounds(120), 120, True)
    d, = torch.autograd.grad(o, buffer, do)
    wanted = formula(q, k, v, do, bounds(120), True)
    for x, y in zip((o, *d.unbind(1)), wanted):
        assert (x - y).norm() <= 1e-3 * y.norm()


def test_layout_makes_no_difference():
    """Transposed, strided, expanded and unaligned inputs, and gradients of the result, give the same numbers as contiguous ones."""
    q, k, v, do = (x.detach() for x in inputs(70, 64, 2, 2))
    forms = {"transposed": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1), "last axis strided": lambda x: x.repeat_interleave(2, 2)[:, :, ::2],
             "unaligned": lambda x: torch.nn.functional.pad(x.flatten(), (1, 0))[1:].view(x.shape), "every second row": lambda x: x.repeat_interleave(2, 0)[::2],
             "heads of a wider row": lambda x: torch.nn.functional.pad(x, (0, 0, 1, 2))[:, 1:3]}
    plain = both_passes(*(x.clone().requires_grad_() for x in (q, k, v)), do, bounds(30, 40), True)
    for name, form in forms.items():
        assert equal(plain, both_passes(*(form(x).requires_grad_() for x in (q, k, v)), form(do), bounds(30, 40), True)), name
    same = k[:1].expand(70, 2, 64)  # row stride 0
    strided, whole = (both_passes(q.requires_grad_(), same_k.detach().requires_grad_(), v.requires_grad_(), do, bounds(70), True)
                      for same_k in (same, same.contiguous()))
    assert equal(strided, whole)


def test_gradients_that_are_not_contiguous():
    """The stride-0 gradient of a sum, and a transposed one (flash-attention#355, fla#871)."""
    q, k, v, _ = inputs(70)
    o = attention(q, k, v, bounds(70), 70, False)
    ones = torch.autograd.grad(o.sum(), (q, k, v), retain_graph=True)
    assert equal(ones, torch.autograd.grad(o, (q, k, v), torch.ones_like(o.detach()).fill_(1), retain_graph=True))
    w = torch.randn(4, 70, 64).half()
    assert equal(torch.autograd.grad((o.transpose(0, 1) * w).sum(), (q, k, v), retain_graph=True),
                 torch.autograd.grad(o, (q, k, v), w.transpose(0, 1).contiguous()))


FAR = """
import sys; sys.path.insert(0, {root!r})
import torch
import torch._dynamo.testing
from kernels.attention import attention
T, stride = 40, 60_000_000                      # the last row begins beyond 2**31 elements
far = lambda x: torch.empty(0, dtype=x.dtype).set_(storage, 0, x.shape, (stride, x.shape[2], 1)).copy_(x)
near = [torch.randn(T, 1, 16, dtype=torch.float16) for _ in range(2)]
storage = torch.UntypedStorage(2 * (stride * T))  # never touched but for a few pages
q = far(near[0])
cu = torch.tensor([0, T], dtype=torch.int32)
a = attention(q, near[1], near[1], cu, T, True)
b = attention(near[0], near[1], near[1], cu, T, True)
assert torch.equal(a, b)
k = far(near[1])
assert torch.equal(attention(near[0], k, k, cu, T, True), attention(near[0], near[1], near[1], cu, T, True))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs memory that is reserved but not used")
def test_offsets_have_64_bits():
    """Rows more than 2**31 elements apart; in a process of its own, since 32-bit offsets end it."""
    far = subprocess.run([sys.executable, "-c", FAR.format(root=str(ROOT))], capture_output=True, text=True)
    assert far.returncode == 0, (far.returncode, far.stderr)


# --- as PyTorch's operators


def call(q, k, v, cu, causal=True):
    return attention(q * 1.5, k, v.sin(), cu, 64, causal).tanh()


def test_operators_pass_opcheck():
    q, k, v, do = inputs(33, 16, dtype=torch.float32)
    table = row_blocks(bounds(33), 33, True)
    opcheck(torch.ops.encoder.attention_forward.default, (q, k, v, table, True))
    o, lse = attention_forward(q, k, v, table, True)
    assert not lse.requires_grad
    q, k, v, o, lse = (x.detach() for x in (q, k, v, o, lse))
    opcheck(torch.ops.encoder.attention_backward.default, (do, q, k, v, o, lse, table, True))


def test_compiled_whole_and_seldom():
    """One graph, gradients as in eager mode, at most two compilations for three batches of other lengths and documents.

    Without Inductor, which would compile the little that lies around the operators with a C++ compiler."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call, fullgraph=True, backend=counter)
    for lengths in ([20, 13], [40, 1, 9], [64, 64, 3, 5]):
        q, k, v, do = inputs(sum(lengths), 16, 2, 1, torch.float32)
        cu = bounds(*lengths)
        got, wanted = (torch.autograd.grad(f(q, k, v, cu), (q, k, v), do) for f in (compiled, call))
        for x, y in zip(got, wanted):
            assert torch.allclose(x, y, atol=1e-5)
    assert counter.frame_count <= 2


def test_twice_differentiated_is_an_error():
    q, k, v, do = inputs(9, 16)
    dq, = torch.autograd.grad(attention(q, k, v, bounds(9), 9, True), q, do, create_graph=True)
    with pytest.raises(RuntimeError, match="attention_backward"):
        torch.autograd.grad(dq.sum(), q)


def test_autocast_brings_mixed_dtypes_together():
    """fp32 q and k beside bf16 v, as norms and rotary positions leave them under autocast; gradients have the inputs' dtypes, outside it too."""
    q, k, _, do = inputs(40, 32, dtype=torch.float32)
    v = torch.randn(40, 2, 32).bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        o = attention(q, k, v, bounds(40), 40, False)
    assert o.dtype == torch.bfloat16
    dq, dk, dv = torch.autograd.grad(o.float(), (q, k, v), do)
    assert (dq.dtype, dk.dtype, dv.dtype) == (torch.float32, torch.float32, torch.bfloat16)
    with pytest.raises(ValueError, match="one dtype"):
        attention(q, k, v, bounds(40), 40, False)


def test_under_ddp_and_compile():
    torch._dynamo.reset()
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        network, ids, cu = tiny(), torch.randint(50, (2, 24)), bounds(24, 10, 14)
        wanted = torch.autograd.grad(network(ids, cu, 24, causal=True).sum(), list(network.parameters()), allow_unused=True)
        torch.compile(torch.nn.parallel.DistributedDataParallel(network), backend="aot_eager")(ids, cu, 24, causal=True).sum().backward()
        for p, d in zip(network.parameters(), wanted):
            assert d is None or torch.allclose(p.grad, d, rtol=1e-4, atol=1e-4)
    finally:
        torch.distributed.destroy_process_group()


# --- bad input is refused


def test_shapes_that_make_no_sense():
    q, k, v, _ = inputs(20)
    with pytest.raises(ValueError, match="give q"):
        attention(q, k[:10], v[:10], bounds(10), 10, True)  # as many queries as keys: what causal means else is anybody's guess
    with pytest.raises(ValueError, match="give q"):
        attention(q[:, :3], k, v, bounds(20), 20, True)
    with pytest.raises(ValueError, match="give q"):
        attention(q, k, v[:, :, :32], bounds(20), 20, True)
    with pytest.raises(ValueError, match="int32"):
        attention(q, k, v, bounds(20).long(), 20, True)
    with pytest.raises(ValueError, match="head dimension 192"):
        attention(*inputs(8, 192)[:3], bounds(8), 8, True)
    with pytest.raises(ValueError, match="float64"):
        attention(*(x.double() for x in (q, k, v)), bounds(20), 20, True)


# --- in the model


def tiny(**changes):
    torch.manual_seed(0)
    network = Transformer(Config(**dict(vocab_size=50, block_size=256, n_layer=2, n_head=2, n_kv_head=1, n_embd=32, intermediate_size=48) | changes))
    for p in network.parameters():
        torch.nn.init.normal_(p, std=0.2) if p.dim() > 1 else torch.nn.init.normal_(p, 1, 0.2)
    network.kernel = True
    return network


@causal_or_not
@pytest.mark.parametrize("rows", ["whole", "packed", "padded"])
def test_model_is_the_same_by_either_path(rows, causal):
    """Hidden states, loss and every gradient; each row one document, documents packed, and padding as a document of its own."""
    network = tiny()
    ids = torch.randint(50, (2, 70))
    cu = {"whole": None, "packed": bounds(40, 30, 1, 20, 49), "padded": bounds(45, 25, 60, 10)}[rows]
    places = None if causal else torch.arange(0, 140, 3)  # MLM scores some, CLM all
    targets = torch.randint(50, (140 if causal else len(places),))
    results = []
    for network.kernel in (True, False):
        hidden = network(ids, cu, None if cu is None else 70, causal).detach()
        loss = network(ids, cu, None if cu is None else 70, causal, places, targets)
        results.append([hidden, loss.detach(), *torch.autograd.grad(loss, list(network.parameters()))])
    for name, x, y in zip(["hidden", "loss", *(name for name, _ in network.named_parameters())], *results):
        assert (x - y).norm() <= 2e-5 * y.norm(), name


def test_padded_and_packed_are_equal_to_the_bit():
    """A text in a padded row gives what it gives in a packed one, and, but for rounding, alone."""
    network, ids = tiny(), torch.randint(50, (40,))
    with torch.no_grad():
        for causal in (False, True):
            padded = network(torch.cat((ids, ids.new_zeros(30)))[None], bounds(40, 30), 40, causal)[0, :40]
            assert torch.equal(padded, network(torch.cat((ids, ids.flip(0)[:30]))[None], bounds(40, 30), 40, causal)[0, :40])
            assert torch.allclose(padded, network(ids[None], causal=causal)[0], atol=1e-5)
