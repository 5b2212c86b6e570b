"""CPU platform for Hardpoint."""
