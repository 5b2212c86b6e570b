"""One server: its socket, its HTTP application and its engine process, from the first bind to the last answer."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from typing import Any

import uvicorn

from hardpoint.config import AppConfig, ServerConfig
from hardpoint.engine.async_llm import AsyncLLM
from hardpoint.errors import ConfigError
from hardpoint.interfaces.endpoint import Endpoint, EndpointContext, ServerFacts
from hardpoint.interfaces.stat_logger import MetricsExporter, StatLogger
from hardpoint.ipc import create_runtime_dir
from hardpoint.launch import Launch, prepare
from hardpoint.plugins.runtime import PluginRuntime
from hardpoint.roles import ProcessRole
from hardpoint.server.app import Engines, create_app, started
from hardpoint.server.keys import load_admin_keys, load_keys, require_safe_binding
from hardpoint.server.protocol import bounded_protocol
from hardpoint.version import __version__

_logger = logging.getLogger("hardpoint.server")
_BACKLOG = 2048
_ECHO_S = 0.5
"""Supervisors may signal a process and its group at once: a second signal so soon is the first one's echo."""
_END_S = 12.0
"""What everything after the last answer gets, plugins' own stops included; then the process is left."""
_EXIT_S = 3.0
"""The same for the interpreter's own end, which waits for threads."""
_FLUSH_S = 2
"""What finished answers get to reach their clients before connections are cut, whole seconds."""


def serve(config: AppConfig, environ: Mapping[str, str]) -> int:
    """Serve until SIGTERM or SIGINT; 0 after an orderly end.

    Raises whatever stops the start: ``ConfigError``, model and plugin errors, each with what to change.
    """
    keys = load_keys(config.server)
    require_safe_binding(config.server, keys)
    admin_keys = load_admin_keys(config.server)
    with bind(config.server) as listener:
        (name,) = config.engines
        roles = frozenset({ProcessRole.API})
        launch = prepare(config, name, environ=dict(environ), roles=roles, runtime_dir=create_runtime_dir())
        engines = Engines([name])
        endpoints = _create_endpoints(config, launch.runtime, engines)
        app = create_app(config.server, engines, endpoints, keys, admin_keys)
        with asyncio.Runner(loop_factory=uvicorn.Config(app).get_loop_factory()) as runner:
            loop = runner.get_loop()
            service = _Service(config.server, launch, engines, endpoints)
            task = loop.create_task(service.run(app, listener))
            while not task.done():
                try:
                    loop.run_until_complete(task)
                except SystemExit:
                    # A task of a plugin raised it, which stops the loop; whoever waits for that task is told as well.
                    _logger.exception("a plugin called for the end of the server, which goes on")
            task.result()
            service.leave_by = time.monotonic() + _EXIT_S
    return 0


def bind(config: ServerConfig) -> socket.socket:
    """The listening socket, taken before anything slow happens. Raises ``ConfigError`` when it cannot be had."""
    try:
        found = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, ValueError) as error:  # ValueError: not even the spelling of a name
        raise ConfigError(f"--host {config.host!r} cannot be bound: {getattr(error, 'strerror', error)}") from None
    family, *_, address = found[0]
    try:
        # Both versions of the protocol where the address means both, as systems do by default.
        return socket.create_server(address, family=family, backlog=_BACKLOG, dualstack_ipv6=family == socket.AF_INET6)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {config.host} port {config.port}: {error.strerror}; choose another --port or --host"
        ) from None


class HttpServer(uvicorn.Server):
    """Leaves signals to its owner."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _create_endpoints(config: AppConfig, runtime: PluginRuntime, engines: Engines) -> dict[str, Endpoint]:
    """Those that are admitted, before there is an engine. Raises the plugin errors."""
    loggers: dict[str, StatLogger] = runtime.create_all("stat_logger")
    for logger in loggers.values():
        logger.interval_s = config.log_interval_s
    (cache,) = (engine.cache for engine in config.engines.values())
    told = config.server.model_dump(include={"endpoints", "max_body_bytes", "request_timeout_s"})
    facts = ServerFacts(__version__, int(time.time()), kv_events=cache.kv_events and cache.prefix_caching, **told)
    exporters = tuple(logger for logger in loggers.values() if isinstance(logger, MetricsExporter))

    shared = {"router": engines, "facts": facts, "exporters": exporters, "is_draining": lambda: engines.draining}
    return runtime.create_all("endpoint", EndpointContext, load_report=runtime.report, **shared)


class _Service:
    """The life of one server. The first signal drains, the second cuts everything short."""

    def __init__(self, config: ServerConfig, launch: Launch, engines: Engines, endpoints: dict[str, Endpoint]) -> None:
        self._config = config
        self._launch = launch
        self._name = launch.spec.model_name
        self._engines = engines
        self._endpoints = endpoints
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._stopped_at: float | None = None
        self.leave_by = float("inf")

    async def run(self, app: Callable[..., Any], listener: socket.socket) -> None:
        """Raises what stops the engine's start."""
        quiet: dict[str, Any] = {"log_config": None, "access_log": False, "server_header": False, "lifespan": "off"}
        http = bounded_protocol(self._config.max_header_bytes)
        server = HttpServer(uvicorn.Config(app, http=http, ws="none", timeout_graceful_shutdown=_FLUSH_S, **quiet))
        threading.Thread(target=self._watch, args=(server,), name="watch-end", daemon=True).start()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            # Not the loop's own handlers, which run no more once a plugin blocks the loop.
            signal.signal(number, lambda *_: self._on_signal(loop))
        async with contextlib.AsyncExitStack() as stack:
            if await self._unless_stopped(stack.enter_async_context(started(self._endpoints))) is None:
                return
            serving = asyncio.create_task(server.serve([listener]), name="http")
            print(self._headline(listener), flush=True)
            try:
                await self._serve_engine()
            finally:
                server.should_exit = True
                server.force_exit = self._hurry.is_set()
                await serving

    async def _serve_engine(self) -> None:
        begun = time.monotonic()
        engine = await self._unless_stopped(AsyncLLM.start(self._launch.spec, self._launch.runtime))
        if engine is None:
            return
        _logger.info("%s is ready after %.1f s", self._name, time.monotonic() - begun)
        try:
            for endpoint in self._endpoints.values():
                endpoint.engine_started(engine)
            self._engines.add(self._name, engine)
            await self._stop.wait()
            _logger.info("stopping: %d running requests get %g s", engine.num_unfinished, self._config.drain_timeout_s)
            await _first(engine.drain(self._config.drain_timeout_s), self._hurry.wait())
            self.leave_by = time.monotonic() + _END_S
        finally:
            # What still runs now ends with its terminal event.
            await engine.shutdown(drain=False)

    async def _unless_stopped(self, work: Coroutine[Any, Any, Any]) -> Any:
        """The result of ``work``; None, with ``work`` cancelled, when a signal came first."""
        task = asyncio.create_task(work)
        await _first(asyncio.shield(task), self._stop.wait())
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
            return None
        return task.result()

    def _on_signal(self, loop: asyncio.AbstractEventLoop) -> None:
        now = time.monotonic()
        if self._stopped_at is None:
            self._stopped_at, self._engines.draining = now, True
            self.leave_by, event = now + self._config.drain_timeout_s + _END_S, self._stop
        elif now - self._stopped_at > _ECHO_S:
            self.leave_by, event = min(self.leave_by, now + _END_S), self._hurry
        else:
            return
        with contextlib.suppress(RuntimeError):  # The loop is closed: only leaving is left.
            loop.call_soon_threadsafe(event.set)

    def _watch(self, server: HttpServer) -> None:
        """Body of a thread: no plugin that hangs, or leaves threads behind, keeps a stopped server from its end."""
        while time.monotonic() < self.leave_by:
            time.sleep(0.1)
        _logger.warning("the server does not end by itself and is cut off; this is what keeps it:")
        faulthandler.dump_traceback()
        # Children end with this process.
        os._exit(1 if server.server_state.tasks else 0)

    def _headline(self, listener: socket.socket) -> str:
        host = f"[{self._config.host}]" if ":" in self._config.host else self._config.host
        routes = ", ".join(self._endpoints) or "none"
        return f"Hardpoint serves {self._name} at http://{host}:{listener.getsockname()[1]} (endpoints: {routes})"


async def _first(*waits: Any) -> None:
    """Wait for the first of ``waits`` and cancel the others. Results and errors are not looked at."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
