"""Prints "N passed, N failed" for Bazel runs, from their build event files.

    python3 bazel/count_tests.py all.json slow.json

Counts test cases in the test.xml of each test that a run reports, so results left over from
targets that no longer exist are not counted. A test target that failed without a failing case
(it did not build, timed out or crashed) counts as one failure, and so does a run that Bazel
itself ended with an error, as on a broken BUILD file. Skipped cases are in neither
number; they are told on a line of their own. Exits with 1 when anything failed or nothing ran.
"""

import json
import pathlib
import sys
import urllib.parse
import xml.etree.ElementTree as ET
from typing import Dict, List, NamedTuple, Optional


class Counts(NamedTuple):
    """Numbers of test cases."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0

    def plus(self, other: "Counts") -> "Counts":
        """Returns the sums."""
        return Counts(*(a + b for a, b in zip(self, other)))


def count_xml(path: pathlib.Path, ok: bool) -> Counts:
    """Counts the cases of one test.xml; `ok` is Bazel's own verdict on the target."""
    try:
        cases = list(ET.parse(path).getroot().iter("testcase"))
    except (OSError, ET.ParseError):
        cases = []
    failed = sum(c.find("failure") is not None or c.find("error") is not None for c in cases)
    skipped = sum(c.find("skipped") is not None or c.get("status") == "notrun" for c in cases)
    passed = len(cases) - failed - skipped
    if ok and not cases:
        passed = 1
    if not ok and not failed:
        failed = 1
    return Counts(passed, failed, skipped)


def _xml_path(result: dict) -> Optional[pathlib.Path]:
    for output in result.get("testActionOutput", []):
        if output.get("name") == "test.xml":
            return pathlib.Path(urllib.parse.unquote(urllib.parse.urlparse(output["uri"]).path))
    return None


def count_run(events: str) -> Counts:
    """Counts the cases of one run from its build events, one JSON object a line."""
    targets: Dict[str, Counts] = {}
    finished = 0
    for line in events.splitlines():
        event = json.loads(line)
        identity = event.get("id", {})
        if "testResult" in event:
            label = identity["testResult"]["label"]
            ok = event["testResult"].get("status") == "PASSED"
            path = _xml_path(event["testResult"])
            found = count_xml(path, ok) if path else Counts(int(ok), int(not ok))
            shard = str(identity["testResult"].get("shard", 1))
            targets[label + "#" + shard] = found
        elif "testSummary" in event:
            label = identity["testSummary"]["label"]
            built = event["testSummary"].get("overallStatus") not in ("NO_STATUS", None)
            if not built and not any(t.startswith(label + "#") for t in targets):
                targets[label + "#"] = Counts(failed=1)
        elif "finished" in event:
            finished = event["finished"].get("exitCode", {}).get("code", 0)
    total = Counts()
    for counts in targets.values():
        total = total.plus(counts)
    return total.plus(Counts(failed=int(finished != 0 and not total.failed)))


def main(argv: List[str]) -> int:
    """Prints the totals over the files named in `argv`."""
    total = Counts()
    for name in argv:
        path = pathlib.Path(name)
        # Bazel writes no file when it cannot even start.
        total = total.plus(
            count_run(path.read_text(encoding="utf-8")) if path.exists() else Counts()
        )
    if total.skipped:
        print(f"{total.skipped} skipped")
    print(f"{total.passed} passed, {total.failed} failed")
    return 0 if total.passed and not total.failed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
