"""The rollout's half of ``verl-fp8 certify``: a real vLLM engine in a process of its own.

``python -m verl_fp8.tools.mismatch.certify_rollout FOLDER`` reads ``job.json`` and the trainer's weight stream,
``stream.safetensors``, out of the folder. It leaves ``result.json``, ``held.safetensors`` (the weights as vLLM holds
them, under Hugging Face names) and ``probes.safetensors`` there.
"""

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from verl.workers.rollout.vllm_rollout import bucketed_weight_transfer

from verl_fp8.numerics.recipe import scales_over
from verl_fp8.rollout.worker import Fp8WorkerExtension, shard_names
from verl_fp8.sync.stream import MANIFEST, SCALE_SUFFIX
from verl_fp8.tools.mismatch.probes import recording

EXTENSION = "verl_fp8.tools.mismatch.certify_rollout.CertifyExtension"
_BUCKET = 64


def receiver(file: str) -> type:
    """A stand-in for verl's BucketedWeightReceiver, which reads the trainer's stream from a file."""

    class FileReceiver:
        def __init__(self, **kwargs: Any) -> None:
            self.device = kwargs["device"]

        def receive_weights(self, on_bucket_received) -> None:
            with safe_open(file, framework="pt") as stored:
                names = [*(n for n in stored.keys() if n != MANIFEST), MANIFEST]
                for start in range(0, len(names), _BUCKET):
                    bucket = [(n, stored.get_tensor(n).to(self.device)) for n in names[start : start + _BUCKET]]
                    on_bucket_received(bucket, is_last=start + _BUCKET >= len(names))

    return FileReceiver


class CertifyExtension(Fp8WorkerExtension):
    """The rollout's worker extension, whose sync reads a file instead of a socket."""

    def certify_sync(self, file: str) -> None:
        """One verified weight sync."""
        original = bucketed_weight_transfer.BucketedWeightReceiver
        bucketed_weight_transfer.BucketedWeightReceiver = receiver(file)
        try:
            self.update_weights_from_ipc()
        finally:
            bucketed_weight_transfer.BucketedWeightReceiver = original

    def _get_zmq_handle(self) -> str:
        return ""  # the file needs none; verl's asks for a device's identity

    def certify_held(self, file: str) -> None:
        """Write the weights as held."""
        save_file({n: t.detach().cpu().contiguous().clone() for n, t in held_weights(self.model_runner.model)}, file)

    def certify_record(self) -> None:
        """Record the next forward pass."""
        self._certify_stack = contextlib.ExitStack()
        self._certify_found = self._certify_stack.enter_context(recording(self.model_runner.model))

    def certify_recorded(self, file: str) -> None:
        """Write what was recorded."""
        self._certify_stack.close()
        save_file({name: tensor.contiguous() for name, tensor in self._certify_found.items()}, file)


def held_weights(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(Hugging Face name, tensor) of every parameter of a vLLM model; fused ones are split. No tensor parallelism."""
    for prefix, module in model.named_modules():
        names = shard_names(model, prefix)
        for leaf, parameter in module.named_parameters(recurse=False):
            tensor = parameter.data
            if len(names) > 1:
                rows = module.weight_block_size[0] if f".{leaf}" == SCALE_SUFFIX else 1
                sizes = [scales_over(width, rows) for width in module.output_partition_sizes]
                yield from zip((f"{name}.{leaf}" for name in names), tensor.split(sizes), strict=True)
            else:
                # vLLM pads the vocabulary.
                yield (
                    f"{prefix}.{leaf}",
                    tensor[: module.org_vocab_size] if hasattr(module, "org_vocab_size") else tensor,
                )


def roll_out(folder: Path) -> None:
    """Do the job of a folder."""
    job = json.loads((folder / "job.json").read_text())
    from vllm import LLM, SamplingParams

    llm = LLM(**job["llm"], worker_extension_cls=EXTENSION)
    llm.collective_rpc("certify_sync", args=(str(folder / "stream.safetensors"),))
    llm.collective_rpc("certify_held", args=(str(folder / "held.safetensors"),))
    # As verl's server does after its start.
    llm.collective_rpc("monkey_patch_model", kwargs={"vocab_size": job["vocab_size"], "banned_token_ids": None})
    count = job["new_tokens"]
    # vLLM's prompt log-probs know no temperature, so everything is at 1.
    # ignore_eos, not min_tokens, which would mask the end token and so change the distribution that is sampled from.
    sample = SamplingParams(temperature=1.0, max_tokens=count, ignore_eos=True, logprobs=0, detokenize=False, seed=0)
    outputs = llm.generate([{"prompt_token_ids": p} for p in job["prompts"]], sample, use_tqdm=False)
    answers = [list(out.outputs[0].token_ids) for out in outputs]
    decoded = [
        [step[token].logprob for step, token in zip(out.outputs[0].logprobs, answer, strict=True)]
        for out, answer in zip(outputs, answers, strict=True)
    ]
    sequences = [prompt + answer for prompt, answer in zip(job["prompts"], answers, strict=True)]
    score = SamplingParams(temperature=1.0, max_tokens=1, prompt_logprobs=0, detokenize=False)

    def scored(part: list[list[int]]) -> list[list[float]]:
        outs = llm.generate([{"prompt_token_ids": s} for s in part], score, use_tqdm=False)
        return [
            [step[token].logprob for step, token in zip(out.prompt_logprobs[-count:], s[-count:], strict=True)]
            for out, s in zip(outs, part, strict=True)
        ]

    together = scored(sequences)
    again = scored(sequences)
    if job["record"]:
        llm.collective_rpc("certify_record")
        scored(sequences[:1])
        llm.collective_rpc("certify_recorded", args=(str(folder / "probes.safetensors"),))
    result = {"answers": answers, "decoded": decoded, "together": together, "again": again}
    (folder / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    roll_out(Path(sys.argv[1]))
