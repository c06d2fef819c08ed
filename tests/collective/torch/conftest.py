"""What needs torch, which `make test-torch` brings; `make test` goes without."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore = [] if find_spec("torch") else ["test_ranks.py"]
