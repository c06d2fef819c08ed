"""Environment variables of mcast and rdma-lab, for docs/environment.md and the manual pages."""

from __future__ import annotations

from typing import NamedTuple


class Variable(NamedTuple):
    """An environment variable.

    values   what it may be
    default  what holds where it is not set
    what     what it does, for the page
    reader   who reads it
    brief    the sentence in the manual pages; "" if they do not have it
    """

    name: str
    values: str
    default: str
    what: str
    reader: str
    brief: str = ""


USE = (
    Variable(
        "MCAST_BACKEND",
        "name of a provider, as `mcast info` lists them",
        "`rdma` if a device can be used; `sim` for `mcast demo`",
        "the provider of a command without `--backend`",
        "`mcast`; not programs, which name their provider",
        "The backend that commands use where no option names one.",
    ),
    Variable(
        "MCAST_BIND",
        "IPv4 or IPv6 address of this host",
        "the only active port that has an address",
        "the local address of a command without `--bind` and `--device`",
        "`mcast`",
        "The local address that commands take part from where no option names one.",
    ),
    Variable(
        "MCAST_SIM",
        "path of a socket; empty: none",
        "none for `sim`; for `sim-shared` and `mcast sim ctl` the user's own, "
        "`$XDG_RUNTIME_DIR/mcast/sim.sock`",
        "the served fabric to attach to. `mcast sim serve` prints the line to export; the pytest plugin sets "
        "it for the subprocesses of a test with a shared fabric",
        "the providers `sim`, `sim-shared` and `sim-shared-ib`, `mcast sim ctl`, `mcast sim tap`",
        "The socket of the served fabric that the backend sim attaches to.",
    ),
    Variable(
        "MCAST_LIBRDMACM",
        "file, as dlopen(3) takes it",
        "`librdmacm.so.1`",
        "the librdmacm to load",
        "the provider `rdma`, when it is first used",
    ),
    Variable(
        "MCAST_LIBIBVERBS",
        "file, as dlopen(3) takes it",
        "`libibverbs.so.1`",
        "the libibverbs to load",
        "the provider `rdma`, when it is first used",
    ),
    Variable(
        "MCAST_UDP_BED",
        "`loopback`",
        "a network namespace with a bridge, where one may be made; else loopback",
        "the test bed of `udp`",
        "`mcast conformance --backend udp`",
    ),
    Variable(
        "RDMA_LAB",
        "`1`",
        "not set outside of the lab",
        "says that this is the lab's guest",
        "set by `rdma-lab`, for programs that want to know",
    ),
)
"""Variables of users."""

BUILD = (
    Variable(
        "MCAST_RDMA",
        "`auto`, `1`, `0`",
        "`auto`: build it where a compiler and the headers are",
        "whether to build the provider `rdma`: `1` stops where that cannot be, `0` leaves it out",
        "`setup.py`: `pip install` from source",
    ),
    Variable(
        "MCAST_SANITIZE",
        "`1`, `thread`",
        "none",
        "build the extension of `rdma` with AddressSanitizer and UndefinedBehaviorSanitizer, or with "
        "ThreadSanitizer",
        "`setup.py`",
    ),
    Variable(
        "MCAST_TESTS",
        "`long`",
        "short runs",
        "run what is repeated more often; `pytest --long` sets it",
        "the project's tests",
    ),
    Variable("MCAST_SEED", "any", "none", "shows that the lab's guest inherits it", "the lab's own tests"),
    Variable(
        "MCAST_CORE",
        "file of the extension of `rdma`",
        "the installed one",
        "the extension to test, made with a sanitizer",
        "the tests of the scripted card",
    ),
    Variable(
        "MCAST_CARD_DELAY",
        "nanoseconds",
        "`0`",
        "how much later a send is seen to be complete",
        "the scripted card",
    ),
    Variable(
        "MCAST_TEST_CRC_BY",
        "`zlib`",
        "`ISA-L`",
        "the library that the test expects to compute the CRC",
        "the tests of `udp`",
    ),
)
"""Variables of those who build mcast or work on it."""

SYSTEM = (
    Variable(
        "NO_COLOR",
        "any",
        "colours on a terminal",
        "output has no colours",
        "`mcast`, by Rich",
        "If it is set, output has no colours.",
    ),
    Variable("COLUMNS", "number", "width of the terminal, or 80", "width of tables", "`mcast`, `rdma-lab`"),
    Variable(
        "XDG_RUNTIME_DIR",
        "directory",
        "`/tmp/mcast-UID`, `/tmp/rdma-lab-UID`",
        "directory of the sockets of the user's own fabric and of running guests",
        "`sim-shared`, `mcast sim`, `rdma-lab`",
    ),
    Variable(
        "XDG_CACHE_HOME",
        "absolute directory",
        "`~/.cache`",
        "its `rdma-lab` has kernels, built modules and snapshots of guests",
        "`rdma-lab`",
    ),
    Variable(
        "PATH",
        "directories",
        "the system's",
        "where tools are looked for; `/usr/sbin` and `/sbin` are added",
        "`mcast`, `rdma-lab`",
    ),
    Variable("CC, CFLAGS", "compiler, its flags", "Python's own", "compile the extensions", "`setup.py`"),
    Variable(
        "SUDO_USER", "name", "none", "name to keep out of a card report", "`mcast conformance --card-report`"
    ),
    Variable(
        "KUBERNETES_SERVICE_HOST, container",
        "any",
        "none",
        "say that this is a container, so that advice names its options",
        "`mcast doctor`, explanations of errors",
    ),
    Variable(
        "OMPI_COMM_WORLD_SIZE, PMI_SIZE, PMIX_SIZE, SLURM_STEP_NUM_TASKS",
        "number of ranks",
        "`1`",
        "say that an MPI launcher has started the command",
        "`mcast bench`",
    ),
)
"""Variables of the system that change what mcast does."""
