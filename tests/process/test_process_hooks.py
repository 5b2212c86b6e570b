"""Which hooks run where, in what order and how often: real processes, and a distribution of hooks that writes it down.

R12.2, R12.12, R12.13 and the hooks of ARCHITECTURE section 3.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli_support import Finished, run_process
from hook_trace import Trace, install_trace
from scratch_install import write_metadata
from server_process import PATIENCE, ServerProcess, WholeAnswer, serving, until

pytestmark = pytest.mark.timeout(300 * PATIENCE)

ORDER = ["first", "middle", "last"]
SCRIPT = """
import asyncio, json, sys
from hardpoint import AsyncLLM, LLM
from hardpoint.errors import HardpointError
from hardpoint.interfaces import Prompt, SamplingParams

model, params = sys.argv[1], SamplingParams(max_tokens=2, temperature=0.0)

def mark(text):
    with open(sys.argv[2], "a") as file:
        file.write(json.dumps({"name": "middle", "hook": text, "pid": 0, "where": "launcher", "frameworks": [],
                               "facts": {}}) + chr(10))

async def serve():
    async with await AsyncLLM.create(model, num_kv_blocks=4096, max_num_seqs=5) as llm:
        async for _ in llm.generate(Prompt(text="a"), params):
            pass

if __name__ == "__main__":
    with LLM(model, num_kv_blocks=4096, served_name="one", max_num_seqs=3) as llm:
        with LLM(model, num_kv_blocks=4096, served_name="two") as other:
            mark("-- both")
            llm.generate("a", params)
            other.generate("b", params)
    mark("-- none")
    try:
        LLM(model, num_kv_blocks=64)
    except HardpointError as error:
        mark(f"-- {type(error).__name__}")
    asyncio.run(serve())
"""


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return install_trace(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def log(trace: Trace, tiny: Path) -> Iterator[str]:
    """The log of one server in three processes, from start to stop, with three requests of which one is aborted."""
    edits = json.dumps({"ENGINE/scheduler/max_waiting": 9, "server/max_n": 5})
    flags = ("--executor", "multiproc", "--num-kv-blocks", "4096", "--max-num-seqs", "7")
    with serving(tiny, *flags, "--plugin", f"hooks.middle.edits={edits}", environ=trace.environ) as server:
        server.complete(max_tokens=3)
        server.complete(max_tokens=3)
        endless = WholeAnswer(server, max_tokens=30_000)
        wait_added(trace, 3)
        refused = server.http.post("/v1/completions", json={"prompt": "a", "n": 6})
        assert (refused.status_code, "from 1 to 5" in refused.text) == (400, True), refused.text
        server.terminate()
        abort(server, endless)
        yield server.log()


def abort(server: ServerProcess, endless: WholeAnswer) -> None:
    """A second signal, not so soon that it counts as an echo, cuts the endless request short."""
    time.sleep(0.7)
    server.terminate()
    assert server.wait(20) == 0
    endless.join()


def wait_added(trace: Trace, count: int) -> None:
    until(lambda: trace.hooks(where="engine").count("request_added") == count, 20, f"{count} requests are added")


def test_the_launcher_and_api_process(trace: Trace, log: str) -> None:
    assert trace.hooks(where="launcher") == [
        "created",
        "process_booting",
        "configure",
        "process_started",
        "process_stopping",
    ]
    assert trace.only("process_booting", where="launcher").facts["roles"] == ["launcher"]
    assert trace.only("process_started", where="launcher").facts == {"roles": ["api", "launcher"], "rank": None}


def test_the_engine_process(trace: Trace, log: str) -> None:
    hooks = trace.hooks(where="engine")
    assert hooks[:3] == ["created", "process_booting", "process_started"]
    assert hooks[-1] == "process_stopping"
    assert set(hooks[3:-1]) == {"request_added", "request_finished"}
    for hook in ("request_added", "request_finished"):
        asked = [call.facts["request"] for call in trace.calls(where="engine") if call.hook == hook]
        assert len(asked) == len(set(asked)) == 3
    reasons = [call.facts["reason"] for call in trace.calls(where="engine") if call.hook == "request_finished"]
    assert reasons == ["length", "length", "abort"]
    steps = [call for call in trace.calls(where="engine") if call.hook == "step_finished"]
    assert len(steps) >= 7


def test_the_worker_process(trace: Trace, log: str, tiny: Path) -> None:
    assert trace.hooks(where="worker") == [
        "created",
        "process_booting",
        "process_started",
        "model_loaded",
        "process_stopping",
    ]
    for hook in ("process_booting", "process_started"):
        facts = trace.only(hook, where="worker").facts
        assert (facts["roles"], facts["rank"]) == (["worker"], 0)
    loaded = trace.only("model_loaded", where="worker").facts
    assert (loaded["model"], loaded["rank"]) == (str(tiny), 0)
    assert 0 < loaded["seconds"] < 120


def test_hooks_boot_before_platform_and_framework_everywhere(trace: Trace, log: str) -> None:
    """L12.7: vendors resort to ``.pth`` files because their code runs too late."""
    booting = [call for call in trace.calls() if call.hook in ("created", "process_booting", "configure")]
    assert {call.where for call in booting} == {"launcher", "engine", "worker"}
    assert [call.frameworks for call in booting] == [[]] * 7
    assert not any(call.facts["platform"] for call in booting if call.hook == "created")
    assert all(call.facts["is_mine"] for call in booting if call.hook == "process_booting")
    # The server was started with one thread; the launcher's hook said three before the platform planned them.
    assert trace.only("model_loaded", where="worker").facts["threads"] == 3


def test_each_process_orders_the_plugins_alike(trace: Trace, log: str) -> None:
    pids = {call.pid for call in trace.calls()}
    assert len(pids) == 3
    for name in ("first", "last"):
        for where in ("launcher", "engine", "worker"):
            assert trace.hooks(where=where, name=name, without=()) == trace.hooks(where=where, without=())
    lines = [json.loads(line) for line in trace.file.read_text().splitlines()]
    for pid in pids:
        mine = [line["name"] for line in lines if line["pid"] == pid and line["hook"] != "created"]
        assert mine == ORDER * (len(mine) // 3)


def test_configure_sees_what_was_given_and_its_edits_count(trace: Trace, log: str, tiny: Path) -> None:
    config = trace.only("configure", where="launcher").facts["config"]
    engine = config["engines"]["served"]
    assert engine["model"] == {"name": str(tiny), "served_name": "served"}
    assert engine["execution"] == {"executor": "multiproc"}
    assert engine["scheduler"] == {"max_num_seqs": "7"}, "defaults are not in it, and nothing is validated yet"
    # Later implementations see the edits of earlier ones; that the server refused six sequences shows the rest.
    (later,) = [call for call in trace.calls(where="launcher", name="last") if call.hook == "configure"]
    assert later.facts["config"]["engines"]["served"]["scheduler"] == {"max_num_seqs": "7", "max_waiting": 9}


def test_each_process_tells_once_what_became_of_its_plugins(log: str, trace: Trace) -> None:
    """R12.16, P12.1, P12.2: a line at the default level."""
    assert "INFO" in next(
        line for line in log.splitlines() if "the configure hook of middle (hook-trace) edited" in line
    )
    lines = [line for line in log.splitlines() if "plugins in process" in line]
    assert all("INFO" in line and "created" in line for line in lines)
    for where, roles in (("launcher", "launcher+api"), ("engine", "engine"), ("worker", "worker, rank 0")):
        pid = trace.only("created", where=where).pid
        assert len([line for line in lines if f"plugins in process {pid} ({roles}" in line]) == 1, lines


def test_programs_run_started_and_stopping_in_pairs(tmp_path: Path, tiny: Path) -> None:
    """R12.12, R12.13: hooks boot once in a process, however many engines it starts; failed starts are no leak."""
    trace = install_trace(tmp_path)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = run_process(tiny, trace.file, command=[sys.executable, str(script)], environ=trace.environ)
    assert done.status == 0, done.err
    seen = trace.hooks(where="launcher", without=("step_finished", "request_added", "request_finished"))
    assert seen == [
        *("created", "process_booting", "configure", "process_started", "model_loaded"),
        *("configure", "model_loaded", "-- both", "process_stopping", "-- none"),
        *("configure", "process_started", "model_loaded", "process_stopping", "-- ConfigError"),
        *("configure", "process_started", "process_stopping"),
    ]
    configs = [call.facts["config"]["engines"] for call in trace.calls(where="launcher") if call.hook == "configure"]
    assert [list(config) for config in configs] == [["one"], ["two"], [str(tiny)], [str(tiny)]]
    assert configs[0]["one"]["scheduler"] == {"max_num_seqs": 3}
    assert configs[3][str(tiny)]["scheduler"] == {"max_num_seqs": 5}
    started = [call.facts["roles"] for call in trace.calls(where="launcher") if call.hook == "process_started"]
    assert started == [["api", "engine", "launcher", "worker"]] * 2 + [["api", "launcher"]]
    assert trace.hooks(where="engine") == [
        *("created", "process_booting", "process_started", "model_loaded"),
        *("request_added", "request_finished", "process_stopping"),
    ]


def generate(trace: Trace, tiny: Path, *flags: str, environ: dict[str, str] | None = None) -> Finished:
    command = ("generate", tiny, "--prompt", "Hi", "--max-tokens", "2", "--num-kv-blocks", "4096", *flags)
    return run_process(*command, environ={**trace.environ, **(environ or {})})


def test_terminal_commands_take_the_same_way(tmp_path: Path, tiny: Path) -> None:
    """The configuration comes from a file, and the environment, and the command line."""
    trace = install_trace(tmp_path)
    file = tmp_path / "settings.yaml"
    file.write_text(f"model: {tiny}\nscheduler: {{max_num_seqs: 5}}\nplugins: {{hooks: {{middle: {{edits: {{}}}}}}}}\n")
    command = ("generate", "--config", file, "--prompt", "Hi", "--max-tokens", "2", "--num-kv-blocks", "4096")
    done = run_process(*command, environ={**trace.environ, "HARDPOINT_MAX_WAITING": "17"})
    assert done.status == 0, done.err
    assert trace.hooks(where="launcher") == [
        *("created", "process_booting", "configure", "process_started", "model_loaded"),
        *("request_added", "request_finished", "process_stopping"),
    ]
    assert trace.only("process_booting", where="launcher").frameworks == []
    (engine,) = trace.only("configure", where="launcher").facts["config"]["engines"].values()
    assert engine["scheduler"] == {"max_num_seqs": 5, "max_waiting": "17"}
    assert engine["cache"] == {"num_kv_blocks": "4096"}


@pytest.mark.parametrize(
    ("edits", "complaint"),
    [
        ({"ENGINE/cache/block_sise": 3}, ("cache.block_sise", "configure hook of middle (hook-trace)")),
        ({"log_level": "LOUD"}, ("log_level", "configure hook of middle (hook-trace)")),
        ({"plugin_policy/strict": False}, ("middle (hook-trace) changed plugin_policy", "operator alone")),
        ({"plugins/hooks/first": {}}, ("middle (hook-trace) changed plugins.hooks", "operator alone")),
        ({"server/endpoints": ["admin"]}, ("middle (hook-trace) changed server.endpoints", "operator alone")),
    ],
)
def test_bad_edits_stop_the_start_and_name_the_plugin(
    tmp_path: Path, tiny: Path, edits: dict[str, object], complaint: tuple[str, ...]
) -> None:
    trace = install_trace(tmp_path)
    done = generate(trace, tiny, "--plugin", f"hooks.middle.edits={json.dumps(edits)}")
    assert done.status == 1
    assert [text for text in complaint if text not in done.complaint()] == [], done.complaint()
    assert "process_started" not in trace.hooks(where="launcher")


def install_broken(trace: Trace) -> None:
    site = Path(trace.environ["PYTHONPATH"].partition(os.pathsep)[0])
    points = {"torn": "broken_plugin:absent", "bad": "broken_plugin:create"}
    write_metadata({"name": "broken-plugin", "version": "1.0", "entry-points": {"hardpoint.hooks.v1": points}}, site)
    (site / "broken_plugin.py").write_text(
        "from hardpoint.interfaces.hooks import hookimpl\n"
        "class Bad:\n"
        "    @hookimpl\n"
        "    def request_added(self): raise OSError('disk full')\n"
        "def create(ctx, options): return Bad()\n"
    )


def test_a_broken_plugin_is_told_of_once_and_the_others_go_on(tmp_path: Path, tiny: Path) -> None:
    """R12.10, R12.14, P12.1: at the level of a command that prints results."""
    trace = install_trace(tmp_path)
    install_broken(trace)
    done = generate(trace, tiny)
    assert done.status == 0, done.err
    told = [line for line in done.err.splitlines() if "broken-plugin" in line]
    assert len(told) == 2, done.err
    assert "1 of the installed hooks plugins failed" in told[0]
    assert "hooks:torn (broken-plugin 1.0)" in told[0]
    assert "hook request_added of 'bad' raised OSError: disk full" in told[1]
    assert trace.hooks(where="launcher")[-2:] == ["request_finished", "process_stopping"]


@pytest.mark.parametrize("asked", [("--strict-plugins",), ("--plugin", "hooks.torn.key=1")])
def test_strict_or_named_it_stops_the_start(tmp_path: Path, tiny: Path, asked: tuple[str, ...]) -> None:
    """R12.15, L12.4: before anything else is done."""
    trace = install_trace(tmp_path)
    install_broken(trace)
    done = generate(trace, tiny, *asked)
    assert "loading hooks:torn (broken-plugin 1.0) failed in process" in done.complaint()
    assert "process_booting" not in trace.hooks(where="launcher")


def test_an_empty_list_of_plugins_admits_no_hook(tmp_path: Path, tiny: Path) -> None:
    """R12.9, P12.6."""
    trace = install_trace(tmp_path)
    assert generate(trace, tiny, environ={"HARDPOINT_PLUGINS": "", "HARDPOINT_PLATFORM": "cpu"}).status == 0
    assert trace.calls() == []
