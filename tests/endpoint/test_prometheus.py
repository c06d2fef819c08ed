"""The Prometheus exporter, read back with the client's own parser."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from mcast import aio, open_endpoint
from mcast.api import Backend
from mcast.backends.sim import Fabric, open_fabric
from mcast.backends.sim.faults import Drop, Messages
from mcast.endpoint.prometheus import EndpointCollector, export

GROUP = "239.1.2.3"


@pytest.fixture
def backend() -> Iterator[Backend]:
    with open_fabric(Fabric.roce(ports=2)) as opened:
        yield opened


def read(registry: CollectorRegistry) -> dict[tuple[str, str], float]:
    """(name, the value of the label of its own, else the address) -> number, as Prometheus would read it."""
    text = generate_latest(registry).decode()
    samples = [one for family in text_string_to_metric_families(text) for one in family.samples]
    own = ("group", "reason", "counter", "address")
    assert all({"backend", "device", "port", "address"} <= set(one.labels) for one in samples)
    return {
        (one.name, next(one.labels[name] for name in own if name in one.labels)): one.value for one in samples
    }


def test_a_scrape_shows_what_the_snapshot_says(backend: Backend) -> None:
    registry = CollectorRegistry()
    with (
        open_endpoint(backend, "10.0.0.1", sequence=True) as sender,
        open_endpoint(backend, "10.0.0.2", sequence=True, receive_depth=8) as receiver,
    ):
        export(receiver, registry)
        group, member = sender.sender(GROUP), receiver.join(GROUP)
        fabric = backend.fabric  # type: ignore[attr-defined]
        with fabric.rules.when(Messages(nth=2), Drop()):
            group.send_batch([b"abc"] * 10)
        list(receiver.batches(timeout=0.01))
        found, stats = read(registry), receiver.stats()
        assert found["mcast_received_messages_total", "10.0.0.2"] == stats.received == 8
        assert found["mcast_received_bytes_total", "10.0.0.2"] == 24
        assert found["mcast_receive_queue_low_water", "10.0.0.2"] == 0
        assert found["mcast_receive_queue_empty_total", "10.0.0.2"] == 1
        assert found["mcast_dropped_messages_total", "no receive was free"] == 1
        assert found["mcast_group_missing_messages", GROUP] == member.stats().gaps == 1
        assert found["mcast_group_joined", GROUP] == 1
        assert found["mcast_joins_total", "10.0.0.2"] == 1
        assert found["mcast_port_counter", "qkey_violations"] == 0
        fabric.bond_failover(fabric.ports[1])
        receiver.recv(timeout=1)
        assert read(registry)["mcast_memberships_restored_total", "10.0.0.2"] == 1
    assert read(registry) == {}


def test_endpoints_share_a_collector(backend: Backend) -> None:
    """Several endpoints share a collector and an awaitable one may be among them."""
    registry = CollectorRegistry()

    async def main() -> None:
        with open_endpoint(backend, "10.0.0.1") as one:
            async with aio.open_endpoint(backend, "10.0.0.2") as other, other.join(GROUP):
                collector = EndpointCollector(one, prefix="our")
                registry.register(collector)
                collector.add(other)
                found = read(registry)
                assert found["our_joins_total", "10.0.0.1"] == 0
                assert found["our_joins_total", "10.0.0.2"] == 1
                assert found["our_group_joined", GROUP] == 1

    asyncio.run(main())


def test_registry_takes_one_collector(backend: Backend) -> None:
    """A registry takes one collector and a collector endpoints alone.

    Prometheus refuses a scrape that has a metric twice, and a broken collector breaks them all.
    """
    registry = CollectorRegistry()
    with open_endpoint(backend, "10.0.0.1") as one, open_endpoint(backend, "10.0.0.2") as other:
        collector = export(one, registry)
        with pytest.raises(ValueError, match="give the endpoint to `add` of what"):
            export(other, registry)
        with pytest.raises(TypeError, match="give what open_endpoint returned"):
            collector.add(None)  # type: ignore[arg-type]
        families = [*text_string_to_metric_families(generate_latest(registry).decode())]
        assert len(families) == len({family.name for family in families}) == len([*collector.describe()])


def test_no_two_samples_are_of_the_same_labels(backend: Backend) -> None:
    """Prometheus refuses a scrape that has them."""
    registry = CollectorRegistry()
    with open_endpoint(backend, "10.0.0.1") as one, open_endpoint(backend, "10.0.0.1") as other:
        collector = EndpointCollector(one, other)
        registry.register(collector)
        for endpoint in (one, other):
            endpoint.sender(GROUP)
        text = generate_latest(registry).decode()
        found = [one for family in text_string_to_metric_families(text) for one in family.samples]
        named = {(sample.name, *sorted(sample.labels.items())) for sample in found}
        assert len(named) == len(found) > 40
        assert {sample.labels["endpoint"] for sample in found} == {"1", "2"}
        one.close()
        collector.add(other)
        text = generate_latest(registry).decode()
        found = [one for family in text_string_to_metric_families(text) for one in family.samples]
        assert {sample.labels["endpoint"] for sample in found} == {"2", "3"}  # no number is used again


def test_a_scrape_from_another_thread_does_no_harm() -> None:
    registry, scraped, stop = CollectorRegistry(), threading.Event(), threading.Event()

    def scrape() -> None:
        while not stop.is_set():
            read(registry)
            scraped.set()

    async def main() -> None:
        with open_fabric(Fabric.roce(ports=2, clock="wall")) as backend:
            async with aio.open_endpoint(backend, "10.0.0.2", sequence=True) as receiver:
                export(receiver, registry)
                async with receiver.join(GROUP), aio.open_endpoint(backend, "10.0.0.1", sequence=True) as one:
                    scraping = asyncio.create_task(asyncio.to_thread(scrape))
                    for _ in range(300):  # every membership is a new stream, a new key in the tables
                        async with one.sender(GROUP) as out:
                            await out.send(b"x")
                            assert await receiver.recv(timeout=10) is not None
                    assert await asyncio.to_thread(scraped.wait, 300)
                    stop.set()
                    await scraping

    asyncio.run(main())


def test_without_the_client_the_pip_line_is_named() -> None:
    code = "import sys; sys.modules['prometheus_client'] = None\nimport mcast.endpoint.prometheus"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=500)
    assert "pip install 'rdma-mcast[prometheus]'" in done.stderr
