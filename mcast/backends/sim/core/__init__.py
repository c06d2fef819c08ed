"""The parts of a simulated fabric, as state machines."""
