"""What tests/rollout/test_derived.py asserts about real vLLM on a tiny model of a family, in a process of its own.

Run as a script: ``python derived_checks.py OUT deepseek_v3|qwen3_next [EXCLUDE...]``; makes the model in OUT and prints
one JSON object, check -> value.
"""

import json
import os
import sys
from pathlib import Path

os.environ |= {
    "VERL_PLATFORM": "cpu",
    "VLLM_CPU_CI_ENV": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
OUT, FAMILY, *OVERRIDES = sys.argv[1:]

import torch

from verl_fp8.hooks import vllm_plugin

vllm_plugin.register()

import transformers
from verl.workers.engine.fsdp.utils import unfuse_moe_params
from vllm import LLM, SamplingParams

from verl_fp8.errors import SyncError
from verl_fp8.rollout import derived
from verl_fp8.rollout.arguments import fp8_arguments
from verl_fp8.switches.settings import Fp8Settings
from verl_fp8.sync.stream import outgoing
from verl_fp8.trainer.convert import convert_linears

NODE = {"mode": "unified", "recipe": {"exclude": OVERRIDES}}
SETTINGS = Fp8Settings.parse(NODE)
COMMON = dict(
    vocab_size=64, hidden_size=256, intermediate_size=512, num_attention_heads=2, num_key_value_heads=2,
    max_position_embeddings=256, moe_intermediate_size=128, num_experts_per_tok=2, norm_topk_prob=True,
    tie_word_embeddings=False, bos_token_id=None, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
# The ranks and widths for which vLLM has MLA kernels on a CPU.
DEEPSEEK = dict(
    num_hidden_layers=2, q_lora_rank=128, kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128,
    n_routed_experts=4, n_shared_experts=1, first_k_dense_replace=1, n_group=1, topk_group=1, routed_scaling_factor=1.0,
    topk_method="noaux_tc", scoring_func="sigmoid",
)  # fmt: skip
NEXT = dict(
    num_hidden_layers=2, layer_types=["linear_attention", "full_attention"], linear_num_key_heads=2,
    linear_num_value_heads=2, linear_key_head_dim=128, linear_value_head_dim=128, linear_conv_kernel_dim=4,
    head_dim=128, num_experts=4, shared_expert_intermediate_size=128, decoder_sparse_step=1, mlp_only_layers=[],
)  # fmt: skip
CONFIG, MODEL, SHAPE = {
    "deepseek_v3": ("DeepseekV3Config", "DeepseekV3ForCausalLM", DEEPSEEK),
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", NEXT),
}[FAMILY]
CONFIG, MODEL = getattr(transformers, CONFIG), getattr(transformers, MODEL)


def perturbed(seed: int):
    """The model with other weights than the checkpoint's, everywhere."""
    model = MODEL.from_pretrained(OUT, dtype=torch.bfloat16)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 0.1 * torch.randn_like(parameter)).add_(0.01 * torch.randn_like(parameter))
    return model


def sync(worker, model, layers) -> str:
    """One sync as verl's receiver does it, in two buckets; the error's text or nothing."""
    bucket = list(outgoing(unfuse_moe_params(model.state_dict().items(), FAMILY), SETTINGS, layers))
    half = len(bucket) // 2
    try:
        worker._begin_sync()
        for part in (bucket[:half], bucket[half:]):
            worker._update_weights(part, None, True)
        worker._end_sync()
    except SyncError as error:
        return str(error)
    return ""


def compare(model, llm, prompts) -> dict[str, float]:
    """Mean |difference| and k3 between trainer and rollout, of tokens that it decodes, then of the same prefilled."""
    once = dict(max_tokens=32, temperature=1.0, logprobs=0, ignore_eos=True, detokenize=False, seed=0)
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], SamplingParams(**once), use_tqdm=False)
    answers = [list(out.outputs[0].token_ids) for out in outputs]
    rows = [p + a for p, a in zip(prompts, answers, strict=True)]
    decoded = [
        [s[t].logprob for s, t in zip(o.outputs[0].logprobs, a, strict=True)]
        for o, a in zip(outputs, answers, strict=True)
    ]
    again = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": row} for row in rows], again, use_tqdm=False)
    n = len(answers[0])
    prefilled = [
        [s[t].logprob for s, t in zip(o.prompt_logprobs[-n:], row[-n:], strict=True)]
        for o, row in zip(outputs, rows, strict=True)
    ]
    ids = torch.tensor(rows)
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
    trained = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)[:, -n:]
    found = {}
    for which, rolled in (("decode", decoded), ("prefill", prefilled)):
        d = (trained - torch.tensor(rolled)).double()
        found |= {f"{which} mean": float(d.abs().mean()), f"{which} k3": float((d.exp() - 1 - d).mean())}
    return found


def storage(worker) -> list[int]:
    """Addresses of the derived weights."""
    found = []
    for module in worker.model_runner.model.modules():
        found += [getattr(module, name).data_ptr() for name in ("W_UK_T", "W_UV") if hasattr(module, name)]
        found += [module.weight.data_ptr()] if hasattr(module, "_cpu_unpacked_conv_weight") else []
    return found


def main() -> None:
    """Build, sync twice, compare, then drop the rebuild."""
    torch.manual_seed(0)
    if not (Path(OUT) / "config.json").exists():
        MODEL(CONFIG(**COMMON, **SHAPE)).to(torch.bfloat16).save_pretrained(OUT)
    prompts = torch.randint(3, 60, (8, 16)).tolist()
    llm = LLM(
        model=OUT, skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True, max_model_len=128, seed=0,
        kv_cache_memory_bytes=1 << 27, enable_prefix_caching=False, load_format="dummy",
        **fp8_arguments(NODE, {"path": OUT}, {}),
    )  # fmt: skip
    workers, found = [], {}
    llm.collective_rpc(lambda worker: workers.append(worker))
    worker = getattr(workers[0], "worker", workers[0])
    before = storage(worker)
    models = {}
    for seed in (1, 2):
        models[seed] = model = perturbed(seed)
        layers = convert_linears(model, SETTINGS.recipe, SETTINGS.layers).converted
        found[f"sync {seed}"] = sync(worker, model, layers)
        found[f"compared {seed}"] = compare(model, llm, prompts)
    found["same storage"], found["derived"] = storage(worker) == before, len(before)
    backend = worker.model_runner.vllm_config.attention_config.backend
    found["backend"] = backend and backend.name
    found["probed"] = derived.probe(worker.model_runner.model)
    spoil(found, worker, llm, models, layers, prompts)
    print(json.dumps(found))


def spoil(found: dict, worker, llm, models, layers, prompts) -> None:
    """Syncs that leave derived weights behind."""
    rebuild, probe = derived.rebuild, derived.probe
    derived.rebuild = lambda model, dtype, experts: None
    found["rebuild dropped"] = sync(worker, models[1], layers)
    derived.probe = lambda model: 0
    sync(worker, models[1], layers)
    found["stale"] = compare(models[1], llm, prompts)
    derived.rebuild, derived.probe = rebuild, probe
    found["whole again"] = sync(worker, models[1], layers)
    if FAMILY == "deepseek_v3":
        spoil_latent(found, worker, probe)


def spoil_latent(found: dict, worker, probe) -> None:
    """MLA's layers changed under the checks."""
    layer = next(m for m in worker.model_runner.model.modules() if hasattr(m, "W_UK_T"))
    # A value as one more optimiser step would leave it: the next FP8 code.
    row = layer.W_UV.data[0, 0]
    kept, largest = row.clone(), row.abs().argmax()
    row[largest] *= 0.9375
    found["one value"] = refusal(probe, worker.model_runner.model)
    row.copy_(kept)
    layer.is_amx_bmm_enabled = True
    found["packed for AMX"] = refusal(derived.refuse, worker.model_runner.model)
    layer.is_amx_bmm_enabled = False
    method, layer.kv_b_proj.quant_method = layer.kv_b_proj.quant_method, Packing()
    found["another method"] = refusal(derived.refuse, worker.model_runner.model)
    layer.kv_b_proj.quant_method = method


class Packing:
    """A quantisation method that derives something that nothing here knows."""

    def process_weights_after_loading(self, layer):
        """Packs."""


def refusal(check, model) -> str:
    """The error's text or nothing."""
    try:
        check(model)
    except SyncError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    main()
