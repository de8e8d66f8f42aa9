"""Small models to convert, in ragged blocks of 32."""

import torch
import transformers
from torch import nn

from verl_fp8.layers.filter import LayerFilter
from verl_fp8.numerics.recipe import Recipe
from verl_fp8.trainer.convert import convert_linears

RECIPE = Recipe(weight_block=(32, 32), activation_block=(1, 32), gradient_block=(1, 32))
BACKWARDS = ["fp8", "high_precision", "dequantized"]


def tiny(kind="qwen3", tie=False, device="cpu"):
    """A two-layer Hugging Face model with ragged 32-wide blocks."""
    sizes = {
        "vocab_size": 96,
        "hidden_size": 80,
        "intermediate_size": 112,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "tie_word_embeddings": tie,
    }
    config = {"qwen3": transformers.Qwen3Config, "llama": transformers.LlamaConfig}[kind](**sizes)
    torch.manual_seed(0)
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def converted_linear(bias=True, dtype=torch.float32, recipe=RECIPE, k=80, n=40):
    """One reference layer (inside a Sequential, at index 0)."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(k, n, bias=bias, dtype=dtype))
    convert_linears(model, recipe, LayerFilter())
    return model


def loss_and_gradients(model, ids):
    """The causal loss under bf16 autocast, as verl runs the actor, and every gradient."""
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(input_ids=ids, labels=ids).loss
    model.zero_grad()
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters()}


def assert_equal_dicts(a, b):
    """The same keys, the same bits."""
    assert a.keys() == b.keys()
    assert not [n for n in a if not torch.equal(a[n], b[n])]
