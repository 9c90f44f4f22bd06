"""Chat rendering and tokenisation: the one place where text becomes ids.

Owner: the gateway (live turns) and rollout/traces (SFT data), which share this code so that
training data and live prompts agree to the id.

Invariants:
  * Only new messages are ever rendered. A delta after an assistant turn is found by
    rendering a fixed base conversation followed by the new messages, and taking what stands
    after the base's end-of-turn token. Templates that render a last assistant message
    differently (Qwen3 adds an empty think block) therefore cannot disturb sampled ids, and what
    a template strips from history (Qwen3: thoughts before the last user message) stays, in live
    turns as in training data.
  * A delta starts right after the end-of-turn id. Special tokens split the text before BPE
    runs, so that encoding a delta alone equals encoding it inside the whole.
  * Special tokens come from the template only. The same text inside a message is encoded as
    ordinary text: tool output cannot forge a turn.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

Message = Mapping[str, Any]

# Stands for the assistant's words in the base conversation.
_SENTINEL = "swe-rl-base-turn"
_BASE = ({"role": "user", "content": "-"}, {"role": "assistant", "content": _SENTINEL})
_END_OF_THOUGHTS = "</think>"
# Characters without a meaning in Unicode; one that no message holds breaks up special text.
_BREAKERS = range(0xE000, 0xF900)


class ChatTemplateError(ValueError):
    """The tokenizer folder or the messages cannot be rendered; the message says which."""


class ChatTemplate:
    """A model's tokenizer and chat template.

    Thread-safe after construction. Build with `load`.
    """

    def __init__(self, tokenizer: Tokenizer, template: str, config: Mapping[str, Any]) -> None:
        """Takes a tokenizer that this object may change, the Jinja text and tokenizer_config."""
        self._tokenizer = tokenizer
        # Special text inside messages is text; our own splitting finds the template's.
        tokenizer.encode_special_tokens = True
        tokenizer.no_truncation()
        tokenizer.no_padding()
        added = tokenizer.get_added_tokens_decoder()
        self._specials = {t.content: i for i, t in added.items() if t.special}
        names = sorted(self._specials, key=len, reverse=True)
        self._special_re = re.compile(
            "(" + "|".join(map(re.escape, names)) + ")" if names else "(?!)"
        )
        eos = _token_text(config.get("eos_token"))
        if eos is None or eos not in self._specials:
            raise ChatTemplateError(
                f"eos_token {eos!r} of tokenizer_config.json is not a special token of "
                "tokenizer.json; it must be the token that ends a turn"
            )
        self._end_of_turn = eos
        self._variables = {
            name: _token_text(config.get(name)) or ""
            for name in ("bos_token", "eos_token", "pad_token", "unk_token")
        }
        self._template = _compile(template)

    @classmethod
    def load(cls, model_dir: str | Path) -> ChatTemplate:
        """Reads tokenizer.json, tokenizer_config.json and, if there, chat_template.jinja.

        Raises ChatTemplateError when a file is missing or not what it should be.
        """
        folder = Path(model_dir)
        try:
            tokenizer = Tokenizer.from_str((folder / "tokenizer.json").read_text("utf-8"))
            config = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
        except OSError as error:
            raise ChatTemplateError(
                f"model folder {folder} has no readable tokenizer: {error}"
            ) from error
        except Exception as error:  # tokenizers raises bare Exception for a malformed file
            raise ChatTemplateError(f"tokenizer of {folder} is malformed: {error}") from error
        separate = folder / "chat_template.jinja"
        template = separate.read_text("utf-8") if separate.exists() else config.get("chat_template")
        if not isinstance(template, str):
            raise ChatTemplateError(
                f"{folder} has no chat template: wanted chat_template.jinja, or a string "
                "`chat_template` in tokenizer_config.json"
            )
        return cls(tokenizer, template, config)

    @property
    def end_of_turn_id(self) -> int:
        """The id that closes an assistant's turn."""
        return self._specials[self._end_of_turn]

    @property
    def stop_ids(self) -> list[int]:
        """Ids that end a turn when sampled."""
        return [self.end_of_turn_id]

    @property
    def special_ids(self) -> list[int]:
        """Every special id, sorted, the stop ids included."""
        return sorted(self._specials.values())

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def encode_delta(
        self,
        new_messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        is_first: bool,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> list[int]:
        """Ids of `new_messages`; `tools` are shown where they start a conversation.

        With `is_first` they start the conversation. Else they follow an assistant turn whose
        last id is the end-of-turn id, and the result starts with the template's glue behind
        it (Qwen3: a newline). `new_messages` may then be empty.
        Raises ChatTemplateError when the template refuses the messages.
        """
        breaker = _unused_character([new_messages, tools])
        messages = self._disarmed(new_messages, breaker)
        if is_first:
            text = self._render(messages, add_generation_prompt, self._disarmed(tools, breaker))
        else:
            whole = self._render([*_BASE, *messages], add_generation_prompt)
            _, found, tail = whole.partition(_SENTINEL)
            glue, closed, text = tail.partition(self._end_of_turn)
            if not found or not closed or glue.strip():
                raise ChatTemplateError(
                    "the chat template does not render an assistant message as its content "
                    f"followed by {self._end_of_turn!r}: got {tail[:60]!r} behind the content"
                )
        return self._encode(text, breaker)

    def encode_text(self, text: str) -> list[int]:
        """Ids of plain text; special text in it is encoded as text."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids) if text else []

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids` without one trailing stop id; other special ids show as their text."""
        if ids and ids[-1] == self.end_of_turn_id:
            ids = ids[:-1]
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def encode_turn(self, message: Message) -> list[int]:
        """Ids of what the assistant wrote in `message`, without the end of the turn.

        Content is taken as it stands. Where there are `tool_calls` or `reasoning_content` too, the
        template writes them around it, as in the last turn of a conversation; an empty block of
        thoughts, which no generation prompt asks for, is not part of it.
        Raises ChatTemplateError when the template refuses the message, or shows it otherwise than as
        a turn that follows the generation prompt.
        """
        thoughts = message.get("reasoning_content")
        content = message.get("content") or ""
        if not message.get("tool_calls") and not thoughts:
            return self.encode_text(content)
        breaker = _unused_character(message)
        question, shown = _BASE[0], self._disarmed({**message, "content": content}, breaker)
        head = self._render([question], True)
        has_thoughts = bool(thoughts) or _END_OF_THOUGHTS in content
        # A turn that is not the last is shown without an empty block of thoughts, and without any.
        whole = self._render([question, shown, *([] if has_thoughts else [question])], False)
        text, closed, _ = whole[len(head) :].partition(self._end_of_turn)
        if not whole.startswith(head) or not closed:
            raise ChatTemplateError(
                "the chat template does not render an assistant message behind its generation "
                f"prompt {head[-40:]!r}, closed by {self._end_of_turn!r}: got {whole[-120:]!r}"
            )
        return self.encode_text(text.replace(breaker, ""))

    def render_training(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[list[int], list[int]]:
        """(ids, loss_mask) of a finished conversation, laid out as live turns would be.

        loss_mask is 1 on what each assistant message says (content, thoughts, tool calls) and on
        its end-of-turn id: on what is sampled, and on nothing that the template writes.
        """
        ids: list[int] = []
        mask: list[int] = []
        pending: list[Message] = []
        is_first = True
        for message in messages:
            if message["role"] != "assistant":
                pending.append(message)
                continue
            prompt = self.encode_delta(
                pending, add_generation_prompt=True, is_first=is_first, tools=tools
            )
            sampled = [*self.encode_turn(message), self.end_of_turn_id]
            ids += prompt + sampled
            mask += [0] * len(prompt) + [1] * len(sampled)
            pending, is_first = [], False
        if pending:
            rest = self.encode_delta(
                pending, add_generation_prompt=False, is_first=is_first, tools=tools
            )
            ids += rest
            mask += [0] * len(rest)
        return ids, mask

    def _render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        try:
            return self._template.render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                tools=tools or None,
                **self._variables,
            )
        except (jinja2.TemplateError, TypeError, KeyError, AttributeError) as error:
            roles = [m.get("role") for m in messages]
            raise ChatTemplateError(f"chat template refused roles {roles}: {error}") from error

    def _disarmed(self, value: Any, breaker: str) -> Any:
        """The value with each special text in its strings, however deep, broken by `breaker`."""
        if isinstance(value, str):
            return self._special_re.sub(lambda m: m[0][0] + breaker + m[0][1:], value)
        if isinstance(value, Mapping):
            return {key: self._disarmed(item, breaker) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._disarmed(item, breaker) for item in value]
        return value

    def _encode(self, text: str, breaker: str) -> list[int]:
        ids: list[int] = []
        for piece in self._special_re.split(text):
            special = self._specials.get(piece)
            if special is not None:
                ids.append(special)
            else:
                ids += self.encode_text(piece.replace(breaker, ""))
        return ids


def _compile(template: str) -> jinja2.Template:
    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, indent: int | None = None) -> str:
        # Jinja's own filter escapes HTML, which no model was trained on.
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    try:
        return environment.from_string(template)
    except jinja2.TemplateError as error:
        raise ChatTemplateError(f"the chat template does not compile: {error}") from error


def _token_text(token: Any) -> str | None:
    """tokenizer_config.json holds a token as a string or as an object with `content`."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _strings(value: Any) -> Iterator[str]:
    """Every string in `value`, however deep."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _strings(item)


def _unused_character(value: Any) -> str:
    text = "".join(_strings(value))
    for code in _BREAKERS:
        if chr(code) not in text:
            return chr(code)
    raise ChatTemplateError(
        "the messages use every private-use character; none is left to escape with"
    )
