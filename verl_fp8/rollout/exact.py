"""The exact mode in vLLM on CPU: custom operators and an attention backend, through vLLM's registries."""

import torch
from vllm.model_executor.custom_op import CustomOp, op_registry_oot
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from verl_fp8.numerics import exact
from verl_fp8.upstream.contract import require


class ExactRMSNorm(RMSNorm):
    """RMSNorm by :func:`verl_fp8.numerics.exact.rms_norm`; the residual sum is rounded before the norm, as Hugging Face
    rounds it."""

    def forward_native(self, x, residual=None):
        if residual is not None:
            x = residual = x + residual
        y = exact.rms_norm(x, self.weight.data, self.variance_epsilon)
        return y if residual is None else (y, residual)

    forward_cpu = forward_native


class ExactSiluAndMul(SiluAndMul):
    """SiLU(gate) * up by :func:`verl_fp8.numerics.exact.silu_mul`."""

    def forward_native(self, x):
        return exact.silu_mul(*x.chunk(2, dim=-1))

    forward_cpu = forward_native


class ExactRotaryEmbedding(RotaryEmbedding):
    """Rotary embedding by :func:`verl_fp8.numerics.exact.rope_table` and :func:`verl_fp8.numerics.exact.apply_rope`."""

    def _compute_cos_sin_cache(self):
        positions = torch.arange(self.max_position_embeddings)
        return torch.cat(exact.rope_table(positions, self.rotary_dim, float(self.base), self.dtype), dim=-1)

    def forward_native(self, positions, query, key=None):
        cos, sin = self.cos_sin_cache.index_select(0, positions.flatten()).to(query.dtype).chunk(2, dim=-1)

        def rotate(x):
            return exact.apply_rope(x.view(positions.numel(), -1, self.head_size), cos, sin).view(x.shape)

        return rotate(query), None if key is None else rotate(key)

    forward_cpu = forward_native


class ExactAttentionImpl(CPUAttentionBackendImpl):
    """Paged attention by :func:`verl_fp8.numerics.exact.attention` on a cache of plain bf16 keys and values.

    The cache is vLLM's own allocation, [blocks, key heads, block size, 2 * dim], keys in the first half of the last
    dimension.
    """

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping):
        block, offset = slot_mapping // kv_cache.shape[2], slot_mapping % kv_cache.shape[2]
        kv_cache[block, :, offset] = torch.cat((key, value), dim=-1)[: slot_mapping.shape[0]]

    def forward(
        self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=None, output_block_scale=None
    ):
        if attn_metadata is None:  # vLLM's warm-up
            return output
        starts, lengths = attn_metadata.query_start_loc.tolist(), attn_metadata.seq_lens.tolist()
        counts = [b - a for a, b in zip(starts, starts[1:], strict=False)]
        # Sequences with equally many new tokens go together: decoding steps are one call, prefills one for each length.
        for count in sorted(set(counts)):
            rows = [i for i, c in enumerate(counts) if c == count]
            if count:
                self._attend(rows, count, starts, lengths, query, kv_cache, attn_metadata, output)
        return output

    def _attend(self, rows, count, starts, lengths, query, kv_cache, attn_metadata, output):
        size = kv_cache.shape[2]
        seq_lens = torch.tensor([lengths[i] for i in rows])
        longest = int(seq_lens.max())
        table = attn_metadata.block_table[rows, : -(-longest // size)].long()
        pages = kv_cache[table].transpose(2, 3).flatten(1, 2)[:, :longest]  # [rows, keys, key heads, 2 * dim]
        keys, values = pages.permute(0, 2, 1, 3).chunk(2, dim=-1)
        tokens = torch.stack([torch.arange(starts[i], starts[i] + count) for i in rows])
        position = (seq_lens[:, None] - count) + torch.arange(count)
        allowed = torch.arange(longest)[None, None] <= position[:, :, None]
        mixed = exact.attention(query[tokens].transpose(1, 2), keys, values, allowed[:, None], self.scale)
        output[tokens] = mixed.transpose(1, 2).reshape(*tokens.shape, *output.shape[1:])


class ExactAttentionBackend(CPUAttentionBackend):
    """vLLM's CPU backend with :class:`ExactAttentionImpl`."""

    @staticmethod
    def get_impl_cls():
        return ExactAttentionImpl


def install_exact() -> None:
    """Register everything above; before the model is built. Idempotent."""
    require("rollout.exact")
    for name, cls in (
        ("RMSNorm", ExactRMSNorm),
        ("SiluAndMul", ExactSiluAndMul),
        ("RotaryEmbedding", ExactRotaryEmbedding),
    ):
        if name not in op_registry_oot:
            CustomOp.register_oot(cls, name=name)
    register_backend(AttentionBackendEnum.CPU_ATTN, f"{__name__}.{ExactAttentionBackend.__name__}")
