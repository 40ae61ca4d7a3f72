"""How long will it take? Models of iteration time, on which every policy and the simulator rely."""
