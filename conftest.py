"""What holds for all tests of the workspace: how parallel runs share the cores, and what starts first."""

from __future__ import annotations

import os

import pytest

# Set before anything imports torch: two parallel runs with a thread for each core would mostly wait for one another.
if "PYTEST_XDIST_WORKER_COUNT" in os.environ:
    _share = len(os.sched_getaffinity(0)) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, _share)))

# Triton asks when it is imported and when a kernel is defined: without a GPU, kernels run through its interpreter.
os.environ.setdefault("TRITON_INTERPRET", "1")

# All tests but those of `make test-gpu` are about processors, whatever else the machine has.
if os.environ.get("HARDPOINT_TEST_GPU") != "1":
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["HIP_VISIBLE_DEVICES"] = ""

_LONG = ("tests/end_to_end/", "tests/parity/", "tests/process/", "plugins/torch_runtime/")


_KITS = ("core/tests/testing/", "plugins/testing_torch/tests/")
_MUTANTS = ("test_a_mutant_", "test_a_faulty_", "test_faulty_")
# Files that mostly start processes and wait for them, or compare a part as the quick tier compares the whole:
# for the slow tier, which is part of what every change must pass.
_SLOW = (
    *("core/tests/testing/test_testing_platform_suite.py", "core/tests/testing/test_testing_probing.py"),
    *("core/tests/testing/test_testing_plugin_suite.py", "core/tests/testing/test_testing_scheduler_suite.py"),
    *("plugins/testing_torch/tests/test_testing_torch_custom_op_suite.py",),
    *("plugins/testing_torch/tests/test_testing_torch_kernel_override_suite.py",),
    *("plugins/testing_torch/tests/test_testing_torch_worker_suite.py",),
    *("plugins/models/tests/test_models_suite.py", "plugins/model_io/tests/test_model_io_gguf_weights.py"),
    *("tests/architecture/test_arch_import_order.py", "tests/docs/test_docs_example_plugins.py"),
    *("tests/end_to_end/test_e2e_kernel_plugins.py", "tests/end_to_end/test_e2e_minimal_platform.py"),
    *("tests/process/test_process_admin.py", "tests/process/test_process_hooks.py"),
    *("tests/plugin_matrix/test_matrix_scaffold.py", "tests/parity/test_parity_torch_worker.py"),
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Long files first, so that a parallel run does not wait for the last of them alone.

    Kits are held against hundreds of mutants, each a test run of its own: that is for the slow tier. The sound samples
    that the kits must accept stay in the fast one.
    """
    for item in items:
        place = item.path.relative_to(config.rootpath).as_posix()
        if place in _SLOW or (place.startswith(_KITS) and item.name.startswith(_MUTANTS)):
            item.add_marker(pytest.mark.slow)

    def rank(item: pytest.Item) -> int:
        place = item.path.relative_to(config.rootpath).as_posix()
        return next((index for index, start in enumerate(_LONG) if place.startswith(start)), len(_LONG))

    items.sort(key=rank)
