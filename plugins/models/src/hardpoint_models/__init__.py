"""Model families for Hardpoint."""
