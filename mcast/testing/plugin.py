"""The pytest plugin for tests of applications that use mcast: a simulated fabric for each test.

fixtures
  mcast_fabric       the test's fabric, a `mcast.backends.sim.Fabric`; during the test the application's
                     `open_endpoint("sim", …)` and `open_backend("sim")` lead to it
  mcast_endpoints    opens endpoints on the fabric, each on a port of its own (McastEndpoints)
  mcast_aio_endpoints  the same for asyncio, closed in the test's event loop (McastAioEndpoints); for tests
                     that pytest-asyncio runs, or anyio on asyncio
  mcast_environment  the environment for subprocesses, where the fabric is shared

marks
  mcast(fabric="roce", shared=False, seed=…, faults=[…], allow_leaks=False, **options)
                     the fabric: its link layer, or several to run the test on each; whether it is shared
                     with subprocesses, of which nothing is left after the test; its seed and faults; and the
                     options of `Fabric.roce` or `.infiniband` (ports, hosts, switches, clock, …)
  mcast_faults(kind, **fields)   a fault by the name that it has in a scenario
  mcast_faults(which, verdict)   a fault as `fabric.rules.when` takes it

options
  --mcast-seed N|random   the seed of the run, by default 0; each test's seed follows from it and the test's
                          node id
  --mcast-traces          say of each object that was left open by which calls it was opened

ini
  mcast_fabric       the link layers of tests that name none; by default roce

A test with one of these marks has the fabric, whether it names a fixture or not. A wrong mark fails its test
alone, and the failure says where the mark is.

Marks of a module, a class and a test add up; for the same argument the nearest wins. Time on the fabric is
virtual, and passes while a call waits; for tests that are coroutines it is real time. Use `clock="wall"` for
programs with threads or asyncio. If a test has passed and left a batch, an id, a queue pair or a backend
open, its teardown fails; the endpoints of `mcast_endpoints` are closed before that check. A failure names the
seed, and the command that repeats the test.
"""

from __future__ import annotations

import gc
import inspect
import logging
import os
import shlex
from argparse import ArgumentTypeError
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from pathlib import Path
from random import SystemRandom
from typing import TYPE_CHECKING, Any, NoReturn, Self

import pytest

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

    from _pytest.nodes import Node

    from mcast.aio import Endpoint as AioEndpoint
    from mcast.api import Backend
    from mcast.backends.sim import Fabric as McastFabric
    from mcast.backends.sim.open_objects import Leftover, OpenObjects
    from mcast.endpoint.blocking import Endpoint
    from mcast.testing.shared import SharedRun
    from mcast.wire.addresses import LocalAddress

# No other module of mcast is imported before a test needs it, because pytest loads this one in every run.

__all__ = ["McastAioEndpoints", "McastEndpoints", "McastFabric"]

LINK_LAYERS = ("roce", "infiniband")
_NAMES = {"roce": ("sim", "sim-roce"), "infiniband": ("sim", "sim-ib")}
"""Link layer -> the names of backends that lead to such a fabric."""

_TRACE_DEPTH = 8
_LOOP_CLOSE_TIMEOUT = 10.0
"""Seconds that a loop in another thread may take to close an endpoint."""

logger: logging.Logger = logging.getLogger("mcast")


def __getattr__(name: str) -> object:
    if name == "McastFabric":
        from mcast.backends.sim import Fabric

        return Fabric
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# --- options, marks, header ----------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("mcast", "tests of applications that use mcast")
    group.addoption(
        "--mcast-seed",
        type=_seed,
        default=0,
        metavar="N|random",
        help="the seed of the run, from which the seed of each test follows (default: 0)",
    )
    group.addoption(
        "--mcast-traces", action="store_true", help="show the calls that opened what a test has left open"
    )
    parser.addini(
        "mcast_fabric",
        f"link layers of mcast_fabric: {', '.join(LINK_LAYERS)}",
        type="args",
        default=["roce"],
    )


def _seed(text: str) -> int:
    from mcast.arguments.amounts import parse_int

    if text == "random":
        return SystemRandom().getrandbits(32)
    seed = parse_int(text)
    if seed is None:
        raise ArgumentTypeError(f"{text!r} is neither a number nor 'random'")
    return seed


def pytest_configure(config: pytest.Config) -> None:
    for line in (
        "mcast(fabric, shared, seed, faults, allow_leaks, **options): the simulated fabric of the test",
        "mcast_faults(kind, **fields) or (which, verdict): a fault on the fabric of the test",
    ):
        config.addinivalue_line("markers", line)
    if config.pluginmanager.has_plugin("asyncio"):  # pytest-asyncio
        config.pluginmanager.import_plugin("mcast.testing.asyncio_fixtures")
    if hasattr(config, "workerinput"):
        config.option.mcast_seed = config.workerinput["mcast_seed"]


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Give a worker of pytest-xdist the seed of the whole run, a random one included."""
    node.workerinput["mcast_seed"] = node.config.getoption("mcast_seed")


def pytest_report_header(config: pytest.Config) -> str:
    return f"mcast: --mcast-seed={config.getoption('mcast_seed')}"


# --- the plan of a test --------------------------------------------------------------------------


@dataclass(frozen=True)
class _FabricMarks:
    """Marks of a test's fabric, merged.

    `seed` None: the seed follows from the run's. `faults` come with the place of their mark; `places` has
    that of each argument of `mcast`, and under "" that of the nearest mark.
    """

    layers: Sequence[str]
    shared: bool = False
    seed: int | None = None
    faults: Sequence[tuple[str, object]] = ()
    allow_leaks: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    places: Mapping[str, str] = field(default_factory=dict)


_MARKS = ("mcast", "mcast_faults")


def _fabric_marks(item: pytest.Item) -> _FabricMarks:
    said: dict[str, Any] = {}
    places: dict[str, str] = {}
    faults: list[tuple[str, object]] = []
    # From the module's to the test's own, decorators from top to bottom.
    for node, mark in reversed([*item.iter_markers_with_node("mcast")]):
        place = _location(node)
        if mark.args:
            raise _failure(
                f"{place}mcast{mark.args}: give its arguments by name, such as mcast(fabric='infiniband')"
            )
        named = mark.kwargs.get("faults", ())
        if not isinstance(named, list | tuple):
            raise _failure(f"{place}mcast(faults={named!r}): give a list of faults")
        faults += [(place, one) for one in named]
        said |= mark.kwargs
        places |= dict.fromkeys([*mark.kwargs, ""], place)
    for node, mark in reversed([*item.iter_markers_with_node("mcast_faults")]):
        faults.append((place := _location(node), _fault_of_mark(mark, place)))
    layers = said.pop("fabric", None) or item.config.getini("mcast_fabric")
    layers = [layers] if isinstance(layers, str) or not isinstance(layers, Iterable) else list(layers)
    for layer in layers:
        if layer not in LINK_LAYERS:
            place = places.get("fabric", "the ini's mcast_fabric: ")
            raise _failure(f"{place}the fabric is {layer!r}: give {' or '.join(LINK_LAYERS)}")
    said.pop("faults", None)
    seed, allow_leaks = said.pop("seed", None), said.pop("allow_leaks", False)
    shared = said.pop("shared", False)
    for name, value in {"allow_leaks": allow_leaks, "shared": shared}.items():
        if not isinstance(value, bool):
            raise _failure(f"{places[name]}mcast({name}={value!r}): give True or False")
    if not isinstance(seed, int | None):
        raise _failure(f"{places['seed']}mcast(seed={seed!r}): give an int")
    return _FabricMarks(layers, shared, seed, faults, allow_leaks, said, places)


def _location(node: Node) -> str:
    """The file and line at which a test, a class or a module has its marks."""
    path: os.PathLike[str] | str = node.path
    line: int | None = None
    if isinstance(node, pytest.Item | pytest.Class):
        path, line, _ = node.reportinfo()
    else:
        with suppress(OSError, UnicodeDecodeError):
            lines = enumerate(node.path.read_text().splitlines())
            line = next((number for number, text in lines if text.startswith("pytestmark")), None)
    shown = os.path.relpath(path, node.config.invocation_params.dir)
    return f"{shown}: " if line is None else f"{shown}:{line + 1}: "


def _fault_of_mark(mark: pytest.Mark, place: str) -> object:
    if len(mark.args) == 1 and isinstance(mark.args[0], str):
        return {"kind": mark.args[0], **mark.kwargs}
    if len(mark.args) == 2 and not mark.kwargs:
        return mark.args
    raise _failure(
        f"{place}mcast_faults takes the kind of one fault and its fields, mcast_faults('drop', nth=3), "
        "or the two arguments of fabric.rules.when"
    )


def _failure(why: str) -> BaseException:
    """An exception that fails a test with a sentence, without a traceback."""
    return pytest.fail.Exception(why, pytrace=False)


def _has_fabric(node: pytest.Item, names: list[str]) -> bool:
    """Return True if the test has the fabric; a mark of the plugin puts its fixture first among the names."""
    if "mcast_fabric" not in names and any(node.get_closest_marker(mark) for mark in _MARKS):
        names.insert(0, "mcast_fabric")
    return "mcast_fabric" in names


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if _has_fabric(metafunc.definition, metafunc.fixturenames) and not _is_parametrized(metafunc):
        try:
            layers = _fabric_marks(metafunc.definition).layers
        except pytest.fail.Exception:
            return  # the test's set-up says it, so that no other test fails
        if len(layers) > 1:
            metafunc.parametrize("mcast_fabric", layers, indirect=True)


def pytest_itemcollected(item: pytest.Item) -> None:
    if isinstance(item, pytest.Function):
        _has_fabric(item, item.fixturenames)  # once more, because a parametrized test has lost the name


def _is_parametrized(metafunc: pytest.Metafunc) -> bool:
    """Return True if the test itself says on which fabrics it runs."""
    named = (mark.args[0] for mark in metafunc.definition.iter_markers("parametrize") if mark.args)
    return any("mcast_fabric" in (n.replace(",", " ").split() if isinstance(n, str) else n) for n in named)


# --- the fixtures --------------------------------------------------------------------------------


@pytest.fixture
def mcast_fabric(request: pytest.FixtureRequest) -> Iterator[McastFabric]:
    """The simulated fabric of this test. The application reaches the fabric by the backend's name."""
    from mcast.backends.sim.open_objects import OpenObjects

    item = request.node
    plan = _fabric_marks(item)
    layer: str = getattr(request, "param", plan.layers[0])
    if layer not in LINK_LAYERS:
        raise _failure(f"the fabric is {layer!r}: give {' or '.join(LINK_LAYERS)}")
    run = item.stash[_RUN] = _Run(layer, _seed_of(item) if plan.seed is None else plan.seed)
    item.user_properties.append(("mcast_seed", run.seed))
    if plan.shared and plan.options.get("clock", "wall") != "wall":
        place = plan.places["clock"]
        raise _failure(
            f"{place}mcast(shared=True): a fabric for several processes runs in real time: leave out clock"
        )
    clock = "wall" if plan.shared else _clock_of(item)
    fabric = _make(layer, run.seed, {"clock": clock, **plan.options}, plan.places)
    depth = _TRACE_DEPTH if request.config.getoption("mcast_traces") else 1
    keeps_leaks, directory = plan.allow_leaks, Path(request.config.invocation_params.dir)
    if plan.shared:
        with _planted(fabric, layer, plan.faults), _served(fabric, layer, depth) as shared:
            yield fabric
            if not (keeps_leaks or run.failed):
                _fail_for(shared.leftovers(), directory)
        return
    opened = OpenObjects(fabric, depth)
    try:
        with _planted(fabric, layer, plan.faults), _reachable(layer, partial(_open, fabric)):
            yield fabric
        if not (keeps_leaks or run.failed):
            _report_leaks(opened, directory)
    finally:
        opened.close()
        fabric.close()


@pytest.fixture
def mcast_environment(mcast_fabric: McastFabric, request: pytest.FixtureRequest) -> dict[str, str]:
    """The environment for the subprocesses of a test with a shared fabric: MCAST_SIM leads them there."""
    if not _fabric_marks(request.node).shared:
        raise _failure("the fabric is in this process alone: mark the test @pytest.mark.mcast(shared=True)")
    return dict(os.environ)


@pytest.fixture
def mcast_endpoints(mcast_fabric: McastFabric) -> Iterator[McastEndpoints]:
    """Opens endpoints on the test's fabric, and closes them at the end of the test."""
    with McastEndpoints(mcast_fabric) as endpoints:
        yield endpoints


@pytest.fixture
def mcast_aio_endpoints(request: pytest.FixtureRequest) -> McastAioEndpoints:
    """Opens endpoints for asyncio on the test's fabric, and closes them in its event loop."""
    if "anyio_backend" in request.fixturenames:
        name = "_mcast_anyio_endpoints"
    elif request.config.pluginmanager.has_plugin("asyncio"):
        name = "_mcast_asyncio_endpoints"
    else:
        raise _failure(
            "mcast_aio_endpoints needs a plugin that runs coroutines: mark the test @pytest.mark.anyio, or "
            "install pytest-asyncio; with any other plugin, use mcast_endpoints.aio"
        )
    endpoints: McastAioEndpoints = request.getfixturevalue(name)
    return endpoints


@pytest.fixture
async def _mcast_anyio_endpoints(mcast_endpoints: McastEndpoints) -> AsyncIterator[McastAioEndpoints]:
    async with McastAioEndpoints(mcast_endpoints) as endpoints:
        yield endpoints


class McastEndpoints:
    """Opens endpoints on the fabric of a test, each on a port of its own.

    They are closed at the end of the test.

    ```python
    def test_feed(mcast_endpoints: McastEndpoints) -> None:
        sender, receiver = mcast_endpoints(2, sequence=True)

    async def test_awaited(mcast_endpoints: McastEndpoints) -> None:
        sender, receiver = mcast_endpoints.aio(2)
    ```
    """

    def __init__(self, fabric: McastFabric) -> None:
        self._ports = fabric.ports
        self._used = 0
        self._close = ExitStack()

    def __call__(self, count: int = 1, **options: Any) -> tuple[Endpoint, ...]:
        """Open endpoints on the next `count` ports; the options are those of `mcast.open_endpoint`.

        Raises ValueError when the fabric has no more ports.
        """
        from mcast.endpoint.blocking import open_endpoint

        opened = (open_endpoint("sim", address, **options) for address in self._next(count))
        return tuple(map(self._close.enter_context, opened))

    def aio(self, count: int = 1, **options: Any) -> tuple[AioEndpoint, ...]:
        """Open endpoints for asyncio.

        Call this in a coroutine, because the endpoints belong to its event loop.
        """
        import asyncio

        from mcast.aio import open_endpoint

        def opened(address: LocalAddress) -> AioEndpoint:
            endpoint = open_endpoint("sim", address, **options)
            self._close.callback(_close_in, asyncio.get_running_loop(), endpoint)
            return endpoint

        return tuple(map(opened, self._next(count)))

    def _next(self, count: int) -> Iterator[LocalAddress]:
        """The addresses of the next ports; one on which no endpoint can be opened stays free."""
        if count < 0:
            raise ValueError(f"count is {count}: give how many endpoints to open")
        end = self._used + count
        if end > len(self._ports):
            raise ValueError(
                f"this fabric has {len(self._ports)} ports, not {end}: "
                f"mark the test @pytest.mark.mcast(ports={end})"
            )
        for _ in range(count):
            yield self._ports[self._used].addresses[0]
            self._used += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._close.close()


class McastAioEndpoints:
    """Opens endpoints for asyncio on the fabric of a test, each on a port of its own.

    They are closed in the test's event loop.

    ```python
    @pytest.mark.asyncio  # or anyio
    async def test_feed(mcast_aio_endpoints: McastAioEndpoints) -> None:
        sender, receiver = mcast_aio_endpoints(2, sequence=True)
    ```
    """

    def __init__(self, endpoints: McastEndpoints) -> None:
        self._endpoints = endpoints
        self._opened: list[AioEndpoint] = []

    def __call__(self, count: int = 1, **options: Any) -> tuple[AioEndpoint, ...]:
        """Open endpoints on the next `count` ports; the options are those of `mcast.aio.open_endpoint`.

        Call this in a coroutine. Raises ValueError when the fabric has no more ports.
        """
        opened = self._endpoints.aio(count, **options)
        self._opened += opened
        return opened

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        for endpoint in reversed(self._opened):
            await endpoint.close()


def _close_in(loop: AbstractEventLoop, endpoint: AioEndpoint) -> None:
    """Close an endpoint in its event loop; if that was closed, in a new one."""
    import asyncio

    if endpoint.closed:
        return
    if loop.is_running():  # in another thread
        asyncio.run_coroutine_threadsafe(endpoint.close(), loop).result(_LOOP_CLOSE_TIMEOUT)
        return
    ended = loop.is_closed()
    with closing(asyncio.new_event_loop()) if ended else nullcontext(loop) as runs:
        runs.run_until_complete(endpoint.close())


# --- making the fabric ---------------------------------------------------------------------------


def _make(layer: str, seed: int, options: Mapping[str, Any], places: Mapping[str, str]) -> McastFabric:
    from mcast.backends.sim import Fabric

    make: Callable[..., McastFabric] = Fabric.roce if layer == "roce" else Fabric.infiniband
    known = inspect.signature(make).parameters
    for name in options:
        if name not in known:
            raise _failure(
                f"{places[name]}mcast({name}=…): the options of a {layer} fabric are {', '.join(known)}"
            )
    try:
        return make(**options, seed=seed)
    except (ValueError, TypeError) as error:
        raise _failure(f"{places.get('', '')}mcast: {error}") from None


def _clock_of(item: pytest.Function) -> str:
    waits = inspect.iscoroutinefunction(item.function) or "mcast_aio_endpoints" in item.fixturenames
    return "wall" if waits else "virtual"


@contextmanager
def _planted(fabric: McastFabric, layer: str, faults: Sequence[tuple[str, Any]]) -> Iterator[None]:
    """Inside the `with`, the faults act on the fabric.

    If several rules fit a message the first one counts.
    """
    from mcast.backends.sim.scenario.faults import scheduled_faults
    from mcast.backends.sim.scenario.model import ScenarioTopology, make_fault

    shape = ScenarioTopology.model_construct(
        link_layer=layer, ports=len(fabric.ports), switches=fabric.switches
    )
    with ExitStack() as stack:
        for place, fault in faults:
            try:
                if isinstance(fault, Mapping):
                    stack.enter_context(scheduled_faults(fabric, [make_fault(fault, shape)]))
                elif isinstance(fault, tuple) and len(fault) == 2:
                    stack.enter_context(fabric.rules.when(*fault))
                else:
                    raise TypeError(f"{fault!r} is neither a table, as in a scenario, nor (which, verdict)")
            except (ValueError, TypeError) as error:
                raise _failure(f"{place}mcast_faults: {error}") from None
        yield


@contextmanager
def _reachable(layer: str, open_it: Callable[..., Backend], shared: str = "") -> Iterator[None]:
    """Make the names of this kind of fabric lead to the test's fabric inside the `with`.

    Names of the other kind lead to an error. `shared` says in words which fabric other processes are on, too.
    """
    from mcast.api import override_provider, provider

    with ExitStack() as stack:
        for kind, names in _NAMES.items():
            opens = open_it if kind == layer else partial(_open_other, kind, layer)
            for name in names if kind == layer else names[1:]:
                stand_in = provider(name)._replace(open=opens, shared=lambda: shared)
                stack.enter_context(override_provider(name, stand_in))
        yield


@contextmanager
def _served(fabric: McastFabric, layer: str, depth: int) -> Iterator[SharedRun]:
    from mcast.testing.shared import served

    with (
        served(fabric, depth, logger.info) as shared,
        _reachable(layer, partial(shared.open, _NAMES[layer][1]), f"the test's fabric at {shared.path}"),
    ):
        yield shared


def _open(fabric: McastFabric, **options: object) -> Backend:
    from mcast.backends.sim import open_fabric

    if options:
        logger.info("the fabric is the test's: the options %s are ignored", ", ".join(options))
    return open_fabric(fabric)


def _open_other(kind: str, layer: str, **options: object) -> NoReturn:
    from mcast.api import BackendUnavailable, UnavailableReason

    raise BackendUnavailable(
        _NAMES[kind][-1],
        UnavailableReason.NO_DEVICE,
        f"the fabric of this test is {layer}",
        f"mark the test @pytest.mark.mcast(fabric={kind!r}), or open 'sim'",
    )


# --- leaks, and what a failure says --------------------------------------------------------------


def _report_leaks(opened: OpenObjects, directory: Path) -> None:
    if opened.leases():
        gc.collect()  # a reference cycle, such as a caught error and its frames, may hold an unused batch
    _fail_for([*opened.leases(), *opened.leftovers()], directory)


def _fail_for(found: Sequence[Leftover], directory: Path) -> None:
    if found:
        lines = [line for leftover in found for line in _leftover_lines(leftover, directory)]
        hint = (
            "Close it, with `with` for example. If it is meant to stay: @pytest.mark.mcast(allow_leaks=True)"
        )
        raise _failure("\n".join(["the test has left open:", *lines, hint]))


def _leftover_lines(leftover: Leftover, directory: Path) -> Iterator[str]:
    yield f"  {leftover.what}"
    for file, line, function in leftover.place:
        path = Path(file)
        shown = path.relative_to(directory) if path.is_relative_to(directory) else path
        yield f"    opened at {shown}:{line} in {function}"


@dataclass
class _Run:
    """State of a test's fabric, for the report.

    After an error (`failed`) leaks are not reported, because the traceback keeps objects alive.
    """

    layer: str
    seed: int
    failed: bool = False


_RUN = pytest.StashKey[_Run]()


def _seed_of(item: pytest.Item) -> int:
    """The seed of a test, which follows from the run's seed and the test's node id."""
    text = f"{item.config.getoption('mcast_seed')}:{item.nodeid}"
    return int.from_bytes(sha256(text.encode()).digest()[:4])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    run = item.stash.get(_RUN, None)
    if run is not None:
        run.failed |= call.excinfo is not None
        if report.failed:
            said = f"fabric {run.layer}, seed {run.seed}; to repeat:\n{_command(item)}"
            # --show-capture=no would hide a section of the report itself.
            if add := getattr(report.longrepr, "addsection", None):
                add("mcast", said)
            else:
                report.sections.append(("mcast", said))
    return report


def _command(item: pytest.Item) -> str:
    """Return the command line that runs this test with the same seed.

    To be run from the directory in which pytest was called.
    """
    config = item.config
    where = Path(os.path.relpath(item.path, config.invocation_params.dir)).as_posix()
    node = "::".join([where, *item.nodeid.split("::")[1:]])
    settings = [one for one in config.option.override_ini or () if one.startswith("mcast_")]
    kept = [("-c", config.option.inifilename), ("--rootdir", config.option.rootdir)]
    kept += [("-o", setting) for setting in settings]
    options = [word for option, value in kept if value for word in (option, str(value))]
    return shlex.join(["pytest", *options, node, f"--mcast-seed={config.getoption('mcast_seed')}"])
