"""The providers. None imports another, nor anything above `mcast.api` and `mcast.contract.testbed`."""
