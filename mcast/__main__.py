"""`python -m mcast` is the command `mcast`."""

from mcast.cli import main

if __name__ == "__main__":
    main()
