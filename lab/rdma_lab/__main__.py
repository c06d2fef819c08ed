"""`python -m rdma_lab` is the command `rdma-lab`."""

import signal


def main() -> None:
    """Run the command. Ctrl-C while modules are read ends it without a traceback."""
    caught = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if caught:  # nothing is to tidy up yet: the signal alone ends the process
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from rdma_lab.cli import main as run

    if caught:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


if __name__ == "__main__":
    main()
