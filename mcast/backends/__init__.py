"""The providers, and `model`, which they share. No provider imports another one."""
