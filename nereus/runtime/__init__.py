"""The real world: Ray, slot processes, state movement, journal, metrics."""
