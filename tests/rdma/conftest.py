"""Tests that need devices stand in in_lab/, to be run by one process in the lab."""

from mcast.api import backend_status

collect_ignore = [] if backend_status("rdma").available else ["in_lab"]
