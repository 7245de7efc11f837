"""The global transition graph: what one change of plan does, in which order, proved and priced before it runs: pure."""
