"""Packets of RoCE and InfiniBand as bytes, and the files that hold them."""
