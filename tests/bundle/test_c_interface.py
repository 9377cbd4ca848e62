"""hybridc.h from C: threads and sessions, memory, a library that a program loads by itself, the example."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("sessions.c")


def compiled(source: Path, bundle: Path, made: Path, *flags: str) -> Path:
    strict = ["-std=c11", "-Wall", "-Wextra", "-Werror", "-pedantic", "-pthread", "-g"]
    places = [f"-I{bundle / 'include'}", f"-L{bundle / 'lib'}", f"-Wl,-rpath,{bundle / 'lib'}"]
    links = ["-lhybridc_runtime", "-Wl,--allow-shlib-undefined"]
    subprocess.run(["gcc", *strict, *flags, *places, str(source), "-o", str(made), *links], check=True)
    return made


def test_two_threads_and_three_sessions_agree_over_a_thousand_runs(cpu_bundle: Path, tmp_path: Path) -> None:
    program = compiled(SOURCE, cpu_bundle, tmp_path / "sessions")
    done = subprocess.run([str(program), str(cpu_bundle), "1000"], env={}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(shutil.which("valgrind") is None, reason="valgrind is not installed")
def test_valgrind_finds_no_error_and_nothing_lost_over_a_thousand_runs(
    cpu_bundle: Path, tmp_path: Path
) -> None:
    program = compiled(SOURCE, cpu_bundle, tmp_path / "sessions")
    leaks = ["--leak-check=full", "--show-leak-kinds=definite", "--errors-for-leak-kinds=definite"]
    command = ["valgrind", *leaks, "--error-exitcode=9", str(program), str(cpu_bundle), "1000"]
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


def test_the_example_builds_and_runs(cpu_bundle: Path, tmp_path: Path) -> None:
    if shutil.which("cmake") is not None:
        configure = ["cmake", "-S", str(cpu_bundle / "example"), "-B", str(tmp_path)]
        for command in (configure, ["cmake", "--build", str(tmp_path)]):
            subprocess.run(command, check=True, capture_output=True)
    program = compiled(cpu_bundle / "example" / "main.c", cpu_bundle, tmp_path / "strict")
    for each in (program, tmp_path / "main"):
        if each.exists():
            done = subprocess.run([str(each), str(cpu_bundle)], env={}, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            assert done.stdout.splitlines()[0] == "out/0: float32, 96 bytes"
