"""Resources and machine code of what NVRTC makes."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridc.errors import DeviceError
from hybridc.gpu_model.kernel import kernels_of
from hybridc.gpu_model.sass.code import NO_SCOREBOARD, parse
from hybridc.gpu_model.sass.cubin import read_resources

SOURCE = (Path(__file__).parent / "data" / "kernels.cu").read_text()


def cubin(architecture: str) -> bytes:
    pytest.importorskip("cuda.bindings.nvrtc")
    from hybridc.codegen.cuda import compile_cubin

    return compile_cubin(SOURCE, architecture)


@pytest.mark.parametrize("architecture", ["sm_75", "sm_90"])
def test_resources_and_parameters(architecture: str) -> None:
    found = read_resources(cubin(architecture))
    assert set(found) == {"copy", "strided", "guarded", "product", "transpose"}
    assert found["product"].shared_bytes == 8192
    assert [p.size_bytes for p in found["product"].parameters] == [8, 8, 8, 4]
    first = found["product"].parameters[0].offset
    assert [p.offset - first for p in found["product"].parameters] == [0, 8, 16, 24]
    assert all(0 < r.registers <= 255 and r.local_bytes == 0 for r in found.values())


def test_what_is_no_cubin_is_refused() -> None:
    with pytest.raises(ValueError, match="ELF"):
        read_resources(b"no cubin")


def test_disassembler_prints_what_the_parser_reads() -> None:
    try:
        kernels = kernels_of(cubin("sm_86"))
    except DeviceError as error:
        assert error.code == "HC432"
        pytest.skip("nvdisasm is not installed")
    assert {"FFMA", "LDS", "BAR", "EXIT"} <= {i.opcode for i in kernels["product"].code}


def test_control_bits_of_known_code() -> None:
    code = parse((Path(__file__).parent / "data" / "kernels.sass").read_text())["copy"]
    load = next(i for i in code if i.opcode == "LDG")
    store = next(i for i in code if i.opcode == "STG")
    assert load.write_scoreboard != NO_SCOREBOARD and load.bytes == 4
    assert store.waits_for >> load.write_scoreboard & 1
