"""What ``verl-fp8 certify`` prints, and the page it writes."""

import html
import json
from typing import Any

from verl_fp8.numerics.recipe import Recipe
from verl_fp8.tools.mismatch.probes import PROBES

MEANINGS = {
    "log-softmax": "how the trainer takes log-probs from its logits, against a float32 log-softmax",
    "weights": "the trainer's weights against those the rollout holds, read back out of vLLM",
    "activations": "bf16 activations against the rollout's quantised ones",
    "kernels": "attention, norms, GEMM order, output head: the same weights and quantiser in vLLM",
    "rollout noise": "vLLM scoring the tokens as a prompt against vLLM sampling them",
    "trainer again": "the trainer with itself, the same batch",
    "trainer in another batch": "the trainer with itself, each sequence alone",
    "rollout again": "vLLM scoring the same prompts a second time",
    "rollout prefill against decode": "the rollout's own noise, the link above",
    "trainer with another attention": "the trainer with itself, sdpa against eager: what this model makes of any "
    "rounding",
}
_FIGURES = ("mean", "max", "k3")


def _figures(row: dict[str, Any]) -> list[str]:
    return [f"{row[key]:.3g}" for key in _FIGURES]


def _link_rows(found: dict[str, Any]) -> list[list[str]]:
    rows = [[link["name"], *_figures(link), f"{link['share']:.1%}", MEANINGS[link["name"]]] for link in found["links"]]
    return [
        *rows,
        [
            "trainer - rollout",
            *_figures(found["total"]),
            "100.0%" if found["total"]["max"] else "-",
            "the mismatch of a run",
        ],
    ]


def _noise_rows(found: dict[str, Any]) -> list[list[str]]:
    return [[name, *_figures(row), "", MEANINGS[name]] for name, row in found["noise"].items()]


def _judgement_rows(found: dict[str, Any]) -> list[list[str]]:
    return [
        [
            j["verdict"],
            f"{j['value']:.3g}",
            f"<= {j['passes']:g}",
            f"<= {j['warns']:g}",
            "; ".join(filter(None, (j["name"], j["note"]))),
        ]
        for j in found["judgements"]
    ]


def _start(found: dict[str, Any]) -> str:
    points = found["points"]
    if points is None:
        return (
            "not looked for: vLLM runs compiled here; set actor_rollout_ref.rollout.enforce_eager=true to see the "
            "layer where it starts"
        )
    if points["starts"] is None:
        return f"nowhere: all {len(points['curve'])} recorded points are equal to the bit"
    last = next(reversed(points["curve"].values()))
    return f"{points['starts']} (relative difference {points['curve'][points['starts']]:.2g}; {last:.2g} at the end)"


def _still(found: dict[str, Any]) -> str:
    """A line on links and noise that changed no bit, or nothing."""
    rows = {link["name"]: link for link in found["links"]} | found["noise"]
    still = ", ".join(name for name, row in rows.items() if row["max"] == 0)
    return f"\nno bit changed on this machine, which says nothing about another: {still}" if still else ""


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, *rows]
    widths = [max(len(row[i]) for row in lines) for i in range(len(header))]
    last = len(header) - 1
    return "\n".join(
        "  ".join(
            c if i == last else c.ljust(w) if i == 0 else c.rjust(w)
            for i, (c, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in lines
    )


_HEADER = ["pair", *_FIGURES, "share", "what"]
_BANDS = ["verdict", "value", "passes", "warns", "figure"]


def _facts(found: dict[str, Any]) -> str:
    recipe = found["recipe"]
    shown = f"{Recipe.from_dict(recipe).granularity}, scales {recipe['scale_format']}" if recipe else "no FP8 layer"
    mode = found["mode"] + (", exact" if found["exact"] else "")
    return (
        f"{found['model']}: fp8={mode}, {found['fp8_layers']} FP8 layers, {shown}, "
        f"trainer {found['backend']}, lm_head {found['lm_head']}, {found['tokens']} sampled tokens"
    )


def certify_text(found: dict[str, Any]) -> str:
    """What the command prints."""
    weights = found["weights"]
    return "\n\n".join(
        [
            _facts(found),
            _table(_HEADER, [*_link_rows(found), *_noise_rows(found)]),
            f"weights: {weights['differ']} of {weights['tensors']} tensors held by vLLM with other bytes "
            f"{' '.join(weights['examples'])}".rstrip()
            + f"\nthe difference starts at: {_start(found)}"
            + _still(found),
            _table(_BANDS, _judgement_rows(found)),
            f"{found['verdict']} ({found['seconds']:.0f} s)",
        ]
    )


def certify_page(found: dict[str, Any]) -> str:
    """The HTML page."""
    from verl_fp8.tools.page import colour_of, figure, line, page, table

    figures = []
    bars = figure("Where the mismatch comes from", "", "share of <d, d>", percent=True)
    bars.update_yaxes(rangemode="normal")
    bars.add_bar(
        x=[link["name"] for link in found["links"]], y=[link["share"] for link in found["links"]], showlegend=False
    )
    figures.append(bars)
    if found["points"]:
        curves = figure(
            "Trainer against rollout inside the model, one sequence", "decoder layer", "relative difference", log=True
        )
        for index, probe in enumerate(PROBES):
            curve = {int(k.split(".")[1]): v for k, v in found["points"]["curve"].items() if k.endswith(f".{probe}")}
            line(curves, probe, list(curve), list(curve.values()), colour_of(index))
        figures.append(curves)
    sources = table(("figure", "source of its band"), [[j["name"], j["source"]] for j in found["judgements"]], small=1)
    recipe = f'<p class="facts">{html.escape(json.dumps(found["recipe"]))}</p>'
    return page(
        f"Certificate: {found['verdict']}", _facts(found),
        [
            ("Bands", "", [table(_BANDS, _judgement_rows(found), small=4) + sources]),
            ("The mismatch and its links", f"<p>The difference starts at: {html.escape(_start(found))}</p>",
             [table(_HEADER, [*_link_rows(found), *_noise_rows(found)], small=5), *figures]),
            ("Recipe", recipe, []),
        ],
    )  # fmt: skip
