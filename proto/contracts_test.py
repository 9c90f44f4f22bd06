"""The contracts stay compatible with the released ones, and every field is explained."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

from proto import contracts

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module", name="compiled")
def compiled_fixture():
    return contracts.compile_contracts(ROOT)


def test_no_breaking_change_against_the_released_contract(compiled):
    released = json.loads((ROOT / "proto" / "contracts.json").read_text())
    assert contracts.breaking_changes(released, contracts.describe(compiled)) == []


def test_released_contract_is_current(compiled):
    released = json.loads((ROOT / "proto" / "contracts.json").read_text())
    assert released == contracts.describe(compiled), "run ./bazelw run //proto:update_contracts"


def test_every_field_and_rpc_is_documented(compiled):
    assert contracts.undocumented(compiled) == []


def _mutations():
    lease = "swe_rl.sandbox.v1.Lease"

    def renumber(c):
        c["messages"][lease]["epoch"]["number"] = 9

    def retype(c):
        c["messages"][lease]["epoch"]["type"] = "TYPE_STRING"

    def drop_field(c):
        del c["messages"][lease]["epoch"]

    def drop_message(c):
        del c["messages"][lease]

    def drop_value(c):
        del c["enums"]["swe_rl.trajectory.v1.Cause"]["CAUSE_LOOP"]

    def make_stream(c):
        c["services"]["swe_rl.sandbox.v1.SandboxBroker"]["Exec"][1] = "stream .x"

    return [renumber, retype, drop_field, drop_message, drop_value, make_stream]


@pytest.mark.parametrize("mutate", _mutations(), ids=lambda f: f.__name__)
def test_a_breaking_change_is_seen(compiled, mutate):
    released = contracts.describe(compiled)
    changed = copy.deepcopy(released)
    mutate(changed)
    assert len(contracts.breaking_changes(released, changed)) == 1


def test_an_addition_is_compatible(compiled):
    released = contracts.describe(compiled)
    changed = copy.deepcopy(released)
    changed["messages"]["swe_rl.sandbox.v1.Lease"]["new"] = {"number": 99}
    assert contracts.breaking_changes(released, changed) == []
