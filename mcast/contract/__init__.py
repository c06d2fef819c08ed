"""The parts of the contract; mcast.api is their front page."""

from mcast.errors.install import require_linux

require_linux()  # all that opens a backend comes through here
