"""count_tests: cases from test.xml files, and failures that leave none."""

import json
import pathlib

from bazel import count_tests

_XML = """<testsuites><testsuite>
<testcase name="a"/><testcase name="b"><failure/></testcase><testcase name="c"><skipped/></testcase>
</testsuite></testsuites>"""


def _result(label: str, status: str, xml: pathlib.Path | None) -> str:
    outputs = [{"name": "test.xml", "uri": f"file://{xml}"}] if xml else []
    identity = {"testResult": {"label": label}}
    result = {"status": status, "testActionOutput": outputs}
    return json.dumps({"id": identity, "testResult": result})


def test_cases_are_counted(tmp_path: pathlib.Path) -> None:
    xml = tmp_path / "test.xml"
    xml.write_text(_XML)
    events = _result("//a:a_test", "FAILED", xml)
    assert count_tests.count_run(events) == count_tests.Counts(passed=1, failed=1, skipped=1)


def test_failures_without_a_failing_case_count(tmp_path: pathlib.Path) -> None:
    xml = tmp_path / "test.xml"
    xml.write_text('<testsuites><testsuite><testcase name="a"/></testsuite></testsuites>')
    identity = {"testSummary": {"label": "//a:unbuilt"}}
    summary = {"id": identity, "testSummary": {"overallStatus": "NO_STATUS"}}
    events = [
        _result("//a:timed_out", "TIMEOUT", xml),
        _result("//a:crashed", "FAILED", None),
        json.dumps(summary),
    ]
    assert count_tests.count_run("\n".join(events)) == count_tests.Counts(passed=1, failed=3)


def test_broken_build_is_a_failure(tmp_path: pathlib.Path) -> None:
    xml = tmp_path / "test.xml"
    xml.write_text("<testsuites><testcase name='a'/></testsuites>")
    finished = json.dumps({"id": {}, "finished": {"exitCode": {"name": "FAILED", "code": 1}}})
    events = _result("//a:a_test", "PASSED", xml) + "\n" + finished
    assert count_tests.count_run(events) == count_tests.Counts(passed=1, failed=1)


def test_empty_run_is_a_failure() -> None:
    assert count_tests.main([]) == 1
