"""TransformerEngine's real Python on a machine without a GPU, its compiled extension replaced by this package's
numerics.

Three functions of the extension are given a meaning, ``quantize``, ``generic_gemm`` and ``te_general_grouped_gemm``, in
the layouts its Python expects; every other name is an empty class. What then runs for real is the Python of the wheel:
te.Linear's forward and backward, the recipe, which quantiser is called for which operand, which operand goes into which
GEMM, what is saved; of the grouped GEMM its arguments and the storages. What the CUDA kernels compute is not shown
here; tests/gpu compares that.

Run as a script: ``python te_host.py WHEEL_FOLDER``, see hosted.py; prints one JSON object, check -> "ok" or what went
wrong.
"""

import enum
import importlib.machinery
import json
import os
import sys
import types
from unittest.mock import MagicMock

import torch

from verl_fp8.numerics import linear as reference
from verl_fp8.numerics import quantize as numerics

os.environ["NVTE_PROJECT_BUILDING"] = "1"  # TransformerEngine then loads no CUDA library when imported


class DType(enum.IntEnum):
    """transformer_engine_torch.DType (common/include/transformer_engine/transformer_engine.h)."""

    kByte = 0
    kInt32 = 2
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat4E2M1 = 10


class NVTE_Fused_Attn_Backend(enum.IntEnum):
    """Its members are compared with TransformerEngine's own list at import."""

    NVTE_No_Backend = -1
    NVTE_F16_arbitrary_seqlen = 1
    NVTE_FP8 = 2


class FP8FwdTensors(enum.IntEnum):
    """Places of the forward's quantisers (pytorch/csrc/common.h)."""

    (
        GEMM1_INPUT,
        GEMM1_WEIGHT,
        GEMM1_OUTPUT,
        GEMM2_INPUT,
        GEMM2_WEIGHT,
        GEMM2_OUTPUT,
        GEMM3_INPUT,
        GEMM3_WEIGHT,
        GEMM3_OUTPUT,
    ) = range(9)


class FP8BwdTensors(enum.IntEnum):
    """Places of the backward's quantisers (pytorch/csrc/common.h)."""

    GRAD_OUTPUT1, GRAD_INPUT1, GRAD_OUTPUT2, GRAD_INPUT2, GRAD_OUTPUT3, GRAD_INPUT3 = range(6)


class _Anything(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(cls, name, len(vars(cls)))
        return vars(cls)[name]


class _Extension(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, _Anything(name, (), {}))
        return self.__dict__[name]


TORCH = {DType.kFloat32: torch.float32, DType.kFloat16: torch.float16, DType.kBFloat16: torch.bfloat16}
CALLS: list[tuple] = []  # what the extension was asked, in order


def quantize(tensor, quantizer, *_):
    """tex.quantize for a Float8BlockQuantizer: codes and scales in the layouts of
    Float8BlockQuantizer.get_scale_shape."""
    from transformer_engine.pytorch.tensor.storage.float8_blockwise_tensor_storage import Float8BlockwiseQTensorStorage

    n, square = quantizer.block_len, quantizer.block_scaling_dim == 2
    options = {
        "scale_format": "pow2" if quantizer.force_pow_2_scales else "fp32",
        "eps": quantizer.amax_epsilon,
        "check_finite": False,
    }
    flat = tensor.reshape(-1, tensor.shape[-1])
    CALLS.append(("quantize", tuple(flat.shape), flat.dtype, (n, n) if square else (1, n), *options.values()))
    fields = dict.fromkeys(("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv"))
    for direction, wanted, matrix in (
        ("rowwise", quantizer.rowwise_usage, flat),
        ("columnwise", quantizer.columnwise_usage, flat.t()),
    ):
        if not wanted:
            continue
        q = numerics.quantize(matrix.contiguous(), (n, n) if square else (1, n), **options)
        shape = quantizer.get_scale_shape(tensor.shape, columnwise=direction == "columnwise")
        scale = q.scale_inv if square else q.scale_inv.t()
        padded = torch.ones(shape)
        padded[: scale.shape[0], : scale.shape[1]] = scale
        fields[f"{direction}_data"], fields[f"{direction}_scale_inv"] = q.data.view(torch.uint8), padded
    return Float8BlockwiseQTensorStorage(
        **fields,
        fp8_dtype=quantizer.dtype,
        quantizer=quantizer,
        is_2D_scaled=square,
        fake_dtype=tensor.dtype,
    )


def _dequantized(operand, direction):
    if isinstance(operand, torch.Tensor):
        return operand.float()
    codes = getattr(operand, f"_{direction}_data").view(torch.float8_e4m3fn)
    scale = getattr(operand, f"_{direction}_scale_inv")
    square = operand._is_2D_scaled
    block = (128, 128) if square else (1, 128)
    scale = scale if square else scale.t()
    shape = [-(-size // unit) for size, unit in zip(codes.shape, block, strict=True)]
    values = numerics.QuantizedTensor(codes, scale[: shape[0], : shape[1]].contiguous(), block).dequantize()
    return values if direction == "rowwise" else values.t()


def generic_gemm(a, transa, b, transb, out, quantizer, out_dtype, *args, **kwargs):
    """tex.generic_gemm, row-major: (b.T if transb else b) @ (a.T if transa else a), from the operand's right
    direction."""
    left = _dequantized(b, "columnwise" if transb else "rowwise")
    right = _dequantized(a, "rowwise" if transa else "columnwise")
    left, right = (left.t() if transb else left), (right.t() if transa else right)
    CALLS.append(("gemm", tuple(left.shape), tuple(right.shape), not isinstance(a, torch.Tensor)))
    y = reference.matmul(left, right, TORCH[DType(int(out_dtype))])
    return y, None, None, None


def te_general_grouped_gemm(a, transa, b, transb, out, out_dtype, m_splits, bias, bias_dtype, single_output, *args):
    """tex.te_general_grouped_gemm (pytorch/csrc/extensions/gemm.cpp): one product an expert, into one tensor's slices
    or many."""
    _, grad, _, _, accumulate, split_accumulator, _ = args
    assert len(a) == len(b) == len(m_splits) and split_accumulator and not accumulate
    assert (grad, single_output) == ((transa, transb) != (True, False), (transa, transb) != (False, True))
    parts = out[0].split(m_splits) if single_output else out
    for left, right, part in zip(a, b, parts, strict=True):
        y = generic_gemm(left, transa, right, transb, None, None, out_dtype)[0]
        assert y.shape == part.shape and part.is_contiguous() and y.numel()
        part.copy_(y)
    return bias


def load(folder: str):
    """``transformer_engine.pytorch`` from an unpacked wheel."""
    extension = _Extension("transformer_engine_torch")
    for known in (
        DType,
        NVTE_Fused_Attn_Backend,
        FP8FwdTensors,
        FP8BwdTensors,
        quantize,
        generic_gemm,
        te_general_grouped_gemm,
    ):
        setattr(extension, known.__name__, known)
    sys.modules["transformer_engine_torch"] = extension
    for name in ("onnxscript", "onnxscript.onnx_opset", "onnx"):
        module = MagicMock(name=name)
        module.__spec__, module.__path__ = importlib.machinery.ModuleSpec(name, None), []
        sys.modules[name] = module
    sys.path.insert(0, folder)
    import transformer_engine.common

    transformer_engine.common.load_framework_extension = lambda framework: None
    import transformer_engine.pytorch
    from transformer_engine.pytorch import quantization
    from transformer_engine.pytorch.module import linear

    # Both sides sum in float64, so that padded tokens cannot change the order of a float32 sum.
    reference.matmul = lambda a, b, dtype: (a.double() @ b.double()).to(dtype)

    # What te.Linear asks of the device.
    quantization._FP8_SUPPORT = quantization._FP8_BLOCK_SCALING_SUPPORT = (True, "")
    torch.cuda.is_available = lambda: True
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.Tensor.is_cuda = property(lambda self: True)
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    gemm = sys.modules["transformer_engine.pytorch.cpp_extensions.gemm"]
    gemm.get_cublas_workspace = linear.get_cublas_workspace = lambda *args: torch.empty(1, 1)
    gemm.get_sm_count, gemm._empty_tensor = lambda: 132, lambda: torch.empty(0)
    return transformer_engine.pytorch


if __name__ == "__main__":
    load(sys.argv[1])
    sys.modules["te_host"] = sys.modules["__main__"]
    import hosted
    import te_checks

    print(json.dumps(hosted.run(vars(te_checks))))
