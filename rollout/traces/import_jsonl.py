"""Imports conversations from JSON lines as SFT records.

Owner: rollout/traces.
  python -m rollout.traces.import_jsonl --model MODEL_DIR --in FILE.jsonl --out FILE.sequences

A line is an object with `messages` (OpenAI form: role, content, tool_calls, tool_call_id) or
such a list itself; mini-swe-agent's trajectory files are objects of that form too. With
`--tool-calls template` calls, answers, thoughts (`reasoning_content`) and the row's `tools` are what
the model's template makes of them. With `--tool-calls text`, the default, what a template may not
know is turned into text, so that one policy learns one form; thoughts of their own are left out:
  * an assistant's tool call becomes a fenced block behind its content: ```bash and the command
    for a call whose only argument is `command`, else ```json with name and arguments;
  * a tool's answer becomes a user message;
  * list content is joined from its text parts; messages of one side in a row are joined, as
    templates want sides to alternate;
  * what follows the last assistant message teaches nothing and is dropped, as are roles that
    only log (mini-swe-agent writes `exit`).
Invariants: a line is taken whole or refused with its number and reason; nothing is invented.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from proto import trajectory_pb2
from rollout.client import write_sequences
from rollout.gateway.chat_template import ChatTemplate, ChatTemplateError
from rollout.traces.records import RowTooLong, training_record

Message = dict[str, Any]
ToolCalls = Literal["text", "template"]

_SIDES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "tool": "user",
    "function": "user",
    "assistant": "assistant",
}
_LOG_ROLES = frozenset({"exit"})
_CALL_FIELDS = ("tool_calls", "reasoning_content")


class TraceFormatError(ValueError):
    """A line is no conversation to train on; the message says which line and why."""


def flatten(messages: object) -> list[Message]:
    """Plain system, user and assistant messages with text content, sides alternating.

    Raises TraceFormatError when `messages` is malformed or holds no assistant message.
    """
    if not isinstance(messages, list):
        raise TraceFormatError(f"messages are no list but {type(messages).__name__}")
    flat: list[Message] = []
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise TraceFormatError(f"message {number} is no object")
        role = message.get("role")
        if role in _LOG_ROLES:
            continue
        if role not in _SIDES:
            raise TraceFormatError(
                f"message {number} has role {role!r}; known are {sorted(_SIDES)}"
            )
        side, text = _SIDES[role], _text(message, number)
        if flat and flat[-1]["role"] == side:
            flat[-1]["content"] += "\n" + text
        else:
            flat.append({"role": side, "content": text})
    while flat and flat[-1]["role"] != "assistant":
        flat.pop()
    if not flat:
        raise TraceFormatError("there is no assistant message to learn from")
    if flat[0]["role"] == "assistant":
        raise TraceFormatError("the conversation starts with the assistant; something is missing")
    return flat


def as_called(messages: object) -> list[Message]:
    """The messages for a template that knows tool calls: checked, their content text.

    Raises TraceFormatError when `messages` is malformed or holds no assistant message.
    """
    flatten(messages)  # every check of the other form holds here too
    assert isinstance(messages, list)
    kept: list[Message] = []
    for number, message in enumerate(messages):
        if message["role"] in _LOG_ROLES:
            continue
        role = {"developer": "system", "function": "tool"}.get(message["role"], message["role"])
        one: Message = {"role": role, "content": _content(message, number)}
        kept.append(one | {k: message[k] for k in _CALL_FIELDS if message.get(k)})
    while kept[-1]["role"] != "assistant":
        kept.pop()
    return kept


def read_conversations(
    path: Path, tool_calls: ToolCalls = "text"
) -> Iterator[tuple[int, list[Message], list[Any]]]:
    """(line number from 1, messages, tools) of each line that is not blank.

    Raises TraceFormatError naming the line, OSError.
    """
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                messages = row.get("messages") if isinstance(row, Mapping) else row
                if tool_calls == "text":
                    yield number, flatten(messages), []
                else:
                    tools = row.get("tools") if isinstance(row, Mapping) else None
                    if tools is not None and not isinstance(tools, list):
                        raise TraceFormatError(f"tools are no list but {type(tools).__name__}")
                    yield number, as_called(messages), tools or []
            except (json.JSONDecodeError, TraceFormatError) as error:
                raise TraceFormatError(f"{path}, line {number}: {error}") from error


def convert(
    template: ChatTemplate, source: Path, max_tokens: int | None, tool_calls: ToolCalls = "text"
) -> Iterator[trajectory_pb2.TokenSequence]:
    """Records of the conversations of `source`; those above `max_tokens` ids are left out.

    Raises TraceFormatError for a line that cannot be read, or whose calls the template has no form for.
    """
    knows_calls: bool | None = None
    for number, messages, tools in read_conversations(source, tool_calls):
        if any(message.get("tool_calls") for message in messages):
            knows_calls = _knows_calls(template) if knows_calls is None else knows_calls
            if not knows_calls:
                raise TraceFormatError(
                    f"{source}, line {number}: it has tool calls, which the model's chat template "
                    "leaves out: use --tool-calls text"
                )
        try:
            yield training_record(
                template,
                messages,
                row_id=f"{source.name}:{number}",
                task_id="",
                tools=tools,
                max_tokens=max_tokens,
            )
        except RowTooLong as error:
            print(f"left out: {error}", file=sys.stderr)


def _knows_calls(template: ChatTemplate) -> bool:
    """Whether the template writes a call's name and arguments down."""
    call = {"type": "function", "function": {"name": "probed", "arguments": {"key": "value"}}}
    answer: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
    try:
        ids, _ = template.render_training([{"role": "user", "content": "q"}, answer])
    except ChatTemplateError:
        return False
    text = template.decode(ids)
    return "probed" in text and "value" in text


def _content(message: Mapping[str, Any], number: int) -> str:
    content = message.get("content")
    if content is None:
        content = ""
    elif isinstance(content, list):
        content = "".join(_part_text(part, number) for part in content)
    elif not isinstance(content, str):
        raise TraceFormatError(f"content of message {number} is {type(content).__name__}, not text")
    return content


def _text(message: Mapping[str, Any], number: int) -> str:
    content = _content(message, number)
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise TraceFormatError(f"tool_calls of message {number} are no list")
    blocks = [_call_text(call, number) for call in calls]
    return "\n\n".join([*([content] if content or not blocks else []), *blocks])


def _part_text(part: object, number: int) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part["text"], str):
        return part["text"]
    raise TraceFormatError(f"message {number} has a part that is not text")


def _call_text(call: object, number: int) -> str:
    try:
        function = call["function"]  # type: ignore[index]
        arguments = function["arguments"]
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        name = function["name"]
    except (TypeError, KeyError, ValueError) as error:
        raise TraceFormatError(
            f"a tool call of message {number} is malformed: {error!r}"
        ) from error
    if isinstance(arguments, Mapping) and list(arguments) == ["command"]:
        return f"```bash\n{arguments['command']}\n```"
    body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"```json\n{body}\n```"


def main(argv: list[str] | None = None) -> int:
    """Command line; prints how many conversations were written."""
    parser = argparse.ArgumentParser(
        prog="python -m rollout.traces.import_jsonl", description=__doc__
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", type=Path, required=True, help="folder with the tokenizer")
    parser.add_argument("--in", dest="source", type=Path, required=True, help="JSON lines")
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    parser.add_argument(
        "--tool-calls",
        choices=("text", "template"),
        default="text",
        help="as fenced text, or as the model's chat template has them",
    )
    parser.add_argument("--max-tokens", type=int, help="leave out longer conversations")
    args = parser.parse_args(argv)
    try:
        template = ChatTemplate.load(args.model)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        count = write_sequences(
            args.out, convert(template, args.source, args.max_tokens, args.tool_calls)
        )
    except (TraceFormatError, ChatTemplateError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{count} conversations: {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
