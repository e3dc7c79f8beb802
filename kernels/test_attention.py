"""What must stay true of the attention kernels, on a machine without a GPU.

Numbers are checked in Triton's interpreter, by kernels/in_interpreter.py, which `test_in_the_interpreter` runs in a process of its own: the
interpreter has to be switched on before Triton is imported. Here the kernels are compiled for GPUs that are not there and their machine code is
read: no spilled registers, shared memory that fits, matrix units in use and kept busy. Neither shows races or speed; bench/attention.py does."""
import collections, importlib.util, multiprocessing, os, re, subprocess, sys, tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="the package triton is not installed")


@needs_triton
def test_in_the_interpreter():
    """All of kernels/in_interpreter.py. BLAS with more than one thread makes it up to 30 times slower."""
    environment = os.environ | dict(TRITON_INTERPRET="1", OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1")
    checks = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "kernels/in_interpreter.py"], cwd=ROOT, env=environment,
                            capture_output=True, text=True)
    assert checks.returncode == 0, checks.stdout + checks.stderr


# --- where the kernel cannot serve


@pytest.mark.parametrize("capability, head_dim, dtype, reason", [
    ((9, 0), 64, torch.bfloat16, None), ((8, 9), 96, torch.bfloat16, None), ((12, 0), 128, torch.float16, None), ((7, 5), 64, torch.float16, "no tiles for Some GPU"),
    ((9, 0), 192, torch.bfloat16, "head dimension 192"), ((9, 0), 64, torch.float64, "torch.float64")], ids=str)
@needs_triton
def test_what_cannot_be_served_is_said_at_the_start(capability, head_dim, dtype, reason, monkeypatch):
    """--attention auto takes PyTorch's and says why in the plan; --attention triton is an error with the same reason."""
    from train import pick_attention
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Some GPU")
    asked, config = SimpleNamespace(attention="auto"), SimpleNamespace(head_dim=head_dim)
    serves, line = pick_attention(asked, torch.device("cuda"), dtype, config)
    assert serves == (reason is None) and "\n" not in line and (reason or "our kernel") in line
    asked.attention = "triton"
    if reason:
        with pytest.raises(SystemExit, match=f"--attention triton: .*{reason}"):
            pick_attention(asked, torch.device("cuda"), dtype, config)
    else:
        assert pick_attention(asked, torch.device("cuda"), dtype, config)[0]
    asked.attention = "sdpa"
    assert not pick_attention(asked, torch.device("cuda"), dtype, config)[0]


def test_without_a_gpu():
    """With or without Triton: auto takes PyTorch's attention, triton is an error."""
    from train import pick_attention
    config = SimpleNamespace(head_dim=64)
    assert not pick_attention(SimpleNamespace(attention="auto"), torch.device("cpu"), torch.float32, config)[0]
    with pytest.raises(SystemExit, match="--attention triton: (no tiles for device cpu|the package triton is not installed)"):
        pick_attention(SimpleNamespace(attention="triton"), torch.device("cpu"), torch.float32, config)


# --- compiled for other machines

# target: (its column of TILES, bytes of shared memory that a program may have, its matrix instruction)
TARGETS = {"sm_80": ("sm_80", 166912, "HMMA"), "sm_86": ("sm_86", 101376, "HMMA"), "sm_89": ("sm_86", 101376, "HMMA"), "sm_90": ("sm_90", 232448, "HGMMA"),
           "sm_100": ("sm_90", 232448, "UTCHMMA"), "sm_120": ("sm_86", 101376, "HMMA"), "gfx942": ("gfx942", 65536, "v_mfma")}
Case = collections.namedtuple("Case", "target kernel head_dim causal group dtype")


def all_cases():
    """Every tile on every target, causal and not, with groups of heads and without; fp16, fp32 and the smaller head dimensions once each."""
    for target in TARGETS:
        for kernel in ("forward", "backward_q", "backward_kv"):
            for head_dim in (64, 96, 128):
                forms = [(True, 4), (False, 1), (False, 4), (True, 1)]  # sm_89 is sm_86 with another name
                for causal, group in forms[:{"sm_90": 4, "sm_89": 1}.get(target, 2)]:
                    yield Case(target, kernel, head_dim, causal, group, "bfloat16")
                if target in ("sm_80", "sm_90") and head_dim == 64:
                    yield Case(target, kernel, head_dim, True, 1, "float16")
            if target == "sm_90":
                for head_dim in (16, 80):
                    yield Case(target, kernel, head_dim, True, 1, "bfloat16")
            if target in ("sm_80", "sm_90"):
                yield Case(target, kernel, 64, True, 1, "float32")


CASES = list(all_cases())


def launched(case, precision="high"):
    """What `launch` would start on the target: (kernel, arguments by name, compiler options)."""
    from kernels import attention
    torch.set_float32_matmul_precision(precision)
    T, kv_heads, dtype = 256, 2, getattr(torch, case.dtype)
    q, o, do = (torch.zeros(T, kv_heads * case.group, case.head_dim, dtype=dtype) for _ in range(3))
    k, v = (torch.zeros(T, kv_heads, case.head_dim, dtype=dtype) for _ in range(2))
    rows = torch.zeros(kv_heads * case.group, T)
    arguments, tensors = {"forward": ((q, k, v), (o, rows)), "backward_q": ((q, k, v, o, do), (q, rows, rows)),
                          "backward_kv": ((q, k, v, do), (k, v, rows, rows))}[case.kernel]
    kernel, calls = attention.KERNELS[case.kernel], []

    class Recorder:
        def __getitem__(self, grid):
            return lambda *arguments, **options: calls.append((arguments, options))

    saved = attention.architecture, attention.KERNELS
    attention.architecture, attention.KERNELS = lambda device: TARGETS[case.target][0], {case.kernel: Recorder()}
    try:
        table = attention.row_blocks(torch.tensor([0, T], dtype=torch.int32), T, case.causal)
        attention.launch(case.kernel, kv_heads if case.kernel == "backward_kv" else q.shape[1], case.group, arguments, tensors, table, case.causal, 0.125)
    finally:
        attention.architecture, attention.KERNELS = saved
    (positional, options), = calls
    values = dict(zip(kernel.arg_names, positional)) | {name: options.pop(name) for name in list(options) if name in kernel.arg_names}
    return kernel, values, options


def compiled(case):
    """The binary that `launch` would run, as Triton's own launcher would compile it: pointers and strides known to be multiples of 16."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    kernel, values, options = launched(case)
    short = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int32: "i32"}
    signature, constants, attributes = {}, {}, {}
    for place, parameter in enumerate(kernel.params):
        value = values[parameter.name]
        if parameter.is_constexpr:
            signature[parameter.name], constants[(place,)] = "constexpr", value
        elif hasattr(value, "block_shape"):
            signature[parameter.name] = f"tensordesc<{short[value.base.dtype]}{list(value.block_shape)}>".replace(" ", "")
        elif isinstance(value, torch.Tensor):
            signature[parameter.name], attributes[(place,)] = "*" + short[value.dtype], [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            signature[parameter.name] = "i32"
            if value % 16 == 0 and not parameter.do_not_specialize:
                attributes[(place,)] = [["tt.divisibility", 16]]
    target = GPUTarget("hip", "gfx942", 64) if case.target == "gfx942" else GPUTarget("cuda", int(case.target[3:]), 32)
    return triton.compile(ASTSource(kernel, signature, constants, attributes), target=target, options=options)


def inspect(case):
    """What the machine code shows: a dict of shared (bytes), spills, code and loop (the instructions of all, and of the innermost loop with products)."""
    binary = compiled(case)
    _, values, options = launched(case)
    facts = dict(shared=binary.metadata.shared, scores=values["BLOCK_M"] * values["BLOCK_N"] / (32 * options["num_warps"]))
    if case.target == "gfx942":
        text = binary.asm["amdgcn"]
        return facts | dict(spills=sum(map(int, re.findall(r"\.vgpr_spill_count:\s*(\d+)", text))), code=re.findall(r"^\s+([a-z]\w+)", text, re.M), loop=[])
    import triton
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        usage = subprocess.run([tools / "cuobjdump", "-res-usage", file.name], capture_output=True, text=True, check=True)
        listing = subprocess.run([tools / "nvdisasm", "-c", file.name], capture_output=True, text=True, check=True).stdout
    from bench.static import read  # tested by bench/test_bench.py
    read_facts = read(listing, usage.stdout + usage.stderr)
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", usage.stdout + usage.stderr).groups())
    code, labels, loops = [], {}, []
    for line in listing.splitlines():
        if label := re.match(r"\s*(\.L_\w+):", line):
            labels[label[1]] = len(code)
        elif instruction := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(.*?);", line):
            code.append(instruction[1].split()[0])
            target = re.search(r"`\((\.L_\w+)\)", instruction[1])
            if code[-1].startswith("BRA") and target and target[1] in labels:
                loops.append(code[labels[target[1]]:])
    # a branch back over EXIT returns from a wait that was moved behind the end
    loops = [loop for loop in loops if "EXIT" not in loop and any(op.split(".")[0] in ("HMMA", "HGMMA", "UTCHMMA") for op in loop)]
    return facts | dict(registers=registers, spills=stack + sum(op.startswith(("LDL", "STL")) for op in code), code=code, loop=min(loops, key=len, default=[]), overlap=read_facts.overlap)


def without_interpreter():
    os.environ.pop("TRITON_INTERPRET", None)
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def machine_code(request):
    """case -> what `inspect` will say of it, of all cases that this session tests."""
    cases = [item.callspec.params["case"] for item in request.session.items if getattr(item, "originalname", "") == "test_machine_code"]
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn"), without_interpreter) as workers:
        yield {case: workers.submit(inspect, case) for case in cases}


@needs_triton
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_machine_code(case, machine_code):
    """No spills, shared memory that the card has, matrix instructions, sums in a fixed order; on Hopper, products that overlap with exponentials."""
    facts = machine_code[case].result()
    _, shared, matrix = TARGETS[case.target]
    if case.dtype == "float32":
        matrix = "HMMA"  # its tiles are too small for Hopper's
    count = collections.Counter(op.split(".")[0] for op in facts["loop"])
    assert facts["spills"] == 0
    assert facts["shared"] <= shared
    assert not [op for op in facts["code"] if op.startswith(("RED.", "REDG", "ATOM.", "ATOMG", "UTMAREDG", "global_atomic", "buffer_atomic"))], "not deterministic"
    if case.target == "gfx942":
        assert any(op.startswith(matrix) for op in facts["code"])
        return
    assert count[matrix], f"no {matrix} in the loop"
    if case.head_dim >= 64:
        assert count["FFMA"] + 2 * count["FFMA2"] >= facts["scores"], "scale and maximum are no longer one fused multiply-add"
    if case.target == "sm_90":
        assert count["WARPGROUP"] <= (12 if case.head_dim in (48, 80, 96) else 6), "the matrix products of the loop were serialised"
        if case.kernel == "forward" and case.dtype == "bfloat16" and case.head_dim in (64, 96, 128):  # at 80 nothing overlaps
            assert facts["overlap"] >= 0.5, "exponentials do not overlap with products"
            most = {64: 7.2, 96: 10, 128: 7.9}[case.head_dim]
            assert len(facts["loop"]) / facts["scores"] <= most, "thread instructions a score"
