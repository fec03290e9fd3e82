"""nbd-tester-client, the tests of the NetworkBlockDevice project's own server, unchanged: the trace of its integrity test, its
throughput test with writes and flushes, oversized requests, the handshake. Debian does not install it; it is built here from
the unpacked source package nbd."""

import shutil
import subprocess
from pathlib import Path

from served import VOLUME, Missing, run

PACKAGES = {"glib-2.0": "libglib2.0-dev", "gnutls": "libgnutls28-dev"}
SOURCES = ["tests/run/nbd-tester-client.c", "cliserv.c", "buffer.c", "crypto-gnutls.c"]
# What its configure would find out on every 64-bit Linux; it would ask for a parser generator too.
FOUND = ["-D_GNU_SOURCE", "-DSIZEOF_UNSIGNED_INT=4", "-DSIZEOF_UNSIGNED_LONG_INT=8", "-DHAVE_GNUTLS=1", "-DNBD_LFS=1"]


def build(source, folder):
    if not source:
        raise Missing("the source of nbd-tester-client is missing: apt-get source nbd, then --nbd-source DIR")
    if not (Path(source) / SOURCES[0]).exists():
        raise Missing(f"'{source}' has no {SOURCES[0]}: give the unpacked source package nbd with --nbd-source")
    for program, package in {"cc": "gcc", "pkg-config": "pkg-config"}.items():
        if not shutil.which(program):
            raise Missing(f"'{program}' is missing: apt-get install {package}")
    flags = []
    for library, package in PACKAGES.items():
        found = subprocess.run(["pkg-config", "--cflags", "--libs", library], capture_output=True, text=True)
        if found.returncode != 0:
            raise Missing(f"the library {library} is missing: apt-get install {package}")
        flags += found.stdout.split()
    (folder / "config.h").write_text("")
    program = folder / "nbd-tester-client"
    run(["cc", "-O1", "-w", *FOUND, f"-I{folder}", f"-I{source}", *(Path(source) / s for s in SOURCES), "-o", program, *flags])
    return program


def nbd_tester_client(served):
    source = served.options.nbd_source
    command = [build(source, served.folder), "-N", "disk", "-u", served.socket]
    # The other trace, integrityhuge, asks for 49 MB at once; a client that has not asked for the block sizes may count on 32 MiB.
    trace = Path(source) / "tests" / "run" / "integrity-test.tr"
    for _ in range(1 if served.placement == "sparse" else 2):
        run([*command, "-i", "-t", trace])
        # It expects a disk of zeroes; the second time it meets a cache that is full of the first.
        run(["qemu-io", "-f", "raw", "-c", f"write -z 0 {VOLUME}", served.uri])
    for test in (["-w", "-f"], ["-o"], ["-h"]):
        run([*command, *test])


CASES = [nbd_tester_client]
