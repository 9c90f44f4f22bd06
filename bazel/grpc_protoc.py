"""protoc from the grpcio-tools wheel, with the well-known types on its path."""

import pathlib
import sys

import grpc_tools
from grpc_tools import protoc


def main(argv: list[str]) -> int:
    """Runs protoc with `argv`."""
    well_known = pathlib.Path(grpc_tools.__file__).parent / "_proto"
    return protoc.main(["protoc", *argv, f"--proto_path={well_known}"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
