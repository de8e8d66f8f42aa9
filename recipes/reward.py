"""Rule-based rewards of the quickstart, in the signature verl asks for (reward.custom_reward_function)."""

import re


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None) -> float:
    """Reward in [0, 1].

    ``digit``: the share of the answer's characters that are the asked digit, so that it rises from the first steps.
    ``sum``: 1 for the right number alone, 0.5 if it is the first number of a longer answer, 0 otherwise.
    """
    text = solution_str.replace("<|im_end|>", "").strip()
    if data_source.endswith("digit"):
        return text.count(ground_truth) / max(len(text), 1)
    if text.rstrip(".") == ground_truth:
        return 1.0
    first = re.search(r"\d+", text)
    return 0.5 if first and first.group() == ground_truth else 0.0
