"""Holds the layer rules of ARCHITECTURE.md: which folder may include which, and what a header looks like.

    python3 tools/check_includes.py [ROOT]

Prints one line for each violation and exits 1 if there is any. There is no list of exceptions: what is
allowed stands in the tables below.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

# A folder includes itself and folders of smaller numbers, never another of its own number.
LAYERS = {
    "base": 0,
    "request": 1, "config": 1, "json": 1, "device": 1, "http": 1,
    "text": 2, "kv_cache": 2, "kv_store": 2, "checkpoint": 2, "kernels": 2,
    "comm": 3,
    "model": 4, "scheduler": 4, "transfer": 4,
    "runtime": 5,
    "engine": 6,
    "api": 7, "router": 7, "loadgen": 7,
    "apps": 8,
}

# Edges that the numbers would allow and the design forbids.
HOST_METADATA = {"device", "json", "http"}
FORBIDDEN = {
    "kv_cache": HOST_METADATA,
    "scheduler": HOST_METADATA | {"text", "checkpoint", "kernels", "comm"},
    "kernels": {"json", "http"},
    "model": {"json", "http", "text"},
    "runtime": {"json", "http", "text", "scheduler"},
    "engine": {"json", "http"},
}

# A library's headers are included by these folders only; a prefix that is longer wins.
LIBRARY_FOLDERS = {
    "boost/json": {"json"},
    "boost/asio": {"http"},
    "boost/beast": {"http"},
    "boost/": {"http", "json"},
    "spdlog/": {"base"},
    "pcre2.h": {"text"},
    "xgrammar/": {"text"},
    "dlpack/": {"text"},
    "hwy/": {"kernels"},
    "openssl/": {"api", "comm"},
    "xxhash.h": {"checkpoint", "text", "kv_cache", "kv_store"},
    "CLI/": {"apps"},
    "editline/": {"apps"},
    "cuda": {"device", "kernels", "comm", "model"},
    "nccl.h": {"comm"},
    "nlohmann/": set(),
}

MAX_LINES = {".h": 800, ".cc": 800, ".py": 800, ".cu": 1500, ".cuh": 1500}

# System headers that a header of any folder may include, besides the C++ standard library's.
SYSTEM_HEADER = re.compile(r"(sys|netinet|arpa|linux)/\w+\.h|(unistd|fcntl|poll|signal|immintrin)\.h")
STANDARD_HEADER = re.compile(r"[a-z_0-9]+")
PUBLIC_THIRD_PARTY = {("src/base/log.h", "fmt/core.h")}

INCLUDE = re.compile(r'^\s*#\s*include\s*(?:"([^"]+)"|<([^>]+)>)', re.MULTILINE)
ENVIRONMENT = re.compile(r"\b(?:secure_)?getenv\s*\(|\benviron\b")
OTHER_CLOCK = re.compile(r"\b\w+_clock::now|\bclock_gettime\b")
CLOCKLESS = {"scheduler", "kv_cache"}


@dataclass
class Source:
    path: str  # relative to the root, with /
    folder: str  # a key of LAYERS, or the unknown name
    text: str
    own_includes: list[str]  # "base/status.h" as written
    other_includes: list[str]  # <vector> as written


def read_sources(root: Path) -> dict[str, Source]:
    sources = {}
    for top in ("src", "apps"):
        for path in sorted((root / top).rglob("*")):
            if path.suffix not in MAX_LINES or not path.is_file():
                continue
            name = path.relative_to(root).as_posix()
            folder = "apps" if top == "apps" else name.split("/")[1]
            text = path.read_text(encoding="utf-8")
            found = INCLUDE.findall(text) if path.suffix != ".py" else []
            sources[name] = Source(name, folder, text, [own for own, _ in found if own],
                                   [other for _, other in found if other])
    return sources


def included_path(include: str) -> str:
    return include if include.startswith("apps/") else "src/" + include


def check_edges(source: Source) -> list[str]:
    if source.folder not in LAYERS:
        return [f"folder '{source.folder}' has no layer; add it to LAYERS and to ARCHITECTURE.md"]
    errors = []
    for include in source.own_includes:
        target = include.split("/")[0]
        if target not in LAYERS:
            errors.append(f'"{include}" is not relative to src/')
        elif target == source.folder:
            continue
        elif LAYERS[target] >= LAYERS[source.folder]:
            errors.append(f'"{include}": {source.folder} is layer {LAYERS[source.folder]} and '
                          f"{target} is layer {LAYERS[target]}; include lower layers only")
        elif target in FORBIDDEN.get(source.folder, ()):
            errors.append(f'"{include}": {source.folder} must not know {target}')
    return errors


def library_folders(include: str) -> set[str] | None:
    """The folders that may include this header; None: it belongs to no library of the table."""
    prefixes = [prefix for prefix in LIBRARY_FOLDERS if include.startswith(prefix)]
    return LIBRARY_FOLDERS[max(prefixes, key=len)] if prefixes else None


def check_libraries(source: Source) -> list[str]:
    errors = []
    for include in source.other_includes:
        allowed = library_folders(include)
        if allowed is not None and source.folder not in allowed:
            where = ", ".join(sorted(allowed)) or "no folder"
            errors.append(f"<{include}> may be included in {where} only")
    return errors


def is_third_party(include: str) -> bool:
    return not (STANDARD_HEADER.fullmatch(include) or SYSTEM_HEADER.fullmatch(include))


def check_public_headers(source: Source, sources: dict[str, Source]) -> list[str]:
    """What `source` includes from other folders must not bring a library's header with it, but for
    a library that its own folder may include."""
    errors = []
    for include in source.own_includes:
        if include.startswith(source.folder + "/"):
            continue
        pending, seen = [included_path(include)], set()
        while pending:
            path = pending.pop()
            if path in seen or path not in sources:
                continue
            seen.add(path)
            header = sources[path]
            pending += [included_path(own) for own in header.own_includes]
            for other in header.other_includes:
                if source.folder in (library_folders(other) or ()):
                    continue
                if is_third_party(other) and (path, other) not in PUBLIC_THIRD_PARTY:
                    errors.append(f'"{include}" brings the library header <{other}> through {path}; '
                                  "keep it in a .cc or in a header of its own folder")
    return errors


def check_text(source: Source) -> list[str]:
    errors = []
    suffix = Path(source.path).suffix
    lines = source.text.count("\n")
    if lines > MAX_LINES[suffix]:
        errors.append(f"{lines} lines; at most {MAX_LINES[suffix]}")
    if suffix in (".h", ".cuh"):
        if not source.text.startswith("//"):
            errors.append("a header begins with a comment that states its contract")
        if "#pragma once" not in source.text.splitlines():
            errors.append("#pragma once is missing")
    if source.folder != "apps" and ENVIRONMENT.search(source.text):
        errors.append("the environment is read in apps/ only")
    if source.folder in CLOCKLESS and OTHER_CLOCK.search(source.text):
        errors.append(f"{source.folder} takes the time from base/clock.h only")
    return errors


def check_script_lengths(root: Path) -> list[str]:
    errors = []
    for top in ("tests", "tools", "bench"):
        for path in sorted((root / top).rglob("*")):
            if path.suffix not in MAX_LINES:
                continue
            lines = path.read_text(encoding="utf-8").count("\n")
            if lines > MAX_LINES[path.suffix]:
                errors.append(f"{path.relative_to(root).as_posix()}: {lines} lines; "
                              f"at most {MAX_LINES[path.suffix]}")
    return errors


def check_tree(root: Path) -> list[str]:
    sources = read_sources(root)
    errors = check_script_lengths(root)
    for source in sources.values():
        found = (check_edges(source) + check_libraries(source)
                 + check_public_headers(source, sources) + check_text(source))
        errors += [f"{source.path}: {error}" for error in dict.fromkeys(found)]
    return errors


def main() -> int:
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent
    if not (root / "src").is_dir():
        print(f"check_includes: no folder {root}/src", file=sys.stderr)
        return 2
    errors = check_tree(root)
    print(*errors, sep="\n", end="\n" if errors else "")
    print(f"check_includes: {len(errors)} violations")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
