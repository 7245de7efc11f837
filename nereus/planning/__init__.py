"""The global plan of an RL job: what it costs, whether it fits, and the search for the best one: pure."""
