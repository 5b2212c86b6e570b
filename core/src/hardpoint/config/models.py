"""The configuration models. Frozen and strict about keys; every field's description is its help text."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from hardpoint.config.units import Bytes, Count
from hardpoint.interfaces.executor import Executor
from hardpoint.plugins.selection import DEFAULT_ENDPOINTS


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, use_attribute_docstrings=True)


class ModelConfig(_Section):
    """Which model, and how its weights are held."""

    name: str = Field(min_length=1)
    """model: a known name, a folder, a file or a hub id"""
    revision: str | None = None
    """revision of a hub model; pinned to one commit for every file"""
    served_name: str | None = None
    """name under which clients ask for the model"""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """compute dtype"""
    max_model_len: Count | None = Field(default=None, ge=1)
    """context length in tokens; the model's own by default"""
    quantization: str | None = None
    """quantization method (plugin name)"""
    loader: str | None = None
    """weight loader (plugin name) instead of the one that fits the files"""
    io_processor: str | None = None
    """IO processor (plugin name) instead of the model's own"""
    chat_renderer: str = "jinja"
    """what turns conversations into prompts (plugin name)"""
    chat_template_file: str | None = None
    """Jinja chat template to use instead of the model's own"""


class CacheConfig(_Section):
    """The KV cache."""

    block_size: int | None = Field(default=None, ge=1, lt=2**31)
    """tokens per KV block; the platform decides by default"""
    kv_cache_dtype: str = "auto"
    """storage dtype of keys and values"""
    kv_cache_memory: Bytes | None = Field(default=None, ge=1)
    """bytes for the KV cache of each worker, such as 2GiB"""
    num_kv_blocks: Count | None = Field(default=None, ge=2)
    """number of KV blocks instead of a memory budget"""
    prefix_caching: bool = True
    """reuse the KV of equal prefixes"""
    hash_algorithm: str = "sha256"
    """block hash (plugin name)"""
    kv_events: bool = False
    """tell routers which prefixes are cached, through the endpoint kv_events"""
    kv_layout: str = "layer_outermost"
    """memory layout of the KV cache (plugin name)"""
    hybrid_kv_cache: bool = True
    """layers with a window keep its blocks only; off: all layers keep the blocks of all tokens"""


class SchedulerConfig(_Section):
    """Batching."""

    scheduler: str = "fcfs"
    """scheduler (plugin name)"""
    max_num_seqs: Count | None = Field(default=None, ge=1)
    """requests computed at the same time"""
    max_num_batched_tokens: Count | None = Field(default=None, ge=1)
    """tokens computed in one step"""
    max_num_active_seqs: Count | None = Field(default=None, ge=1)
    """requests that may run at a time, of max_num_seqs (default: all of them)"""
    max_waiting: Count | None = Field(default=4096, ge=1)
    """requests that may wait; more are answered with 429"""
    async_scheduling: bool = False
    """plan a step while the one before it is computed"""
    chunked_prefill: bool = True
    """compute a long prompt in several steps; off: all of it in one"""
    long_prefill_threshold: Count = Field(default=0, ge=0)
    """cap on one prompt's tokens per step while others wait"""
    adaptive_prefill_threshold: bool = False
    """raise that cap to an equal share of the step where few wait"""
    watermark: float = Field(default=0.0, ge=0.0, lt=1.0)
    """fraction of KV blocks that admission leaves free"""
    full_sequence_must_fit: bool = False
    """admit a request only when all tokens it has, without those to come, fit the free blocks"""

    @model_validator(mode="after")
    def _active_have_places(self) -> SchedulerConfig:
        if self.max_num_seqs is not None and (self.max_num_active_seqs or 0) > self.max_num_seqs:
            raise ValueError(f"max_num_active_seqs must be at most max_num_seqs ({self.max_num_seqs})")
        return self


class ExecutionConfig(_Section):
    """Devices and kernels."""

    platform: str | None = None
    """platform (plugin name); found by probing by default"""
    executor: str | None = None
    """executor (plugin name, or package.module:Class); the platform decides by default"""
    tensor_parallel_size: int = Field(default=1, ge=1, le=1024)
    """number of ranks that share every layer"""
    pipeline_parallel_size: int = Field(default=1, ge=1, le=1024)
    """number of stages that share the layers, each of as many ranks"""
    attention_backend: str | None = None
    """attention backend (plugin name) instead of the choice"""
    compiler: str | None = None
    """compiler (plugin name) for ranges of layers"""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """seed of unseeded sampling"""
    batch_invariant: bool = False
    """same tokens whatever the neighbors in the batch"""

    @field_validator("executor", mode="before")
    @classmethod
    def _as_name(cls, given: Any) -> Any:
        """Classes travel by their names, so that a process of its own can import them."""
        if not isinstance(given, type):
            return {"mp": "multiproc", "uni": "uniproc"}.get(str(given), given)
        if not issubclass(given, Executor):
            raise TypeError(f"executor={given!r} is no subclass of hardpoint.interfaces.Executor")
        return f"{given.__module__}:{given.__qualname__}"


class EngineConfig(_Section):
    """One model with its engine process."""

    model: ModelConfig
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    execution: ExecutionConfig = ExecutionConfig()

    @classmethod
    def sections(cls, model: str, **settings: Any) -> dict[str, dict[str, Any]]:
        """Flat keyword settings (``dtype="bfloat16", max_num_seqs=8``) sorted into their sections, not validated.

        Raises ``ConfigError`` for a setting that no section has.
        """
        from hardpoint.config.errors import unknown_setting

        sections: dict[str, dict[str, Any]] = {"model": {"name": model}, "cache": {}, "scheduler": {}, "execution": {}}
        owners = {
            field: section
            for section, info in cls.model_fields.items()
            for field in getattr(info.annotation, "model_fields", {})
        }
        for key, value in settings.items():
            if key not in owners or key == "name":
                raise unknown_setting(key, owners)
            sections[owners[key]][key] = value
        return sections


class ServerConfig(_Section):
    """The HTTP server."""

    host: str = "127.0.0.1"
    """address to bind; beyond loopback a key is required"""
    port: int = Field(default=8000, ge=0, le=65535)
    """port to bind; 0 picks a free one"""
    api_key: tuple[str, ...] = ()
    """key that requests must carry; repeatable"""
    api_key_file: str | None = None
    """file with one key per line"""
    admin_key: tuple[str, ...] = ()
    """key for the routes of admin endpoints, which API keys do not open; repeatable"""
    admin_key_file: str | None = None
    """file with one admin key per line"""
    allow_anonymous: bool = False
    """serve beyond loopback without any key"""
    endpoints: tuple[str, ...] = DEFAULT_ENDPOINTS
    """endpoint plugins that may open routes"""
    max_body_bytes: Bytes = Field(default=64 * 2**20, ge=1024)
    """largest request body"""
    max_header_bytes: Bytes = Field(default=64 * 2**10, ge=1024)
    """largest total of request headers"""
    max_json_depth: int = Field(default=100, ge=1, le=1000)
    """deepest nesting of a JSON body"""
    max_n: int = Field(default=128, ge=1)
    """most sequences per prompt"""
    max_prompts: int = Field(default=256, ge=1)
    """most prompts per request"""
    max_logprobs: int = Field(default=20, ge=0)
    """most alternatives per token"""
    request_timeout_s: float | None = Field(default=None, gt=0, le=86_400)
    """seconds after which a request is aborted"""
    drain_timeout_s: float = Field(default=30.0, ge=0)
    """seconds that running requests get at shutdown"""
    allowed_hosts: tuple[str, ...] = ()
    """Host header values to accept beside the bound address"""


class PluginPolicy(_Section):
    """Which installed plugins may act."""

    allow: tuple[str, ...] | None = None
    """plugins that may load merely by being installed"""
    pins: tuple[str, ...] = ()
    """kind:name=distribution, where two distributions claim one name"""
    strict: bool = False
    """a merely installed plugin that fails stops the start as well"""


class AppConfig(_Section):
    """A whole instance. ``plugins`` holds each plugin's own options: ``plugins.<kind>.<name>.<key>``."""

    engines: dict[str, EngineConfig] = Field(min_length=1)
    server: ServerConfig = ServerConfig()
    plugins: dict[str, dict[str, dict[str, Any]]] = {}
    plugin_policy: PluginPolicy = PluginPolicy()
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """level of the log"""
    log_interval_s: float = Field(default=10.0, gt=0)
    """seconds between throughput lines"""
