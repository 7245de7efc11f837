"""The errors of the cost model on tables of public measurements."""
