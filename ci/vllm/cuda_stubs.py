"""Builds small stand-ins for CUDA's libraries, so that PyPI's torch can be loaded on a machine without them.

The dynamic linker needs every library that torch's files name, with each symbol in the version that they name. Each stand-in has these
symbols as functions that return 100, CUDA's `cudaErrorNoDevice`: torch then finds no GPU and uses the CPU.

    python cuda_stubs.py SITE_PACKAGES FOLDER
"""

import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

CUDA_LIBRARY = re.compile(
    r"lib(cuda|cudart|cublas|cublasLt|cudnn|cufft|cufile|cupti|curand|cusolver|cusparse|cusparseLt|nccl|nvrtc|nvshmem_host)\.so\.\d+$"
)
CUDA_SYMBOL = re.compile(r"(_*cu|nccl|nvrtc|nvshmem|nvtx|_*fatbin)")


def readelf(option, file):
    return subprocess.run(["readelf", option, "-W", str(file)], capture_output=True, text=True, check=True).stdout.splitlines()


def undefined_and_defined(file):
    """Returns the file's undefined symbols with their versions ('' for none), and the names of its defined symbols."""
    undefined, defined = {}, set()
    for line in readelf("--dyn-syms", file):
        columns = line.split()
        if len(columns) < 8 or not re.fullmatch(r"\d+:", columns[0]):
            continue
        name, _, version = columns[7].partition("@")
        if columns[6] == "UND":
            undefined[name] = version.strip("@")
        else:
            defined.add(name)
    return undefined, defined


def library_of_versions(file):
    """Returns the CUDA library in which the file expects each symbol version."""
    library, versions = None, {}
    for line in readelf("-V", file):
        if match := re.search(r"File: (\S+)", line):
            library = match[1]
        elif (match := re.search(r"Name: (\S+)\s+Flags", line)) and library and CUDA_LIBRARY.match(library):
            versions[match[1]] = library
    return versions


def build(folder, library, symbols_of):
    """Compiles the stand-in of one library from its symbols, which are given by version."""
    source, script = folder / "stub.c", folder / "stub.map"
    names = sorted(name for symbols in symbols_of.values() for name in symbols)
    source.write_text("#define STUB(name) int name(void) { return 100; }\n" + "".join(f"STUB({name})\n" for name in names))
    versions = [f"{version} {{ global: {' '.join(f'{name};' for name in sorted(symbols))} }};\n" for version, symbols in sorted(symbols_of.items()) if version]
    script.write_text("".join(versions))
    linker = [f"-Wl,-soname,{library}"] + ([f"-Wl,--version-script={script}"] if versions else [])
    # -w suppresses the warnings for symbols that have the names of the compiler's built-in functions.
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-w", *linker, "-o", str(folder / library), str(source)], check=True)


def main(site_packages, folder):
    files = sorted(Path(site_packages, "torch", "lib").glob("*.so*"))
    if not files:
        sys.exit(f"cuda_stubs.py: no torch in {site_packages}")
    needed, undefined, defined, home = set(), {}, set(), {}
    for file in files:
        needed |= {match[1] for line in readelf("-d", file) if (match := re.search(r"NEEDED.*\[(.*)\]", line))}
        of_file, own = undefined_and_defined(file)
        for name, version in of_file.items():
            undefined[name] = undefined.get(name) or version
        defined |= own
        home |= library_of_versions(file)
    libraries = sorted(name for name in needed if CUDA_LIBRARY.match(name))
    symbols = {library: defaultdict(set) for library in libraries}
    for version, library in home.items():
        symbols[library][version] = set()
    for name, version in undefined.items():
        if name not in defined and CUDA_SYMBOL.match(name):
            # The dynamic linker accepts a symbol without a version from any loaded library, so the stand-in for libcudart defines all of
            # these.
            library = home.get(version) or next(name for name in libraries if name.startswith("libcudart."))
            symbols[library][version if version in home else ""].add(name)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for library in libraries:
        build(folder, library, symbols[library])
    print(f"{len(libraries)} stubs of CUDA's libraries are in {folder}")


if __name__ == "__main__":
    main(*sys.argv[1:])
