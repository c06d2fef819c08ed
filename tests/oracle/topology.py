"""Subnets to compare on: drawn from a seed, written as ibsim and OpenSM read them, and as the model does."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from mcast.backends.sim.core.sa import DEFAULT_PREFIX, Quirks, SaPort, SubnetAdmin, WellKnownGroup
from mcast.wire.mcmember import MLID_FIRST

SM_HOST = "HSM"
HOSTS = ("H1", "H2", "H3", "H4", "H5", "H6", "H7")  # with the SM's own, ibsim serves ten clients
SWITCH_PORTS = 16
LINKS = {(1, 1): 2, (1, 3): 5, (3, 1): 3, (3, 3): 6, (1, 7): 3, (3, 7): 7}
"""Enabled widths and speeds of a link as ibsim writes them -> the rate that comes of it."""
PARTITIONS = (0x7FFF, 0x0001, 0x0002)
FULL = 0x8000
SITE_MGID = bytes.fromhex("ff15 4001 ffff 0000 0000 0000 0000 00aa")


@dataclass(frozen=True)
class Host:
    name: str
    guid: int
    switch: int
    width: int
    speed: int
    pkeys: tuple[int, ...]

    @property
    def values(self) -> SaPort:
        return SaPort(self.guid, pkeys=self.pkeys, rate=LINKS[self.width, self.speed])


@dataclass(frozen=True)
class Topology:
    seed: int
    hosts: tuple[Host, ...]
    switches: int
    mlids: int
    subnet_prefix: bytes
    ipoib: tuple[WellKnownGroup, ...]
    others: tuple[WellKnownGroup, ...]

    def netlist(self) -> str:
        """The file that ibsim reads: a chain of switches with the hosts on it."""
        uplinks = {
            at: [f'[{SWITCH_PORTS - 1}]\t"S{at + 1}"[{SWITCH_PORTS}]'] * (at + 1 < self.switches)
            + [f'[{SWITCH_PORTS}]\t"S{at - 1}"[{SWITCH_PORTS - 1}]'] * (at > 0)
            for at in range(self.switches)
        }
        sections = []
        for at in range(self.switches):
            links = [
                f'[{slot}]\t"{host.name}"[1] w={host.width} s={host.speed}'
                for slot, host in enumerate(self.hosts, 1)
                if host.switch == at
            ]
            sections.append("\n".join([f'Switch\t{SWITCH_PORTS} "S{at}"', *links, *uplinks[at]]))
        for slot, host in enumerate(self.hosts, 1):
            link = f'[1]\t"S{host.switch}"[{slot}] w={host.width} s={host.speed}'
            sections.append(f'caguid={host.guid - 1:#x}\nHca\t1 "{host.name}"\n{link}')
        return "\n\n".join(sections) + "\n"

    def partitions(self) -> str:
        """The partition file that OpenSM reads."""
        lines = []
        for base in PARTITIONS:
            members = [
                f"{host.guid:#x}={'full' if pkey & FULL else 'limited'}"
                for host in self.hosts
                for pkey in host.pkeys
                if pkey & 0x7FFF == base
            ]
            flags = [
                f",ipoib,rate={group.rate},mtu={group.mtu},Q_Key={group.qkey:#x}"
                for group in self.ipoib
                if group.pkey & 0x7FFF == base
            ]
            lines.append(f"P{base}={base:#06x}{''.join(flags)} : {', '.join(members)} ;")
        for group in self.others:
            assert group.mgid
            pieces = [group.mgid[at : at + 2].hex() for at in range(0, 16, 2)]
            lines.append(
                f"P{group.pkey & 0x7FFF}={group.pkey & 0x7FFF:#06x} : mgid={':'.join(pieces)}"
                f",rate={group.rate},mtu={group.mtu},Q_Key={group.qkey:#x}"
                f",TClass={group.tclass},FlowLabel={group.flow_label},scope={group.mgid[1] & 15} ;"
            )
        return "\n".join(lines) + "\n"

    def options(self) -> str:
        """OpenSM's option file: no sweeps but those asked for, a log that shows at once when one is done."""
        prefix = int.from_bytes(self.subnet_prefix)
        options = {
            "subnet_prefix": f"{prefix:#018x}",
            "sweep_interval": "0",
            "sweep_on_trap": "FALSE",
            "log_flags": "0x02",
            "force_log_flush": "TRUE",
        }
        return "".join(f"{name} {value}\n" for name, value in options.items())

    def model(self, quirks: Quirks) -> SubnetAdmin:
        """Return this subnet in `sa.py`."""
        sa = SubnetAdmin(
            subnet_prefix=self.subnet_prefix,
            well_known=(*self.ipoib, *self.others),
            max_mlid=MLID_FIRST + self.mlids - 1,
            quirks=quirks,
        )
        for host in self.hosts:
            sa.add_port(host.values)
        return sa


def generate(seed: int) -> Topology:
    """The subnet of this seed: 1 to 3 switches, links of several rates, 3 partitions, few or many MLIDs."""
    rng = Random(seed)
    switches = rng.randint(1, 3)
    hosts = []
    for at, name in enumerate((SM_HOST, *HOSTS)):
        width, speed = rng.choice([(3, 1)] * 4 + list(LINKS))
        # The SM's port is a full member of the default partition whatever the file says.
        default = FULL if name == SM_HOST or rng.random() < 0.8 else 0
        extra = [base | rng.choice((FULL, FULL, 0)) for base in PARTITIONS[1:] if rng.random() < 0.5]
        pkeys = (PARTITIONS[0] | default, *extra)
        hosts.append(Host(name, 0x100001 + 0x10 * at, rng.randrange(switches), width, speed, pkeys))
    ipoib = [WellKnownGroup()]
    # OpenSM forgets a partition without a member, and its groups.
    if any(0x0001 in {pkey & 0x7FFF for pkey in host.pkeys} for host in hosts) and rng.random() < 0.5:
        ipoib.append(WellKnownGroup(pkey=0x8001, rate=2, mtu=3, qkey=0x1234))
    others = [WellKnownGroup(mgid=SITE_MGID, qkey=7, rate=2, mtu=4, tclass=3, flow_label=9)]
    return Topology(
        seed=seed,
        hosts=tuple(hosts),
        switches=switches,
        mlids=rng.choice((32, 32, 64, 1024)),
        subnet_prefix=DEFAULT_PREFIX if rng.random() < 0.7 else bytes.fromhex("fec0000000000007"),
        ipoib=tuple(ipoib),
        others=tuple(others) if rng.random() < 0.5 else (),
    )
