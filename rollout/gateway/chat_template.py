"""Chat rendering and tokenisation: the one place where text becomes ids.

Owner: the gateway (live turns) and rollout/traces (SFT data), which share this code so that
training data and live prompts agree to the id.

Invariants:
  * Only new messages are ever rendered. A delta after an assistant turn is found by
    rendering a fixed base conversation followed by the new messages, and taking what stands
    after the base's end-of-turn token. Templates that render a last assistant message
    differently (Qwen3 adds an empty think block) therefore cannot disturb sampled ids.
  * A delta starts right after the end-of-turn id. Special tokens split the text before BPE
    runs, so that encoding a delta alone equals encoding it inside the whole.
  * Special tokens come from the template only. The same text inside a message is encoded as
    ordinary text: tool output cannot forge a turn.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

Message = Mapping[str, Any]

# Stands for the assistant's words in the base conversation.
_SENTINEL = "swe-rl-base-turn"
_BASE = ({"role": "user", "content": "-"}, {"role": "assistant", "content": _SENTINEL})
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
        self, new_messages: Sequence[Message], *, add_generation_prompt: bool, is_first: bool
    ) -> list[int]:
        """Ids of `new_messages`.

        With `is_first` they start the conversation. Else they follow an assistant turn whose
        last id is the end-of-turn id, and the result starts with the template's glue behind
        it (Qwen3: a newline). `new_messages` may then be empty.
        Raises ChatTemplateError when the template refuses the messages.
        """
        breaker = _unused_character(new_messages)
        messages = [self._disarmed(message, breaker) for message in new_messages]
        if is_first:
            text = self._render(messages, add_generation_prompt)
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

    def render_training(self, messages: Sequence[Message]) -> tuple[list[int], list[int]]:
        """(ids, loss_mask) of a finished conversation, laid out as live turns would be.

        loss_mask is 1 on each assistant message's content and on its end-of-turn id.
        """
        ids: list[int] = []
        mask: list[int] = []
        pending: list[Message] = []
        is_first = True
        for message in messages:
            if message["role"] != "assistant":
                pending.append(message)
                continue
            prompt = self.encode_delta(pending, add_generation_prompt=True, is_first=is_first)
            sampled = [*self.encode_text(message["content"]), self.end_of_turn_id]
            ids += prompt + sampled
            mask += [0] * len(prompt) + [1] * len(sampled)
            pending, is_first = [], False
        if pending:
            rest = self.encode_delta(pending, add_generation_prompt=False, is_first=is_first)
            ids += rest
            mask += [0] * len(rest)
        return ids, mask

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, **self._variables
            )
        except (jinja2.TemplateError, TypeError, KeyError, AttributeError) as error:
            roles = [m.get("role") for m in messages]
            raise ChatTemplateError(f"chat template refused roles {roles}: {error}") from error

    def _disarmed(self, message: Message, breaker: str) -> dict[str, Any]:
        """The message with each special text in a string field broken by `breaker`."""
        return {
            key: self._special_re.sub(lambda m: m[0][0] + breaker + m[0][1:], value)
            if isinstance(value, str)
            else value
            for key, value in message.items()
        }

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


def _unused_character(messages: Sequence[Message]) -> str:
    text = "".join(v for m in messages for v in m.values() if isinstance(v, str))
    for code in _BREAKERS:
        if chr(code) not in text:
            return chr(code)
    raise ChatTemplateError(
        "the messages use every private-use character; none is left to escape with"
    )
