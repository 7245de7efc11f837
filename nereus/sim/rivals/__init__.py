"""Other systems in the simulated world: what verl and OpenRLHF do in a step, timed by the same truth as Nereus' plans.

`sources.json` names where each assumption comes from.
"""
