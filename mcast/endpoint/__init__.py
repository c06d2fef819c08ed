"""The application layer: endpoints, which block or await, over one core that never waits."""
