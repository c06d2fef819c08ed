"""The conformance suite: every clause of the sources and every measured fact, for any provider."""
