"""The one table of plugin kinds. Discovery, plan, process policy, doctor and the docs table derive from it."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from hardpoint.errors import PluginNotFoundError
from hardpoint.plugins.suggest import did_you_mean
from hardpoint.roles import ProcessRole

GROUP_PREFIX = "hardpoint."


class Phase(enum.StrEnum):
    """The moment at which a process first runs code of the kind."""

    PROCESS_START = "process start"
    PLATFORM_SELECTION = "platform selection"
    COMMAND_LINE = "command line"
    CONFIG = "configuration"
    ENGINE_START = "engine start"
    WORKER_START = "worker start"
    COMPONENT_START = "engine or worker start"
    FRONT_END_START = "front-end start"
    APPLICATION_START = "application start"
    ON_DEMAND = "when asked for"


class Cardinality(enum.StrEnum):
    """How many plugins of the kind are active in one instance."""

    EXACTLY_ONE = "exactly one"
    ONE = "one"
    KEYED = "keyed"
    MANY = "many"


class Trust(enum.StrEnum):
    """``LOAD``: installed suffices (and listed, where the list is set). ``ALLOW_LIST``: denied unless listed."""

    LOAD = "load"
    ALLOW_LIST = "allow-list"


@dataclass(frozen=True, slots=True)
class KindSpec:
    """One row. ``roles`` are the processes that run the kind's code; ``required`` kinds are reported when missing."""

    name: str
    roles: frozenset[ProcessRole]
    phase: Phase
    cardinality: Cardinality
    description: str
    trust: Trust = Trust.LOAD
    api_version: int = 1
    required: bool = False

    @property
    def group(self) -> str:
        """The entry-point group, which carries the major version of the kind's API."""
        return f"{GROUP_PREFIX}{self.name}.v{self.api_version}"

    @property
    def chosen(self) -> bool:
        """Whether at most one plugin of the kind is active, so that several candidates need a choice."""
        return self.cardinality in (Cardinality.EXACTLY_ONE, Cardinality.ONE)


_LAUNCHER, _API, _ENGINE, _WORKER = (frozenset({role}) for role in ProcessRole)
_ALL = frozenset(ProcessRole)
_EXACTLY_ONE, _ONE, _KEYED, _MANY = Cardinality
_AT_ENGINE, _AT_WORKER, _AT_COMPONENT = Phase.ENGINE_START, Phase.WORKER_START, Phase.COMPONENT_START
_ASKED = Phase.ON_DEMAND

_ROWS = (
    KindSpec("platform", _ALL, Phase.PLATFORM_SELECTION, _EXACTLY_ONE, "the hardware", required=True),
    KindSpec("hooks", _ALL, Phase.PROCESS_START, _MANY, "observers of the life of a process and of requests"),
    KindSpec("cli_command", _LAUNCHER, Phase.COMMAND_LINE, _KEYED, "further subcommands of the command line"),
    KindSpec("conformance", _LAUNCHER, _ASKED, _KEYED, "test classes that plugins of a kind must pass"),
    KindSpec("model_source", _LAUNCHER | _WORKER, Phase.CONFIG, _KEYED, "names to files", required=True),
    KindSpec("executor", _ENGINE, _AT_ENGINE, _ONE, "runs the workers", required=True),
    KindSpec("scheduler", _ENGINE, _AT_ENGINE, _ONE, "decides what each step computes", required=True),
    KindSpec("scheduling_policy", _ENGINE | _WORKER, _AT_COMPONENT, _KEYED, "the order of waiting requests"),
    KindSpec("kv_layout", _ENGINE | _WORKER, _AT_COMPONENT, _KEYED, "how cache blocks lie in memory", required=True),
    KindSpec("kv_cache_spec", _ENGINE | _WORKER, _AT_COMPONENT, _KEYED, "cache managers", required=True),
    KindSpec("kv_connector", _ENGINE | _WORKER, _AT_COMPONENT, _KEYED, "moves cache blocks between instances"),
    KindSpec("hash", _ENGINE | _WORKER, _AT_COMPONENT, _KEYED, "block hashes", required=True),
    KindSpec("worker", _WORKER, _AT_WORKER, _KEYED, "one rank's model runner", required=True),
    KindSpec("attention_backend", _WORKER, _AT_WORKER, _KEYED, "attention kernels", required=True),
    KindSpec("custom_op", _WORKER, _AT_WORKER, _KEYED, "operators added to the framework"),
    KindSpec("kernel_override", _WORKER, _AT_WORKER, _KEYED, "other kernels at declared seams"),
    KindSpec("communicator", _WORKER, _AT_WORKER, _KEYED, "collectives between ranks"),
    KindSpec("compiler", _WORKER, _AT_WORKER, _KEYED, "lowers ranges of layers"),
    KindSpec("graph_backend", _WORKER, _AT_WORKER, _KEYED, "captures and replays steps"),
    KindSpec("memory", _WORKER, _AT_WORKER, _KEYED, "device memory pools"),
    KindSpec("model", _WORKER, _AT_WORKER, _KEYED, "model architectures", required=True),
    KindSpec("quantization", _WORKER, _AT_WORKER, _KEYED, "quantized linear layers"),
    KindSpec("weight_loader", _LAUNCHER | _WORKER, Phase.CONFIG, _KEYED, "reads weight files", required=True),
    KindSpec("logits_processor", _ENGINE | _WORKER, _AT_COMPONENT, _KEYED, "edits logits before sampling"),
    KindSpec("speculator", _ENGINE | _WORKER, _AT_COMPONENT, _KEYED, "proposes draft tokens"),
    KindSpec("structured_output", _ENGINE | _WORKER, _AT_COMPONENT, _KEYED, "grammars"),
    KindSpec("eplb_policy", _ENGINE | _WORKER, _AT_COMPONENT, _KEYED, "balances experts over ranks"),
    KindSpec("reasoning_parser", _API | _ENGINE, _ASKED, _KEYED, "separates reasoning from answers"),
    KindSpec("tokenizer", _API | _ENGINE, _ASKED, _KEYED, "text to tokens and back", required=True),
    KindSpec("chat_renderer", _API, _ASKED, _KEYED, "conversations to prompts", required=True),
    KindSpec("tool_parser", _API, _ASKED, _KEYED, "reads tool calls from answers"),
    KindSpec("io_processor", _API, _ASKED, _KEYED, "raw inputs to model inputs and back"),
    KindSpec("stat_logger", _API, Phase.FRONT_END_START, _MANY, "statistics sinks of asynchronous serving"),
    KindSpec("endpoint", _API, Phase.APPLICATION_START, _MANY, "HTTP routes", Trust.ALLOW_LIST),
)

KINDS: Mapping[str, KindSpec] = MappingProxyType({row.name: row for row in _ROWS})


def kind_spec(kind: str) -> KindSpec:
    """The row of ``kind``. Raises ``PluginNotFoundError`` with the nearest known kind."""
    try:
        return KINDS[kind]
    except KeyError:
        hint = did_you_mean(kind, KINDS)
        raise PluginNotFoundError(f"unknown plugin kind {kind!r}{hint}; known kinds: {', '.join(KINDS)}") from None


def no_candidate(kind: str) -> str:
    """What to say when a kind that is needed has no plugin at all."""
    return f"no {kind} plugin is installed; {install_hint(kind)}"


def missing_plugin(kind: str, name: str, installed: Iterable[str], refusal: str = "") -> PluginNotFoundError:
    """The error for a name nobody provides; ``refusal`` is why an installed plugin of that name is not used."""
    if refusal:
        return PluginNotFoundError(f"{kind} plugin {name!r} is installed but refused: {refusal}")
    names = sorted(installed)
    listed = f"{did_you_mean(name, names)}; installed: {', '.join(names) or 'none, but one is required'}"
    return PluginNotFoundError(f"no {kind} plugin {name!r}{listed}; {install_hint(kind, name)}")


def install_hint(kind: str, name: str = "<name>") -> str:
    """What to do about a plugin that is not there."""
    # The core knows no distribution by name, so it can only say what one must provide.
    return (
        f"install a distribution that provides the entry point {kind_spec(kind).group}:{name} (a newly added entry "
        "point is seen only once its distribution is installed again, editable ones too)"
    )
