"""``verl-fp8 attribute <verl overrides>``: which operation makes two forwards of one model differ, where, and how much.

One Hugging Face model forwards tokens that it sampled itself. The baseline computes as the exact mode does. Two
questions are asked of every cause in :mod:`verl_fp8.tools.mismatch.causes`. What if only this differs? (``alone``: the
baseline with the cause.) What if everything differs but this? (``without``: the stock model with this one operation
made equal again.) Both are compared with the baseline: the log-probs of the sampled tokens, and the residual stream
after every decoder layer. With FP8 layers ``without`` hardly ever helps: any one difference is amplified to nearly the
same size.
"""

import contextlib
import json
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from verl_fp8.errors import ConfigError
from verl_fp8.layers.shapes import load_config, split_layers
from verl_fp8.numerics import exact
from verl_fp8.rollout.arguments import plain
from verl_fp8.switches.settings import Fp8Settings
from verl_fp8.sync.stream import codes_of_weight
from verl_fp8.tools.mismatch.causes import Cause, causes, to_codes
from verl_fp8.tools.mismatch.compare import log_prob_difference, prompts_of, relative_difference
from verl_fp8.tools.overrides import compose, root_cause, take_output_options, validate, write_outputs
from verl_fp8.trainer.exact import check_config, make_exact


@dataclass(frozen=True)
class Trace:
    """One forward pass.

    Attributes:
        log_probs: [tokens] float64, of the sampled tokens.
        stream: one [tokens, hidden] tensor for the residual stream after each decoder layer.
    """

    log_probs: torch.Tensor
    stream: tuple[torch.Tensor, ...]


@torch.no_grad()
def trace(model: nn.Module, ids: torch.Tensor, start: int, *, alone: bool = False) -> Trace:
    """Run tokens ``ids`` [sequences, length] through the model; the sampled ones begin at ``start``.

    Args:
        alone: each sequence by itself rather than all in one batch.
    """
    layers = [m for m in model.modules() if hasattr(m, "post_attention_layernorm")]
    streams: list[list[torch.Tensor]] = [[] for _ in layers]
    log_probs = []

    def keep(index: int):
        def hook(module, args, output):
            streams[index].append((output[0] if isinstance(output, tuple) else output).flatten(0, 1).to(torch.bfloat16))

        return hook

    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.autocast(ids.device.type, dtype=torch.bfloat16))  # as verl's engine runs it
        for index, layer in enumerate(layers):
            stack.callback(layer.register_forward_hook(keep(index)).remove)
        for part in ids.split(1) if alone else (ids,):
            logits = model(input_ids=part, use_cache=False).logits[:, start - 1 : -1].float()
            log_probs.append(exact.log_probs(logits, part[:, start:]).double().flatten())
    return Trace(torch.cat(log_probs), tuple(torch.cat(stream) for stream in streams))


def attribute(model: nn.Module, ids: torch.Tensor, start: int, *, fp8: bool) -> dict[str, Any]:
    """All causes of one exact model; see the module's docstring.

    Args:
        model: exact (:func:`verl_fp8.trainer.exact.make_exact`), with FP8 layers as
            :func:`verl_fp8.tools.mismatch.causes.to_codes` leaves them.
        ids: [sequences, length].
        start: index of the first sampled token.
        fp8: whether it has FP8 layers.

    Returns:
        ``tokens``, ``layers``, ``all`` (every ordinary cause at once) and ``causes``: name -> ``meaning``, ``acts``
        (whether it changes any bit on this machine, whose kernels may not reach a rounding), ``alone`` and, of ordinary
        causes, ``without``. ``all``, ``alone`` and ``without`` hold mean, max and k3 of the log-prob differences,
        ``stream`` (relative difference after each layer), ``starts`` (first layer with a difference, None without) and
        ``grows`` (layer that adds most).
    """
    listed = causes(fp8=fp8)
    ordinary = [c for c in listed if c.ordinary]
    baseline = trace(model, ids, start)

    def measure(chosen: Iterable[Cause]) -> dict[str, Any]:
        chosen = list(chosen)
        with contextlib.ExitStack() as stack:
            for cause in chosen:
                if cause.apply is not None:
                    stack.enter_context(cause.apply(model))
            found = trace(model, ids, start, alone=any(c.apply is None for c in chosen))
        stream = [relative_difference(a, b) for a, b in zip(found.stream, baseline.stream, strict=True)]
        growth = [b - a for a, b in zip([0.0, *stream], stream, strict=False)]
        return log_prob_difference(found.log_probs, baseline.log_probs) | {
            "stream": stream,
            "starts": next((i for i, value in enumerate(stream) if value > 0), None),
            "grows": max(range(len(growth)), key=growth.__getitem__) if any(stream) else None,
        }

    table = {}
    for cause in listed:
        alone = measure([cause])
        table[cause.name] = {"meaning": cause.meaning, "alone": alone, "acts": alone["max"] > 0 or any(alone["stream"])}
        if cause.ordinary:
            table[cause.name]["without"] = measure(c for c in ordinary if c is not cause)
    return {
        "tokens": baseline.log_probs.numel(),
        "layers": len(baseline.stream),
        "all": measure(ordinary),
        "causes": table,
    }


@torch.no_grad()
def exact_model(config: Any, settings: Fp8Settings) -> tuple[nn.Module, Any, torch.Tensor, int]:
    """The exact model of a composed run, and tokens that it sampled as a stock bf16 model.

    Returns:
        Model, tokenizer, token ids [sequences, length], index of the first sampled token.

    Raises:
        ConfigError: a model whose operations the exact mode does not define.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from verl.utils.fs import copy_to_local

    node = plain(config.actor_rollout_ref.model)
    path = copy_to_local(node["path"])
    hf_config = load_config(node)
    check_config(hf_config)
    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=bool(node.get("trust_remote_code")))
    model = AutoModelForCausalLM.from_pretrained(
        path, config=hf_config, dtype=torch.bfloat16, attn_implementation="sdpa"
    ).eval()
    prompts = prompts_of(tokenizer, template=False)
    start = min(map(len, prompts))
    ids = torch.tensor([p[-start:] for p in prompts])
    torch.manual_seed(0)
    ids = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, top_p=1.0, temperature=1.0,
        min_new_tokens=NEW_TOKENS, max_new_tokens=NEW_TOKENS, pad_token_id=0,
    )  # fmt: skip
    converted, _, _ = split_layers(hf_config, settings.layer_filter)
    codes = {name: codes_of_weight(model.get_submodule(name).weight, settings) for name in converted}
    make_exact(model)
    to_codes(model, codes, settings.recipe)
    return model, tokenizer, ids, start


NEW_TOKENS = 16


def attribute_command(arguments: list[str]) -> int:
    """Compose, validate, measure and print; exit code 0, or 2 if the run is refused.

    Args:
        arguments: verl's overrides; ``--json FILE`` and ``--html FILE`` anywhere among them.
    """
    outputs, overrides = take_output_options(arguments)
    try:
        config = compose(overrides)
        summary = validate(config)
        if summary.fp8 is None:
            raise ConfigError(
                "verl-fp8 attribute", "no fp8 group among the overrides", "add +fp8=unified, rollout or bf16"
            )
        if summary.fp8.recipe.weights != "block":
            raise ConfigError(
                "verl-fp8 attribute, which compares with vLLM's block quantiser",
                f"fp8.recipe.weights={summary.fp8.recipe.weights}",
                "set fp8.recipe.weights=block and fp8.recipe.activations=group, or use verl-fp8 certify",
            )
        started = time.perf_counter()
        model, _, ids, start = exact_model(config, summary.fp8)
        found = attribute(model, ids, start, fp8=summary.fp8.layer_filter is not None)
    except Exception as error:  # whatever refuses the run is the answer
        print(f"refused: {root_cause(error)}", file=sys.stderr)
        return 2
    found |= {
        "model": str(config.actor_rollout_ref.model.path),
        "recipe": summary.fp8.recipe.to_dict() if summary.fp8.layer_filter else None,
        "seconds": time.perf_counter() - started,
    }
    print(text(found))
    write_outputs(outputs, found, attribution_page)
    return 0


def rows(found: dict[str, Any]) -> list[list[str]]:
    """The rows of the table: cause, alone (mean, max, k3, first layer, layer that adds most), without (mean, k3)."""
    out = []
    for name, row in found["causes"].items():
        alone, without = row["alone"], row.get("without")
        place = ["-", "-"] if alone["starts"] is None else [str(alone["starts"]), str(alone["grows"])]
        rest = [f"{without['mean']:.2g}", f"{without['k3']:.2g}"] if without else ["-", "-"]
        out.append([name, *(f"{alone[key]:.2g}" for key in ("mean", "max", "k3")), *place, *rest])
    everything = found["all"]
    out.append(
        [
            "all ordinary",
            *(f"{everything[key]:.2g}" for key in ("mean", "max", "k3")),
            str(everything["starts"]),
            str(everything["grows"]),
            "-",
            "-",
        ]
    )
    return out


HEADER = ("cause", "mean", "max", "k3", "starts at", "grows at", "mean without", "k3 without")


def text(found: dict[str, Any]) -> str:
    """What the command prints."""
    table = [list(HEADER), *rows(found)]
    widths = [max(len(row[i]) for row in table) for i in range(len(HEADER))]
    lines = [
        "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        for row in table
    ]
    head = (
        f"{found['tokens']} sampled tokens, {found['layers']} layers, log-prob differences from the exact forward "
        f"({found['seconds']:.0f} s)"
    )
    still = ", ".join(name for name, row in found["causes"].items() if not row["acts"])
    tail = [f"no bit changed on this machine, which says nothing about another: {still}"] if still else []
    return "\n".join([head, *lines, *tail])


def attribution_page(found: dict[str, Any]) -> str:
    """The HTML page: table, meanings, and the residual stream's difference layer by layer."""
    from verl_fp8.tools.page import colour_of, definitions, figure, line, page, table

    curves = figure("Residual stream, one cause alone", "decoder layer", "relative difference", log=True)
    x = list(range(found["layers"]))
    for index, (name, row) in enumerate(found["causes"].items()):
        line(curves, name, x, row["alone"]["stream"], colour_of(index))
    line(curves, "all ordinary", x, found["all"]["stream"], "#000000", 3)
    bars = figure("k3 of the log-probs", "", "k3", log=True)
    for kind in ("alone", "without"):
        chosen = {n: r[kind]["k3"] for n, r in found["causes"].items() if kind in r and r[kind]["k3"] > 0}
        bars.add_bar(
            x=list(chosen),
            y=list(chosen.values()),
            name={"alone": "only this differs", "without": "all but this"}[kind],
        )
    meanings = {name: row["meaning"] for name, row in found["causes"].items()}
    facts = f"{found['model']}; {found['tokens']} sampled tokens; recipe {json.dumps(found['recipe'])}"
    return page(
        "Where trainer and rollout come apart", facts,
        [
            ("Causes", "", [table(HEADER, rows(found)) + definitions(meanings)]),
            ("Layer by layer", "", [curves, bars]),
        ],
    )  # fmt: skip
