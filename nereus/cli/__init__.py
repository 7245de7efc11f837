"""The commands, and the loading of a run's configuration: the only place that wires a world to a job."""
