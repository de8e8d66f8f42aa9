"""Rule-based rewards of the quickstart, in the signature verl asks for (reward.custom_reward_function)."""

import re


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None) -> float:
    """Reward in [0, 1], with something to climb from the first step on.

    ``digit``: the share of the answer's characters that are the asked digit.
    ``sum``: 0.3 for answering in digits alone (their share of the characters but blanks), and 0.7 / (1 + error)
    for the first number of the answer.
    """
    text = solution_str.replace("<|im_end|>", "").strip()
    if data_source.endswith("digit"):
        return text.count(ground_truth) / max(len(text), 1)
    visible = "".join(text.split())
    digits = sum(character.isdigit() for character in visible) / max(len(visible), 1)
    first = re.search(r"\d+", text)
    if first is None:
        return 0.0
    return 0.3 * digits + 0.7 / (1 + abs(int(first.group()) - int(ground_truth)))
