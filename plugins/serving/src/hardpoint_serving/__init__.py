"""HTTP endpoints for Hardpoint."""
