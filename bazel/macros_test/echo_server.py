"""Prints which environment it runs in; started as a child by the macros' own tests."""

import json
import os
import sys


def main() -> None:
    """Prints the interpreter's version and what it would import first, as JSON."""
    print(json.dumps({"version": sys.version_info[:2], "path": sys.path, "cwd": os.getcwd()}))


if __name__ == "__main__":
    main()
