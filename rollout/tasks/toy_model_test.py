"""The toy policy's folder: token design, special ids, and a configuration both readers take."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollout.gateway.chat_template import ChatTemplate
from rollout.tasks.toy_model import SPECIAL_TOKENS, model_config, write_model_dir
from rollout.tasks.toy_names import OPERATORS, ToyNames, fix_command, look_command


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("model")
    write_model_dir(out, seed=0)
    return out


def test_special_ids(model_dir: Path) -> None:
    template = ChatTemplate.load(model_dir)
    assert template.special_ids == list(range(len(SPECIAL_TOKENS)))
    assert template.stop_ids == [2]
    ids = template.encode_delta(
        [{"role": "system", "content": "ok"}, {"role": "user", "content": "ok"}],
        add_generation_prompt=True,
        is_first=True,
    )
    ok = template.encode_text("ok")
    assert ids == [1, 5, *ok, 2, 1, 3, *ok, 2, 1, 4]


def test_names_and_operators_are_one_token_a_word(model_dir: Path) -> None:
    template = ChatTemplate.load(model_dir)
    names = ToyNames(0)
    words = {word for stem in names.stems["all"] for word in stem.split("_")}
    for word in words:
        assert len(template.encode_text("_" + word)) == 1, word
    for stem in names.files["all"]:
        # As in "Tests of red_box.py fail": blank, word, underscore, word, dot, py.
        assert len(template.encode_text(f" {stem}.py")) == 4, stem
    look = look_command("fn_red_box", "old_cat.py")
    assert template.decode(template.encode_text(look)) == look
    assert len(template.encode_text(look)) == 10, look
    for word, symbol in OPERATORS.items():
        assert len(template.encode_text(f" # {word}")) == 2, word
        text = fix_command("add_red_box", symbol, "old_cat.py")
        assert len(template.encode_text(text)) == 22, text
        assert template.decode(template.encode_text(text)) == text


def test_same_seed_same_bytes(model_dir: Path, tmp_path: Path) -> None:
    write_model_dir(tmp_path, seed=0)
    for path in sorted(model_dir.iterdir()):
        assert path.read_bytes() == (tmp_path / path.name).read_bytes(), path.name


def test_vocabulary_size_is_the_tokenizers(model_dir: Path) -> None:
    config = json.loads((model_dir / "config.json").read_text())
    assert config["vocab_size"] == ChatTemplate.load(model_dir).vocab_size


def test_transformers_reads_the_configuration(model_dir: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.from_pretrained(model_dir)
    assert type(config).__name__ == "Qwen3MoeConfig"
    assert (config.num_experts, config.num_experts_per_tok, config.head_dim) == (8, 2, 32)
    assert config.rope_theta == 10000.0 and config.norm_topk_prob and config.tie_word_embeddings


def test_parameter_count() -> None:
    c = model_config(467)
    hidden, head = c["hidden_size"], c["head_dim"]
    attention = hidden * head * (2 * c["num_attention_heads"] + 2 * c["num_key_value_heads"])
    experts = c["num_experts"] * (3 * hidden * c["moe_intermediate_size"] + hidden)
    layer = attention + experts + 2 * hidden + 2 * head
    total = c["vocab_size"] * hidden + c["num_hidden_layers"] * layer + hidden
    assert total == 1_834_752
