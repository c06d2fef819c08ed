"""The parts of the contract; mcast.api is their front page."""
