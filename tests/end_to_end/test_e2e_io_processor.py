"""A model whose configuration names an IO processor answers tasks, over HTTP as in Python (R12.43, R12.44, R12.47)."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from scratch_install import write_metadata
from server_process import PATIENCE, ServerProcess, serving, until
from tiny_llama import write_tiny_llama

pytestmark = pytest.mark.timeout(300 * PATIENCE)

PLUGIN = """
import os
from hardpoint.errors import InvalidRequestError
from hardpoint.interfaces import IOProcessor, IOProcessorContext, IORequest, NoOptions, Prompt, SamplingParams, plugin

class Continue(IOProcessor):
    def __init__(self, ctx):
        self.ctx = ctx

    def parse(self, data):
        if not isinstance(data, dict) or not isinstance(data.get("texts"), list):
            raise InvalidRequestError("'texts' must be a list", param="data.texts")
        params = SamplingParams(max_tokens=data.get("length", 6), temperature=0.0, ignore_eos=True)
        return [IORequest(Prompt(text=text), params, state=text) for text in data["texts"]]

    def finish(self, requests, outputs):
        return {"texts": [r.state + o.outputs[0].text for r, o in zip(requests, outputs)],
                "architecture": self.ctx.model.architecture, "pid": os.getpid(), "instance": id(self)}

@plugin("io_processor")
def create(ctx: IOProcessorContext, options: NoOptions) -> IOProcessor:
    return Continue(ctx)
"""
OFFLINE = """
import json, sys
from hardpoint import LLM
with LLM(sys.argv[1], num_kv_blocks=64) as llm:
    print(json.dumps(llm.process({"texts": ["one", "two"]})))
"""
PROJECT = {
    "name": "acme-continue",
    "version": "1.0",
    "dependencies": ["hardpoint-core<1"],
    "entry-points": {"hardpoint.io_processor.v1": {"acme-continue": "acme_continue:create"}},
}
TASK = {"texts": ["one", "two"]}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    (folder / "acme_continue.py").write_text(PLUGIN)
    write_metadata(PROJECT, folder)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny", io_processor_plugin="acme-continue")


@pytest.fixture(scope="module")
def server(site: Path, model: Path) -> Iterator[ServerProcess]:
    flags = ("--endpoints", "openai,ops,process", "--num-kv-blocks", "64")
    with serving(model, *flags, environ={"PYTHONPATH": str(site)}) as made:
        yield made


def ask(server: ServerProcess, data: Any, **fields: Any) -> httpx.Response:
    return server.http.post(f"{server.url}/v1/process", json={"data": data, **fields})


def test_a_task_equals_its_prompts_one_by_one(server: ServerProcess) -> None:
    answer = ask(server, TASK).json()["data"]
    assert answer["architecture"] == "LlamaForCausalLM"
    for text, whole in zip(TASK["texts"], answer["texts"], strict=True):
        fields = {"prompt": text, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
        alone = server.http.post(f"{server.url}/v1/completions", json=fields).json()
        assert whole == text + alone["choices"][0]["text"]


def test_there_is_one_processor_in_the_servers_own_process(server: ServerProcess) -> None:
    """R12.47: process 0, once."""
    answers = [ask(server, TASK).json()["data"] for _ in range(3)]
    assert {answer["pid"] for answer in answers} == {server.pid}
    assert len({answer["instance"] for answer in answers}) == 1


def test_refusals_reach_the_client(server: ServerProcess) -> None:
    refused = ask(server, {"texts": 1})
    assert (refused.status_code, refused.json()["error"]["message"]) == (400, "'texts' must be a list")
    too_long = ask(server, {**TASK, "length": 10**6})
    assert (too_long.status_code, too_long.json()["error"]["param"]) == (400, "max_tokens")
    assert ask(server, TASK, model="other").status_code == 404


def test_a_client_that_leaves_frees_its_blocks(server: ServerProcess) -> None:
    # Sooner than a hundred steps of any machine.
    impatient = httpx.Timeout(5, read=0.001)
    with pytest.raises(httpx.ReadTimeout):
        server.http.post(f"{server.url}/v1/process", json={"data": {**TASK, "length": 100}}, timeout=impatient)
    until(lambda: server.http.get(f"{server.url}/load").json()["server_load"] == 0, 5, "the abandoned task ends")


@pytest.mark.slow
def test_offline_gives_the_same(server: ServerProcess, site: Path, model: Path) -> None:
    answer = ask(server, TASK).json()["data"]
    environ = {"PYTHONPATH": str(site), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", OFFLINE, str(model)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120 * PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["texts"] == answer["texts"]
