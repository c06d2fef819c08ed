"""`mcast sim cast`: plays a transfer to many receivers on a simulated fabric, and prints what it cost."""

from __future__ import annotations

from typing import Annotated

import typer

from mcast.cli.signals import interruptible
from mcast.cli.status import ExitStatus
from mcast.cli.terminal import Failure, Json, UsageError, json_output, say
from mcast.cli.values import MAX_RECEIVERS, MAX_SEED, StrategyOption, bit_rate, number_option, size


def cast(
    receivers: Annotated[int, number_option(min=1, max=MAX_RECEIVERS, help="Receivers.")] = 100,
    loss: Annotated[
        float,
        number_option(
            min=0, max=0.9, metavar="P", help="Fraction of messages that each end loses.", is_whole=False
        ),
    ] = 0.001,
    bytes_: Annotated[
        int, typer.Option("--size", parser=size, metavar="BYTES", help="Of the object, such as 64M.")
    ] = "16M",  # type: ignore[assignment]  # which the parser reads
    strategy: StrategyOption = "all",
    rate: Annotated[
        float,
        typer.Option(parser=bit_rate, metavar="BITS", help="The sender's link, bits a second."),
    ] = "10G",  # type: ignore[assignment]  # which the parser reads
    parity: Annotated[bool, typer.Option(help="Repair with parity; without, repeat segments.")] = True,
    seed: Annotated[int, number_option(min=0, max=MAX_SEED, help="Seed of the random numbers.")] = 0,
    as_json: Json = False,
) -> None:
    """Play a transfer from one sender to N receivers in virtual time, and print what it cost.

    The ends are those of mcast.cast.protocol. Losses are independent. The exit status
    is 1 if a receiver does not have the object that the strategy promises.
    """
    from mcast.cast.protocol import fec as coding
    from mcast.cli.progress import Watch
    from mcast.testing.transfer import SimulatedTransfer, TransferSetup

    if strategy.carousel:
        raise UsageError("a carousel has no answers to count: choose another strategy")
    if parity and not coding.available():
        say(
            "losses are repaired by repeating segments, because parity needs the extra fec, which is not "
            "installed: pip install 'rdma-mcast[fec]'",
            err=True,
        )
    setup = TransferSetup(receivers, loss, bytes_, strategy, seed, rate / 1e9, parity=parity)
    try:
        with interruptible(), Watch("receivers join") as watch:
            costs = SimulatedTransfer(setup, lambda done: watch.show("playing", done, bytes_)).run()
    except RuntimeError as error:
        raise Failure(str(error)) from None
    if as_json:
        json_output.result(costs)
    else:
        for name, value in costs._asdict().items():
            say(f"{name.replace('_', ' '):26}{_shown(value)}" if name != "parity" else _repaired(value))
    if not costs.strategy_met:
        raise typer.Exit(ExitStatus.FAILED)


def _shown(value: float) -> str:
    return f"{'yes' if value else 'no':>12}" if isinstance(value, bool) else f"{value:>12,}"


def _repaired(parity: bool) -> str:
    return "losses were repaired by parity" if parity else "losses were repaired by repeating segments"
