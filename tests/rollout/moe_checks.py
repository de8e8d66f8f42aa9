"""What tests/rollout/test_experts_cpu.py asserts about real vLLM on a tiny Qwen3-MoE, in a process of its own.

Run as a script: ``python moe_checks.py MODEL``; prints one JSON object, check -> value.
"""

import contextlib
import copy
import json
import os
import sys

os.environ |= {
    "VERL_PLATFORM": "cpu",
    "VLLM_CPU_CI_ENV": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
MODEL, MODE, *OVERRIDES = sys.argv[1:]

import torch

from verl_fp8.hooks import vllm_plugin

vllm_plugin.register()

from transformers import AutoModelForCausalLM
from verl.workers.engine.fsdp.utils import unfuse_moe_params
from vllm import LLM, SamplingParams
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

from verl_fp8.errors import SyncError
from verl_fp8.rollout.arguments import fp8_arguments
from verl_fp8.switches.settings import Fp8Settings
from verl_fp8.sync.stream import outgoing
from verl_fp8.trainer.convert import convert_linears

NODE = {"mode": "unified", "recipe": {"exclude": OVERRIDES}}
SETTINGS = Fp8Settings.parse(NODE)


def perturbed(seed: int):
    """The model with other weights than the checkpoint's, everywhere."""
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.bfloat16)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 0.1 * torch.randn_like(parameter)).add_(0.01 * torch.randn_like(parameter))
    return model


def log_probs(model, ids) -> torch.Tensor:
    """Of each next token, in float32."""
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
    return logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)


@contextlib.contextmanager
def trainer_routes(model):
    """Collects, layer by layer, the experts that the trainer's routers choose: [tokens, k]."""
    chosen = []
    gates = [m for n, m in model.named_modules() if n.endswith(".mlp.gate")]
    handles = [gate.register_forward_hook(lambda _, __, output: chosen.append(output[2])) for gate in gates]
    yield chosen
    for handle in handles:
        handle.remove()


@contextlib.contextmanager
def rollout_routes():
    """The same from vLLM's."""
    chosen, compute = [], CPURouter._compute_routing

    def watch(self, *args, **kwargs):
        weights, ids = compute(self, *args, **kwargs)
        chosen.append(ids)
        return weights, ids

    CPURouter._compute_routing = watch
    yield chosen
    CPURouter._compute_routing = compute


def compare(model, llm, ids) -> dict[str, float]:
    """Mean |difference| and k3 of the log-probs, and the share of (token, layer) pairs with one choice of experts."""
    with trainer_routes(model) as trained:
        ours = log_probs(model, ids)
    with rollout_routes() as rolled:
        theirs = rollout_log_probs(llm, ids)
    d = (ours - theirs).double()
    same = [(a.sort(-1).values == b.sort(-1).values).all(-1) for a, b in zip(trained, rolled, strict=True)]
    agreement = float(torch.stack(same).double().mean())
    return {"mean": float(d.abs().mean()), "k3": float((d.exp() - 1 - d).mean()), "routing": agreement}


def rollout_log_probs(llm, ids) -> torch.Tensor:
    """The same from vLLM."""
    sampling = SamplingParams(max_tokens=1, temperature=1.0, prompt_logprobs=0, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": row} for row in ids.tolist()], sampling, use_tqdm=False)
    return torch.tensor(
        [
            [step[token].logprob for step, token in zip(out.prompt_logprobs[1:], row[1:], strict=True)]
            for out, row in zip(outputs, ids.tolist(), strict=True)
        ]
    )


def stream(model, layers):
    """What the trainer sends."""
    return list(outgoing(unfuse_moe_params(model.state_dict().items(), "qwen3_moe"), SETTINGS, layers))


def sync(worker, bucket) -> str:
    """One sync, in two buckets; the error's text or nothing."""
    try:
        worker._begin_sync()
        half = len(bucket) // 2
        worker._update_weights(bucket[:half], None, True)
        worker._update_weights(bucket[half:], None, True)
        worker._end_sync()
    except SyncError as error:
        return str(error)
    return ""


def main() -> None:
    """Build, sync, compare, then spoil."""
    torch.manual_seed(0)
    ids = torch.randint(3, 60, (8, 48))
    fp8 = MODE != "bf16"
    arguments = fp8_arguments(NODE, {"path": MODEL}, {}) if fp8 else {}
    llm = LLM(
        model=MODEL, skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True, max_model_len=128, seed=0,
        kv_cache_memory_bytes=1 << 27, enable_prefix_caching=False, load_format="dummy" if fp8 else "auto", **arguments,
    )  # fmt: skip
    found = {}
    if not fp8:
        model = perturbed(1)
        weights = list(unfuse_moe_params(model.state_dict().items(), "qwen3_moe"))
        llm.collective_rpc(lambda worker: worker.model_runner.model.load_weights(iter(weights)) and None)
        print(json.dumps({"floor": compare(model, llm, ids)}))
        return
    workers = []
    llm.collective_rpc(lambda worker: workers.append(worker))
    worker = getattr(workers[0], "worker", workers[0])
    for seed in (1, 2):
        model = perturbed(seed)
        plain = copy.deepcopy(model)
        report = convert_linears(model, SETTINGS.recipe, SETTINGS.layers)
        bucket = stream(model, report.converted)
        found[f"sync {seed}"] = sync(worker, bucket)
        found[f"unified {seed}"], found[f"rollout {seed}"] = compare(model, llm, ids), compare(plain, llm, ids)
    modules = worker._fp8_modules
    found["layers"] = sorted(worker._fp8_owner) == sorted(report.converted)
    found["n"] = len(report.converted)
    experts = {p: m for p, m in modules.items() if hasattr(m, "w13_weight")}
    found["kernels"] = sorted({type(m.quant_method.moe_kernel.fused_experts).__name__ for m in experts.values()})
    found["gates"] = sorted(
        {
            type(m.quant_method).__name__
            for n, m in worker.model_runner.model.named_modules()
            if n.endswith(".mlp.gate") and hasattr(m, "quant_method")
        }
    )
    if experts:
        spoil(found, worker, next(iter(experts.values())), bucket)
    print(json.dumps(found))


def spoil(found: dict, worker, experts, bucket) -> None:
    """Wrong layouts with every name and shape right, which the check by value must find."""
    loader = type(experts).weight_loader

    def swapped(self, param, loaded_weight, weight_name, shard_id, expert_id, return_success=False):
        shard_id = {"w1": "w3", "w3": "w1"}.get(shard_id, shard_id)
        return loader(self, param, loaded_weight, weight_name, shard_id, expert_id, return_success)

    def shifted(self, param, loaded_weight, weight_name, shard_id, expert_id, return_success=False):
        return loader(self, param, loaded_weight, weight_name, shard_id, (expert_id + 1) % 8, return_success)

    for name, wrong in (("gate and up swapped", swapped), ("experts shifted", shifted)):
        for layer in worker._fp8_modules.values():
            if hasattr(layer, "w13_weight"):
                for parameter in layer.parameters(recurse=False):
                    parameter.weight_loader = wrong.__get__(layer)
        found[name] = sync(worker, bucket)
    for layer in worker._fp8_modules.values():
        if hasattr(layer, "w13_weight"):
            for parameter in layer.parameters(recurse=False):
                parameter.weight_loader = layer.weight_loader
    kernel = type(experts.quant_method.moe_kernel.fused_experts)
    product, kernel.product = kernel.product, _stale(kernel.product)
    found["an older copy in use"] = sync(worker, bucket)
    kernel.product = product
    found["whole again"] = sync(worker, bucket)


def _stale(product):
    def other(self, x, weight, which, expert):
        return product(self, x, weight, which, (expert + (expert == 3)) % weight.shape[0])

    return other


if __name__ == "__main__":
    main()
