"""What must stay true of the benchmarks: they read machine code rightly, and count what they say they count."""
import json, os, subprocess, sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="the kernels are written in Triton")
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from bench import attention as bench
from bench import gpu_checks, static

pytestmark = pytest.mark.skipif(static.ours.INTERPRETED, reason="TRITON_INTERPRET is set: nothing is compiled")

LISTING = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;
        /*0010*/                   STL.64 [R1], R2 ;
        /*0020*/                   MUFU.EX2 R3, R3 ;
.L_x_1:
        /*0030*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], !UPT ;
        /*0040*/                   MUFU.EX2 R3, R3 ;
        /*0050*/                   WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
        /*0060*/              @!P0 MUFU.EX2 R4, R4 ;
        /*0070*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0080*/                   MUFU.EX2 R5, R5 ;
        /*0090*/                   MUFU.EX2 R6, R6 ;
        /*00a0*/               @P0 BRA `(.L_x_1) ;
        /*00b0*/                   LDL R2, [R1] ;
        /*00c0*/                   EXIT ;
"""


def test_a_listing_is_read_as_it_stands():
    facts = static.read(LISTING, "Function f:\n REG:40 STACK:8 SHARED:0 LOCAL:0")
    assert facts == static.Facts(registers=40, spills=2, loop=8, matrix=1, exponentials=4, matrix_flops=2 * 64 * 128 * 16 / 4, overlap=0.5)


def test_only_the_loop_with_the_products_counts_and_outer_loops_do_not():
    outer = "\n".join((".L_x_0:", LISTING, "        /*00d0*/  BRA `(.L_x_0) ;", ".L_x_7:", "        /*00e0*/  FADD R1, R1, R2 ;", "        /*00f0*/  BRA `(.L_x_7) ;"))
    assert static.read(outer, "REG:40 STACK:0").loop == 8


def launch_of(name, D=64, causal=True, **options):
    kernel, args, constants = next(launch for launch in static.our_launches("sm_90", D, causal, torch.bfloat16, 1) if launch[0].fn.__name__ == name)
    return kernel, args, constants | options


def test_the_forward_kernel_on_hopper_and_one_that_must_spill():
    good = static.examine("ours", "sm_90", launch_of("forward"), 64, True, torch.bfloat16)
    assert good["spills"] == 0 and good["fits"] and good["overlap"] >= 0.5
    assert good["mma"] == 4 * good["tile"][0] * good["tile"][1] * 64 / 4096  # the products, no more and no fewer
    assert good["exponentials"] * good["tile"][2] * 32 >= good["tile"][0] * good["tile"][1]
    assert 5 < good["a_score"] <= 7.2
    squeezed = static.examine("ours", "sm_90", launch_of("forward", maxnreg=112), 64, True, torch.bfloat16)
    assert squeezed["registers"] <= 112 and squeezed["spills"] > 20
    assert static.summary([good, squeezed]).startswith("0 spills in 1 of 2 kernels; ")


def test_the_tutorials_form_is_read_too_and_does_not_overlap():
    row = static.examine("tutorial", "sm_90", static.tutorial_launch(64, True, torch.bfloat16), 64, True, torch.bfloat16)
    assert row["overlap"] == 0 and row["matrix"] and row["a_score"] > 8


def test_a_kernel_that_does_not_compile_is_a_row_and_a_failure():
    row = static.examine("ours", "sm_90", launch_of("forward", BLOCK_N=24), 64, True, torch.bfloat16)
    assert "error" in row and row["error"] in static.line(row)
    assert static.summary([row]).startswith("0 spills in 0 of 1 kernels")


def test_registers_and_shared_memory_bound_the_blocks_on_an_sm():
    assert static.blocks_on_sm("sm_90", 255, 1000, 8) == 1 and static.blocks_on_sm("sm_90", 128, 1000, 8) == 2
    assert static.blocks_on_sm("sm_90", 32, 113 * 1024, 4) == 2 and static.blocks_on_sm("sm_90", 32, 114 * 1024, 4) == 1
    assert static.blocks_on_sm("sm_86", 32, 1000, 8) == 6


def test_pairs_are_those_that_exist():
    case = bench.Case("", [3, 0, 1], 2, 1, 16, True)
    assert bench.pairs(case) == 6 + 0 + 1 and bench.pairs(case._replace(causal=False)) == 9 + 0 + 1
    lengths = bench.packed("short", 5000, 64, True).lengths
    assert sum(lengths) == 5000 and max(lengths) <= 2048


def test_a_wrong_contender_is_found_out_and_not_timed(monkeypatch):
    device, case = torch.device("cpu"), bench.Case("", [40, 24], 2, 1, 16, True)

    def right(case, device, dtype):
        def run(q, k, v):
            parts = [t.transpose(0, 1)[None].split(case.lengths, 2) for t in (q, k, v)]
            return torch.cat([torch.nn.functional.scaled_dot_product_attention(*part, is_causal=True, enable_gqa=True)[0].transpose(0, 1) for part in zip(*parts)])
        return run

    def blind(case, device, dtype):  # to the bounds of documents
        return lambda q, k, v: right(case._replace(lengths=[64]), device, dtype)(q, k, v)

    monkeypatch.setattr(bench, "CONTENDERS", {"right": right, "blind": blind})
    results = bench.race(case, ["right", "blind"], device, torch.float32, 1)
    assert max(results["right"]["errors"]) < 1e-6 and len(results["right"]["errors"]) == 4 and results["right"]["fwd"][1] > 0 and results["right"]["bwd"][1] > 0
    assert results["blind"]["out"].startswith("wrong") and "fwd" not in results["blind"]


def test_the_report_tells_of_parts_that_failed(tmp_path, capsys):
    step = dict(ms=[1.0, 2.0, 3.0], tokens_per_s=1e6, mfu=0.5, memory_gb=3.0, first_loss=9.0, last_loss=8.0)
    (tmp_path / "step-mlm-triton-true.json").write_text(json.dumps(step))
    for name, status in {"step-mlm-triton-true": "0 9", "attention": "1 3", "train": "skipped 0"}.items():
        (tmp_path / f"{name}.status").write_text(status)
    (tmp_path / "attention.log").write_text("Traceback\nRuntimeError: no luck\n")
    gpu_checks.report(tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert any("step-mlm-triton-true" in x and "done" in x and "MFU 50.0%" in x for x in lines)
    assert any("attention" in x and "FAILED" in x and "no luck" in x for x in lines) and any("train" in x and "no time left" in x for x in lines)
    assert json.loads((tmp_path / "gpu.json").read_text())["attention"]["status"] == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_one_line_says_what_can_be_done():
    for script, words in ((["bench/attention.py"], "--static"), (["bench/gpu_checks.py", "step"], "--device cpu")):
        done = subprocess.run([sys.executable, *script], cwd=ROOT, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        assert done.returncode == 1 and len(done.stderr.splitlines()) == 1 and words in done.stderr
