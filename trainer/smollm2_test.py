"""The real file of SmolLM2-135M-Instruct: weights and tokens are those that they should be."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from trainer import smollm2
from trainer.gguf_model import GgufModel

# Of names and values, in order of name. transformers 5.19 with accelerate reads the same values from
# the file (`AutoModelForCausalLM.from_pretrained(..., gguf_file=..., dtype=torch.float32)`).
DIGEST = "785e20b3e653276b0579b744214a1186d730ba80af04f397f642d6432e5e0154"
TEXT = "Hello  world 2024! <|im_end|>\n\n  def f(x):\n\treturn x, 'don''t', ünïcode 漢字"


@pytest.fixture(scope="module")
def model() -> GgufModel:
    return GgufModel(smollm2.fetch())


def test_weights(model: GgufModel) -> None:
    weights = model.weights()
    assert len(weights) == 272
    assert sum(tensor.size for tensor in weights.values()) == 134_515_008
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(name.encode())
        digest.update(weights[name].tobytes())
    assert digest.hexdigest() == DIGEST


def test_tokens(model: GgufModel) -> None:
    tokenizer = model.tokenizer()
    assert tokenizer.get_vocab_size() == 49152
    encoded = tokenizer.encode(TEXT)
    assert tokenizer.decode(encoded.ids, skip_special_tokens=False) == TEXT
    assert encoded.tokens[:11] == ["Hello", "Ġ", "Ġworld", "Ġ", *"2024", "!", "Ġ", "<|im_end|>"]
    assert encoded.ids[10] == 2


def test_a_folder_is_never_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert smollm2.main(["--out", str(tmp_path)]) == 2
    assert f"error: {tmp_path} exists" in capsys.readouterr().err
