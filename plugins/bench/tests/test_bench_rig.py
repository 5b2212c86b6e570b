"""From settings to limits, and schedulers with options of their own."""

from __future__ import annotations

from typing import Any

import pytest

from hardpoint.config import AppConfig
from hardpoint.errors import ConfigError
from hardpoint_bench.rig import with_blocks, with_scheduler


def config(plugins: dict[str, Any] | None = None, **sections: Any) -> AppConfig:
    engine = {"model": {"name": "scheduler"}, **sections}
    return AppConfig.model_validate({"engines": {"scheduler": engine}, "plugins": plugins or {}})


def test_another_scheduler_by_name() -> None:
    changed = with_scheduler(config(), "priority")
    assert changed.engines["scheduler"].scheduler.scheduler == "priority"
    assert changed.plugins == {}


def test_options_are_read_as_json_or_text() -> None:
    changed = with_scheduler(config({"scheduler": {"x": {"a": 0, "z": 9}}}), "x:a=1,b=fair_share,c=true,d=[2]")
    assert changed.plugins == {"scheduler": {"x": {"a": 1, "z": 9, "b": "fair_share", "c": True, "d": [2]}}}


def test_options_of_other_plugins_have_their_kind_and_name() -> None:
    before: dict[str, Any] = {"scheduling_policy": {"fair": {"weights": {"a": 1}, "z": 9}, "other": {"x": 1}}}
    changed = with_scheduler(config(before), 'x:policy=fair,scheduling_policy.fair.weights={"a":4,"b":0.5},c=[1,2]')
    assert changed.plugins == {
        "scheduler": {"x": {"policy": "fair", "c": [1, 2]}},
        "scheduling_policy": {"fair": {"weights": {"a": 4, "b": 0.5}, "z": 9}, "other": {"x": 1}},
    }
    assert before["scheduling_policy"]["fair"]["weights"] == {"a": 1}


def test_commas_in_text_of_json_part_nothing() -> None:
    changed = with_scheduler(config(), r'x:a={"q,\"]":1},b="1,2",kind.dotted.name.key=v')
    assert changed.plugins["scheduler"] == {"x": {"a": {'q,"]': 1}, "b": "1,2"}}
    assert changed.plugins["kind"] == {"dotted.name": {"key": "v"}}


def test_values_that_are_nearly_json_are_told() -> None:
    with pytest.raises(ConfigError, match=r"'\{search: 3, batch: 1\}' is not JSON .*double quotes"):
        with_scheduler(config(), "x:k.n.weights={search: 3, batch: 1},a=2")


def test_the_original_stays_as_it_is() -> None:
    original = config({"scheduler": {"x": {"a": 0}}})
    with_scheduler(original, "x:a=1")
    assert original.plugins == {"scheduler": {"x": {"a": 0}}}
    assert original.engines["scheduler"].scheduler.scheduler == "fcfs"


@pytest.mark.parametrize(
    "choice", ["", ":a=1", "x:", "x:a", "x:=1", "x:a=1,", "x:k.a=1", "x:.n.a=1", "x:k..a=1", "x:k.n.=1"]
)
def test_choices_of_another_form_are_refused(choice: str) -> None:
    with pytest.raises(ConfigError, match="--compare"):
        with_scheduler(config(), choice)


def test_blocks_are_another_spelling_of_the_setting() -> None:
    assert with_blocks(config(), None).engines["scheduler"].cache.num_kv_blocks is None
    assert with_blocks(config(), 50).engines["scheduler"].cache.num_kv_blocks == 50
    assert with_blocks(config(cache={"num_kv_blocks": 50}), 50).engines["scheduler"].cache.num_kv_blocks == 50
    with pytest.raises(ConfigError, match="--blocks 60 and --num-kv-blocks 50 say different things"):
        with_blocks(config(cache={"num_kv_blocks": 50}), 60)
    with pytest.raises(ConfigError, match="--blocks 1 must be at least 2"):
        with_blocks(config(), 1)
