"""The HTML page of ``verl-fp8 replay``."""

import itertools
from typing import Any

import plotly.graph_objects as go

from verl_fp8.tools.page import LABELS, colour_of, definitions, figure, line, page, table
from verl_fp8.tools.runs.figures import COLUMNS, table_row

_COLOUR = {name: colour_of(i) for i, name in enumerate(LABELS)}

# Where a logarithmic axis of the bias ends: an unbiased method has rounding errors only.
_LEAST_BIAS = 1e-5

# alpha over its parts: where the other two are neutral it lies on alpha_mis.
_PARTS = {
    "alpha_ess": {"colour": colour_of(1), "width": 2},
    "alpha_mis": {"colour": colour_of(5), "width": 6},
    "alpha_var": {"colour": colour_of(4), "width": 2},
    "alpha": {"colour": colour_of(7), "width": 2, "dash": "dash"},
}

# Methods that reject tokens or do nothing: the weights they leave are all 1.
_ALL_ONE = ("none", "geo_rs", "k3_rs")

# Heading, introduction as HTML, and figures or ready HTML.
Section = tuple[str, str, list[go.Figure | str]]

_COLUMN_MEANINGS = {
    "ESS": "effective sample size, share of the batch; median over batches",
    "mean w": "mean weight of all valid tokens; rejected tokens count as 0",
    "w p99, p99.9, max": "tail of the weights over the kept tokens",
    "clipped": "tokens whose ratio the method truncates (TIS, MIS, AIS) or sets to 0 (IcePop)",
    "rejected": "tokens left out of the loss",
    "bias": "distance from the untruncated token-level importance-sampling gradient; 0 is unbiased, "
    "none shows the cost of no correction",
    "variance": "second moment of the weighted advantages over that of the plain ones; "
    "1 is no growth, less means fewer tokens",
    "alpha": "AIS's mixing factor: 0 no correction, 1 truncated importance sampling; median over batches",
}


def replay_page(found: dict[str, Any]) -> str:
    """The page for what :func:`verl_fp8.tools.runs.replay.replay` returned."""
    return page(f"Replay of {found['run']['name']}", _facts(found), _sections(found))


def _facts(found: dict[str, Any]) -> str:
    steps, config = found["steps"], found["run"]["config"]
    tokens = sum(s["mismatch"].get("n_tokens", 0) for s in steps)
    responses = sum(s["mismatch"].get("n_responses", 0) for s in steps)
    fp8 = config.get("fp8") or {}
    return (
        f"{len(steps)} batches, steps {steps[0]['step']} to {steps[-1]['step']}, {responses:,.0f} responses, "
        f"{tokens:,.0f} valid tokens. The run corrected with {found['run']['method']}; fp8 {fp8.get('mode', 'off')}; "
        f"estimator {config.get('adv_estimator')}; model {config.get('model')}."
    )


def _sections(found: dict[str, Any]) -> list[Section]:
    profile = "<p>alpha as it would be if the tokens of a bin were a batch of their own, over the whole dump.</p>"
    return [
        _methods(found),
        _bias_and_variance(found),
        _weights(found),
        _mismatch(found),
        _alphas(found),
        ("By position in the response", profile, _profile(found["by_position"], "token position")),
        ("By length of the response", profile, _profile(found["by_length"], "response length, tokens")),
    ]


def _methods(found: dict[str, Any]) -> Section:
    """The table."""
    note = ""
    if found["run"]["rejected_fraction"] > 0:
        note = (
            f'<p class="note">The run rejected up to {found["run"]["rejected_fraction"]:.1%} of a batch\'s tokens; '
            "they are not in the dump, so every method is compared on the tokens the run kept. "
            "Dump under none, ais or tis to compare on all of them.</p>"
        )
    rows = [[LABELS[name], *table_row(row), _parameters(row)] for name, row in found["methods"].items()]
    methods = table(["method", *COLUMNS, "parameters"], rows, small=len(COLUMNS) + 1)
    return "Methods", note, [methods + definitions(_COLUMN_MEANINGS)]


def _by_method(
    found: dict[str, Any],
    title: str,
    key: str,
    y: str,
    *,
    least: float | None = None,
    skip: tuple[str, ...] = (),
    **style: bool,
) -> go.Figure:
    """A figure of every step: one line a method.

    Args:
        key: of the methods' figures.
        y: the axis.
        least: what a smaller value is drawn at.
        skip: methods to leave out.
        style: of :func:`verl_fp8.tools.page.figure`.
    """
    out = figure(title, "step", y, **style)
    for name in found["methods"]:
        if name not in skip:
            values = [s["methods"][name].get(key) for s in found["steps"]]
            if least is not None:
                values = [None if v is None else max(v, least) for v in values]
            line(out, LABELS[name], _step_numbers(found), values, _COLOUR[name])
    return out


def _step_numbers(found: dict[str, Any]) -> list[int]:
    return [s["step"] for s in found["steps"]]


def _bias_and_variance(found: dict[str, Any]) -> Section:
    plane = figure("Bias against variance, whole dump", "variance (1 = no growth)", "bias", log=True)
    plane.update_layout(hovermode="closest")
    plane.update_xaxes(type="log")
    for name, row in found["methods"].items():
        if row["bias"] is not None:
            plane.add_scatter(
                x=[row["variance"]],
                y=[max(row["bias"], _LEAST_BIAS)],
                name=LABELS[name],
                mode="markers",
                marker={"size": 13, "color": _COLOUR[name]},
            )
    text = (
        "<p>Closer to the lower left is better on both counts; both are proxies (see the table's legend). "
        f"A bias below {_LEAST_BIAS:g} is drawn there.</p>"
    )
    by_step = [
        _by_method(found, "Bias by step", "bias", "bias", log=True, least=_LEAST_BIAS),
        _by_method(found, "Variance by step", "variance", "variance"),
        _by_method(found, "Effective sample size by step", "ess", "share of the batch"),
    ]
    return "Bias and variance", text, [plane, *by_step]


def _weights(found: dict[str, Any]) -> Section:
    histogram = figure("Weights of the kept tokens", "weight", "share of tokens", log=True)
    histogram.update_xaxes(type="log")
    edges = found["weight_histogram"]["weight"]
    middle = [(low * high) ** 0.5 for low, high in itertools.pairwise(edges)]
    for name, tokens in found["weight_histogram"]["tokens"].items():
        total = sum(tokens) or 1.0
        if name not in _ALL_ONE:
            line(histogram, LABELS[name], middle, [t / total for t in tokens], _COLOUR[name])
    text = "<p>Rejected tokens and tokens of weight 0 are in the last two plots, not in the first three.</p>"
    share = "share of valid tokens"
    keep_all = ("none", "tis", "tis_seq", "icepop", "ais", "ais_auto")
    figures = [
        histogram,
        _by_method(found, "99.9th percentile of the weights", "weight_p999", "weight"),
        _by_method(found, "Largest weight", "weight_max", "weight"),
        _by_method(found, "Truncated or zeroed tokens", "clip_fraction", share, percent=True, skip=_ALL_ONE),
        _by_method(found, "Rejected tokens", "rejected_fraction", share, percent=True, skip=keep_all),
        _signs(_step_numbers(found), found["steps"]),
    ]
    return "Weights", text, figures


def _mismatch(found: dict[str, Any]) -> Section:
    x, steps = _step_numbers(found), found["steps"]
    gap = figure("|log-prob difference|, trainer and rollout", "step", "nats", log=True)
    for i, (key, label) in enumerate({"mean_abs": "mean", "p99": "p99", "p999": "p99.9", "max": "largest"}.items()):
        line(gap, label, x, [s["mismatch"].get(key) for s in steps], colour_of((1, 5, 3, 7)[i]))
    kl = figure("KL(rollout || trainer), k3 estimator", "step", "nats a token", log=True)
    line(kl, "k3", x, [s["mismatch"].get("k3") for s in steps], colour_of(1))
    score = figure("Mean score of the responses", "step", "score")
    line(score, "score", x, [s["mismatch"].get("score_mean") for s in steps], colour_of(5))
    return "Mismatch over the run", "", [gap, kl, score]


def _alphas(found: dict[str, Any]) -> Section:
    x, steps = _step_numbers(found), found["steps"]
    text = (
        "<p>alpha = clip(alpha_ess - beta_var * alpha_var, 0, 1) * alpha_mis: "
        "can the weights be trusted, do they inflate the gradient, is a correction needed.</p>"
    )
    return "AIS: alpha and its three parts", text, [_alpha(x, steps, "ais"), _alpha(x, steps, "ais_auto")]


def _parameters(row: dict[str, Any]) -> str:
    shown = {
        k: v
        for k, v in row["parameters"].items()
        if k not in ("eps", "max_nonfinite_fraction") and not (k in ("ema", "batch_normalize") and not v)
    }
    return ", ".join(f"{k} {v}" for k, v in shown.items())


def _alpha(x: list[int], steps: list[dict[str, Any]], name: str) -> go.Figure:
    out = figure(f"{LABELS[name]}: alpha and its parts", "step", "")
    for key, style in _PARTS.items():
        line(out, key, x, [s["methods"][name].get(f"ais/{key}") for s in steps], **style)
    return out


def _signs(x: list[int], steps: list[dict[str, Any]]) -> go.Figure:
    out = figure("AIS: mean weight by sign of the advantage", "step", "weight")
    for i, sign in enumerate(("positive", "negative")):
        line(
            out,
            f"{sign} advantage",
            x,
            [s["methods"]["ais"].get(f"ais/weight_{sign}_advantage") for s in steps],
            colour_of((5, 7)[i]),
        )
    return out


def _profile(bins: list[dict[str, float]], label: str) -> list[go.Figure]:
    names = [str(int(b["from"])) if b["to"] - b["from"] == 1 else f"{int(b['from'])}-{int(b['to']) - 1}" for b in bins]
    gap = figure("Mean |log-prob difference|", label, "nats")
    gap.add_bar(
        x=names,
        y=[b["mean_abs"] for b in bins],
        marker_color=colour_of(1),
        name="mean |difference|",
        customdata=[b["n_tokens"] for b in bins],
        hovertemplate="%{y:.5f}, %{customdata:,.0f} tokens",
    )
    alpha = figure("alpha and its parts", label, "")
    for key, style in _PARTS.items():
        line(alpha, key, names, [b[key] for b in bins], **style)
    for out in (gap, alpha):
        out.update_xaxes(type="category", nticks=16, tickangle=0)
    return [gap, alpha]
