"""For tests of programs that use mcast."""
