"""Turns the contracts into plain data, and says which changes would break a deployed client.

Owner: `proto`. `contracts.json` beside this file is the released contract; a breaking change
against it fails //proto:contracts_test. Additions are taken over with
`./bazelw run //proto:update_contracts`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import grpc_tools
from google.protobuf import descriptor_pb2
from grpc_tools import protoc

SOURCES = ("trajectory.proto", "sandbox.proto", "rollout.proto", "trainer.proto")
_FIELD = descriptor_pb2.FieldDescriptorProto


def compile_contracts(root: Path) -> descriptor_pb2.FileDescriptorSet:
    """Compiles root/proto/*.proto with source info. Raises RuntimeError when protoc refuses."""
    include = Path(grpc_tools.__file__).parent / "_proto"
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "set.bin"
        arguments = ["protoc", f"--proto_path={root}", f"--proto_path={include}"]
        arguments += ["--include_source_info", f"--descriptor_set_out={out}"]
        if protoc.main([*arguments, *(f"proto/{name}" for name in SOURCES)]) != 0:
            raise RuntimeError(f"protoc refused the contracts below {root}/proto")
        return descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes())


def describe(files: descriptor_pb2.FileDescriptorSet) -> dict[str, Any]:
    """Messages, enums and services by full name: field numbers, types, method shapes."""
    contract: dict[str, Any] = {"messages": {}, "enums": {}, "services": {}}
    for file in files.file:
        for message in file.message_type:
            _describe_message(message, file.package, contract)
        for enum in file.enum_type:
            contract["enums"][f"{file.package}.{enum.name}"] = {
                v.name: v.number for v in enum.value
            }
        for service in file.service:
            contract["services"][f"{file.package}.{service.name}"] = {
                method.name: [
                    ("stream " if method.client_streaming else "") + method.input_type,
                    ("stream " if method.server_streaming else "") + method.output_type,
                ]
                for method in service.method
            }
    return contract


def _describe_message(
    message: descriptor_pb2.DescriptorProto, scope: str, contract: dict[str, Any]
) -> None:
    name = f"{scope}.{message.name}"
    contract["messages"][name] = {
        field.name: {
            "number": field.number,
            "type": field.type_name or _FIELD.Type.Name(field.type),
            "repeated": field.label == _FIELD.LABEL_REPEATED,
        }
        for field in message.field
    }
    for nested in message.nested_type:
        _describe_message(nested, name, contract)


def breaking_changes(released: dict[str, Any], current: dict[str, Any]) -> list[str]:
    """What a client of `released` would trip over in `current`; empty when compatible."""
    problems = []
    for kind in ("messages", "enums", "services"):
        for owner, members in released[kind].items():
            now = current[kind].get(owner)
            if now is None:
                problems.append(f"{owner} is gone")
                continue
            for name, shape in members.items():
                if name not in now:
                    problems.append(f"{owner}.{name} is gone")
                elif now[name] != shape:
                    problems.append(f"{owner}.{name} was {shape}, is {now[name]}")
    return problems


def undocumented(files: descriptor_pb2.FileDescriptorSet) -> list[str]:
    """Fields, enum values and RPCs of ours that no comment explains."""
    missing = []
    for file in files.file:
        if not file.package.startswith("swe_rl."):
            continue
        commented = {
            tuple(location.path)
            for location in file.source_code_info.location
            if location.leading_comments.strip() or location.trailing_comments.strip()
        }
        for index, message in enumerate(file.message_type):
            missing += _undocumented_fields(message, file.package, (4, index), commented)
        for index, service in enumerate(file.service):
            missing += [
                f"{file.package}.{service.name}.{method.name}"
                for m, method in enumerate(service.method)
                if (6, index, 2, m) not in commented
            ]
    return missing


def _undocumented_fields(
    message: descriptor_pb2.DescriptorProto,
    scope: str,
    path: tuple[int, ...],
    commented: set[tuple[int, ...]],
) -> list[str]:
    if message.options.map_entry:
        return []
    name = f"{scope}.{message.name}"
    missing = [
        f"{name}.{f.name}" for i, f in enumerate(message.field) if (*path, 2, i) not in commented
    ]
    for index, nested in enumerate(message.nested_type):
        missing += _undocumented_fields(nested, name, (*path, 3, index), commented)
    return missing


def dump(contract: dict[str, Any]) -> str:
    """The text of contracts.json."""
    return json.dumps(contract, indent=1, sort_keys=True) + "\n"


def main() -> int:
    """Takes the contracts as they are over into contracts.json, refusing breaking changes."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--force", action="store_true", help="release a breaking change on purpose")
    args = parser.parse_args()
    root = Path(os.environ.get("BUILD_WORKSPACE_DIRECTORY", "."))
    target = root / "proto" / "contracts.json"
    current = describe(compile_contracts(root))
    released = json.loads(target.read_text()) if target.exists() else current
    problems = breaking_changes(released, current)
    if problems and not args.force:
        print("error: breaking changes (see --force):\n  " + "\n  ".join(problems), file=sys.stderr)
        return 1
    target.write_text(dump(current))
    return 0


if __name__ == "__main__":
    sys.exit(main())
