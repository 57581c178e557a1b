#!/usr/bin/env python3
"""check_wheel.py WHEEL: says PASS or FAIL of what a wheel of libmla promises about its modules.

They need no newer glibc than the wheel's manylinux tag says, no library beyond glibc, libgcc_s and
those named below, and export the functions that apache-tvm-ffi looks up and nothing else.
"""

import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

# What one built on Debian 12 needs, by the versions of the symbols that it asks for.
GLIBC = (2, 34)
SYSTEM = r"lib(c|m|gcc_s)\.so\.\d+|ld-linux-.*|libtvm_ffi\.so"


def read(*command: str | Path) -> str:
    """What a command prints."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def check(module: Path) -> list[str]:
    """What is wrong with a module."""
    symbols = read("readelf", "--wide", "--version-info", module)
    versions = {tuple(map(int, v.split("."))) for v in re.findall(r"GLIBC_([\d.]+)", symbols)}
    needed = re.findall(r"NEEDED.*\[(.*)\]", read("readelf", "--dynamic", module))
    exported = read("nm", "--dynamic", "--defined-only", "--format=just-symbols", module).split()
    wrong = [f"needs glibc {'.'.join(map(str, v))}" for v in versions if v > GLIBC]
    wrong += [f"needs {name}" for name in needed if not re.fullmatch(SYSTEM, name)]
    wrong += [f"exports {name}" for name in exported if not name.startswith("__tvm_ffi_")]
    return wrong if versions and exported else ["readelf and nm say nothing"]


def main() -> int:
    """Checks every module of the wheel, and its tag."""
    wheel = Path(sys.argv[1])
    wrong = []
    tag = f"manylinux_{GLIBC[0]}_{GLIBC[1]}_"
    if not re.fullmatch(rf"libmla-[\d.]+-py3-none-{tag}\w+\.whl", wheel.name):
        wrong.append(f"its tag is not py3-none-{tag}ARCH")
    with tempfile.TemporaryDirectory() as folder:
        zipfile.ZipFile(wheel).extractall(folder)
        modules = sorted(Path(folder).rglob("*.so"))
        wrong += [f"{module.name} {text}" for module in modules for text in check(module)]
    if not modules:
        wrong.append("it has no module")
    print("FAIL" if wrong else "PASS", "wheel", wheel.name)
    print("\n".join(wrong), end="\n" if wrong else "")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
