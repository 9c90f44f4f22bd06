"""Makes a Hugging Face folder, float32, out of a GGUF file that holds a small Llama and its tokenizer.

Runs in the engine environment, which has `gguf`. Quantised matrices are taken for what they stand
for: the folder is the model that the file describes, not the one that was quantised.
Invariant: a file of another architecture, of another tokenizer, or with tensors that the folder has
no place for is refused.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

# What the names of GGUF's tensors become; `N` stands for the layer.
_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "blk.N.attn_norm.weight": "model.layers.N.input_layernorm.weight",
    "blk.N.attn_q.weight": "model.layers.N.self_attn.q_proj.weight",
    "blk.N.attn_k.weight": "model.layers.N.self_attn.k_proj.weight",
    "blk.N.attn_v.weight": "model.layers.N.self_attn.v_proj.weight",
    "blk.N.attn_output.weight": "model.layers.N.self_attn.o_proj.weight",
    "blk.N.ffn_norm.weight": "model.layers.N.post_attention_layernorm.weight",
    "blk.N.ffn_gate.weight": "model.layers.N.mlp.gate_proj.weight",
    "blk.N.ffn_up.weight": "model.layers.N.mlp.up_proj.weight",
    "blk.N.ffn_down.weight": "model.layers.N.mlp.down_proj.weight",
}
_ARCHITECTURE = "llama"
# Byte-level BPE in GPT-2's pieces, with each digit apart.
_TOKENIZER = ("gpt2", "smollm")
_CONTROL = 3  # token type
# Settings that make another model of the same tensors.
_NOT_CONVERTED = ("llama.rope.scaling.type", "llama.expert_count", "llama.attention.sliding_window")


class GgufError(Exception):
    """The file cannot be read, or is not a model that this module knows."""


class GgufModel:
    """An open GGUF file."""

    def __init__(self, path: Path) -> None:
        """Opens and checks the file. Raises GgufError."""
        import gguf

        self.path = path
        try:
            self._reader: Any = gguf.GGUFReader(path)
        except (OSError, ValueError, IndexError) as error:
            raise GgufError(f"cannot read {path} as GGUF: {error}") from error
        self._wants("general.architecture", _ARCHITECTURE)
        self._wants("tokenizer.ggml.model", _TOKENIZER[0])
        self._wants("tokenizer.ggml.pre", _TOKENIZER[1])
        for key in _NOT_CONVERTED:
            if self._get(key):
                raise GgufError(f"{path}: {key} is {self._get(key)!r}, which is not converted")

    def config(self) -> dict[str, Any]:
        """config.json. The rope base stands where transformers 4 looks and where 5 does."""
        hidden, heads = self._int("llama.embedding_length"), self._int("llama.attention.head_count")
        theta = self._float("llama.rope.freq_base")
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self._int("llama.vocab_size"),
            "hidden_size": hidden,
            "intermediate_size": self._int("llama.feed_forward_length"),
            "num_hidden_layers": self._int("llama.block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._int("llama.attention.head_count_kv"),
            "head_dim": hidden // heads,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "mlp_bias": False,
            "rms_norm_eps": self._float("llama.attention.layer_norm_rms_epsilon"),
            "rope_theta": theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": theta},
            "max_position_embeddings": self._int("llama.context_length"),
            "tie_word_embeddings": all(t.name != "output.weight" for t in self._reader.tensors),
            "torch_dtype": "float32",
            "dtype": "float32",
            **self._special_ids(),
        }

    def weights(self) -> dict[str, np.ndarray]:
        """Every weight by Hugging Face name, float32."""
        import gguf

        config = self.config()
        heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
        result = {}
        for tensor in self._reader.tensors:
            part = tensor.name.split(".")
            layer = part[1] if part[0] == "blk" else ""
            pattern = tensor.name.replace(f"blk.{layer}.", "blk.N.") if layer else tensor.name
            if pattern not in _NAMES:
                raise GgufError(f"{self.path}: tensor {tensor.name} is not part of a Llama")
            value = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
            value = value.reshape([int(n) for n in reversed(tensor.shape)])
            if pattern in ("blk.N.attn_q.weight", "blk.N.attn_k.weight"):
                value = halves_of_pairs(value, heads[part[2][-1]])
            result[_NAMES[pattern].replace(".N.", f".{layer}.")] = np.ascontiguousarray(value)
        return result

    def tokenizer(self) -> Any:
        """The `tokenizers.Tokenizer`; special tokens are never split."""
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

        tokens = self._list("tokenizer.ggml.tokens")
        merges = [tuple(merge.split(" ")) for merge in self._list("tokenizer.ggml.merges")]
        tokenizer = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, merges))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens(
            [AddedToken(token, special=True, normalized=False) for token in self._special_tokens()]
        )
        return tokenizer

    def tokenizer_config(self) -> dict[str, Any]:
        """tokenizer_config.json, with the chat template."""
        tokens, ids = self._list("tokenizer.ggml.tokens"), self._special_ids()
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "chat_template": self._get("tokenizer.chat_template"),
            "clean_up_tokenization_spaces": False,
            "model_max_length": self._int("llama.context_length"),
            "bos_token": tokens[ids["bos_token_id"]],
            "eos_token": tokens[ids["eos_token_id"]],
            "pad_token": tokens[ids["pad_token_id"]],
            "additional_special_tokens": self._special_tokens(),
        }

    def write(self, out: Path) -> None:
        """Writes the folder `out`, which must not exist, whole or not at all."""
        from safetensors.numpy import save_file

        partial = out.with_name(f".{out.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        save_file(self.weights(), partial / "model.safetensors", metadata={"format": "pt"})
        (partial / "model.safetensors").chmod(0o644)  # safetensors makes it private
        self.tokenizer().save(str(partial / "tokenizer.json"))
        for name, content in (
            ("config.json", self.config()),
            ("generation_config.json", self._special_ids()),
            ("tokenizer_config.json", self.tokenizer_config()),
        ):
            (partial / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        partial.rename(out)

    # ---- the file's own fields ---------------------------------------------------------

    def _get(self, key: str) -> Any:
        field = self._reader.fields.get(key)
        return None if field is None else field.contents()

    def _wants(self, key: str, value: str) -> None:
        found = self._get(key)
        if found != value:
            raise GgufError(f"{self.path}: {key} is {found!r}, and only {value!r} is converted")

    def _int(self, key: str) -> int:
        value = self._get(key)
        if not isinstance(value, int):
            raise GgufError(f"{self.path}: {key} is {value!r}, want a whole number")
        return value

    def _float(self, key: str) -> float:
        """The shortest number whose float32 the file holds: 1e-05, not 9.999999747378752e-06."""
        value = self._get(key)
        if not isinstance(value, float):
            raise GgufError(f"{self.path}: {key} is {value!r}, want a number")
        return float(str(np.float32(value)))

    def _list(self, key: str) -> list[Any]:
        value = self._get(key)
        if not isinstance(value, list):
            raise GgufError(f"{self.path}: {key} is {value!r}, want a list")
        return value

    def _special_tokens(self) -> list[str]:
        kinds = self._list("tokenizer.ggml.token_type")
        tokens = self._list("tokenizer.ggml.tokens")
        return [t for t, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]

    def _special_ids(self) -> dict[str, int]:
        names = {"bos": "bos", "eos": "eos", "pad": "padding"}
        return {
            f"{ours}_token_id": self._int(f"tokenizer.ggml.{theirs}_token_id")
            for ours, theirs in names.items()
        }


def halves_of_pairs(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorders a query or key matrix [heads * D, H] from rotated pairs to rotated halves.

    GGUF's Llama turns neighbours (0, 1), (2, 3) ... of a head by one angle each, Hugging Face's the
    numbers i and i + D/2.
    """
    pairs = weight.reshape(num_heads, -1, 2, weight.shape[-1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)
