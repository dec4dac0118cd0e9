"""The ctypes mirror against the C header: names, order, types, constants, offsets, prototypes."""

from __future__ import annotations

import ctypes
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from attention_autotuner import templates
from attention_autotuner.core import abi

INCLUDES = Path(next(iter(templates.__path__))) / "include"
NAMES = ("abi.h", "abi_gemm.h", "abi_retention_packed.h")
HEADERS = [INCLUDES / "attention_autotuner" / name for name in NAMES]

C_TYPES = {
    "uint32_t": ctypes.c_uint32,
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "float": ctypes.c_float,
    "size_t": ctypes.c_size_t,
    "void*": ctypes.c_void_p,
    "float*": ctypes.c_void_p,
    "const float*": ctypes.c_void_p,
    "const int32_t*": ctypes.c_void_p,
    "const char*": ctypes.c_char_p,
    "const void*": ctypes.c_void_p,
    "attention_autotuner_kernel_info*": ctypes.POINTER(abi.KernelInfo),
    **abi.STRUCTS,
}


def header_text() -> str:
    text = "".join(header.read_text() for header in HEADERS)
    return re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)


def header_structs() -> dict[str, list[tuple[str, str]]]:
    structs = {}
    for body, name in re.findall(r"typedef struct \w+ \{(.*?)\} (\w+);", header_text(), re.DOTALL):
        fields = re.findall(r"^\s*([\w ]+\*?)\s+(\w+);", body, re.MULTILINE)
        structs[name] = [(c_type.strip(), field) for c_type, field in fields]
    return structs


def header_prototypes() -> dict[str, tuple[str, list[str]]]:
    prototypes = {}
    pattern = r"ATTENTION_AUTOTUNER_EXPORT ([\w ]+\*?)\s*attention_autotuner_(\w+)\(([^)]*)\);"
    for result, name, arguments in re.findall(pattern, header_text()):
        types = [re.sub(r"\s*\w+$", "", argument.strip()) for argument in arguments.split(",")]
        prototypes[name] = (result.strip(), [] if arguments.strip() == "void" else types)
    return prototypes


def test_every_struct_is_mirrored_field_by_field() -> None:
    structs = header_structs()
    assert structs.keys() == abi.STRUCTS.keys()
    for name, fields in structs.items():
        expected = [(field, C_TYPES[c_type]) for c_type, field in fields]
        assert list(abi.STRUCTS[name]._fields_) == expected, name


def test_constants_match() -> None:
    text = header_text()
    version = re.search(r"#define ATTENTION_AUTOTUNER_ABI_VERSION (\d+)", text)
    assert version is not None
    assert int(version[1]) == abi.ABI_VERSION
    body = re.search(r"enum attention_autotuner_status \{(.*?)\};", text, re.DOTALL)
    assert body is not None
    statuses = dict(re.findall(r"ATTENTION_AUTOTUNER_(\w+)\s*=\s*(\d+)", body[1]))
    mirrored = {
        name.removeprefix("STATUS_"): str(value)
        for name, value in vars(abi).items()
        if name.startswith("STATUS_")
    }
    assert mirrored == statuses


def test_every_function_is_mirrored() -> None:
    prototypes = header_prototypes()
    assert prototypes.keys() == abi.PROTOTYPES.keys()
    for name, (result, arguments) in prototypes.items():
        expected = (C_TYPES[result], tuple(C_TYPES[argument] for argument in arguments))
        assert abi.PROTOTYPES[name] == expected, name


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a C compiler")
def test_offsets_and_sizes_match_what_a_c_compiler_lays_out(tmp_path: Path) -> None:
    lines = []
    for name, struct in abi.STRUCTS.items():
        lines.append(f'printf("\\"{name}\\": {{\\"sizeof\\": %zu", sizeof({name}));')
        lines += [
            f'printf(", \\"{field[0]}\\": %zu", offsetof({name}, {field[0]}));'
            for field in struct._fields_
        ]
        lines.append('printf("},\\n");')
    body = "\n".join(lines)
    source = tmp_path / "layout.c"
    source.write_text(
        "#include <stdio.h>\n"
        + "".join(f'#include "{header}"\n' for header in HEADERS)
        + f'int main(void) {{ printf("{{"); {body} printf("\\"end\\": 0}}"); return 0; }}\n'
    )
    binary = tmp_path / "layout"
    subprocess.run(
        ["gcc", "-std=c11", "-Wall", "-Werror", f"-I{INCLUDES}", source, "-o", binary], check=True
    )
    layout = json.loads(subprocess.run([binary], check=True, capture_output=True).stdout)
    for name, struct in abi.STRUCTS.items():
        mirrored = {field[0]: getattr(struct, field[0]).offset for field in struct._fields_}
        assert {"sizeof": ctypes.sizeof(struct), **mirrored} == layout[name], name
