"""The Triton quantiser: its bits in Triton's interpreter, its instructions as compiled for Hopper and Blackwell."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from verl_fp8.errors import ConfigError, DataError

triton = pytest.importorskip("triton", reason="no Triton, hence no GPU either")
from verl_fp8.numerics import quantize_triton


@pytest.mark.slow
def test_in_the_interpreter():
    """triton_interpreted.py: the very kernels that Triton compiles on a GPU, interpreted, equal numerics/quantize.py
    bit for bit."""
    tests = Path(__file__).with_name("triton_interpreted.py")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-W",
        "ignore::RuntimeWarning",
        str(tests),
    ]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
    assert int(re.search(r"(\d+) passed", done.stdout).group(1)) >= 60, done.stdout[-500:]


def test_refusals():
    """Wrong dtypes, shapes, formats and blocks raise as numerics.quantize does."""
    for x in (torch.ones(2, 2, dtype=torch.float64), torch.ones(4)):
        with pytest.raises(DataError):
            quantize_triton.quantize_rows(x, 4)
    with pytest.raises(ConfigError, match="scale_format"):
        quantize_triton.quantize_rows(torch.ones(2, 2), 2, scale_format="e8m0")
    with pytest.raises(ConfigError, match="weight_block"):
        quantize_triton.quantize_blocks(torch.ones(2, 2), (0, 2))


_SIZES = {"rows": "i32", "columns": "i32", "x_stride": "i32", "scale_stride": "i32", "scale_block_stride": "i32"}
_TYPES = {
    "x": "*i16",
    "codes": "*u8",
    "codes_t": "*u8",
    "scales": "*fp32",
    "scales_t": "*fp32",
    "eps": "fp32",
    "largest": "fp32",
}
_CONSTANTS = {
    "N": 128,
    "R": 128,
    "C": 128,
    "WIDTH": 128,
    "HEIGHT": 128,
    "ROWS": 32,
    "ALONG_ROWS": True,
    "HARDWARE_CAST": True,
}


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")  # Triton 3.9 announces its next default
@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize("kernel", ["_rows_kernel", "_both_kernel", "_blocks_kernel"])
@pytest.mark.parametrize("scale_format", ["fp32", "pow2"])
def test_instructions(kernel, capability, scale_format, tmp_path, monkeypatch):
    """PTX for Hopper and Blackwell: IEEE division and product, the saturating cast to nearest even, nothing fused or
    flushed."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    function = getattr(quantize_triton, kernel)
    types = {**_SIZES, **_TYPES}
    signature = {name: types.get(name, "constexpr") for name in function.arg_names}
    constants = {**_CONSTANTS, "POW2": scale_format == "pow2", "TRANSPOSED": True}
    constants = {name: constants[name] for name, kind in signature.items() if kind == "constexpr"}
    aligned = {
        (i,): [["tt.divisibility", 16]] for i, n in enumerate(signature) if signature[n] not in ("constexpr", "fp32")
    }
    source = ASTSource(function, signature=signature, constexprs=constants, attrs=aligned)
    ptx = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 8}).asm["ptx"]
    for wanted in ("div.rn.f32", "mul.f32", "cvt.rn.satfinite.e4m3x2.f32"):
        assert wanted in ptx, wanted
    for unwanted in ("div.full", "div.approx", "rcp.", "fma.", ".ftz", "mul.rn.f16", "cvt.rn.f16"):
        assert unwanted not in ptx, unwanted
    # Memory in 16-byte accesses: what keeps the kernels near the bandwidth of a copy.
    assert "ld.global.v4.b32" in ptx
    assert "st.global.v4.b32" in ptx
