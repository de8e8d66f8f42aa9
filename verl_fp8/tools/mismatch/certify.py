"""``verl-fp8 certify <verl overrides>``: how far apart trainer and rollout will be, and why, before a long job.

The trainer's model is converted as the engine does it, without FSDP. A real vLLM engine runs in a child process with
the arguments that verl would pass, and gets its weights through the verified sync. Both score the tokens that vLLM
sampled. Their log-probs differ by the sum of these links, token by token and exactly; each link is the difference of a
measured pair:

==============  ===================================================================================================
log-softmax     the trainer's log-probs as verl takes them from its logits - by float32 log-softmax, as vLLM does
weights         the trainer - the same with the weights that the rollout holds, read back out of vLLM
activations     that - the same with the rollout's activation quantiser (no link where the trainer quantises too)
kernels         that - vLLM scoring the same tokens as prompts: attention, norms, GEMM order, output head
rollout noise   vLLM scoring them - vLLM sampling them: prefill against decode, other batches
==============  ===================================================================================================

It also measures each side's own noise (a second time; in another batch), the trainer against itself with another
attention implementation (what FP8 makes of differences that nobody would call an error), and the first probe at which
the two sides differ.
"""

import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from safetensors.torch import load_file, save_file

from verl_fp8.errors import ConfigError, SyncError
from verl_fp8.layers.shapes import load_config
from verl_fp8.numerics import exact
from verl_fp8.numerics.quantize import QuantizedTensor, quantize_activation
from verl_fp8.rollout.arguments import fp8_arguments, plain
from verl_fp8.rollout.environment import environment
from verl_fp8.switches.hardware import probe
from verl_fp8.switches.settings import Fp8Settings
from verl_fp8.sync.stream import MANIFEST, SCALE_SUFFIX, WEIGHT_SUFFIX, outgoing
from verl_fp8.tools.mismatch.bands import judge, worst
from verl_fp8.tools.mismatch.causes import to_codes
from verl_fp8.tools.mismatch.certify_page import certify_page, certify_text
from verl_fp8.tools.mismatch.compare import log_prob_difference, prompts_of, relative_difference
from verl_fp8.tools.mismatch.probes import probes_in_order, recording
from verl_fp8.tools.overrides import compose, root_cause, take_output_options, validate, write_outputs

NEW_TOKENS = 24


# What of the rollout's configuration reaches vLLM: launch_server of
# verl/workers/rollout/vllm_rollout/vllm_async_server.py.
_PASSED = (
    "dtype", "max_model_len", "max_num_seqs", "enable_chunked_prefill", "max_num_batched_tokens",
    "enable_prefix_caching", "enforce_eager", "gpu_memory_utilization", "logprobs_mode",
)  # fmt: skip


class Trainer:
    """The trainer's forward pass: the Hugging Face model as the engine prepares it, in bf16 as FSDP2 gathers it."""

    def __init__(self, config: DictConfig, fp8: Fp8Settings) -> None:
        from transformers import AutoModelForCausalLM
        from verl.utils.device import get_device_name
        from verl.utils.fs import copy_to_local

        from verl_fp8.trainer.engine_fsdp import prepare_module

        if fp8.megatron:
            raise ConfigError(
                "verl-fp8 certify", "+fp8=unified_megatron: it builds the Hugging Face model", "certify +fp8=unified"
            )
        node = plain(config.actor_rollout_ref.model)
        overrides = node.get("override_config") or {}
        attention = overrides.get("attn_implementation", "flash_attention_2")  # verl's own default
        self.fp8 = fp8
        self.module = AutoModelForCausalLM.from_pretrained(
            copy_to_local(node["path"]), config=load_config(node), dtype=torch.bfloat16, attn_implementation=attention,
            trust_remote_code=bool(node.get("trust_remote_code")),
        ).eval().to(get_device_name())  # fmt: skip
        report, self.backend = prepare_module(self.module, fp8)
        self.layers = report.converted
        if experts := [name for name in self.layers if ".experts." in name]:
            raise ConfigError(
                "verl-fp8 certify",
                f"fused experts, {experts[0]}, whose codes it cannot put into the trainer",
                "certify a dense model",
            )

    def weights(self, transport: str | None = None) -> dict[str, torch.Tensor]:
        """The sync's stream, by name; ``transport`` in place of ``fp8.weight_sync``."""
        settings = dataclasses.replace(self.fp8, weight_sync=transport or self.fp8.weight_sync)
        tied = self.module.config.tie_word_embeddings
        state = self.module.state_dict().items()
        return dict(outgoing(state, settings, self.layers, skip=frozenset({"lm_head.weight"} if tied else ())))

    @torch.no_grad()
    def log_probs(
        self, sequences: list[list[int]], count: int, *, alone: bool = False, plain: bool = False
    ) -> torch.Tensor:
        """[sequences * count] float64: log-probs of the last ``count`` tokens of each sequence.

        Args:
            sequences: token ids, of any lengths; padded on the right in one batch.
            count: how many.
            alone: a batch for each.
            plain: by float32 log-softmax rather than by verl's function.
        """
        if alone:
            return torch.cat([self.log_probs([s], count, plain=plain) for s in sequences])
        from verl.utils.torch_functional import logprobs_from_logits

        take = exact.log_probs if plain or self.fp8.exact else logprobs_from_logits
        device, longest = self.module.device, max(map(len, sequences))
        ids = torch.tensor([s + [0] * (longest - len(s)) for s in sequences], device=device)
        mask = torch.tensor([[1] * len(s) + [0] * (longest - len(s)) for s in sequences], device=device)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            logits = self.module(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
        rows = []
        for i, s in enumerate(sequences):
            of = logits[i, len(s) - count - 1 : len(s) - 1]
            rows.append(take(of.float() if plain else of, ids[i, len(s) - count : len(s)]).double().cpu())
        return torch.cat(rows)

    @torch.no_grad()
    def probed(self, sequence: list[int]) -> dict[str, torch.Tensor]:
        """What :func:`verl_fp8.tools.mismatch.probes.recording` finds for one sequence."""
        with recording(self.module) as found, torch.autocast(self.module.device.type, dtype=torch.bfloat16):
            self.module(input_ids=torch.tensor([sequence], device=self.module.device), use_cache=False)
        return found

    def hold(self, held: dict[str, torch.Tensor], *, quantize: bool) -> None:
        """Compute with the rollout's weights; ``quantize``: and with its activation quantiser."""
        accumulate = exact.WIDE if self.fp8.exact else torch.float32
        recipe, device = self.fp8.recipe, self.module.device
        codes = {
            name: QuantizedTensor(
                held[name + WEIGHT_SUFFIX].to(device), held[name + SCALE_SUFFIX].to(device), recipe.weight_block
            )
            for name in self.layers
        }
        state = self.module.state_dict()
        for name, tensor in held.items():
            if name in state and tensor.dtype != torch.float8_e4m3fn:
                state[name].copy_(tensor)
        to_codes(self.module, codes, recipe, quantize_activation if quantize else None, accumulate)


def roll_out(
    config: DictConfig, fp8: Fp8Settings, stream: dict[str, torch.Tensor], prompts: list[list[int]], vocab_size: int
):
    """(result, held weights, probes) of a vLLM engine that was sent ``stream``.

    :mod:`verl_fp8.tools.mismatch.certify_rollout` is the child process.

    Raises:
        SyncError: the child failed; its last error line is in the message.
    """
    rollout, model = config.actor_rollout_ref.rollout, plain(config.actor_rollout_ref.model)
    extra = {k: v for k, v in plain(rollout.engine_kwargs.vllm).items() if v is not None}
    arguments = fp8_arguments(config.fp8, rollout.fp8_model, extra)
    arguments.pop("worker_extension_cls")
    llm = {key: rollout[key] for key in _PASSED if rollout.get(key) is not None} | {
        "model": model["path"],
        "load_format": "dummy",
        "seed": 0,
        "trust_remote_code": bool(model.get("trust_remote_code")),
        "quantization": rollout.quantization,
        **arguments,
    }
    with tempfile.TemporaryDirectory(prefix="verl_fp8_certify_") as name:
        folder = Path(name)
        save_file({n: t.contiguous().cpu() for n, t in stream.items()}, folder / "stream.safetensors")
        job = {
            "llm": llm,
            "prompts": prompts,
            "new_tokens": NEW_TOKENS,
            "vocab_size": vocab_size,
            "record": bool(rollout.enforce_eager),
        }
        (folder / "job.json").write_text(json.dumps(job))
        env = {**os.environ, **environment(fp8, probe()), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        env.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        child = subprocess.run(
            [sys.executable, "-m", "verl_fp8.tools.mismatch.certify_rollout", name],
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )
        if child.returncode:
            raise SyncError(
                "a rollout by vLLM",
                f"its process failed: {last_error(child.stderr) or child.returncode}",
                "correct what it names",
            )
        result = json.loads((folder / "result.json").read_text())
        held, probes = load_file(folder / "held.safetensors"), folder / "probes.safetensors"
        return result, held, load_file(probes) if probes.exists() else None


def last_error(stderr: str) -> str:
    """The last exception of a traceback on stderr, at most 400 characters; it may have several lines."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    starts = [i for i, line in enumerate(lines) if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return " ".join(lines[starts[-1] :] if starts else lines[-1:])[:400]


def differing_bytes(held: dict[str, torch.Tensor], sent: dict[str, torch.Tensor]) -> list[str]:
    """Names of the sent tensors that the rollout holds with other bytes, or not at all."""

    def same(a: torch.Tensor | None, b: torch.Tensor) -> bool:
        return a is not None and a.dtype == b.dtype and a.shape == b.shape and torch.equal(
            a.contiguous().reshape(-1).view(torch.uint8), b.cpu().contiguous().reshape(-1).view(torch.uint8)
        )  # fmt: skip

    return [name for name, tensor in sent.items() if name != MANIFEST and not same(held.get(name), tensor)]


def split(chain: list[tuple[str, torch.Tensor]]) -> list[dict[str, Any]]:
    """The links of a chain of log-probs.

    Args:
        chain: (name of the link that ends here, log-probs); the first has no name.

    Returns:
        A dict for each link: ``name``, mean, max and k3 of its difference, and ``share`` = <link, whole> / <whole,
        whole>; the shares sum to 1 (to 0 where the whole is 0).
    """
    whole = chain[0][1] - chain[-1][1]
    square = float(whole @ whole)
    return [
        {
            "name": name,
            **log_prob_difference(before, after),
            "share": float((before - after) @ whole) / square if square else 0.0,
        }
        for (_, before), (name, after) in zip(chain, chain[1:], strict=False)
    ]


def certify(config: DictConfig, fp8: Fp8Settings) -> dict[str, Any]:
    """Measure a composed and validated run. The result is plain JSON.

    Raises:
        ConfigError: tensor parallelism, or a model with fused experts.
        SyncError: the rollout failed.
    """
    from transformers import AutoTokenizer
    from verl.utils.fs import copy_to_local

    path = "actor_rollout_ref.rollout.tensor_model_parallel_size"
    if config.actor_rollout_ref.rollout.tensor_model_parallel_size != 1:
        raise ConfigError(
            "verl-fp8 certify",
            f"{path}={config.actor_rollout_ref.rollout.tensor_model_parallel_size}",
            f"certify with {path}=1",
        )
    tokenizer = AutoTokenizer.from_pretrained(copy_to_local(config.actor_rollout_ref.model.path))
    trainer = Trainer(config, fp8)
    sent, by_codes = trainer.weights(), trainer.weights("codes")
    result, held, rollout_probes = roll_out(config, fp8, sent, prompts_of(tokenizer), len(tokenizer))
    sequences = [p + a for p, a in zip(prompts_of(tokenizer), result["answers"], strict=True)]
    flat = {key: torch.tensor(result[key], dtype=torch.float64).flatten() for key in ("decoded", "together", "again")}

    first = trainer.log_probs(sequences, NEW_TOKENS)
    by_log_softmax = trainer.log_probs(sequences, NEW_TOKENS, plain=True)
    points = None if rollout_probes is None else differing_probes(trainer.probed(sequences[0]), rollout_probes)
    noise = _noise(trainer, sequences, first, by_log_softmax, flat)
    backend, layers = trainer.backend, len(trainer.layers)
    del trainer

    stand_in = Trainer(config, dataclasses.replace(fp8, backend="reference"))
    other = differing_bytes(held, by_codes)
    stand_in.hold(held, quantize=fp8.mode == "unified")
    chain = [
        ("", first),
        ("log-softmax", by_log_softmax),
        ("weights", stand_in.log_probs(sequences, NEW_TOKENS, plain=True)),
    ]
    if fp8.mode == "rollout":
        stand_in.hold(held, quantize=True)
        chain.append(("activations", stand_in.log_probs(sequences, NEW_TOKENS, plain=True)))
    chain += [("kernels", flat["together"]), ("rollout noise", flat["decoded"])]
    total = log_prob_difference(first, flat["decoded"])
    found = {
        "model": str(config.actor_rollout_ref.model.path),
        "mode": fp8.mode, "exact": fp8.exact, "lm_head": fp8.lm_head,
        "recipe": fp8.recipe.to_dict() if fp8.layer_filter else None, "fp8_layers": layers, "backend": backend,
        "tokens": first.numel(), "total": total, "links": split(chain), "noise": noise,
        "weights": {"tensors": len(by_codes) - 1, "differ": len(other), "examples": other[:4]}, "points": points,
    }  # fmt: skip
    found["judgements"] = judge(found)
    found["verdict"] = worst(found["judgements"])
    return found


def _noise(
    trainer: Trainer,
    sequences: list[list[int]],
    first: torch.Tensor,
    by_log_softmax: torch.Tensor,
    rollout: dict[str, torch.Tensor],
) -> dict[str, dict[str, float]]:
    """Each side against itself. Leaves the trainer with another attention implementation, unless it is exact."""
    found = {
        "trainer again": log_prob_difference(trainer.log_probs(sequences, NEW_TOKENS), first),
        "trainer in another batch": log_prob_difference(trainer.log_probs(sequences, NEW_TOKENS, alone=True), first),
        "rollout again": log_prob_difference(rollout["again"], rollout["together"]),
        "rollout prefill against decode": log_prob_difference(rollout["together"], rollout["decoded"]),
    }
    if not trainer.fp8.exact:
        attention = trainer.module.config._attn_implementation
        trainer.module.set_attn_implementation("sdpa" if attention == "eager" else "eager")
        other = trainer.log_probs(sequences, NEW_TOKENS, plain=True)
        found["trainer with another attention"] = log_prob_difference(other, by_log_softmax)
    return found


def differing_probes(trainer: dict[str, torch.Tensor], rollout: dict[str, torch.Tensor]) -> dict[str, Any]:
    """``starts``: the first probe at which any value differs, None without; ``curve``: probe -> relative difference."""
    layers = len({name.split(".")[1] for name in trainer if name.startswith("layers.")})
    both = [probe for probe in probes_in_order(layers) if probe in trainer and probe in rollout]
    curve = {probe: relative_difference(trainer[probe], rollout[probe]) for probe in both}
    return {"starts": next((probe for probe, value in curve.items() if value > 0), None), "curve": curve}


def certify_command(arguments: list[str]) -> int:
    """``verl-fp8 certify [--json FILE] [--html FILE] <overrides>``; exit 0 (pass or warn), 1 (fail), 2 (refused)."""
    outputs, overrides = take_output_options(arguments)
    started = time.perf_counter()
    try:
        config = compose(overrides)
        summary = validate(config)
        if summary.fp8 is None:
            raise ConfigError(
                "verl-fp8 certify", "no fp8 group among the overrides", "add +fp8=unified, rollout or bf16"
            )
        found = certify(config, summary.fp8)
    except Exception as error:  # whatever refuses the run is the answer
        print(f"refused: {root_cause(error)}", file=sys.stderr)
        return 2
    found["seconds"] = time.perf_counter() - started
    print(certify_text(found))
    write_outputs(outputs, found, certify_page)
    return 1 if found["verdict"] == "fail" else 0
