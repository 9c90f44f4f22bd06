"""GGUF to Hugging Face: names, layouts, dequantised values, settings and the tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from trainer.gguf_model import GgufError, GgufModel

HIDDEN, WIDTH, HEADS, KV_HEADS = 64, 96, 4, 2
HEAD = HIDDEN // HEADS
# Bytes as GPT-2 writes them: "Ġ" is a blank.
TOKENS = ["<|start|>", "<|end|>", *"abc123", "Ġ", "ab", "Ġab", "12"]
MERGES = ["a b", "Ġ ab", "1 2"]


def matrices(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = {"token_embd.weight": (len(TOKENS), HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(2):
        blk = f"blk.{layer}"
        shapes |= {
            f"{blk}.attn_norm.weight": (HIDDEN,),
            f"{blk}.attn_q.weight": (HIDDEN, HIDDEN),
            f"{blk}.attn_k.weight": (KV_HEADS * HEAD, HIDDEN),
            f"{blk}.attn_v.weight": (KV_HEADS * HEAD, HIDDEN),
            f"{blk}.attn_output.weight": (HIDDEN, HIDDEN),
            f"{blk}.ffn_norm.weight": (HIDDEN,),
            f"{blk}.ffn_gate.weight": (WIDTH, HIDDEN),
            f"{blk}.ffn_up.weight": (WIDTH, HIDDEN),
            f"{blk}.ffn_down.weight": (HIDDEN, WIDTH),
        }
    return {n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}


def write_gguf(
    path: Path,
    tensors: dict[str, np.ndarray],
    architecture: str = "llama",
    pre_tokenizer: str = "smollm",
    quantised: tuple[str, ...] = (),
    **more: str,
) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_vocab_size(len(TOKENS))
    writer.add_block_count(2)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3] + [1] * (len(TOKENS) - 2))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(1)
    writer.add_chat_template("{{ messages }}")
    for key, value in more.items():
        writer.add_string(key.replace("__", "."), value)
    q8 = gguf.GGMLQuantizationType.Q8_0
    for name, tensor in tensors.items():
        if name in quantised:
            writer.add_tensor(name, gguf.quantize(tensor, q8), raw_dtype=q8)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def halves(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Row 2i + s of a head goes to row i + s D/2."""
    result = np.empty_like(weight)
    for head in range(num_heads):
        for i in range(HEAD // 2):
            for side in range(2):
                result[head * HEAD + i + side * HEAD // 2] = weight[head * HEAD + 2 * i + side]
    return result


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_every_tensor_has_its_name_and_layout(tmp_path: Path, tied: bool) -> None:
    source = matrices()
    if not tied:
        source["output.weight"] = source["token_embd.weight"] * 2
    GgufModel(write_gguf(tmp_path / "m.gguf", source)).write(tmp_path / "out")
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert len(weights) == len(source)
    for name, tensor in {
        "model.embed_tokens.weight": source["token_embd.weight"],
        "model.norm.weight": source["output_norm.weight"],
        "model.layers.1.input_layernorm.weight": source["blk.1.attn_norm.weight"],
        "model.layers.1.self_attn.q_proj.weight": halves(source["blk.1.attn_q.weight"], HEADS),
        "model.layers.1.self_attn.k_proj.weight": halves(source["blk.1.attn_k.weight"], KV_HEADS),
        "model.layers.1.self_attn.v_proj.weight": source["blk.1.attn_v.weight"],
        "model.layers.1.self_attn.o_proj.weight": source["blk.1.attn_output.weight"],
        "model.layers.1.post_attention_layernorm.weight": source["blk.1.ffn_norm.weight"],
        "model.layers.1.mlp.gate_proj.weight": source["blk.1.ffn_gate.weight"],
        "model.layers.1.mlp.up_proj.weight": source["blk.1.ffn_up.weight"],
        "model.layers.1.mlp.down_proj.weight": source["blk.1.ffn_down.weight"],
    }.items():
        assert weights[name].dtype == np.float32
        np.testing.assert_array_equal(weights[name], tensor)
    assert ("lm_head.weight" in weights) != tied
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["tie_word_embeddings"] == tied


def test_a_quantised_matrix_is_what_its_numbers_stand_for(tmp_path: Path) -> None:
    source, name = matrices(), "blk.0.ffn_up.weight"
    path = write_gguf(tmp_path / "m.gguf", source, quantised=(name,))
    (tensor,) = [t for t in gguf.GGUFReader(path).tensors if t.name == name]
    # A block is a half-precision scale and 32 numbers of 8 bits.
    blocks = np.asarray(tensor.data).reshape(-1, 34)
    scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    expected = (scale * blocks[:, 2:].view(np.int8)).reshape(WIDTH, HIDDEN)
    found = GgufModel(path).weights()["model.layers.0.mlp.up_proj.weight"]
    np.testing.assert_array_equal(found, expected)
    assert 0 < np.abs(found - source[name]).max() < 0.02


def test_settings(tmp_path: Path) -> None:
    config = GgufModel(write_gguf(tmp_path / "m.gguf", matrices())).config()
    assert config["rms_norm_eps"] == 1e-5
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 100000.0
    assert (config["head_dim"], config["num_key_value_heads"]) == (HEAD, KV_HEADS)
    assert (config["bos_token_id"], config["eos_token_id"]) == (0, 1)


def test_the_tokenizer_merges_and_keeps_digits_and_special_tokens_apart(tmp_path: Path) -> None:
    GgufModel(write_gguf(tmp_path / "m.gguf", matrices())).write(tmp_path / "out")
    tokenizer = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    encoded = tokenizer.encode("<|start|>ab ab12<|end|>")
    assert encoded.tokens == ["<|start|>", "ab", "Ġab", "1", "2", "<|end|>"]
    assert tokenizer.decode(encoded.ids, skip_special_tokens=False) == "<|start|>ab ab12<|end|>"
    settings = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert (settings["eos_token"], settings["chat_template"]) == ("<|end|>", "{{ messages }}")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"architecture": "qwen2"}, "general.architecture is 'qwen2', and only 'llama'"),
        ({"pre_tokenizer": "llama-bpe"}, "tokenizer.ggml.pre is 'llama-bpe'"),
        ({"llama__rope__scaling__type": "yarn"}, "llama.rope.scaling.type is 'yarn'"),
    ],
)
def test_what_would_be_another_model_is_refused(
    tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(GgufError, match=message):
        GgufModel(write_gguf(tmp_path / "m.gguf", matrices(), **changed))


def test_a_strange_tensor_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    source = matrices() | {"blk.0.attn_q.bias": np.zeros(HIDDEN, np.float32)}
    model = GgufModel(write_gguf(tmp_path / "m.gguf", source))
    with pytest.raises(GgufError, match=r"blk\.0\.attn_q\.bias is not part of a Llama"):
        model.write(tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a model at all, but long enough"])
def test_another_file_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(GgufError, match=r"cannot read .*m\.gguf"):
        GgufModel(tmp_path / "m.gguf")
