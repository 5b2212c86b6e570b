"""All quick tests of kernels once more, with kernels that end the process when they touch what is not theirs.

A kernel's tests take part by using the fixtures of conftest.py; there is nothing to register.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from hardpoint_cpu.host import Host
from hardpoint_cpu.native.build import KernelBuild, cache_folder, find_compiler
from hardpoint_cpu.native.levels import named_level

HERE = Path(__file__).parent
# They compile, which is not to be done with a sanitizer inside the compiler, or are this file.
APART = {"test_cpu_native_build.py", "test_cpu_native_levels.py", Path(__file__).name}
FLAGS = ("-O1", "-g1", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
SECONDS = 900
# A layer of 64 inputs is told that there are four rows where there is one.
BEYOND = """
import ctypes, sys, torch
from pathlib import Path
from hardpoint_cpu.native.library import NativeLibrary
library = NativeLibrary(Path(sys.argv[1]), threads=1)
layer = library.linear_f32(torch.ones(16, 64))
x, y = torch.ones(int(sys.argv[2]), 64), torch.ones(4, 16)
run = library.function("hp_linear_run")
status = run(library.runtime, layer.handle, ctypes.c_void_p(x.data_ptr()), ctypes.c_int64(64), ctypes.c_int64(4),
             ctypes.c_void_p(y.data_ptr()), ctypes.c_int64(16), 0)
print("done", status, float(y.sum()))
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(SECONDS)]


BEST = named_level("auto", platform.machine(), Host().cpu_flags())


@pytest.fixture(scope="module")
def library() -> Path:
    """Kernels of the best level that report what is wrong and end the process."""
    return KernelBuild(BEST, cache_folder(), find_compiler(), FLAGS).compile()


def _runtimes() -> str:
    """Of the sanitizers, and of C++: exceptions pass through the former, which looks for the latter at its start."""
    found = []
    for name in ("libasan.so", "libstdc++.so"):
        command = [find_compiler(), f"-print-file-name={name}"]
        path = Path(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())
        if not path.is_absolute():
            pytest.skip(f"{find_compiler()} has no shared {name}")
        found.append(str(path))
    return ":".join(found)


def run(*command: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "LD_PRELOAD": _runtimes(),
        # The interpreter keeps what it has until the end.
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "OMP_NUM_THREADS": "1",
        "HARDPOINT_TEST_KERNEL_FLAGS": " ".join(FLAGS),
    }
    # The workers of a parallel run have a say in what their tests see.
    for name in [name for name in environment if name.startswith("PYTEST_")]:
        del environment[name]
    return subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
    )


def test_no_kernel_touches_what_is_not_its_own(library: Path) -> None:
    assert library.exists()
    files = [str(path) for path in sorted(HERE.glob("test_cpu_native_*.py")) if path.name not in APART]
    assert files
    # What a sanitizer says goes past the interpreter, and is lost where the files behind its streams are replaced.
    options = ["-q", "--capture=sys", "-m", "not slow", *("-p", "no:cacheprovider"), *("-p", "no:xdist")]
    done = run("-m", "pytest", *options, *files)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    assert " passed" in done.stdout


def test_reading_beyond_the_end_is_seen(library: Path) -> None:
    sound = run("-c", BEYOND, str(library), "4")
    assert sound.stdout.strip() == "done 0 4096.0", sound.stderr[-3000:]
    broken = run("-c", BEYOND, str(library), "1")
    assert broken.returncode != 0
    assert "done" not in broken.stdout
    assert "AddressSanitizer: heap-buffer-overflow" in broken.stderr
    assert "READ of size" in broken.stderr
