"""For tests of programs that use mcast.

help(mcast.testing.plugin) has pytest's fixtures, marks and options, and docs/testing.md shows them in use.
"""
