"""Everything that happened on a simulated fabric, and how it is shown."""
