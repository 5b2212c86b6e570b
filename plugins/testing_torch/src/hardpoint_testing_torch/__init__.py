"""Torch part of the Hardpoint conformance kit."""

from hardpoint_testing_torch.attention_problems import (
    AttentionProblem,
    AttentionShape,
    dense_attention,
    make_problem,
    run_backend,
)
from hardpoint_testing_torch.attention_suite import AttentionBackendSuite
from hardpoint_testing_torch.installed import installed_factory, installed_loader
from hardpoint_testing_torch.local_driver import LocalDriver, build_model, worker_config
from hardpoint_testing_torch.parity import ParityHarness, check_parity, relative_error
from hardpoint_testing_torch.plain_attention import PlainAttention, PlainAttentionBackend
from hardpoint_testing_torch.state_dict_loader import StateDictLoader, weight_tensor
from hardpoint_testing_torch.tiny_models import TinyModel, make_tiny_model, model_info

__all__ = [
    "AttentionBackendSuite",
    "AttentionProblem",
    "AttentionShape",
    "LocalDriver",
    "ParityHarness",
    "PlainAttention",
    "PlainAttentionBackend",
    "StateDictLoader",
    "TinyModel",
    "build_model",
    "check_parity",
    "dense_attention",
    "installed_factory",
    "installed_loader",
    "make_problem",
    "make_tiny_model",
    "model_info",
    "relative_error",
    "run_backend",
    "weight_tensor",
    "worker_config",
]
