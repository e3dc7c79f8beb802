"""What must stay true of the attention kernels, on a machine without a GPU.

Numbers are checked in Triton's interpreter, by kernels/in_interpreter.py, which `test_in_the_interpreter` runs in a process of its own: the
interpreter has to be switched on before Triton is imported. Here the kernels are compiled for GPUs that are not there and their machine code is
read: no spilled registers, shared memory that fits, matrix units in use and kept busy. Neither shows races or speed; bench/attention.py does."""
import collections, importlib.util, multiprocessing, os, subprocess, sys
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

MATRIX = {"sm_80": "HMMA", "sm_86": "HMMA", "sm_89": "HMMA", "sm_90": "HGMMA", "sm_100": "UTCHMMA", "sm_120": "HMMA", "gfx942": "v_mfma"}
Case = collections.namedtuple("Case", "target kernel head_dim causal group dtype")


def all_cases():
    """Every tile on every target, causal and not, with groups of heads and without; fp16, fp32 and the smaller head dimensions once each."""
    for target in MATRIX:
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


def inspect(case):
    """What the machine code shows: a dict of fits, spills, overlap, scores (of a tile, for each thread), code and loop (names of instructions)."""
    from bench import static  # tested by bench/test_bench.py
    launches = static.our_launches(case.target, case.head_dim, case.causal, getattr(torch, case.dtype), case.group)
    kernel, args, constants = next(launch for launch in launches if launch[0].fn.__name__ == case.kernel)
    binary = static.compiled(kernel, args, constants, case.target)
    listing, usage = static.disassembled(binary)
    facts, code = static.read(listing, usage), static.instructions(listing)
    return dict(fits=binary.metadata.shared <= static.TARGETS[case.target][1], spills=facts.spills, overlap=facts.overlap,
                scores=constants["BLOCK_M"] * constants["BLOCK_N"] / (32 * constants["num_warps"]),
                code=[name for name, _ in code], loop=[name for name, _ in static.main_loop(code)],
                not_specialised={parameter.name for parameter in kernel.params if parameter.do_not_specialize})


def without_interpreter():
    os.environ.pop("TRITON_INTERPRET", None)
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high")  # fp32 by tf32, on matrix units


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
    matrix = MATRIX[case.target] if case.dtype != "float32" else "HMMA"  # its tiles are too small for Hopper's
    count = collections.Counter(op.split(".")[0] for op in facts["loop"])
    assert facts["spills"] == 0
    assert facts["fits"]
    assert facts["not_specialised"] == {"T", "n_slots"}  # what differs from batch to batch compiles nothing anew
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
