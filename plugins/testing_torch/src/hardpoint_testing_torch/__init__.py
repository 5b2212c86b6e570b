"""Torch part of the Hardpoint conformance kit."""

from hardpoint_testing_torch.attention_oracle import dense_attention, visible_keys
from hardpoint_testing_torch.attention_problems import AttentionProblem, make_problem, run_backend
from hardpoint_testing_torch.attention_shape import AttentionShape
from hardpoint_testing_torch.attention_storage import StoredStates
from hardpoint_testing_torch.attention_suite import AttentionBackendConformance, AttentionBackendSuite
from hardpoint_testing_torch.compiler_suite import CompilerSuite
from hardpoint_testing_torch.custom_op_suite import CustomOpSuite
from hardpoint_testing_torch.engine_parity import run_parity
from hardpoint_testing_torch.fake_graph_backend import FakeGraph, FakeGraphBackend
from hardpoint_testing_torch.fake_streams import FakeStreams, PromisingExecutor
from hardpoint_testing_torch.fixed_attention import FixedShapeAttention, FixedShapeBackend
from hardpoint_testing_torch.graph_backend_suite import GraphBackendSuite
from hardpoint_testing_torch.installed import installed_backend, installed_factory, installed_loader
from hardpoint_testing_torch.kernel_override_suite import KernelOverrideSuite
from hardpoint_testing_torch.kernel_problems import KernelProblem, kernel_problems
from hardpoint_testing_torch.linear_bench import LinearBench, relative_norm
from hardpoint_testing_torch.local_driver import LocalDriver, build_model, create_model, worker_config
from hardpoint_testing_torch.logits_processor_suite import LogitsProcessorSuite
from hardpoint_testing_torch.model_suite import ModelSuite
from hardpoint_testing_torch.parity import ParityHarness, check_parity, measure_parity, relative_error
from hardpoint_testing_torch.parity_case import MODES, ParityCase
from hardpoint_testing_torch.parity_report import ModeResult, ParityReport, Verdict
from hardpoint_testing_torch.plain_attention import PlainAttention, PlainAttentionBackend
from hardpoint_testing_torch.quantization_suite import QuantizationSuite
from hardpoint_testing_torch.state_dict_loader import StateDictLoader, TensorLoader, weight_tensor
from hardpoint_testing_torch.step_buffers import HostBlind, StepBuffers
from hardpoint_testing_torch.tiny_models import ModelCheckpoint, TinyModel, make_tiny_model, model_info
from hardpoint_testing_torch.tiny_tokenizer import write_tiny_tokenizer
from hardpoint_testing_torch.worker_suite import WorkerSuite

__all__ = [
    "MODES",
    "AttentionBackendConformance",
    "AttentionBackendSuite",
    "AttentionProblem",
    "AttentionShape",
    "CompilerSuite",
    "CustomOpSuite",
    "FakeGraph",
    "FakeGraphBackend",
    "FakeStreams",
    "FixedShapeAttention",
    "FixedShapeBackend",
    "GraphBackendSuite",
    "HostBlind",
    "KernelOverrideSuite",
    "KernelProblem",
    "LinearBench",
    "LocalDriver",
    "LogitsProcessorSuite",
    "ModeResult",
    "ModelCheckpoint",
    "ModelSuite",
    "ParityCase",
    "ParityHarness",
    "ParityReport",
    "PlainAttention",
    "PlainAttentionBackend",
    "PromisingExecutor",
    "QuantizationSuite",
    "StateDictLoader",
    "StepBuffers",
    "StoredStates",
    "TensorLoader",
    "TinyModel",
    "Verdict",
    "WorkerSuite",
    "build_model",
    "check_parity",
    "create_model",
    "dense_attention",
    "installed_backend",
    "installed_factory",
    "installed_loader",
    "kernel_problems",
    "make_problem",
    "make_tiny_model",
    "measure_parity",
    "model_info",
    "relative_error",
    "relative_norm",
    "run_backend",
    "run_parity",
    "visible_keys",
    "weight_tensor",
    "worker_config",
    "write_tiny_tokenizer",
]
