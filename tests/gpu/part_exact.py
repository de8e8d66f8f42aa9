"""What equality to the bit needs of the GPU's kernels (recipes/exact-on-gpu.md): a token's bits must not depend on its
batch."""

import json
import os
import subprocess
import sys

sys.path[:0] = [os.path.join(os.path.dirname(os.path.abspath(__file__)), *up) for up in (("..", ".."), ())]

import common
import torch
from common import need, need_gpu, randn

from verl_fp8.layers.filter import LayerFilter
from verl_fp8.numerics import exact
from verl_fp8.numerics.quantize import quantize
from verl_fp8.numerics.recipe import Recipe

# A decoding step, around FlashInfer's switch at 32 tokens, and training.
ROWS = (1, 8, 31, 32, 64, 512, 4096)


def _rows_equal(values: dict, name: str, function, x: torch.Tensor, rows=ROWS) -> bool:
    """Whether ``function`` of the first rows gives the first rows of ``function(x)``, to the bit."""
    whole, equal = function(x), True
    for count in rows:
        share = float((function(x[:count]) == whole[:count]).float().mean())
        values[f"{name}, {count} of {len(x)} tokens: outputs equal"] = share
        equal &= share == 1.0
    return equal


def reference(values: dict) -> None:
    """The exact mode's float64 operations: the CPU's bits on the GPU, and independent of the batch."""
    need_gpu()
    x, weight, up = randn(64, 1024, seed=1), randn(1024, seed=2), randn(64, 1024, seed=3)
    q, k, v = (randn(2, heads, 40, 64, seed=heads + i) for i, heads in enumerate((4, 2, 2)))
    allowed = torch.ones(40, 40, dtype=torch.bool, device=q.device).tril()[None, None]
    table = exact.rope_table(torch.arange(40, device=q.device), 64, 1e6, torch.bfloat16)
    operations = {
        "rms_norm": (lambda a, b: exact.rms_norm(a, b, 1e-6), (x, weight)),
        "silu_mul": (exact.silu_mul, (x, up)),
        "apply_rope": (exact.apply_rope, (q.transpose(1, 2), *(t[None] for t in table))),
        "attention": (lambda *a: exact.attention(*a, 0.125), (q, k, v, allowed)),
        "dense": (lambda a, b: exact.dense(a, b, None, torch.float32), (x, up)),
    }
    wrong = []
    for name, (operation, inputs) in operations.items():
        same = torch.equal(operation(*inputs).cpu(), operation(*(t.cpu() for t in inputs)))
        values[f"{name}: the CPU's bits"] = same
        wrong += [] if same else [name]
    assert not wrong, wrong
    need("transformers")
    model = _model()
    ids = torch.randint(0, 512, (6, 50), generator=torch.Generator().manual_seed(5)).to(q.device)
    with torch.no_grad():
        together = model(input_ids=ids, use_cache=False).logits
        assert all(
            torch.equal(model(input_ids=row[None], use_cache=False).logits[0], all_)
            for row, all_ in zip(ids, together, strict=True)
        )
    values["model: sequences alone and together"] = "equal to the bit"


def _model():
    import transformers

    from verl_fp8.trainer.convert import convert_linears
    from verl_fp8.trainer.exact import make_exact

    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=128, architectures=["Qwen3ForCausalLM"],
    )  # fmt: skip
    model = transformers.Qwen3ForCausalLM(config).to(common.DEVICE, torch.bfloat16).eval()
    convert_linears(model, Recipe(), LayerFilter())
    make_exact(model)
    return model


def fp8_products(values: dict) -> None:
    """FP8 GEMMs: each token's output at every number of tokens; DeepGEMM's must be equal, cuBLASLt's is reported."""
    need_gpu(hopper=True)
    from verl_fp8.numerics import scaled_mm

    x, recipe = randn(max(ROWS), 4096, seed=1), Recipe()
    w_q = scaled_mm.weight_operand(randn(3072, 4096, seed=2), recipe)
    _rows_equal(
        values, "cuBLASLt", lambda a: scaled_mm.gemm(scaled_mm.quantize_rows(a, recipe), w_q, torch.bfloat16), x
    )
    need("deep_gemm")
    import deep_gemm

    def product(a: torch.Tensor) -> torch.Tensor:
        codes = quantize(a, (1, 128), check_finite=False)
        out = torch.empty(len(a), 3072, dtype=torch.bfloat16, device=a.device)
        deep_gemm.fp8_gemm_nt((codes.data, codes.scale_inv), (w_q.data, w_q.scale_inv), out, disable_ue8m0_cast=True)
        return out

    assert _rows_equal(values, "DeepGEMM", product, x), "DeepGEMM's bits depend on the number of tokens"


def attention(values: dict) -> None:
    """FlashAttention with one split: a query decoded from a paged cache has the bits of its row in the whole
    sequence."""
    need_gpu()
    need("vllm")
    from vllm.v1.attention.backends.fa_utils import get_flash_attn_version
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    version = get_flash_attn_version()
    values["FlashAttention version"] = version
    lengths, heads, groups, dim, page = (17, 300, 2049), 16, 8, 128, 16
    wrong = []
    for length in lengths:
        q, k, v = (randn(length, n, dim, seed=length + i) for i, n in enumerate((heads, groups, groups)))
        ends = torch.tensor([0, length], dtype=torch.int32, device=q.device)
        options = {"causal": True, "num_splits": 1, "fa_version": version, "softmax_scale": dim**-0.5}
        whole = flash_attn_varlen_func(q, k, v, length, ends, length, cu_seqlens_k=ends, **options)
        pages = -(-length // page)
        cache = [torch.zeros(pages * page, groups, dim, dtype=q.dtype, device=q.device) for _ in range(2)]
        cache[0][:length], cache[1][:length] = k, v
        cache = [c.view(pages, page, groups, dim) for c in cache]
        last = flash_attn_varlen_func(
            q[-1:].contiguous(), *cache, 1, torch.tensor([0, 1], dtype=torch.int32, device=q.device), length,
            seqused_k=torch.tensor([length], dtype=torch.int32, device=q.device),
            block_table=torch.arange(pages, dtype=torch.int32, device=q.device)[None], **options,
        )  # fmt: skip
        same = torch.equal(last[0], whole[-1])
        values[f"length {length}: decode equals prefill"] = same
        wrong += [] if same else [length]
    assert not wrong, f"decode and prefill differ at lengths {wrong}"


def _in_mode(values: dict, name: str) -> None:
    """Run one of the functions below in a process of its own: vLLM's kernels and cuBLAS read the mode once a
    process."""
    need_gpu()
    need("vllm")
    env = {
        **os.environ,
        "VLLM_BATCH_INVARIANT": "1",
        "CUBLAS_WORKSPACE_CONFIG": ":16:8",
        "CUBLASLT_WORKSPACE_SIZE": "1",
    }
    child = subprocess.run([sys.executable, __file__, name], env=env, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr.strip().splitlines()[-1:]
    values |= json.loads(child.stdout.splitlines()[-1])
    assert values["holds"], "depends on the number of tokens"


def norms(values: dict) -> None:
    """vLLM's norms of the batch-invariant mode: a row at a time, and the fused one against the plain one."""
    _in_mode(values, "norms")


def head(values: dict) -> None:
    """vLLM's matmul and log-softmax of the batch-invariant mode: a row at a time and all of them."""
    _in_mode(values, "head")


def _norms(values: dict) -> None:
    from vllm.model_executor.determinism.batch_invariant import rms_norm_batch_invariant

    x, residual, weight = randn(4096, 2560, seed=1), randn(4096, 2560, seed=2), randn(2560, seed=3)

    def fused(both: torch.Tensor) -> torch.Tensor:
        hidden, stream = (t.clone() for t in both.unbind(1))
        return rms_norm_batch_invariant(hidden, weight, 1e-6, residual=stream)[0]

    plain = _rows_equal(values, "plain", lambda a: rms_norm_batch_invariant(a, weight, 1e-6), x)
    both = _rows_equal(values, "with residual", fused, torch.stack((x, residual), dim=1))
    sums = rms_norm_batch_invariant(x + residual, weight, 1e-6)
    values["with residual equals the plain one on the rounded sum"] = float(
        (fused(torch.stack((x, residual), 1)) == sums).float().mean()
    )
    values["holds"] = plain and both


def _head(values: dict) -> None:
    from vllm.model_executor.determinism import batch_invariant

    x, weight = randn(512, 2560, seed=1), randn(32000, 2560, seed=2, scale=0.02)
    rows = tuple(r for r in ROWS if r <= len(x))
    product = _rows_equal(values, "linear", lambda a: batch_invariant.linear_batch_invariant(a, weight), x, rows)
    logits = torch.nn.functional.linear(x, weight).float()
    softmax = _rows_equal(values, "log-softmax", batch_invariant.log_softmax, logits, rows)
    _rows_equal(values, "torch's linear", lambda a: torch.nn.functional.linear(a, weight), x, rows)
    values["holds"] = product and softmax


PARTS = {
    "exact reference": reference,
    "exact fp8 products": fp8_products,
    "exact attention": attention,
    "exact norms": norms,
    "exact head": head,
}

if __name__ == "__main__":
    found: dict = {}
    {"norms": _norms, "head": _head}[sys.argv[1]](found)
    print(json.dumps(found))
