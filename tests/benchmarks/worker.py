"""A process of ``processes.py``: sets up what its arguments say, prints ``ready``, then does one measured piece of work
a line.

    python worker.py rollout|trainer|sync fp8|bf16|stock MODEL

Each answer is one JSON object: ``seconds`` of the piece, and at the end of the input ``rss``, the process's largest
resident set.
"""

import json
import os
import resource
import sys
import time
from collections.abc import Callable

os.environ.setdefault("VERL_PLATFORM", "cpu")
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

import torch

from verl_fp8.switches.settings import Fp8Settings

FP8 = {"mode": "unified", "recipe": {"weight_block": [64, 64]}}
ROWS, PROMPT, ANSWER = 32, 32, 8  # the quickstart's


def rollout(kind: str, model: str) -> Callable[[], dict]:
    """vLLM as verl starts it, with the trainer's weights; a piece is 32 sequences of 32 tokens."""
    import tempfile
    from pathlib import Path

    import verl  # noqa: F401 (the CPU platform, and vLLM's version)
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM
    from vllm import LLM, SamplingParams

    from verl_fp8.rollout.arguments import fp8_arguments
    from verl_fp8.sync.stream import outgoing
    from verl_fp8.trainer.engine_fsdp import prepare_module

    arguments = {"model": model, "dtype": "bfloat16", "seed": 0, "enforce_eager": True,
                 "max_model_len": 128, "max_num_seqs": 64, "max_num_batched_tokens": 1024,
                 "kv_cache_memory_bytes": 1 << 28, "enable_prefix_caching": False}  # fmt: skip
    if kind == "fp8":
        node = Fp8Settings.parse(FP8)
        arguments |= fp8_arguments(FP8, {"path": model}, {}) | {"quantization": "fp8", "load_format": "dummy"}
        arguments["worker_extension_cls"] = "verl_fp8.tools.mismatch.certify_rollout.CertifyExtension"
    llm = LLM(**arguments)
    if kind == "fp8":
        module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        layers = prepare_module(module, node)[0].converted
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "stream.safetensors"
            stream = outgoing(module.state_dict().items(), node, layers, skip=frozenset({"lm_head.weight"}))
            save_file({n: t.contiguous() for n, t in stream}, file)
            llm.collective_rpc("certify_sync", args=(str(file),))
        del module
    generator = torch.Generator().manual_seed(0)
    prompts = [
        {"prompt_token_ids": torch.randint(5, 40000, (PROMPT,), generator=generator).tolist()} for _ in range(ROWS)
    ]
    sample = SamplingParams(temperature=1.0, max_tokens=32, ignore_eos=True, logprobs=0, detokenize=False, seed=0)

    def piece() -> dict:
        start = time.perf_counter()
        outputs = llm.generate(prompts, sample, use_tqdm=False)
        seconds = time.perf_counter() - start
        return {"seconds": seconds, "tokens": sum(len(o.outputs[0].token_ids) for o in outputs)}

    return piece


def sync(kind: str, model: str) -> Callable[[], dict]:
    """One weight sync of fp32 masters over verl's shared-memory transport into a vLLM in this process.

    ``fp8``: ours. ``bf16``: stock verl's into vLLM in bf16. ``stock``: stock verl's into vLLM with quantization=fp8.
    """
    import asyncio
    import threading

    from transformers import AutoModelForCausalLM
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender
    from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
    from vllm import LLM

    from verl_fp8.rollout.arguments import fp8_arguments
    from verl_fp8.rollout.worker import Fp8WorkerExtension
    from verl_fp8.sync.stream import outgoing
    from verl_fp8.trainer.engine_fsdp import prepare_module

    settings = Fp8Settings.parse(FP8)
    module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    layers = prepare_module(module, settings)[0].converted
    arguments = {"model": model, "dtype": "bfloat16", "enforce_eager": True,
                 "max_model_len": 128, "max_num_seqs": 64, "max_num_batched_tokens": 1024,
                 "kv_cache_memory_bytes": 1 << 28, "load_format": "dummy"}  # fmt: skip
    if kind != "bf16":
        arguments |= fp8_arguments(FP8, {"path": model}, {}) | {"quantization": "fp8"}
    if kind == "stock":
        from verl.utils.vllm.vllm_quant_utils import apply_vllm_quant_patches

        # The layers get our kernel, for vLLM's own FP8 block kernel on CPU needs AMX; it computes nothing in a sync.
        apply_vllm_quant_patches()
    extension = Fp8WorkerExtension if kind == "fp8" else vLLMColocateWorkerExtension
    arguments["worker_extension_cls"] = f"{extension.__module__}.{extension.__name__}"
    handle = f"ipc:///tmp/verl_fp8_benchmark_{os.getpid()}.sock"
    vLLMColocateWorkerExtension._get_zmq_handle = lambda self: handle
    llm = LLM(**arguments)

    def send() -> None:
        weights = iter(module.state_dict().items())
        if kind == "fp8":
            weights = outgoing(weights, settings, layers, skip=frozenset({"lm_head.weight"}))
        # Stock verl sends the tied lm_head as well, and vLLM takes it only where all weights come in one bucket.
        size = 256 if kind == "fp8" else 1024
        asyncio.run(
            BucketedWeightSender(zmq_handle=handle, bucket_size_mb=size, use_shm=True).async_send_weights(weights)
        )

    def piece() -> dict:
        start = time.perf_counter()
        sender = threading.Thread(target=send)
        sender.start()
        llm.collective_rpc("update_weights_from_ipc", kwargs={"use_shm": True})
        sender.join()
        return {"seconds": time.perf_counter() - start}

    return piece


def trainer(kind: str, model: str) -> Callable[[], dict]:
    """The model under FSDP2 as verl's engine builds it, fp32 masters and bf16 copies; a piece is one step on 32
    rows."""
    import torch.distributed as dist
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from transformers import AutoModelForCausalLM
    from verl.utils.torch_functional import logprobs_from_logits

    from verl_fp8.trainer.engine_fsdp import prepare_module

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa")
    if kind == "fp8":
        prepare_module(module, Fp8Settings.parse(FP8))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in module.model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(module, mp_policy=policy)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-5)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 40000, (ROWS, PROMPT + ANSWER), generator=generator)

    def piece() -> dict:
        start = time.perf_counter()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = module(input_ids=ids, use_cache=False).logits[:, PROMPT - 1 : -1]
        loss = -logprobs_from_logits(logits.float(), ids[:, PROMPT:]).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return {"seconds": time.perf_counter() - start, "loss": float(loss.detach())}

    return piece


def main() -> None:
    """Answer every line of the input."""
    out = os.fdopen(os.dup(1), "w")  # vLLM prints to stdout
    os.dup2(2, 1)
    torch.set_num_threads(2)
    piece = {"rollout": rollout, "trainer": trainer, "sync": sync}[sys.argv[1]](*sys.argv[2:])
    print("ready", file=out, flush=True)
    for _ in sys.stdin:
        print(json.dumps(piece()), file=out, flush=True)
    print(json.dumps({"rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}), file=out, flush=True)
    out.close()
    os._exit(0)


if __name__ == "__main__":
    main()
