"""The toy policy's folder: tokenizer, chat template and configuration of a tiny Qwen3-MoE.

Owner: rollout/tasks.   python -m rollout.tasks.toy_model --out MODEL_DIR [--seed S]

Weights are not written here: trainer.init_model adds them.

Invariants: same seed, same bytes. Every word of a toy name is one token behind a blank or
`_`, and so is every operator, so that choosing a fix is a choice of one token. Role markers are single special tokens with fixed ids (SPECIAL_TOKENS).
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rollout.tasks.toy_names import OPERATORS, SECOND_LOOK_SHARE, ToyNames
from rollout.traces.toy_rows import noisy_trace

# In id order: the tokenizer's first ids.
SPECIAL_TOKENS = (
    "<pad>",
    "<|im_start|>",
    "<|im_end|>",
    "<|user|>",
    "<|assistant|>",
    "<|system|>",
)
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|><|' + message.role + '|>' + message.content + '<|im_end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|><|assistant|>' -}}{%- endif -%}"
)
VOCABULARY_SIZE = 512
MAX_POSITIONS = 2048
_CORPUS_ROWS = 3000
# A word keeps the blank or underscore before it; digits stand alone, so do runs of signs.
_PIECES = r"[ _]?[A-Za-z]+|[0-9]| ?[^\sA-Za-z0-9_]+|\s+|_"


def train_tokenizer(seed: int) -> Any:
    """A byte-level BPE `tokenizers.Tokenizer` of VOCABULARY_SIZE ids, learned from toy text."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(seed), trainer)
    return tokenizer


def tokenizer_config() -> dict[str, Any]:
    """tokenizer_config.json."""
    decoder = {
        str(number): {
            "content": token,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": True,
        }
        for number, token in enumerate(SPECIAL_TOKENS)
    }
    return {
        "added_tokens_decoder": decoder,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<pad>",
        "model_max_length": MAX_POSITIONS,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def model_config(vocab_size: int) -> dict[str, Any]:
    """config.json of the tiny Qwen3-MoE (1.83 M parameters at 467 ids, embeddings tied).

    The rope base stands both at the top level, where transformers 4 looks, and in
    `rope_parameters`, where transformers 5 does.
    """
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": vocab_size,
        "hidden_size": 128,
        "intermediate_size": 256,
        "moe_intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "max_position_embeddings": MAX_POSITIONS,
        "use_sliding_window": False,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "use_cache": True,
        "torch_dtype": "float32",
        "dtype": "float32",
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def write_model_dir(out: Path, seed: int) -> None:
    """Writes tokenizer.json, tokenizer_config.json, config.json and generation_config.json."""
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(seed)
    (out / "tokenizer.json").write_text(tokenizer.to_str(pretty=True) + "\n", encoding="utf-8")
    _write_json(out / "tokenizer_config.json", tokenizer_config())
    _write_json(out / "config.json", model_config(tokenizer.get_vocab_size()))
    _write_json(
        out / "generation_config.json",
        {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "do_sample": True},
    )


def _corpus(seed: int) -> Iterator[str]:
    names = ToyNames(seed)
    rng = random.Random(seed + 1)
    for _ in range(_CORPUS_ROWS):
        task = names.sample(rng, "all", rng.random() < SECOND_LOOK_SHARE)
        # Names and operators drawn anew half the time, so that no pair of them merges.
        messages = noisy_trace(task, rng, names, right_operator=0.0, right_name=0.5)
        yield "\n".join(message["content"] for message in messages)
    # Every operator behind its blank, in equal shares.
    for word, symbol in OPERATORS.items():
        yield f"a {symbol} b # {word}"


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    """Command line; prints the folder."""
    parser = argparse.ArgumentParser(prog="python -m rollout.tasks.toy_model", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, required=True, help="model folder to write")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    try:
        write_model_dir(args.out, args.seed)
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
