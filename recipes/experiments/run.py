"""A coarse per-tensor FP8 rollout, with and without corrections, against bf16 and unified FP8: runs, table, figure.

    python recipes/experiments/run.py run [--only SETTING ...] [--seed N ...] [--out DIR]
    python recipes/experiments/run.py collect [--out DIR]     DIR -> results.json, table in README.md
    python recipes/experiments/run.py plot                    results.json -> results.svg; needs matplotlib

``run`` trains what DIR does not hold yet.
One process a run, no Ray and no vLLM: README.md says which functions are the product's and verl's own.
"""

import argparse
import copy
import json
import re
import runpy
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RESULTS, README, FIGURE = HERE / "results.json", HERE / "README.md", HERE / "results.svg"
sys.path.insert(0, str(ROOT))

STEPS, SEEDS = 60, (1, 2, 3)
DIGITS = "7"
PROMPTS, ANSWERS, TOKENS, MINI_BATCHES = 8, 4, 8, 2
LEARNING_RATE = 2e-3
LEARNED = 0.95
# The size of one weight in every FP8 tensor, connected to nothing (see `outlier`).
OUTLIER = 28672.0

_PER_TENSOR = {"mode": "rollout", "recipe": {"weights": "tensor", "activations": "tensor"}}
# Setting -> (the group fp8, the correction).
SETTINGS = {
    "bf16": ({"mode": "bf16"}, None),
    "fp8": (_PER_TENSOR, None),
    "tis": (_PER_TENSOR, "tis"),
    "ais": (_PER_TENSOR, "ais"),
    "unified": ({"mode": "unified", "backend": "reference"}, None),
}
NAMES = {
    "bf16": "bf16 rollout",
    "fp8": "FP8 rollout per tensor, uncorrected",
    "tis": "the same, TIS (clip 2)",
    "ais": "the same, AIS",
    "unified": "unified FP8, 128x128 blocks",
}


def outlier(model, value: float) -> None:
    """Put one weight of this size into every linear layer of the tiny model; what it computes and learns is unchanged.

    The last channel of the hidden state, the last of each MLP's inner state and of the values, and one rotary pair of
    queries and keys are cut off: zero in, zero out, and so zero in every gradient. The weights are where two of these
    meet.
    """
    import torch

    config = model.config
    dead, inner, head = config.hidden_size - 1, config.intermediate_size - 1, config.head_dim
    value_row = config.num_key_value_heads * head - 1
    with torch.no_grad():
        model.model.embed_tokens.weight[:, dead] = 0
        model.lm_head.weight[:, dead] = 0
        for layer in model.model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            for projection, rows in (
                (attention.q_proj, [value_row - head // 2, value_row]),
                (attention.k_proj, [value_row - head // 2, value_row]),
                (attention.v_proj, [value_row]),
                (mlp.gate_proj, [inner]),
                (mlp.up_proj, [inner]),
            ):
                projection.weight[:, dead] = 0
                projection.weight[rows] = 0
                projection.weight[rows[-1], dead] = value
            for projection, column in ((attention.o_proj, value_row), (mlp.down_proj, inner)):
                projection.weight[dead] = 0
                projection.weight[:, column] = 0
                projection.weight[dead, column] = value


def train(setting: str, seed: int, folder: Path) -> Iterator[dict[str, float]]:
    """One run: the figures of each step.

    Args:
        setting: of ``SETTINGS``.
        seed: of the model's weights and of sampling.
        folder: for the tiny model.
    """
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage, compute_policy_loss_vanilla
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights
    from verl.utils.torch_functional import logprobs_from_logits
    from verl.workers.config import ActorConfig

    from verl_fp8.correction.ais import ais_weights, apply_weights
    from verl_fp8.layers.shapes import linear_shapes
    from verl_fp8.numerics.quantize import QuantizedTensor
    from verl_fp8.switches.settings import Fp8Settings
    from verl_fp8.sync.stream import SCALE_SUFFIX, WEIGHT_SUFFIX, Incoming, outgoing
    from verl_fp8.tools.mismatch.causes import to_codes
    from verl_fp8.tools.mismatch.compare import log_prob_difference
    from verl_fp8.trainer.convert import convert_linears

    torch.set_num_threads(1)  # the order of sums, and with it every figure, would depend on it
    score = runpy.run_path(str(ROOT / "recipes" / "reward.py"))["compute_score"]
    runpy.run_path(str(ROOT / "recipes" / "prepare.py"))["tiny_model"](folder, seed=seed)
    node, correction = SETTINGS[setting]
    settings = Fp8Settings.parse(node, capability=None)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    trainer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    outlier(trainer, OUTLIER)
    rollout = copy.deepcopy(trainer).to(torch.bfloat16).eval()
    layers = () if settings.layer_filter is None else settings.layers.split(linear_shapes(trainer))[0]
    if settings.mode == "unified":
        convert_linears(trainer, settings.recipe, settings.layers, backend="reference")
    optimizer = torch.optim.AdamW(trainer.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    actor = ActorConfig(strategy="fsdp2", rollout_n=ANSWERS, ppo_micro_batch_size_per_gpu=1, clip_ratio_c=3.0)
    generator = torch.Generator().manual_seed(seed)

    digits = [DIGITS[i % len(DIGITS)] for i in range(PROMPTS)]
    turns = [[{"role": "user", "content": f"write {digit}"}] for digit in digits]
    text = [tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True) for turn in turns]
    prompts = torch.tensor(tokenizer(text)["input_ids"]).repeat_interleave(ANSWERS, dim=0)
    group = np.repeat(np.arange(PROMPTS), ANSWERS)

    def sync() -> None:
        incoming = Incoming(settings, frozenset(layers))
        received = dict(incoming.take(outgoing(trainer.named_parameters(), settings, layers)))
        incoming.finish()
        codes = {}
        for name in layers:
            tensors = received.pop(name + WEIGHT_SUFFIX), received.pop(name + SCALE_SUFFIX)
            codes[name] = QuantizedTensor(*tensors, settings.recipe.weight_block).dequantize()  # once a sync
        to_codes(rollout, codes, settings.recipe, accumulate=torch.float32)
        parameters = dict(rollout.named_parameters())
        for name, tensor in received.items():
            parameters[name].data.copy_(tensor)

    @torch.no_grad()
    def sample() -> tuple[torch.Tensor, torch.Tensor]:
        given, past, tokens, log_probs = prompts, None, [], []
        for _ in range(TOKENS):
            out = rollout(input_ids=given, past_key_values=past, use_cache=True)
            past, log_p = out.past_key_values, torch.log_softmax(out.logits[:, -1].float(), dim=-1)
            given = torch.multinomial(log_p.exp(), 1, generator=generator)
            tokens.append(given)
            log_probs.append(log_p.gather(1, given))
        return torch.cat(tokens, dim=1), torch.cat(log_probs, dim=1)

    def of_trainer(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs of the answers, and the logits they come from."""
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = trainer(input_ids=rows, use_cache=False).logits[:, -TOKENS - 1 : -1]
        return logprobs_from_logits(logits, rows[:, -TOKENS:], inplace_backward=False), logits

    for _ in range(STEPS):
        sync()
        answers, rolled = sample()
        ended = (answers == tokenizer.eos_token_id).long()
        mask = ((ended.cumsum(1) - ended) == 0).float()
        rewards = torch.tensor(
            [
                score("experiment/digit", tokenizer.decode(row[keep > 0]), digits[i // ANSWERS])
                for i, (row, keep) in enumerate(zip(answers, mask, strict=True))
            ]
        )
        rows = torch.cat((prompts, answers), dim=1)
        with torch.no_grad():
            old, logits = of_trainer(rows)
            log_p = torch.log_softmax(logits.float(), dim=-1)
            entropy = -(log_p.exp() * log_p).sum(-1)
        spread = rewards[:, None] / mask.sum(1, keepdim=True) * mask  # verl sums the tokens' rewards
        advantages, _ = compute_grpo_outcome_advantage(spread, mask, group)
        weights, alpha = None, None
        if correction == "tis":
            weights, _ = compute_rollout_correction_weights(
                old - rolled, mask, rollout_is="token", rollout_is_threshold=2.0, rollout_is_batch_normalize=False
            )
        elif correction == "ais":
            result = ais_weights(old, rolled, advantages, mask)
            advantages, alpha = apply_weights(advantages, result.weights), result.alpha
        norms = []
        for part in torch.arange(len(rows)).chunk(MINI_BATCHES):
            new, _ = of_trainer(rows[part])
            corrected = {} if weights is None else {"rollout_is_weights": weights[part]}
            batch = (old[part], new, advantages[part], mask[part])
            loss, _ = compute_policy_loss_vanilla(*batch, config=actor, **corrected)
            optimizer.zero_grad()
            loss.backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(trainer.parameters(), 1.0)))
            optimizer.step()
        valid = mask.bool()
        difference = log_prob_difference(old[valid].double(), rolled[valid].double())
        figures = {
            "reward": rewards.mean(), "k3": difference["k3"], "mean_abs_logp_diff": difference["mean"],
            "grad_norm": statistics.fmean(norms), "entropy": entropy[valid].mean(),
        }  # fmt: skip
        figures |= {} if alpha is None else {"alpha": alpha}
        yield {name: float(f"{float(value):.5g}") for name, value in figures.items()}


def run(setting: str, seed: int, out: Path) -> None:
    """Train and keep the figures as ``out/<setting>-<seed>.jsonl``, a line a step, unless they are there."""
    if len(lines_of(setting, seed, out)) == STEPS:
        return
    out.mkdir(parents=True, exist_ok=True)
    with (out / f"{setting}-{seed}.jsonl").open("w", buffering=1) as file:
        for figures in train(setting, seed, out / f"model-{setting}-{seed}"):
            file.write(json.dumps(figures) + "\n")


def lines_of(setting: str, seed: int, out: Path) -> list[dict[str, float]]:
    """The steps a run has made."""
    file = out / f"{setting}-{seed}.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def collect(out: Path) -> dict:
    """Every complete run: the command that made it, and its figures a step."""
    runs = []
    for setting in SETTINGS:
        for seed in SEEDS:
            steps = lines_of(setting, seed, out)
            command = f"python recipes/experiments/run.py run --only {setting} --seed {seed}"
            if len(steps) == STEPS:
                figures = {name: [step[name] for step in steps] for name in steps[0]}
                runs.append({"setting": setting, "seed": seed, "command": command, **figures})
            else:
                print(f"left out, {len(steps)} of {STEPS} steps: {command}", file=sys.stderr)
    return {"steps": STEPS, "outlier": OUTLIER, "learning_rate": LEARNING_RATE, "runs": runs}


def table(results: dict) -> str:
    """One row a setting, in each cell the seeds in their order; all from results.json."""
    early, late = 10, results["steps"] // 4

    def learned(run: dict) -> str:
        return next((str(step) for step, reward in enumerate(run["reward"], 1) if reward >= LEARNED), "never")

    def median(key: str, steps: slice):
        return lambda run: f"{statistics.median(run[key][steps]):.1g}" if key in run else ""

    last = slice(-late, None)
    columns = {
        f"first step with reward {LEARNED}": learned,
        f"reward, last {late}": lambda run: f"{statistics.fmean(run['reward'][last]):.3f}",
        f"k3, first {early}": median("k3", slice(early)),
        f"k3, last {late}": median("k3", last),
        f"gradient norm, last {late}": median("grad_norm", last),
        f"alpha, first {early}": median("alpha", slice(early)),
        f"alpha, last {late}": median("alpha", last),
    }
    lines = ["| setting | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for setting, name in NAMES.items():
        runs = [run for run in results["runs"] if run["setting"] == setting]
        cells = [", ".join(filter(None, map(of, runs))) for of in columns.values()]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


_TABLE = re.compile(r"(?<=<!-- table -->\n).*?(?=\n<!-- end of table -->)", re.DOTALL)


def plot(results: dict) -> None:
    """Mean over seeds and their range, one panel a figure."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    shown = {"reward": "reward", "k3": "k3, trainer and rollout", "entropy": "entropy", "grad_norm": "gradient norm"}
    figure, axes = pyplot.subplots(2, 2, figsize=(10, 7), layout="constrained")
    for axis, (key, title) in zip(axes.flat, shown.items(), strict=True):
        for setting, name in NAMES.items():
            curves = [r[key] for r in results["runs"] if r["setting"] == setting]
            if curves:
                over, steps = list(zip(*curves, strict=True)), range(1, results["steps"] + 1)
                (line,) = axis.plot(steps, [statistics.fmean(v) for v in over], label=name, linewidth=1.3)
                low, high = [min(v) for v in over], [max(v) for v in over]
                axis.fill_between(steps, low, high, alpha=0.13, color=line.get_color(), linewidth=0)
        axis.set(title=title, xlabel="step", yscale="log" if key in ("k3", "grad_norm") else "linear")
    axes.flat[0].legend(fontsize=8)
    figure.savefig(FIGURE, metadata={"Date": None})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "collect", "plot"))
    parser.add_argument("--only", nargs="+", choices=tuple(SETTINGS), default=tuple(SETTINGS), help="settings")
    parser.add_argument("--seed", type=int, nargs="+", choices=SEEDS, default=SEEDS, help="seeds")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "experiments", help="folder of the runs")
    arguments = parser.parse_args()
    if arguments.what == "run":
        for seed in arguments.seed:
            for setting in arguments.only:
                run(setting, seed, arguments.out)
                print(f"{setting}-{seed}: done", flush=True)
    elif arguments.what == "collect":
        results = collect(arguments.out)
        RESULTS.write_text(json.dumps(results, separators=(",", ":")).replace('{"setting"', '\n{"setting"') + "\n")
        README.write_text(_TABLE.sub(lambda _: table(results), README.read_text()))
    else:
        plot(json.loads(RESULTS.read_text()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
