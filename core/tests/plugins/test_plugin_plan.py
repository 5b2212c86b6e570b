"""From installed plugins and the operator's selection to the plan."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hardpoint.errors import ConfigError, PluginConflictError, PluginError, PluginNotFoundError
from hardpoint.plugins.kinds import KINDS, Trust
from hardpoint.plugins.plan import PluginPlan, SelectedBy
from hardpoint.plugins.records import DiscoveredPlugin, Discovery
from hardpoint.plugins.resolve import build_plan, resolve_plan
from hardpoint.plugins.selection import PluginSelection, parse_names, parse_pins

if TYPE_CHECKING:
    from .conftest import Site


def found(kind: str, name: str, distribution: str = "acme", version: str = "1.0") -> DiscoveredPlugin:
    return DiscoveredPlugin(kind, name, 1, distribution, version, f"{distribution}.{name}:create", f"/{distribution}")


def plan_of(*plugins: DiscoveredPlugin, **selection: Any) -> PluginPlan:
    return build_plan(Discovery(plugins), PluginSelection(**selection))


# -- allow-lists


@pytest.mark.parametrize(
    ("text", "names"), [(None, None), ("", ()), (" , ", ()), ("a", ("a",)), ("a, b,,c", ("a", "b", "c"))]
)
def test_an_unset_list_differs_from_an_empty_one(text: str | None, names: tuple[str, ...] | None) -> None:
    """R12.8, R12.9, P12.6"""
    assert parse_names(text) == names


def test_the_environment_gives_list_and_strictness_unless_set_explicitly() -> None:
    environ = {"HARDPOINT_PLUGINS": "a,b", "HARDPOINT_PLUGINS_STRICT": "1"}
    assert PluginSelection.from_environment(environ) == PluginSelection(allow=("a", "b"), strict=True)
    assert PluginSelection.from_environment(environ, allow=()).allow == ()
    assert PluginSelection.from_environment({}).allow is None
    assert PluginSelection.from_environment({"HARDPOINT_PLUGINS": ""}).allow == ()
    with pytest.raises(ConfigError, match="HARDPOINT_PLUGINS_STRICT='maybe'"):
        PluginSelection.from_environment({"HARDPOINT_PLUGINS_STRICT": "maybe"})


def test_the_list_governs_what_loads_by_being_installed() -> None:
    """R12.8."""
    plan = plan_of(found("hooks", "a"), found("stat_logger", "b"), found("scheduler", "c"), allow=("a",))
    assert [p.name for p in plan.plugins if p.active] == ["a"]
    assert [(r.name, r.reason) for r in plan.refused] == [("b", "not on the list HARDPOINT_PLUGINS")]
    assert not plan.find("scheduler", "c").automatic


def test_naming_a_plugin_is_its_permission() -> None:
    plan = plan_of(found("scheduler", "c"), found("hooks", "h"), allow=(), choices={"scheduler": "c", "hooks": ("h",)})
    assert plan.selected("scheduler").selected_by is SelectedBy.NAMED
    assert plan.find("hooks", "h").active


def test_an_unknown_name_on_the_list_is_an_error() -> None:
    """L12.2: an unknown allow-list name is silent."""
    with pytest.raises(PluginNotFoundError, match=r"'audti' on the list HARDPOINT_PLUGINS .*did you mean 'audit'"):
        plan_of(found("hooks", "audit"), allow=("audti",))


def test_a_listed_but_refused_plugin_is_an_error_with_the_reason(site: Site) -> None:
    site.install("acme", {"hardpoint.hooks.v9|audit": "acme:create"})
    with pytest.raises(PluginNotFoundError, match=r"'audit' .*API version 9"):
        site.plan(allow=("audit",))


# -- endpoints


def test_endpoints_are_denied_by_default_with_one_notice() -> None:
    """R12.48, R12.50, I12.2, P12.7"""
    plan = plan_of(found("endpoint", "chat"), found("endpoint", "ops"))
    assert plan.of("endpoint") == ()
    assert len(plan.notices) == 1
    assert "server.endpoints" in plan.notices[0]
    assert "chat, ops" in plan.notices[0]


def test_an_empty_endpoint_list_means_none_without_a_notice() -> None:
    """R12.51"""
    plan = plan_of(found("endpoint", "chat"), endpoints=())
    assert (plan.of("endpoint"), plan.notices) == ((), ())


def test_the_general_list_does_not_open_endpoints() -> None:
    assert plan_of(found("endpoint", "chat"), allow=("chat",)).of("endpoint") == ()


def test_listed_endpoints_are_active_and_their_absence_an_error() -> None:
    plan = plan_of(found("endpoint", "ops"), found("endpoint", "chat"), endpoints=("chat", "ops"), allow=())
    assert [p.name for p in plan.of("endpoint") if p.active] == ["ops", "chat"]
    with pytest.raises(PluginNotFoundError, match=r"entry point hardpoint\.endpoint\.v1:gone .*installed again"):
        plan_of(found("endpoint", "ops"), endpoints=("gone",))


@pytest.mark.parametrize(("tasks", "admitted"), [(("generate",), True), (("embed",), False), (None, True)])
def test_required_tasks_of_the_manifest_decide(site: Site, tasks: tuple[str, ...] | None, admitted: bool) -> None:
    """R12.49, R12.55. The launcher plans before it knows the model's tasks: the process that serves judges then."""
    manifest = {"plugins": {"endpoint": {"chat": {"required_tasks": ["generate"]}}}}
    site.install("acme-ep", {"endpoint:chat": "acme_ep.mod:create"}, modules={"acme_ep.mod": "1/0"}, manifest=manifest)
    plan = site.plan(endpoints=("chat",), tasks=tasks)
    assert bool(plan.of("endpoint")) is admitted
    if not admitted:
        assert "it serves generate" in plan.refused[0].reason
    assert "acme_ep" not in sys.modules


# -- names and doubles


def test_two_distributions_with_one_name_are_an_error_that_names_both() -> None:
    """R12.11, L12.18; lesson: same name twice, last wins."""
    with pytest.raises(
        PluginConflictError, match=r"claim hooks:x: a 1.0 at /a, b 1.0 at /b; pin one with .* remove all but one"
    ):
        plan_of(found("hooks", "x", "a"), found("hooks", "x", "b"))


def test_a_pin_settles_it() -> None:
    """L12.18."""
    plugins = (found("hooks", "x", "a"), found("hooks", "x", "b"))
    plan = plan_of(*plugins, pins=parse_pins(["hooks:x=b"]))
    assert [p.distribution for p in plan.of("hooks")] == ["b"]
    assert [(r.distribution, r.reason) for r in plan.refused] == [("a", "hooks:x is pinned to b")]


def test_a_pin_that_matches_nothing_is_an_error() -> None:
    with pytest.raises(PluginNotFoundError, match=r"pin hooks:x=c: that distribution has no such plugin, only a 1\.0"):
        plan_of(found("hooks", "x", "a"), pins={"hooks:x": "c"})
    with pytest.raises(PluginNotFoundError, match="no hooks plugin 'y'"):
        plan_of(found("hooks", "x", "a"), pins={"hooks:y": "a"})


@pytest.mark.parametrize("pin", ["hooks:x", "hooks=a", ":=", "hooks:=a"])
def test_malformed_pins_are_errors(pin: str) -> None:
    with pytest.raises(ConfigError, match="kind:name=distribution"):
        parse_pins([pin])


def test_contradicting_pins_are_errors() -> None:
    with pytest.raises(ConfigError, match="both 'a' and 'b'"):
        parse_pins(["hooks:x=a", "hooks:x=b"])
    with pytest.raises(PluginNotFoundError, match="unknown plugin kind 'hoks'"):
        parse_pins(["hoks:x=a"])


# -- choices


def test_the_only_candidate_of_a_choose_one_kind_is_taken() -> None:
    selected = plan_of(found("scheduler", "a")).selected("scheduler")
    assert (selected.name, selected.selected_by, selected.reason) == ("a", SelectedBy.INSTALLED, "the only candidate")


def test_of_several_candidates_the_operator_must_name_one() -> None:
    """L12.19: two platforms, two compilers active."""
    plugins = (found("scheduler", "a"), found("scheduler", "b", "other"))
    with pytest.raises(PluginConflictError, match=r"scheduler:a .acme 1.0., scheduler:b .*--scheduler"):
        plan_of(*plugins).selected("scheduler")
    assert plan_of(*plugins, choices={"scheduler": "b"}).selected("scheduler").name == "b"
    assert plan_of(*plugins, allow=("b",)).selected("scheduler").name == "b"
    by_default = plan_of(*plugins, defaults={"scheduler": "a"}).selected("scheduler")
    assert (by_default.name, by_default.selected_by) == ("a", SelectedBy.DEFAULT)
    both = plan_of(*plugins, defaults={"scheduler": "a"}, choices={"scheduler": "b"})
    assert [p.name for p in both.of("scheduler") if p.active] == ["b"]


def test_a_named_plugin_that_is_missing_lists_the_alternatives() -> None:
    """R12.46"""
    with pytest.raises(PluginNotFoundError, match=r"'fcsf' .did you mean 'fcfs'.*installed: fcfs; install a dist"):
        plan_of(found("scheduler", "fcfs"), choices={"scheduler": "fcsf"})
    with pytest.raises(PluginNotFoundError, match=r"no worker plugin 'w'; installed: none"):
        plan_of(defaults={"worker": "w"})
    with pytest.raises(ConfigError, match="unknown plugin kind 'schedular'"):
        plan_of(choices={"schedular": "fcfs"})
    with pytest.raises(PluginNotFoundError, match="no executor plugin is installed"):
        plan_of().selected("executor")


def test_naming_two_of_a_choose_one_kind_is_an_error() -> None:
    with pytest.raises(PluginConflictError, match="2 executor plugins were named"):
        plan_of(found("executor", "a"), found("executor", "b"), choices={"executor": ("a", "b")})


def test_several_problems_are_told_together() -> None:
    with pytest.raises(PluginNotFoundError) as caught:
        plan_of(allow=("a",), choices={"executor": "b"})
    assert "'a'" in str(caught.value)
    assert "'b'" in str(caught.value)


def test_a_later_choice_gives_a_new_plan() -> None:
    plan = plan_of(found("platform", "x"), found("platform", "y"), found("worker", "w"))
    chosen = plan.choose("platform", "x", SelectedBy.DEFAULT, "available").choose(
        "worker", "w", SelectedBy.DEFAULT, "the platform's"
    )
    assert [p.name for p in chosen.plugins if p.active] == ["x", "w"]
    assert [p.name for p in chosen.choose("platform", "y", SelectedBy.NAMED, "").plugins if p.active] == ["y", "w"]
    assert not any(p.active for p in plan.plugins)
    with pytest.raises(PluginNotFoundError):
        plan.choose("platform", "z", SelectedBy.NAMED, "")


# -- options


def manifest_site(site: Site) -> None:
    schema = {"properties": {"window": {"type": "integer"}}}
    manifest = {"plugins": {"scheduler": {"sjf": {"options": schema}}}}
    site.install("acme-s", {"scheduler:sjf": "acme_s.mod:create"}, modules={"acme_s.mod": "1/0"}, manifest=manifest)


def test_unknown_options_fail_in_the_launcher_with_a_suggestion(site: Site) -> None:
    """L12.15."""
    manifest_site(site)
    with pytest.raises(ConfigError, match=r"plugins\.scheduler\.sjf\.windwo .did you mean 'window'"):
        site.plan(options={"scheduler": {"sjf": {"windwo": 3}}})
    assert site.plan(options={"scheduler": {"sjf": {"window": 3}}}).find("scheduler", "sjf").options == {"window": 3}
    assert "acme_s" not in sys.modules


def test_options_of_something_not_installed_are_an_error() -> None:
    with pytest.raises(
        PluginNotFoundError, match=r"no scheduler plugin 'x'.*options are set under plugins.scheduler.x"
    ):
        plan_of(options={"scheduler": {"x": {}}})


def test_setting_options_of_an_observer_counts_as_naming_it() -> None:
    """So that a mistake in them stops the start instead of dropping the plugin with a warning."""
    plan = plan_of(found("stat_logger", "b"), found("scheduler", "c"), options={"stat_logger": {"b": {"x": 1}}})
    assert plan.find("stat_logger", "b").selected_by is SelectedBy.NAMED
    assert plan_of(found("stat_logger", "b")).find("stat_logger", "b").selected_by is SelectedBy.INSTALLED


def test_options_must_be_plain_data() -> None:
    with pytest.raises(ConfigError, match=r"plugins\.hooks\.x is not plain data"):
        plan_of(found("hooks", "x"), options={"hooks": {"x": {"a": object()}}})


def test_a_broken_manifest_is_named(site: Site) -> None:
    site.install("acme-m", {"hooks:x": "acme_m.mod:create"}, modules={"acme_m.mod": ""}, manifest={"plugin": {}})
    with pytest.raises(PluginError, match=r"acme_m.hardpoint\.json is not valid"):
        site.plan(options={"hooks": {"x": {"a": 1}}})


# -- the plan's form


def test_the_plan_survives_the_way_to_another_process() -> None:
    plan = plan_of(
        *(found("hooks", "x"), found("scheduler", "y"), found("endpoint", "z")),
        options={"hooks": {"x": {"a": (1, 2), "b": {"c": None}}}},
        tasks=("generate",),
        strict=True,
    )
    assert PluginPlan.from_bytes(plan.to_bytes()) == plan
    with pytest.raises(AttributeError):
        plan.strict = False  # type: ignore[misc]


names = st.sampled_from(["a", "b", "c", "d", "e"])
plugins_strategy = st.lists(st.tuples(st.sampled_from(sorted(KINDS)), names), max_size=12, unique=True)
allow_strategy = st.none() | st.lists(names, unique=True).map(tuple)


@given(plugins_strategy, allow_strategy, allow_strategy)
def test_admission_is_the_intersection_of_installed_and_listed(
    keys: list[tuple[str, str]], allow: tuple[str, ...] | None, endpoints: tuple[str, ...] | None
) -> None:
    """I12.1, I12.2 as amended: kinds that load many filter by list, endpoints by their own; order is discovery's."""
    discovery = Discovery(tuple(found(kind, name) for kind, name in keys))
    plan, problems = resolve_plan(discovery, PluginSelection(allow=allow, endpoints=endpoints))

    def admitted(kind: str, name: str) -> bool:
        if KINDS[kind].trust is Trust.ALLOW_LIST:
            return name in (endpoints or ())
        return allow is None or name in allow or kind not in ("hooks", "stat_logger")

    assert [(p.kind, p.name) for p in plan.plugins] == [key for key in keys if admitted(*key)]
    assert {(r.kind, r.name) for r in plan.refused} == {key for key in keys if not admitted(*key)}
    unknown = {name for name in allow or () if name not in {name for _, name in keys}}
    absent = {name for name in endpoints or () if ("endpoint", name) not in keys}
    assert len(problems) == len(unknown) + len(absent)
    assert PluginPlan.from_bytes(plan.to_bytes()) == plan


def test_options_of_a_plugin_that_was_not_chosen_are_told() -> None:
    """Nobody sets an option for nothing; kinds of which several act at once have no such thing as not chosen."""
    options = {"scheduler": {"a": {"x": 1}, "b": {"y": 2}}, "hash": {"c": {"z": 3}}}
    told = PluginSelection(choices={"scheduler": "a", "hash": "d"}, options=options).without_effect()
    assert told == ["options of scheduler 'b' have no effect: 'a' is chosen, not 'b'"]
    assert PluginSelection(defaults={"scheduler": "b"}, options=options).without_effect() == [
        "options of scheduler 'a' have no effect: 'b' is chosen, not 'a'"
    ]
    assert PluginSelection(options=options).without_effect() == []
