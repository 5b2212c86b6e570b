"""Which communicator a worker gets, and what it says when there is none to have."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec
import pytest
import torch

from hardpoint.errors import ConfigError, PluginNotFoundError
from hardpoint.interfaces import ParallelSlice, PluginContext, WorkerConfig, WorkerContext
from hardpoint.testing.executor_suite import worker_config
from hardpoint.testing.fake_platform import FakePlatform
from hardpoint_torch_runtime.communication import create_communicator, require_alike, smallest
from hardpoint_torch_runtime.layers import TensorParallel

CPU = torch.device("cpu")


class Peers:
    """Two ranks that always hold the same; the second one has a little more memory."""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return 2 * tensor

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.cat([tensor, tensor + 1], dim)

    def close(self) -> None:
        """Nothing is held."""


class Installed:
    """Access to the communicators ``peers`` and ``gloo``, which are remembered when made."""

    def __init__(self) -> None:
        self.made: list[tuple[str, Any]] = []

    def names(self, kind: str) -> tuple[str, ...]:
        return ("gloo", "peers")

    def context(self, kind: str, name: str) -> PluginContext:
        return PluginContext(name, 1, frozenset())

    def create(self, kind: str, name: str, context: PluginContext) -> Peers:
        if name not in self.names(kind):
            raise PluginNotFoundError(f"no {kind} plugin {name!r}; installed: gloo, peers")
        self.made.append((name, context))
        return Peers()

    def fingerprint(self) -> str:
        return ""

    def notify(self, hook: str, **arguments: Any) -> None:
        """Nobody listens."""


class Silent(FakePlatform):
    collective_backend: ClassVar[str] = ""


class Choosy(FakePlatform):
    communicator: ClassVar[str] = "peers"


def two_ranks() -> WorkerConfig:
    place = ParallelSlice(rank=1, world_size=2, tensor_parallel_size=2)
    return msgspec.structs.replace(worker_config(), parallel=place)


def test_one_rank_needs_none() -> None:
    """R7.19: nothing is created, and nothing is called."""
    installed = Installed()
    assert create_communicator(installed, Silent(environment={}), worker_config(), CPU, "peers") is None
    assert installed.made == []
    assert smallest(7, None, CPU) == 7


@pytest.mark.parametrize(
    ("platform", "wanted", "name"), [(FakePlatform, None, "gloo"), (Choosy, None, "peers"), (Choosy, "gloo", "gloo")]
)
def test_the_option_counts_before_the_platform(platform: type[FakePlatform], wanted: str | None, name: str) -> None:
    """R12.27, R7.22: the platform names the communicator it prefers, or else its collective library."""
    installed, config = Installed(), two_ranks()
    assert create_communicator(installed, platform(environment={}), config, CPU, wanted) is not None
    ((made, context),) = installed.made
    assert isinstance(context, WorkerContext)
    assert made == name
    assert (context.config, context.device) == (config, CPU)


def test_a_platform_without_collectives_says_what_can_be_named() -> None:
    with pytest.raises(
        ConfigError, match=r"names no communicator; set plugins.worker.<name>.communicator to one of gloo"
    ):
        create_communicator(Installed(), Silent(environment={}), two_ranks(), CPU)


def test_a_missing_plugin_says_who_needs_it() -> None:
    with pytest.raises(
        PluginNotFoundError, match=r"tensor_parallel_size is 2.*'flags'.*or set --tensor-parallel-size 1"
    ):
        create_communicator(Installed(), FakePlatform(environment={}), two_ranks(), CPU, "flags")


def test_the_tightest_rank_decides() -> None:
    """Engines that plan for themselves must plan alike."""
    assert smallest(1 << 40, Peers(), CPU) == 1 << 40
    assert smallest(-5, Peers(), CPU) == -5


@pytest.mark.parametrize(
    ("total", "size", "fitting"),
    [(9, 2, "1, 3, 9"), (7, 3, "1, 7"), (1536, 5, "1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64")],
)
def test_what_cannot_be_shared_names_the_sizes_that_fit(total: int, size: int, fitting: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"heads is {total} and cannot be split over tensor_parallel_size={size}; set .*: {fitting}$"
    ):
        TensorParallel(0, size, Peers()).divide(total, "heads")
    assert TensorParallel(0, 3, Peers()).divide(9, "heads") == 3


def test_a_share_without_a_communicator_is_refused() -> None:
    with pytest.raises(ConfigError, match="was given no communicator"):
        TensorParallel.from_slice(two_ranks().parallel)
    assert TensorParallel.from_slice(ParallelSlice()) == TensorParallel()


class RecordedPeer(Peers):
    """The other one of two ranks, which said what ``said`` was asked to remember."""

    def __init__(self, said: torch.Tensor | None = None) -> None:
        self.said = said

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        other = tensor if self.said is None else self.said
        self.said = tensor.clone()
        return torch.cat([other, tensor], dim)


def test_ranks_started_with_other_settings_are_refused() -> None:
    """Another seed draws other tokens, a larger step other shapes; neither may show as wrong text or as a wait."""
    peer = RecordedPeer()
    require_alike(two_ranks(), peer, CPU)
    mine = msgspec.structs.replace(two_ranks(), seed=5, max_num_batched_tokens=3)
    with pytest.raises(ConfigError, match=r"different settings: max_num_batched_tokens, seed of rank 1 .*the same"):
        require_alike(mine, peer, CPU)


def test_ranks_may_differ_in_their_place_their_free_memory_and_in_where_files_lie() -> None:
    peer, config = RecordedPeer(), two_ranks()
    require_alike(config, peer, CPU)
    artifact = msgspec.structs.replace(config.model.artifact, root="/another/folder", name="/another/folder")
    elsewhere = msgspec.structs.replace(
        config,
        model=msgspec.structs.replace(config.model, artifact=artifact),
        parallel=msgspec.structs.replace(config.parallel, rank=0),
        show_progress=not config.show_progress,
        kv_cache_bytes=12_345_678,
    )
    require_alike(elsewhere, peer, CPU)
    require_alike(elsewhere, None, CPU)
