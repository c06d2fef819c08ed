"""The QEMU command line of a machine: planned by virtme-ng, with the lab's devices and init added.

virtme-ng gives the machine and an initramfs with what mounts this host's files. The lab adds its serial log,
its virtio ports and its 9p shares, and makes `guest.sh` the init, because virtme-ng's own
init takes 5 s to start udev, which nothing here needs.
"""

import os
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from errno import ENOSPC
from pathlib import Path

from rdma_lab import host, initramfs
from rdma_lab.errors import LabUnavailableError
from rdma_lab.kernels import Kernel, boot_image

CPUS = 2
"""Number of the guest's processors.

With one, a ping-pong of two processes is 200 times slower (K-FABRIC-3).
"""

CHEAP = ("mitigations=off", "audit=0", "kfence.sample_interval=0", "rcupdate.rcu_expedited=1")
"""Kernel parameters that save work, because nobody attacks the guest from inside or reads its audit log."""
CHEAP_EMULATED = ("tsc=reliable", "clocksource=tsc", "highres=off")
"""Kernel parameters for emulation.

Without them each use of the HPET or of a one-shot timer costs a pass of QEMU's main loop.
"""
NO_TIMER_CHECK = ("no_timer_check",)
"""Kernel parameter that keeps the kernel from checking its timer.

The kernel panics ("IO-APIC + timer doesn't work!") if it sees too few ticks in a while that it counts in
instructions; an emulator that other programs hold up delivers too few.
"""

FEW_QUEUES = ("-global", "virtio-serial-device.max_ports=6")
"""A serial device has 64 queues unless told otherwise, each with a descriptor that QEMU's main loop polls."""
NO_IOEVENTFD = ("-global", "virtio-serial-pci.ioeventfd=off", "-global", "virtio-9p-pci.ioeventfd=off")
"""Let an emulated processor serve a request itself, instead of waking the main loop by a descriptor."""

GENERATION = ("-device", "vmgenid,guid=auto")
"""Tells a guest that is resumed to draw new random numbers; the value differs for each QEMU."""


def plan(
    kernel: Kernel,
    job: Path,
    *,
    memory: int,
    kvm: bool,
    shares: Sequence[Path],
    devices: int,
    ports: Mapping[str, int],
    go: int,
    tty: bool = False,
) -> list[str]:
    """The argv that boots `kernel`, for a process whose file descriptor 2 takes the guest's console.

    `memory` in MiB. `job` is the directory that guest.sh reads; the initramfs, for `devices` Soft-RoCE
    devices, is put there as well. `ports` maps the names of virtio ports to the file descriptors they write
    to, and `go` is a socket for the port that the guest reads. With `tty` the guest's ttyS0 is this terminal.
    Raises LabUnavailableError with virtme-ng's own words, and OSError if `job` has no room.
    """
    busybox = host.static_busybox()
    virtme = host.virtme_run()
    assert busybox is not None
    assert virtme is not None
    log = ["-chardev", "file,id=lab.log,path=/proc/self/fd/2", "-serial", "chardev:lab.log"]
    mounts = [("lab.root", Path("/"), True), ("lab.job", job, True)]
    mounts += [(f"lab.share{i}", path, False) for i, path in enumerate(shares)]
    append = " ".join(["console=ttyS1 earlyprintk=serial,ttyS1,115200 panic=-1 oops=panic", *CHEAP])
    append += "" if kvm else f" {' '.join(CHEAP_EMULATED + NO_TIMER_CHECK)}"
    extra = [
        *["-nodefaults", "-no-reboot", "-kernel", str(boot_image(kernel))],
        *FEW_QUEUES,
        *([] if kvm else (*NO_IOEVENTFD, *GENERATION)),
        *["-append", append],
        *log,
        *["-device", "virtio-serial-pci,id=lab"],
    ]
    chardevs = {name: f"file,id={name},path=/proc/self/fd/{fd}" for name, fd in ports.items()}
    chardevs["lab.go"] = f"socket,id=lab.go,fd={go}"
    for name, chardev in chardevs.items():
        extra += ["-chardev", chardev]
        extra += ["-device", f"virtserialport,bus=lab.0,name={name},chardev={name}"]
    for tag, path, readonly in mounts:
        extra += [
            "-fsdev",
            fsdev(tag, path, readonly),
            "-device",
            f"virtio-9p-pci,fsdev={tag},mount_tag={tag}",
        ]

    command = [*virtme, "--kimg", str(kernel.image), "--mods", "auto", "--force-9p", "--disable-microvm"]
    command += ["--busybox", busybox, "--cpus", str(CPUS), "--memory", f"{memory}M"]
    command += ["--dry-run", "--show-command", "--save-initramfs", str(job / "initramfs")]
    command += [] if kvm else ["--disable-kvm"]
    command += [] if tty else ["--script-sh", "true"]  # decides who has standard input
    command += [f"-q={word}" for word in extra]
    # The job directory, because virtme-ng leaves a file in TMPDIR, for an exit code that it will not fetch.
    environ = os.environ | {"TMPDIR": str(job), "PATH": f"{os.environ.get('PATH', '')}:{host.SYSTEM_PATH}"}
    stdin = None if tty else subprocess.DEVNULL
    done = subprocess.run(command, stdin=stdin, capture_output=True, text=True, env=environ)
    words = shlex.split(done.stdout.strip().rpartition("\n")[2])
    if done.returncode or not words:
        why = done.stderr.strip().rpartition("\n")[2]  # the last line of a traceback
        if os.strerror(ENOSPC) in why:
            raise OSError(ENOSPC, os.strerror(ENOSPC))
        raise LabUnavailableError(f"virtme-ng cannot plan this machine: {why or 'no reason given'}")
    initramfs.add_ours(job / "initramfs", kernel, devices)
    return _without_overridden(words)


def _without_overridden(words: list[str]) -> list[str]:
    """Of options that virtme-ng gave and the lab gave again, the lab's alone."""
    last = {option: len(words) - 1 - words[::-1].index(option) for option in ("-kernel", "-append")}
    overridden = {at + n for at, word in enumerate(words) if last.get(word, at) != at for n in (0, 1)}
    return [word for at, word in enumerate(words) if at not in overridden]


def fsdev(tag: str, path: Path, readonly: bool) -> str:
    """QEMU's description of a 9p export; a comma in a path is doubled there."""
    quoted = str(path).replace(",", ",,")
    return f"local,id={tag},path={quoted},security_model=none,multidevs=remap" + (
        ",readonly=on" if readonly else ""
    )
