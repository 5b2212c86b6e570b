"""The model runner: persistent state by slot, input preparation, forward, outputs."""
