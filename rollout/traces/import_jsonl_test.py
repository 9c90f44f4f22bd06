"""The importer keeps every word of both sides and refuses what it cannot represent."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from rollout.client import read_sequences
from rollout.gateway.chat_template import ChatTemplate
from rollout.tasks.toy_model import write_model_dir
from rollout.traces.import_jsonl import TraceFormatError, flatten, main

CALL = {
    "role": "assistant",
    "content": "Look first.",
    "tool_calls": [
        {
            "id": "c1",
            "type": "function",
            "function": {"name": "bash", "arguments": '{"command": "ls -la"}'},
        }
    ],
}
OPENAI = [
    {"role": "system", "content": "Fix bugs."},
    {"role": "user", "content": [{"type": "text", "text": "Tests "}, {"type": "text", "text": "fail."}]},
    CALL,
    {"role": "tool", "tool_call_id": "c1", "content": "a.py"},
    {"role": "assistant", "content": None, "tool_calls": [
        {"function": {"name": "edit", "arguments": {"path": "a.py", "line": 1}}}]},
    {"role": "tool", "tool_call_id": "c2", "content": "done"},
]  # fmt: skip
MINI = {
    "info": {"exit_status": "Submitted"},
    "messages": [
        {"role": "system", "content": "You are helpful."},
        {"role": "user", "content": "Fix it."},
        {"role": "assistant", "content": "THOUGHT: look\n\n```bash\nls\n```", "extra": {"cost": 1}},
        {"role": "user", "content": "<returncode>0</returncode>"},
        {"role": "assistant", "content": "```bash\necho COMPLETE\n```"},
        {"role": "exit", "content": "Submitted"},
    ],
}


def test_openai_messages_become_text() -> None:
    assert flatten(OPENAI) == [
        {"role": "system", "content": "Fix bugs."},
        {"role": "user", "content": "Tests fail."},
        {"role": "assistant", "content": "Look first.\n\n```bash\nls -la\n```"},
        {"role": "user", "content": "a.py"},
        {
            "role": "assistant",
            "content": '```json\n{"name": "edit", "arguments": {"path": "a.py", "line": 1}}\n```',
        },
    ]


def test_mini_swe_agent_trajectory_is_kept_as_it_is() -> None:
    flat = flatten(MINI["messages"])
    assert [m["role"] for m in flat] == ["system", "user", "assistant", "user", "assistant"]
    assert flat[2]["content"] == "THOUGHT: look\n\n```bash\nls\n```"


def test_two_answers_of_parallel_calls_are_joined() -> None:
    tools = [{"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}]
    flat = flatten(
        [{"role": "user", "content": "x"}, CALL, *tools, {"role": "assistant", "content": "y"}]
    )
    assert flat[2] == {"role": "user", "content": "1\n2"}


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ("text", "no list"),
        ([3], "no object"),
        ([{"role": "wizard", "content": "x"}], "role 'wizard'"),
        ([{"role": "user", "content": "x"}], "no assistant"),
        ([{"role": "assistant", "content": "x"}], "starts with the assistant"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "not text"),
        ([{"role": "user", "content": 3}], "int, not text"),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}], "malformed"),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}], "malformed"),
    ],
    ids=["type", "item", "role", "user only", "no prompt", "image", "number", "no arguments", "bad json"],
)  # fmt: skip
def test_refused(messages: object, reason: str) -> None:
    with pytest.raises(TraceFormatError, match=reason):
        flatten(messages)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("model")
    write_model_dir(out, seed=0)
    return out


def test_records_train_the_assistants_words_only(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(f"{json.dumps({'messages': OPENAI})}\n\n{json.dumps(MINI)}\n")
    out = tmp_path / "out.sequences"
    args = ["--model", str(model), "--in", str(source), "--out", str(out)]
    assert main(args) == 0
    assert capsys.readouterr().out.startswith("2 conversations")
    first, second = read_sequences(out)
    template = ChatTemplate.load(model)
    ids = np.frombuffer(first.token_ids, "<i4")
    mask = np.frombuffer(first.loss_mask, np.uint8)
    trained = template.decode(ids[mask == 1].tolist())
    said = [m["content"] for m in flatten(OPENAI) if m["role"] == "assistant"]
    assert trained == "<|im_end|>".join(said)
    assert second.attempt_id == "in.jsonl:3"
    assert main([*args, "--max-tokens", "10"]) == 0
    assert list(read_sequences(out)) == []


def test_a_bad_line_is_named_and_nothing_is_written(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.sequences"
    source.write_text(f"{json.dumps(MINI)}\n{{oops\n")
    assert main(["--model", str(model), "--in", str(source), "--out", str(out)]) == 2
    assert "line 2" in capsys.readouterr().err
    assert not out.exists()


def test_calls_that_the_template_leaves_out_are_refused_and_no_file_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    write_model_dir(model, seed=0)
    source = tmp_path / "t.jsonl"
    source.write_text(json.dumps({"messages": OPENAI}) + "\n")
    args = ["--model", str(model), "--in", str(source), "--out", str(tmp_path / "t.sequences")]
    assert main([*args, "--tool-calls", "template"]) != 0
    assert "line 1: it has tool calls, which the model's chat template leaves out" in (
        capsys.readouterr().err
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "t.jsonl"]
