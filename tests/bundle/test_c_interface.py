"""hybridc.h from C: threads and sessions, memory, a library that a program loads by itself, the example."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("sessions.c")


C = ("gcc", "-std=c11")
CPP = ("g++", "-std=c++17")
LEAKS = ("--leak-check=full", "--show-leak-kinds=definite", "--errors-for-leak-kinds=definite")
VALGRIND = ("valgrind", *LEAKS, "--error-exitcode=9")


def compiled(source: Path, bundle: Path, made: Path, *, compiler: tuple[str, ...] = C) -> Path:
    strict = ["-Wall", "-Wextra", "-Werror", "-pedantic", "-pthread", "-g"]
    places = [f"-I{bundle / 'include'}", f"-L{bundle / 'lib'}", f"-Wl,-rpath,{bundle / 'lib'}"]
    links = ["-lhybridc_runtime", "-Wl,--allow-shlib-undefined"]
    subprocess.run([*compiler, *strict, *places, str(source), "-o", str(made), *links], check=True)
    return made


@pytest.mark.slow
def test_two_threads_and_three_sessions_agree_over_a_thousand_runs(cpu_bundle: Path, tmp_path: Path) -> None:
    program = compiled(SOURCE, cpu_bundle, tmp_path / "sessions")
    done = subprocess.run([str(program), str(cpu_bundle), "1000"], env={}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(shutil.which("valgrind") is None, reason="valgrind is not installed")
def test_valgrind_finds_no_error_and_nothing_lost_over_a_thousand_runs(
    cpu_bundle: Path, tmp_path: Path
) -> None:
    program = compiled(SOURCE, cpu_bundle, tmp_path / "sessions")
    command = [*VALGRIND, str(program), str(cpu_bundle), "1000"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_program_may_load_the_library_for_itself(cpu_bundle: Path, tmp_path: Path) -> None:
    """With RTLD_LOCAL, as Python and plug-ins do: TVM's functions must be found all the same."""
    source = tmp_path / "loads.c"
    source.write_text("""
#include <dlfcn.h>
typedef int (*Open)(const char *, const void *, void **);
int main(int count, char **words) {
  void *library = dlopen(words[1], RTLD_NOW | RTLD_LOCAL), *session, *found = 0;
  if (count != 3 || library == 0 || (found = dlsym(library, "hybridc_open")) == 0) return 1;
  Open open;
  *(void **)&open = found;
  return open(words[2], 0, &session);
}
""")
    subprocess.run(["gcc", str(source), "-o", str(tmp_path / "loads"), "-ldl"], check=True)
    library = cpu_bundle / "lib" / "libhybridc_runtime.so"
    assert subprocess.run([str(tmp_path / "loads"), str(library), str(cpu_bundle)], env={}).returncode == 0


@pytest.mark.parametrize("language", [("gcc", "-xc", "-std=c11"), ("g++", "-xc++", "-std=c++17")])
def test_the_header_is_c_and_cpp(cpu_bundle: Path, language: tuple[str, ...]) -> None:
    strict = ["-Wall", "-Wextra", "-Werror", "-pedantic", "-fsyntax-only"]
    subprocess.run([*language, *strict, str(cpu_bundle / "include" / "hybridc.h")], check=True)


def run_example(program: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(program), *words], env={}, capture_output=True, text=True)


@pytest.mark.skipif(shutil.which("cmake") is None, reason="cmake is not installed")
def test_the_examples_build_by_cmake_and_run(cpu_bundle: Path, tmp_path: Path) -> None:
    configure = ["cmake", "-S", str(cpu_bundle / "example"), "-B", str(tmp_path)]
    for command in (configure, ["cmake", "--build", str(tmp_path)]):
        subprocess.run(command, check=True, capture_output=True)
    printed = [run_example(tmp_path / name, str(cpu_bundle)) for name in ("main", "main_cpp")]
    assert [done.returncode for done in printed] == [0, 0]
    assert printed[0].stdout == printed[1].stdout
    assert printed[0].stdout.splitlines()[0] == "out/0: float32, 96 bytes"


@pytest.mark.parametrize(("name", "compiler"), [("main.c", C), ("main.cc", CPP)])
def test_the_examples_compile_without_warnings_and_tell_errors(
    cpu_bundle: Path, tmp_path: Path, name: str, compiler: tuple[str, ...]
) -> None:
    program = compiled(cpu_bundle / "example" / name, cpu_bundle, tmp_path / "main", compiler=compiler)
    assert run_example(program, str(cpu_bundle)).returncode == 0
    refused = run_example(program, "/nowhere")
    assert refused.returncode == 1 and "error[HC301]" in refused.stderr
    assert run_example(program).returncode == 1


@pytest.mark.skipif(shutil.which("valgrind") is None, reason="valgrind is not installed")
def test_valgrind_finds_nothing_in_the_cpp_example(cpu_bundle: Path, tmp_path: Path) -> None:
    program = compiled(cpu_bundle / "example" / "main.cc", cpu_bundle, tmp_path / "main", compiler=CPP)
    for bundle, status in ((str(cpu_bundle), 0), ("/nowhere", 1)):
        done = subprocess.run([*VALGRIND, str(program), bundle], capture_output=True, text=True)
        assert done.returncode == status, done.stderr
