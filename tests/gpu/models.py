"""Whole models: FSDP2 with recomputation, and the log-probs of a small Qwen3 on both sides."""

import copy
import json
import os
import tempfile
from pathlib import Path

import common
import torch
from common import DEVICE, GPU, Skip, need
from torch import nn

from verl_fp8.layers.filter import LayerFilter
from verl_fp8.numerics.quantize import quantize_weight
from verl_fp8.numerics.recipe import Recipe
from verl_fp8.trainer.convert import convert_linears


def fsdp2(values: dict) -> None:
    """FSDP2 with fp32 masters, and recomputation: the bits of the plain bf16 model, for every backend at hand."""
    import torch.distributed as dist
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if GPU:
        torch.cuda.set_device(0)
    dist.init_process_group("nccl" if GPU else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = dist.init_device_mesh(DEVICE, (1,))
        for backend in common.backends():
            recipe = Recipe(scale_format=common.formats()[0])
            x = common.randn(256 if GPU else 32, 1024, seed=8)
            expected = common.gradients(common.layer(backend, recipe), x)
            sharded = common.layer(backend, recipe).float()
            for child in (sharded[0], sharded[2], sharded):
                fully_shard(child, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
            found = [
                t.full_tensor().bfloat16() if hasattr(t, "full_tensor") else t
                for t in common.gradients(sharded, x, recompute=True)
            ]
            different = sum(not torch.equal(f, e) for f, e in zip(found, expected, strict=True))
            values[f"{backend}: tensors of y, dx, dW, db that differ"] = f"{different} of {len(found)}"
            assert not different, backend
    finally:
        dist.destroy_process_group()


def small_qwen3():
    """A four-layer Qwen3 with random weights in bf16, and token ids."""
    import transformers

    wide = 1024 if GPU else 256
    config = transformers.Qwen3Config(
        vocab_size=4096, hidden_size=wide, intermediate_size=3 * wide, num_hidden_layers=4,
        num_attention_heads=wide // 64, num_key_value_heads=wide // 128, head_dim=128,
        tie_word_embeddings=False, max_position_embeddings=1024,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").to(
        DEVICE
    )
    shape = (4, 512 if GPU else 48)
    return model, torch.randint(0, 4096, shape, generator=torch.Generator().manual_seed(9)).to(DEVICE)


def log_probs(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of each next token, in float32."""
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
    return logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)


def k3(train: torch.Tensor, rollout: torch.Tensor) -> float:
    """The k3 estimate of KL(rollout | trainer): mean of exp(d) - 1 - d, d = train - rollout."""
    d = train.double() - rollout.double()
    return float((d.exp() - 1 - d).mean())


def model_log_probs(values: dict) -> None:
    """Log-probs of a four-layer Qwen3: the backends at hand, bf16, and vLLM where it is installed."""
    need("transformers")
    plain, ids = small_qwen3()
    found = {"bf16": log_probs(plain, ids)}
    recipe = Recipe(scale_format=common.formats()[0])
    for backend in common.backends():
        model = copy.deepcopy(plain)
        convert_linears(model, recipe, LayerFilter(), backend)
        found[backend] = log_probs(model, ids)
    try:
        found["vllm"] = vllm_log_probs(plain, ids, recipe)
    except Skip as reason:
        values["vllm"] = f"skipped: {reason}"
    names = list(found)
    for i, first in enumerate(names):
        for second in names[i + 1 :]:
            mean = float((found[first] - found[second]).abs().mean())
            values[f"{first} - {second}: mean |difference|, k3"] = f"{mean:.2e}, {k3(found[first], found[second]):.2e}"
    assert all(torch.isfinite(value).all() for value in found.values())


def vllm_log_probs(model: nn.Module, ids: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """The same model's log-probs from vLLM: our codes in a checkpoint, our quantiser and kernel registered."""
    for module in ("vllm", "omegaconf", "wrapt"):
        need(module)
    # In this process, so that the registrations hold although no entry point is installed.
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
    from verl_fp8.hooks import vllm_plugin
    from verl_fp8.rollout.arguments import pin_gpu_kernels
    from verl_fp8.rollout.environment import environment
    from verl_fp8.switches.hardware import probe
    from verl_fp8.switches.settings import NODE, Fp8Settings

    node = {"recipe": {"scale_format": recipe.scale_format}}
    settings, arguments = Fp8Settings.parse(node), {"additional_config": {NODE: node}}
    os.environ |= environment(settings, probe())
    if GPU:
        pin_gpu_kernels(settings, probe(), arguments)
        arguments["gpu_memory_utilization"] = 0.3
    else:
        os.environ |= {"VERL_PLATFORM": "cpu", "VLLM_CPU_CI_ENV": "1"}
        arguments["kv_cache_memory_bytes"] = 1 << 28
    vllm_plugin.register()
    from vllm import LLM, SamplingParams

    with tempfile.TemporaryDirectory() as folder:
        save_fp8(model, recipe, Path(folder))
        llm = LLM(
            model=folder, skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True, max_model_len=1024,
            enable_prefix_caching=False, seed=0, **arguments,
        )  # fmt: skip
        prompts = [{"prompt_token_ids": row} for row in ids.tolist()]
        sampling = SamplingParams(max_tokens=1, temperature=1.0, prompt_logprobs=0, detokenize=False)
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
    rows = [
        [step[token].logprob for step, token in zip(out.prompt_logprobs[1:], row[1:], strict=True)]
        for out, row in zip(outputs, ids.tolist(), strict=True)
    ]
    return torch.tensor(rows, device=DEVICE)


def save_fp8(model: nn.Module, recipe: Recipe, folder: Path) -> None:
    """A checkpoint in vLLM's fp8 block format with the codes the trainer computes with."""
    from safetensors.torch import save_file

    linears = {n: tuple(m.weight.shape) for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    converted, kept = LayerFilter().split(linears)
    tensors = {}
    for name, tensor in model.state_dict().items():
        layer = name.removesuffix(".weight")
        if layer in converted:
            q = quantize_weight(tensor, recipe)
            tensors[name], tensors[f"{layer}.weight_scale_inv"] = q.data, q.scale_inv
        else:
            tensors[name] = tensor
    save_file({name: tensor.contiguous().cpu() for name, tensor in tensors.items()}, folder / "model.safetensors")
    config = model.config.to_dict()
    config["architectures"] = [type(model).__name__]
    config["quantization_config"] = {
        "quant_method": "fp8",
        "fmt": recipe.fmt,
        "activation_scheme": "dynamic",
        "weight_block_size": list(recipe.weight_block),
        "ignored_layers": sorted(kept),
    }
    (folder / "config.json").write_text(json.dumps(config, default=str))
