"""ROCm platform for Hardpoint."""
