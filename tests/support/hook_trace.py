"""A distribution of ``hooks`` plugins that write a line for every call in every process, and the lines as records."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scratch_install import write_metadata

__all__ = ["HookCall", "Trace", "install_trace"]

_TRACE = "HOOK_TRACE_FILE"
_SOURCE = '''
"""Three observers, alike but for the order they ask for."""

import json
import os
import sys

from pydantic import BaseModel

from hardpoint.interfaces.hooks import hookimpl
from hardpoint.interfaces.plugin import plugin


class Options(BaseModel):
    edits: dict = {}


def write(name, hook, **facts):
    child = "hardpoint.process" in " ".join(sys.orig_argv)
    where = sys.argv[1].partition("-")[0] if child else "launcher"
    frameworks = sorted({"torch", "transformers", "hardpoint_cpu"} & set(sys.modules))
    line = {"name": name, "hook": hook, "pid": os.getpid(), "where": where, "frameworks": frameworks, "facts": facts}
    with open(os.environ["HOOK_TRACE_FILE"], "a") as file:
        file.write(json.dumps(line) + "\\n")


def observer(name, order):
    class Observer:
        def __init__(self, options):
            self.options = options

        @hookimpl(**order)
        def process_booting(self, roles, rank, environ):
            write(name, "process_booting", roles=sorted(roles), rank=rank, is_mine=environ is os.environ)
            environ["OMP_NUM_THREADS"] = "3"

        @hookimpl(**order)
        def configure(self, config):
            write(name, "configure", config=config)
            for path, value in self.options.edits.items():
                *sections, key = path.split("/")
                place = config
                for section in sections:
                    is_engine = section == "ENGINE"
                    place = next(iter(config["engines"].values())) if is_engine else place.setdefault(section, {})
                place[key] = value

        @hookimpl(**order)
        def process_started(self, roles, rank):
            write(name, "process_started", roles=sorted(roles), rank=rank)

        @hookimpl(**order)
        def process_stopping(self):
            write(name, "process_stopping")

        @hookimpl(**order)
        def request_added(self, request):
            write(name, "request_added", request=request.request_id)

        @hookimpl(**order)
        def request_finished(self, output):
            write(name, "request_finished", request=output.request_id, reason=str(output.finish_reason))

        @hookimpl(**order)
        def step_finished(self, stats):
            write(name, "step_finished", running=stats.num_running)

        @hookimpl(**order)
        def model_loaded(self, model_name, rank, load_seconds):
            threads = sys.modules["torch"].get_num_threads() if "torch" in sys.modules else None
            write(name, "model_loaded", model=model_name, rank=rank, seconds=load_seconds, threads=threads)

    @plugin("hooks", options=Options)
    def create(ctx, options):
        write(name, "created", roles=sorted(ctx.roles), rank=ctx.rank, platform=ctx.platform is not None)
        return Observer(options)

    return create


last = observer("last", {"trylast": True})
middle = observer("middle", {})
first = observer("first", {"tryfirst": True})
'''


@dataclass(frozen=True, slots=True)
class HookCall:
    """``where`` is the kind of process by its name; ``frameworks`` are those imported at the time of the call."""

    name: str
    hook: str
    pid: int
    where: str
    frameworks: list[str]
    facts: dict[str, Any]


class Trace:
    """What the plugins wrote, in order."""

    def __init__(self, site: Path, file: Path) -> None:
        self.file = file
        self.environ: Mapping[str, str] = {
            "PYTHONPATH": os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])]),
            _TRACE: str(file),
        }

    def calls(self, *, where: str | None = None, name: str = "middle") -> list[HookCall]:
        """Of one plugin, in one kind of process."""
        lines = self.file.read_text(encoding="utf-8").splitlines() if self.file.exists() else []
        every = [HookCall(**json.loads(line)) for line in lines]
        return [call for call in every if call.name == name and where in (None, call.where)]

    def hooks(self, *, where: str, without: Iterable[str] = ("step_finished",), name: str = "middle") -> list[str]:
        return [call.hook for call in self.calls(where=where, name=name) if call.hook not in without]

    def only(self, hook: str, *, where: str) -> HookCall:
        (call,) = [call for call in self.calls(where=where) if call.hook == hook]
        return call


def install_trace(folder: Path) -> Trace:
    """Write the distribution ``hook-trace`` into a new place of installed packages in ``folder``."""
    site = folder / "site"
    site.mkdir(parents=True)
    names = {"last": "hook_trace_plugin:last", "middle": "hook_trace_plugin:middle", "first": "hook_trace_plugin:first"}
    write_metadata({"name": "hook-trace", "version": "1.0", "entry-points": {"hardpoint.hooks.v1": names}}, site)
    (site / "hook_trace_plugin.py").write_text(_SOURCE, encoding="utf-8")
    return Trace(site, folder / "trace.jsonl")
